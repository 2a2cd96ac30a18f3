"""`ImageRewardWorker`: the reward manager as a worker, in mini-batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.config import RewardConfig
from guerdon.errors import ConfigError
from guerdon.models import save_checkpoint
from guerdon.serve.manager import RewardManager, Verdict, available_device
from guerdon.serve.relabel import map_rewards
from guerdon.types import FloatArray, UInt8Array

MINI_BATCH = 256


class ImageRewardWorker:
    """Judges images with a fitted model. A plain class; engines decide in which process it lives."""

    def __init__(self, cfg: RewardConfig, *, device: str | None = None, given: Collection[str] = ()) -> None:
        """Remember the settings; `init_worker` loads the model.

        Args:
            cfg: the `reward` section.
            device: where to compute; None: a GPU if there is one.
            given: names of `reward.model` settings that were set by hand.
        """
        self.cfg = cfg
        self._device = available_device() if device is None else device
        self._given = tuple(given)
        self._manager: RewardManager | None = None

    def init_worker(self) -> None:
        """Load the checkpoint."""
        self._manager = RewardManager(self.cfg, device=self._device, given=self._given)

    @property
    def manager(self) -> RewardManager:
        """The loaded manager."""
        if self._manager is None:
            raise ConfigError("the reward worker has no model yet: call init_worker() first")
        return self._manager

    def judge(self, frames: Mapping[str, UInt8Array]) -> Verdict:
        """Verdicts on frames (camera -> uint8 [N, H, W, C]) in mini-batches of 256."""
        count = len(next(iter(frames.values())))
        parts = [
            self.manager.judge({name: images[start : start + MINI_BATCH] for name, images in frames.items()})
            for start in range(0, count, MINI_BATCH)
        ]
        if not parts:
            empty = np.zeros(0, np.float32)
            return Verdict(prob_success=empty, disagreement=empty)
        return Verdict(
            prob_success=np.concatenate([part.prob_success for part in parts]),
            disagreement=np.concatenate([part.disagreement for part in parts]),
        )

    def compute_batch_rewards(self, observations: Any) -> FloatArray:
        """Learned rewards of a batched observation, however large -> float32 [N]."""
        frames = self.manager.images(observations)
        return map_rewards(self.judge(frames).prob_success, self.cfg, self.manager.threshold)

    def compute_rewards(self, observations: Any) -> FloatArray:
        """The same under the name of the second document."""
        return self.compute_batch_rewards(observations)

    def save_checkpoint(self, path: Path | str, step: int) -> Path:
        """Save the model as `path/step_{step}/` with its contract; returns that folder."""
        target = Path(path) / f"step_{step}"
        save_checkpoint(target, self.manager.model, self.manager.contract)
        return target


EmbodiedRewardWorker = ImageRewardWorker
"""The older name."""
