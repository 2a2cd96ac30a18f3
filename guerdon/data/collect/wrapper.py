"""`DataCollectorWrapper`: a Gymnasium wrapper that records labelled episodes while a policy runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from numpy.typing import NDArray

from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.data.collect.archive import EpisodeArchive, open_archive
from guerdon.data.collect.recorder import EpisodeRecorder
from guerdon.envs.observations import (
    AT_REST_INFO,
    AnyEnv,
    FrameSource,
    native_of,
    per_env,
    state_from,
    with_final,
)
from guerdon.envs.success import LabelFunction, SuccessLabels, missing_success, success_of

RenderMode: TypeAlias = Literal["always", "on_demand"]


class _RecordsEpisodes:
    """What the single and the vector wrapper share: they differ in the batch axis and in auto-reset."""

    def __init__(
        self,
        env: AnyEnv,
        save_dir: Path | str,
        target_success: int | None = None,
        target_failure: int | None = None,
        reward_render_mode: RenderMode = "always",
        *,
        cameras: Sequence[str] = ("base_camera",),
        format: str = "native",
        keep_states: bool = True,
        only_at_rest: bool = False,
        success_key: str | None = None,
        label_fn: LabelFunction | str | None = None,
        archive: EpisodeArchive | None = None,
    ) -> None:
        """Record `env`.

        Args:
            env: its frames come from the observation or from rendering, its labels from the info `success` or
                `is_success`, unless one of the last two arguments says otherwise.
            save_dir: where the episodes go; what is there already is never overwritten.
            target_success: how many successes to keep, those that are there included; None: no limit.
            target_failure: the same for failures.
            reward_render_mode: `always` records every frame; `on_demand` renders and records only the final
                frame of each episode, which is what a terminal reward scores.
            cameras: camera names; the first one is RLinf's `main_images`.
            format: any writable format of `guerdon.data.formats`.
            keep_states: whether to keep state vectors beside the frames.
            only_at_rest: render an episode's first frame and those of a robot that stands still, as the info
                `is_robot_static` tells; while it moves the last picture is kept again.
            success_key: the entry of the info that tells success; it may be missing in steps without news.
            label_fn: tells success of a single environment's step, `(obs, info) -> bool`.
            archive: where the episodes go instead of `save_dir`; its limits then hold instead of the targets.
        """
        if isinstance(self, RecordConstructorArgs):  # `gymnasium.make(env.spec)` makes it again with these
            RecordConstructorArgs.__init__(
                self,
                save_dir=save_dir,
                target_success=target_success,
                target_failure=target_failure,
                reward_render_mode=reward_render_mode,
                cameras=cameras,
                format=format,
                keep_states=keep_states,
                only_at_rest=only_at_rest,
                success_key=success_key,
                label_fn=label_fn,
            )
        super().__init__(env)  # type: ignore[call-arg]  # of Gymnasium's wrapper
        if reward_render_mode not in ("always", "on_demand"):
            raise ConfigError(
                f"reward_render_mode must be 'always' or 'on_demand', not {reward_render_mode!r}"
            )
        self.archive = archive or open_archive(save_dir, format, target_success, target_failure)
        """Counts of what was kept."""
        spec = getattr(env, "spec", None)
        self._recorder = EpisodeRecorder(
            env.num_envs if isinstance(env, VectorEnv) else 1,
            self.archive.add,
            capacity=(spec.max_episode_steps if spec is not None else None) or 64,
            source=_source(env),
        )
        self._frames = FrameSource(env, cameras)
        self._labels = SuccessLabels(success_key, label_fn)
        self._every_step = reward_render_mode == "always"
        self._keep_states = keep_states
        self._only_at_rest = only_at_rest
        self._last_pictures: dict[str, UInt8Array] = {}
        self._native = native_of(env)
        self.intended: FloatArray | None = None
        """float32 [N, A]; what the demonstrator means by the next step's actions, where it tells."""

    @property
    def is_full(self) -> bool:
        """Whether both targets are met: further steps are not recorded."""
        return self.archive.is_full

    def close(self, **kwargs: Any) -> None:
        """Keep unfinished episodes apart and finish writing, then close the environment."""
        try:
            if not self.archive.is_full:
                self._recorder.truncate()
            self.archive.close()
        finally:
            super().close(**kwargs)  # type: ignore[misc]

    def _states(self, obs: Any, *, final: bool) -> FloatArray | None:
        """State vectors [N, S], from the environment itself where it offers them, if they are wanted.

        `final`: those that the last action led to, and not those of episodes that have begun since.
        """
        if not self._keep_states:
            return None
        if self._native is None:
            return state_from(obs)
        return self._native.final_state() if final else self._native.state()

    def _record_step(
        self,
        env_ids: IntArray,
        obs: Any,
        action: Any,
        env_reward: NDArray[Any],
        terminated: BoolArray,
        truncated: BoolArray,
        info: Mapping[str, Any],
    ) -> None:
        """Record one step of `env_ids`; all arguments are batched over all environments, [N, ...]."""
        self.archive.check()
        if self.archive.is_full or len(env_ids) == 0:
            return
        done = terminated | truncated
        success = success_of(info, len(done), done)
        if success is None:
            raise DataError(missing_success(info))
        self._recorder.success_once[env_ids] |= success[env_ids] >= 0.5
        # Of an episode that was lost with its simulator there is no last step, and it proves no failure.
        lost = _flags(info, "episode_lost", done)
        shown = env_ids[~lost[env_ids]] if self._every_step else env_ids[(done & ~lost)[env_ids]]
        if len(shown):
            values: dict[str, NDArray[Any] | None] = {
                "actions": np.asarray(to_numpy(action), np.float32).reshape(len(done), -1),
                "intended": self.intended,
                "states": self._states(obs, final=True),
                "env_rewards": env_reward,
                "terminated": terminated,
                "truncated": truncated,
                "is_grasped": per_env(info, "is_grasped", len(done), done),
                "at_rest": per_env(info, AT_REST_INFO, len(done), done),
            }
            frames = self._pictures(obs, done, shown, values["at_rest"])
            if len(shown) < len(done):
                values = {name: None if value is None else value[shown] for name, value in values.items()}
            self._recorder.record(shown, frames, success[shown], **values)
        if not done.any():
            return
        self._recorder.success_once |= _flags(info, "success_once", done) & done
        for env in env_ids[done[env_ids]].tolist():
            self._recorder.end(env, complete=not bool(lost[env]))

    def _pictures(
        self, obs: Any, done: BoolArray, shown: IntArray, at_rest: NDArray[Any] | None
    ) -> dict[str, UInt8Array]:
        """Camera -> uint8 [n, H, W, C] of `shown` (int [n]); a robot in motion may keep its last ones."""
        if not self._only_at_rest:
            return self._frames.frames(obs, done, shown)
        if at_rest is None:
            raise DataError(f"collect.only_at_rest needs an environment whose info has {AT_REST_INFO}")
        fresh = shown[(at_rest[shown] >= 0.5) | (self._recorder.lengths[shown] == 0)]
        if len(fresh):
            for name, images in self._frames.frames(obs, done, fresh).items():
                if name not in self._last_pictures:
                    self._last_pictures[name] = np.zeros((len(done), *images.shape[1:]), np.uint8)
                self._last_pictures[name][fresh] = images
        return {name: pictures[shown] for name, pictures in self._last_pictures.items()}

    def _record_reset(self, env_ids: IntArray, obs: Any, info: Mapping[str, Any]) -> None:
        """New episodes begin in `env_ids` with `obs` [N, ...]; what was running is kept as unfinished."""
        if self.archive.is_full or len(env_ids) == 0:
            return
        self._recorder.truncate(env_ids)
        states = self._states(obs, final=False)
        seeds = info.get("env_seed")
        self._recorder.reset(
            env_ids,
            None if states is None else states[env_ids],
            None if seeds is None else to_numpy(seeds)[env_ids].astype(np.int64),
        )


class DataCollectorWrapper(_RecordsEpisodes, gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Records every episode of an environment until the targets are met; afterwards it only steps.

    `DataCollectorWrapper(env, ...)` takes single and vector environments; for a vector environment it
    returns a `VectorDataCollectorWrapper`, which takes the same arguments.
    """

    def __new__(cls, env: Any, *args: Any, **kwargs: Any) -> Any:
        """Choose by the kind of environment."""
        if isinstance(env, VectorEnv):
            return VectorDataCollectorWrapper(env, *args, **kwargs)
        return super().__new__(cls)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset; an episode that was running is kept as unfinished."""
        obs, info = self.env.reset(seed=seed, options=options)
        self._record_reset(np.zeros(1, np.int64), _batched(obs), _batched(info))
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step and record."""
        obs, env_reward, terminated, truncated, info = self.env.step(action)
        labelled = self._labels.of_step(obs, info, bool(terminated or truncated))
        self._record_step(
            np.zeros(1, np.int64),
            _batched(obs),
            np.asarray(to_numpy(action))[None],
            np.array([float(env_reward)], np.float32),
            np.array([bool(terminated)]),
            np.array([bool(truncated)]),
            _batched(labelled),
        )
        return obs, env_reward, terminated, truncated, info


class VectorDataCollectorWrapper(_RecordsEpisodes, VectorWrapper):
    """`DataCollectorWrapper` for vector environments, in all of Gymnasium's auto-reset modes."""

    def __init__(self, env: VectorEnv[Any, Any, Any], *args: Any, **kwargs: Any) -> None:
        """Record `env`; the arguments after it are those of `DataCollectorWrapper`."""
        super().__init__(env, *args, **kwargs)
        self._mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._ended: BoolArray = np.zeros(env.num_envs, np.bool_)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `options["reset_mask"]`."""
        obs, info = self.env.reset(seed=seed, options=options)
        mask = None if options is None else options.get("reset_mask")
        mask = np.ones(self.num_envs, np.bool_) if mask is None else np.asarray(mask, np.bool_)
        self._record_reset(np.flatnonzero(mask), obs, info)
        self._ended[mask] = False
        return obs, info

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step and record; the step in which Gymnasium resets an ended episode is not part of any episode."""
        obs, env_rewards, terminated, truncated, info = self.env.step(actions)
        term, trunc = (to_numpy(flags).astype(np.bool_) for flags in (terminated, truncated))
        done = term | trunc
        same_step = self._mode == AutoresetMode.SAME_STEP
        next_obs = with_final(obs, info.get("final_obs"), done) if same_step else obs
        stepped = np.flatnonzero(~self._ended)
        labelled = self._labels.of_batch(next_obs, info, done)
        self._record_step(stepped, next_obs, actions, to_numpy(env_rewards), term, trunc, labelled)
        if same_step:
            self._record_reset(np.flatnonzero(done), obs, info)
        elif self._mode == AutoresetMode.NEXT_STEP:
            self._record_reset(np.flatnonzero(self._ended), obs, info)
            self._ended = done
        else:
            self._ended |= done
        return obs, env_rewards, terminated, truncated, info


def _batched(value: Any) -> Any:
    """Put a batch axis of one before every array of a single environment's observation or info."""
    if isinstance(value, Mapping):
        return {key: _batched(item) for key, item in value.items()}
    try:
        return np.asarray(to_numpy(value))[None]
    except (TypeError, ValueError):  # an info entry that is no array; nothing here reads those
        return value


def _flags(info: Mapping[str, Any], key: str, done: BoolArray) -> BoolArray:
    """A flag of the info for each environment, bool [N]; false where it is not there."""
    values = per_env(info, key, len(done), done)
    flags: BoolArray = np.zeros(len(done), np.bool_) if values is None else values > 0
    return flags


def _source(env: Any) -> str:
    """What recorded episodes say of where they come from."""
    source = getattr(env.unwrapped, "source", None)
    if isinstance(source, str):
        return source
    spec = getattr(env, "spec", None)
    return spec.id if spec is not None else type(env.unwrapped).__name__
