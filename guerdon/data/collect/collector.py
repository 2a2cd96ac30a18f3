"""`RewardDataCollector`: collects images and success labels while a policy trains, as `.npy` trajectories."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.core.errors import DataError
from guerdon.core.images import to_numpy, to_uint8_hwc, to_unit_chw
from guerdon.core.types import BoolArray, FloatArray
from guerdon.data.collect.archive import EpisodeArchive
from guerdon.data.collect.recorder import EpisodeRecorder
from guerdon.data.formats.base import files_in
from guerdon.data.formats.npy_trajectory import NpyTrajectoryWriter
from guerdon.envs.observations import images_from, with_final
from guerdon.envs.success import SUCCESS_KEYS, LabelFunction, SuccessLabels, missing_success

log = logging.getLogger("guerdon")


def open_npy_archive(
    positive_dir: Path, negative_dir: Path, max_positive: int | None, max_negative: int | None
) -> EpisodeArchive:
    """An archive of `.npy` trajectories; unfinished ones go to `unfinished/` beside the directories."""
    return EpisodeArchive(
        NpyTrajectoryWriter(positive_dir, negative_dir),
        max_success=max_positive,
        max_failure=max_negative,
        num_success=len(files_in(positive_dir, ".npy")),
        num_failure=len(files_in(negative_dir, ".npy")),
    )


class RewardDataCollector:
    """Buffers the steps of parallel environments and saves each finished trajectory.

    A trajectory is positive if `success_once` or any `success_frame >= 0.5`, and is saved as
    `{counter:06d}.npy` in `positive_dir` or `negative_dir`; counters continue after what is there.
    """

    def __init__(
        self,
        *,
        positive_dir: Path | str = "./reward_data/positive",
        negative_dir: Path | str = "./reward_data/negative",
        image_keys: Sequence[str] = ("base_camera",),
        max_positive_trajectories: int | None = None,
        max_negative_trajectories: int | None = None,
        success_key: str | None = None,
        label_fn: LabelFunction | str | None = None,
    ) -> None:
        """Collect into two directories; the arguments are those of `reward.data_collection`.

        The limits count what is in the directories already; None means no limit. Labels are `success_frame`,
        or the `success` or `is_success` of the info, unless `success_key` names another entry of the info or
        `label_fn` tells success of a single environment, `(obs, info) -> bool`.
        """
        self.image_keys = tuple(image_keys)
        self._labels = SuccessLabels(success_key, label_fn)
        self.archive = open_npy_archive(
            Path(positive_dir), Path(negative_dir), max_positive_trajectories, max_negative_trajectories
        )
        if self.archive.is_full:
            log.warning(
                "reward data: %s are there already; nothing more is collected", self.archive.progress()
            )
        self._recorder: EpisodeRecorder | None = None

    @property
    def positive_count(self) -> int:
        """Positive trajectories kept, including those that were there."""
        return self.archive.num_success

    @property
    def negative_count(self) -> int:
        """Negative trajectories kept, including those that were there."""
        return self.archive.num_failure

    @property
    def is_full(self) -> bool:
        """Whether both limits are reached: further steps are not kept."""
        return self.archive.is_full

    def add_env_output(
        self, env_output: Any, env_info: Mapping[str, Any], is_last_step: bool = False
    ) -> None:
        """Add one step of all environments.

        Args:
            env_output: mapping or object with `obs` (images [N, ...] of every image key), `success_frame`
                ([N], or [N, chunk] for action chunks, of which the last belongs to the frame), `dones`
                ([N] or [N, chunk]; or `terminations` and `truncations`), and under auto-reset `final_obs`.
            env_info: may have `success_once` [N]; read when an episode ends, since before that it may still
                speak of the one before.
            is_last_step: whether a rollout ends here; then all finished trajectories are on disk on return.
                Episodes that go on into the next rollout stay in their buffers.
        """
        self.archive.check()
        if not self.archive.is_full:
            self._add(env_output, env_info)
        if is_last_step:
            self.archive.flush()

    def _add(self, env_output: Any, env_info: Mapping[str, Any]) -> None:
        done = _flags(env_output)
        obs = with_final(_field(env_output, "obs"), _field(env_output, "final_obs"), done)
        success = None if self._labels.given else _field(env_output, "success_frame")
        if success is None:
            labelled = self._labels.of_batch(obs, env_info, done)
            success = next((labelled[key] for key in SUCCESS_KEYS if labelled.get(key) is not None), None)
        if success is None:
            raise DataError(
                "env_output has no 'success_frame' and env_info no 'success': frames need a label; "
                + missing_success(env_info)
            )
        chunk = np.asarray(to_numpy(success), np.float32).reshape(len(done), -1)
        frames = images_from(obs, self.image_keys)
        if self._recorder is None:
            self._recorder = EpisodeRecorder(len(done), self.archive.add)
        self._recorder.record(np.arange(len(done)), frames, chunk[:, -1])
        self._recorder.success_once |= (chunk >= 0.5).any(axis=1)
        once = env_info.get("success_once")
        if once is not None:
            self._recorder.success_once |= _per_env(once, len(done)) & done
        for env in np.flatnonzero(done).tolist():
            self.save_trajectory(env)

    def save_trajectory(self, env_idx: int) -> None:
        """Save what environment `env_idx` has collected as one trajectory and empty its buffer."""
        if self._recorder is not None:
            self._recorder.end(env_idx)

    def _extract_image(self, image: Any, key_offset: int = 0) -> FloatArray:
        """One image as RLinf stores it: float32 [C, H, W] in [0, 1].

        Args:
            image: [H, W, C] or [C, H, W], or a batch of them; uint8 or float, 0-255 or 0-1; torch or numpy.
            key_offset: which image of a batch.
        """
        images = to_uint8_hwc(image)
        if images.ndim > 4:
            raise DataError(f"image has shape {list(images.shape)}; expected one image or one batch")
        if images.ndim == 4:
            if not 0 <= key_offset < len(images):
                raise DataError(f"image {key_offset} asked for, but the batch has {len(images)}")
            images = images[key_offset]
        return to_unit_chw(images)

    def truncate_running_episodes(self) -> None:
        """Call it when all environments are reset: what was running goes to `unfinished/`."""
        if self._recorder is not None and not self.archive.is_full:
            self._recorder.truncate()

    def flush(self) -> None:
        """Wait until all finished trajectories are on disk."""
        self.archive.flush()

    def close(self) -> None:
        """Finish; running episodes go to `unfinished/` beside the two directories."""
        self.truncate_running_episodes()
        self.archive.close()


def _field(env_output: Any, name: str) -> Any | None:
    return env_output.get(name) if isinstance(env_output, Mapping) else getattr(env_output, name, None)


def _flags(env_output: Any) -> BoolArray:
    """Which environments' episodes ended in this step -> bool [N]."""
    names = ("dones", "done", "terminations", "truncations", "terminated", "truncated")
    found = [np.asarray(to_numpy(value)) for name in names if (value := _field(env_output, name)) is not None]
    if not found:
        raise DataError("env_output has neither 'dones' nor 'terminations' and 'truncations'")
    num_envs = found[0].shape[0] if found[0].ndim else 1
    ended = [flags.reshape(num_envs, -1).astype(np.bool_).any(axis=1) for flags in found]
    anyone: BoolArray = np.logical_or.reduce(ended)
    return anyone


def _per_env(value: Any, num_envs: int) -> BoolArray:
    """A flag for each environment; a single one holds for all."""
    array = np.asarray(to_numpy(value))
    if array.size not in (1, num_envs):
        raise DataError(f"success_once has shape {list(array.shape)}; expected [{num_envs}]")
    flags: BoolArray = np.broadcast_to(array.reshape(-1) > 0, (num_envs,))
    return flags
