"""The image reward worker, under RLinf's names; engines decide in which process it lives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import FloatArray, IntArray
from guerdon.envs.observations import images_from
from guerdon.rewards.image import save_checkpoint
from guerdon.rewards.image.given import RewardGiven, reward_section
from guerdon.rewards.image.scorer import Frames, RewardFacts, RewardManager, Scores


class ImageRewardWorker:
    """Scores images with a fitted model."""

    def __init__(self, cfg: RewardGiven, *, device: str = "auto") -> None:
        """Remember the settings; `init_worker` loads the model.

        Args:
            cfg: the `reward` section, a whole config, or the path of a checkpoint.
            device: where to compute; `auto`: on a GPU where there is one, unless the model is int8.
        """
        self.cfg = reward_section(cfg, "ImageRewardWorker")
        self._device = device
        self._manager: RewardManager | None = None

    def init_worker(self) -> None:
        """Load the checkpoint."""
        self._manager = RewardManager(self.cfg, device=self._device)

    def load(self, checkpoint: str) -> RewardFacts:
        """Score with another checkpoint from now on; returns what others need to know of it."""
        self.cfg = replace(self.cfg, model=replace(self.cfg.model, checkpoint_path=checkpoint))
        self.init_worker()
        return self.describe()

    @property
    def manager(self) -> RewardManager:
        """The loaded manager."""
        if self._manager is None:
            raise ConfigError("the reward worker has no model yet: call init_worker() first")
        return self._manager

    def describe(self) -> RewardFacts:
        """What others need to know of the model."""
        return self.manager.facts

    def score(self, frames: Frames) -> Scores:
        """Scores of frames (camera -> uint8 [N, H, W, C], or nothing at all) in mini-batches of 256."""
        return self.manager.score(frames)

    def score_some(self, frames: Frames, start: int, stop: int) -> Scores:
        """Scores of the frames from `start` to `stop`; frames that do not fit fail the request alone."""
        return self.manager.score_some(frames, start, stop)

    def features_of(self, frames: Frames, rows: IntArray) -> FloatArray:
        """Pooled encoder features of the frames `rows`, float32 [K, F]."""
        return self.manager.features_some(frames, rows)

    def compute_batch_rewards(self, observations: Any) -> FloatArray:
        """Learned rewards, in mini-batches, however many there are.

        Args:
            observations: a batched observation of N environments -> float32 [N]; a list of T of them, or one
                whose images are [T, N, H, W, C] -> [T, N]; or an object that has `transitions` or
                `forward_inputs`, as RLinf's rollouts do.
        """
        for name in ("transitions", "forward_inputs"):
            if (held := getattr(observations, name, None)) is not None:
                return self.compute_batch_rewards(_observations_in(held))
        if isinstance(observations, list | tuple):
            if not observations:
                raise DataError("there are no observations to score")
            return np.stack([self.manager.compute_rewards(each) for each in observations])
        found = images_from(observations, self.manager.image_keys)
        shape = next(iter(found.values())).shape
        if len(shape) != 5 or self.manager.facts.num_frames > 1:
            return self.manager.compute_rewards(found)
        flat = {name: frames.reshape(-1, *frames.shape[2:]) for name, frames in found.items()}
        return self.manager.compute_rewards(flat).reshape(shape[:2])

    def compute_rewards(self, observations: Any) -> FloatArray:
        """The same under the name that RLinf's reward workflow uses."""
        return self.compute_batch_rewards(observations)

    _compute_rewards_with_model = compute_batch_rewards

    def save_checkpoint(self, path: Path | str, step: int) -> Path:
        """Save the model as `path/step_{step}/` with its contract; returns that folder."""
        target = Path(path) / f"step_{step}"
        save_checkpoint(target, self.manager.model, self.manager.contract)
        return target


def _observations_in(held: Any) -> Any:
    """The observations of RLinf's `transitions` ([(obs, next_obs), ...], or dicts) or `forward_inputs`."""
    steps = held if isinstance(held, list | tuple) else [held]
    found = []
    for step in steps:
        if isinstance(step, Mapping):
            step = step.get("next_obs", step.get("obs", step))
        elif isinstance(step, list | tuple) and step:
            step = step[-1]
        found.append(step)
    return found if isinstance(held, list | tuple) else found[0]


EmbodiedRewardWorker = ImageRewardWorker
"""The older name."""
