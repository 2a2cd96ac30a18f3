"""Refit a reward model while a policy trains on it: the policy's false fires are its hardest negatives.

Frames that the policy reached are kept with the simulator's own label, false fires above all. A refit goes on
from the present weights with them beside the data of the first fit, and calibrates again on held-out episodes
of both.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from guerdon.config import FitConfig, RewardConfig
from guerdon.core.atomic import write_atomic
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import BoolArray, Episode, FloatArray, IntArray, UInt8Array, display_path
from guerdon.data.datasets.frames import RewardDataset
from guerdon.data.files.checksums import load_npz
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.fit.fit import FitResult, device_of, finish_fit, open_data, sampler_of, split_rows
from guerdon.fit.process_group import ProcessGroup
from guerdon.fit.trainer import RewardModelTrainer
from guerdon.rewards.image import load_checkpoint
from guerdon.rewards.image.contract import Contract
from guerdon.rewards.image.int8_file import quantize_checkpoint
from guerdon.rewards.relabel import fires

log = logging.getLogger("guerdon")

FramesAt: TypeAlias = Callable[[IntArray, IntArray], dict[str, UInt8Array]]
"""(t int [M], env int [M]) -> camera -> what was scored of these steps, uint8 [M, H, W, C] or stacks."""

MIN_FALSE_FIRES = 16
"""With fewer there is nothing to learn from, and the model stays as it is."""
SHARE = 0.25
"""Of the frames that a refit looks at, mined ones make up about so much."""
MAX_REPEATS = 20
VAL_EVERY = 5
"""One of so many of the policy's episodes is held out for calibration."""
FILE = "mined.npz"
_KEPT = ("label", "fired", "group")


def held_out(group: IntArray) -> BoolArray:
    """Which of the policy's episodes (int, any shape) are kept out of training, for calibration."""
    mixed = (group.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    apart: BoolArray = mixed % np.uint64(VAL_EVERY) == 0
    return apart


@dataclass(frozen=True, kw_only=True)
class ScoredSteps:
    """T steps of N environments with the scores of the reward model and the simulator's labels."""

    prob_success: FloatArray
    """float32 [T, N]; NaN where nothing was steps."""
    success: BoolArray
    """bool [T, N]; the simulator's label."""
    elapsed: IntArray
    """int64 [T, N]; the step within its episode."""
    first_step: int
    """Steps that each environment had taken before."""
    frames_at: FramesAt


class MinedFrames:
    """Labelled frames of the policy, the latest `size` of them: false fires, and some of the rest."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.frames: dict[str, UInt8Array] = {}
        self.label: BoolArray = np.zeros(0, np.bool_)
        self.fired: BoolArray = np.zeros(0, np.bool_)
        self.group: IntArray = np.zeros(0, np.int64)
        """Frames of one episode have the same number."""

    def __len__(self) -> int:
        return len(self.label)

    @property
    def num_false_fires(self) -> int:
        """Frames that fired when they were scored, and are no success."""
        return int((self.fired & ~self.label).sum())

    def add(self, steps: ScoredSteps, threshold: float, rng: np.random.Generator) -> None:
        """Keep up to an eighth of `size`: half of it false fires, the rest drawn from all other frames.

        Of held-out episodes a quarter as many are kept besides, drawn whatever the score: among chosen
        false fires a threshold that keeps the promised rate is far stricter than promised.
        """
        there = np.isfinite(steps.prob_success)
        fired = fires(steps.prob_success, threshold)
        began = steps.first_step + np.arange(len(there))[:, None] - steps.elapsed
        group = began * there.shape[1] + np.arange(there.shape[1])  # [T, N]
        apart = held_out(group)
        mine = there & ~apart
        false = np.argwhere(mine & fired & ~steps.success)
        good, bad = np.argwhere(mine & steps.success), np.argwhere(mine & ~steps.success & ~fired)
        most = max(self.size // 8, 1)
        picked = [rng.permutation(false)[: most // 2]]
        others = max(len(picked[0]), most // 16)
        picked += [rng.permutation(rest)[: -(-others // 2)] for rest in (good, bad)]
        count = -(-sum(map(len, picked)) // (VAL_EVERY - 1))
        picked.append(rng.permutation(np.argwhere(there & apart))[:count])
        t, env = np.concatenate(picked).T
        if not len(t):
            return
        kept = {name: [images] for name, images in self.frames.items()}
        self.frames = {
            name: np.concatenate([*kept.get(name, ()), images])[-self.size :]
            for name, images in steps.frames_at(t, env).items()
        }
        fresh = {"label": steps.success, "fired": fired, "group": group}
        for name, values in fresh.items():
            setattr(self, name, np.concatenate([getattr(self, name), values[t, env]])[-self.size :])

    def write(self, path: Path) -> None:
        """As a native store: each frame, or stack, is an episode of its own; its last row is what counts."""
        episodes = []
        for number, (label, group) in enumerate(zip(self.label, self.group, strict=True)):
            stacks = {name: images[number] for name, images in self.frames.items()}
            frames = {name: each if each.ndim == 4 else each[None] for name, each in stacks.items()}
            labels = np.full(len(next(iter(frames.values()))), label, np.float32)
            source = f"policy/{group}/{number}"
            episodes.append(Episode(frames=frames, labels=labels, success=bool(label), source=source))
        with StoreWriter(path) as writer:
            writer.add_many(episodes)

    def save(self, path: Path) -> None:
        """To a file, completely or not at all."""
        arrays: dict[str, Any] = {f"frames/{name}": images for name, images in self.frames.items()}
        arrays |= {name: getattr(self, name) for name in _KEPT}
        write_atomic(path, lambda file: np.savez(file, allow_pickle=False, **arrays))

    def load(self, path: Path) -> None:
        """Go on from a file that `save` wrote."""
        arrays = load_npz(path)
        whole = arrays.keys() >= {*_KEPT} and all(each.ndim for each in arrays.values())
        if not whole or len({len(each) for each in arrays.values()}) > 1:
            parts = {name: list(each.shape) for name, each in sorted(arrays.items())[:9]}
            raise DataError(f"cannot read the mined frames {display_path(path)}: it has {parts}")
        for name in _KEPT:
            setattr(self, name, arrays.pop(name))
        self.frames = {name.removeprefix("frames/"): images for name, images in arrays.items()}


class Refitter:
    """Mines frames as a run goes on, and refits when it is asked to."""

    def __init__(
        self, reward: RewardConfig, cfg: FitConfig, contract: Contract, folder: Path, seed: int
    ) -> None:
        """Open the data of the first fit, whose settings `cfg` hold for refits too.

        `contract` is that of the model as it is now; `seed` decides the split, as in the first fit, and the
        order. Refits go to `refit/step_{N}/` in `folder`.
        """
        data = cfg.data
        if data.path is None and (data.positive_dir is None or data.negative_dir is None):
            raise ConfigError(
                "reward.refit_interval needs the data of the first fit: set fit.data.path, or "
                "fit.data.positive_dir and fit.data.negative_dir"
            )
        self.mined = MinedFrames(reward.refit_frames)
        self.num_refits = 0
        self._reward, self._folder, self._seed = reward, folder, seed
        self._cfg = replace(cfg, epochs=reward.refit_epochs, backend="simple", save_dir=None)
        self._model = contract.model_config(reward.model)
        self._store, self._faults = open_data(self._model, cfg, folder)
        if contract.data_hash not in (None, self._store.content_hash):
            log.warning(
                "fit.data is not what the reward model was fitted to (%s, not %s); refits use fit.data",
                self._store.content_hash,
                contract.data_hash,
            )
        self._split = split_rows(self._store, self._model, cfg, seed)

    def metrics(self) -> dict[str, float]:
        """How often, and from how much."""
        return {
            "reward/refits": float(self.num_refits),
            "reward/mined_frames": float(len(self.mined)),
            "reward/mined_false_fires": float(self.mined.num_false_fires),
        }

    def add(self, step: int, steps: ScoredSteps, threshold: float) -> None:
        """Keep some of the frames that were scored up to environment step `step`."""
        self.mined.add(steps, threshold, np.random.default_rng([self._seed, step]))

    def refit(self, step: int, checkpoint: Path) -> FitResult | None:
        """Go on from the present model's checkpoint with the mined frames; None if they are too few."""
        started = time.perf_counter()
        if self.mined.num_false_fires < MIN_FALSE_FIRES:
            count = self.mined.num_false_fires
            log.info("step %d: no refit, the reward has fired wrongly on %d kept frames only", step, count)
            return None
        place = _new_folder(self._folder / "refit" / f"step_{step}")
        self.mined.write(place / "mined")
        store = EpisodeStore(self._store.path, place / "mined", cameras=self._model.image_keys)
        train, val = self._rows(store)
        model, contract, _ = load_checkpoint(checkpoint, self._model)
        dataset = RewardDataset(store, cameras=self._model.image_keys, num_frames=self._model.num_frames)
        trainer = RewardModelTrainer(
            model,
            dataset,
            sampler_of(store, train, self._cfg, self._seed),
            val,
            self._cfg,
            replace(contract, data_hash=store.content_hash),
            folder=place,
            seed=self._seed + step,
            device=device_of(self._cfg, ProcessGroup()),
            tensorboard=False,
        )
        # The earliest success is that of whole episodes: mined frames have no step.
        known = {"first_success_step": contract.metrics.get("first_success_step")}
        try:
            trainer.run()
            result = finish_fit(trainer, store, val, self._faults, started, known)
        finally:
            trainer.close()
        if self._reward.model.precision == "int8":
            try:
                quantize_checkpoint(result.checkpoint, dataset, np.unique(train), val, seed=self._seed)
            except DataError as error:
                log.warning("step %d: the refitted model is not used: %s", step, error)
                return None
        self.num_refits += 1
        return result

    def _rows(self, store: EpisodeStore) -> tuple[IntArray, IntArray]:
        """Rows to train and to validate on, mined ones repeated until they count."""
        (train, val, num_episodes), few = self._split, self._cfg.data.num_samples_per_episode
        mined = store.starts[self._store.num_episodes + 1 :] - 1  # the last row of each
        apart = held_out(self.mined.group)
        per_epoch = min(len(train), few * num_episodes) if few else len(train)
        own = mined[~apart]
        repeats = round(SHARE / (1 - SHARE) * per_epoch / max(len(own), 1))
        own = np.tile(own, min(max(repeats, 1), MAX_REPEATS))
        return np.concatenate([train, own]), np.concatenate([val, mined[apart]])


def _new_folder(wanted: Path) -> Path:
    """`wanted`, or a name beside it if a run that broke off has left one there."""
    number, place = 1, wanted
    while place.exists():
        number += 1
        place = wanted.with_name(f"{wanted.name}-{number}")
    return place
