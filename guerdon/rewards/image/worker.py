"""Reward workers, under the names of RLinf's reward workflow; engines decide in which process they live."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from guerdon.config.schema import TaskType
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import FloatArray, IntArray
from guerdon.rewards.image import save_checkpoint
from guerdon.rewards.image.scorer import (
    Frames,
    RewardFacts,
    RewardGiven,
    RewardManager,
    Scores,
    available_device,
    reward_section,
)


class ImageRewardWorker:
    """Scores images with a fitted model."""

    def __init__(self, cfg: RewardGiven, *, device: str | None = None) -> None:
        """Remember the settings; `init_worker` loads the model.

        Args:
            cfg: the `reward` section, or the path of a checkpoint.
            device: where to compute; None: a GPU if there is one.
        """
        self.cfg = reward_section(cfg, "ImageRewardWorker")
        self._device = available_device() if device is None else device
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
        """Learned rewards of a batched observation, however large -> float32 [N]."""
        return self.manager.compute_rewards(observations)

    def compute_rewards(self, observations: Any) -> FloatArray:
        """The same under the name that RLinf's reward workflow uses."""
        return self.manager.compute_rewards(observations)

    def save_checkpoint(self, path: Path | str, step: int) -> Path:
        """Save the model as `path/step_{step}/` with its contract; returns that folder."""
        target = Path(path) / f"step_{step}"
        save_checkpoint(target, self.manager.model, self.manager.contract)
        return target


EmbodiedRewardWorker = ImageRewardWorker
"""The older name."""


class RewardWorker:
    """The reward worker for any task: a fitted model scores images, rules score text."""

    def __init__(
        self,
        cfg: RewardGiven,
        *,
        task_type: TaskType = "embodied",
        device: str | None = None,
    ) -> None:
        """Remember the settings; `init_worker` loads what is needed.

        Args:
            cfg: the `reward` section, or the path of a checkpoint.
            task_type: `runner.task_type`.
            device: where to compute; None: a GPU if there is one.
        """
        cfg = reward_section(cfg, "RewardWorker")
        if task_type not in get_args(TaskType):
            raise ConfigError(f"task_type must be one of {get_args(TaskType)}, not {task_type!r}")
        if task_type == "text" and cfg.use_reward_model:
            raise ConfigError(
                "a learned reward model is not supported for text tasks: set reward.use_reward_model=False "
                "and choose rules in reward.text"
            )
        self.cfg, self.task_type = cfg, task_type
        self._images = ImageRewardWorker(cfg, device=device) if task_type == "embodied" else None
        self._rules: Callable[[Sequence[str], Sequence[str]], FloatArray] | None = None

    def init_worker(self) -> None:
        """Load the checkpoint, or make the rules."""
        if self._images is not None:
            self._images.init_worker()
        else:
            from guerdon.rewards.text.rules import create_text_reward

            self._rules = create_text_reward(self.cfg.text)

    @property
    def embodied(self) -> ImageRewardWorker:
        """The worker of an embodied task."""
        if self._images is None:
            raise ConfigError("a text task has no image reward worker")
        return self._images

    def compute_batch_rewards(self, observations: Any) -> FloatArray:
        """Learned rewards of a batched observation -> float32 [N]."""
        return self.embodied.compute_batch_rewards(observations)

    def compute_rewards(self, inputs: Any, references: Sequence[str] | None = None) -> FloatArray:
        """Rewards float32 [N]: of a batched observation, or of texts against their references."""
        if self._images is not None:
            return self._images.compute_batch_rewards(inputs)
        if self._rules is None:
            raise ConfigError("the reward worker has no rules yet: call init_worker() first")
        if references is None:
            raise DataError("text rewards need a reference for each response")
        return self._rules(inputs, references)

    def save_checkpoint(self, path: Path | str, step: int) -> Path:
        """Save the image model; see `ImageRewardWorker`."""
        return self.embodied.save_checkpoint(path, step)
