"""`ImageRewardWorker`: the reward manager as a worker, in mini-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from guerdon.config import RewardConfig
from guerdon.config.schema import TaskType
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import FloatArray, IntArray, UInt8Array
from guerdon.rewards.image import save_checkpoint
from guerdon.rewards.image.manager import (
    RewardFacts,
    RewardGiven,
    RewardManager,
    available_device,
    reward_section,
)
from guerdon.rewards.image.scorer import MINI_BATCH, Scores
from guerdon.rewards.relabel import map_rewards

REQUEST_FRAMES = 4 * MINI_BATCH
"""Frames in a request to a reward worker; whole mini-batches, so that sharing changes no score."""


def join_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of the frames of all parts, in their order; parts may be missing altogether."""
    none = [np.zeros(0, np.float32)]
    return Scores(
        prob_success=np.concatenate([part.prob_success for part in parts] or none),
        disagreement=np.concatenate([part.disagreement for part in parts] or none),
    )


class ImageRewardWorker:
    """Scores images with a fitted model. A plain class; engines decide in which process it lives."""

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

    def score(self, frames: Mapping[str, UInt8Array]) -> Scores:
        """Scores of frames (camera -> uint8 [N, H, W, C], or nothing at all) in mini-batches of 256."""
        count = len(next(iter(frames.values()))) if frames else 0
        return join_scores(
            [
                self.manager.score({name: each[start : start + MINI_BATCH] for name, each in frames.items()})
                for start in range(0, count, MINI_BATCH)
            ]
        )

    def describe(self) -> RewardFacts:
        """What others need to know of the model."""
        return self.manager.facts

    def score_some(self, frames: Mapping[str, UInt8Array], start: int, stop: int) -> Scores:
        """Scores of the frames from `start` to `stop`; frames that do not fit fail the request alone."""
        some = {name: images[start:stop] for name, images in frames.items()}
        return self.score(some)

    def features_of(self, frames: Mapping[str, UInt8Array], rows: IntArray) -> FloatArray:
        """Pooled encoder features of the frames `rows`, float32 [K, F]."""
        return self.manager.features({name: images[rows] for name, images in frames.items()})

    def compute_batch_rewards(self, observations: Any) -> FloatArray:
        """Learned rewards of a batched observation, however large -> float32 [N]."""
        frames = self.manager.images(observations)
        return map_rewards(self.score(frames).prob_success, self.cfg, self.manager.threshold)

    def compute_rewards(self, observations: Any) -> FloatArray:
        """The same under the name that RLinf's reward workflow uses."""
        return self.compute_batch_rewards(observations)

    def save_checkpoint(self, path: Path | str, step: int) -> Path:
        """Save the model as `path/step_{step}/` with its contract; returns that folder."""
        target = Path(path) / f"step_{step}"
        save_checkpoint(target, self.manager.model, self.manager.contract)
        return target


EmbodiedRewardWorker = ImageRewardWorker
"""The older name."""


def load_image_worker(cfg: RewardConfig, task_type: TaskType) -> ImageRewardWorker:
    """A reward worker that has its model, ready to score."""
    worker = RewardWorker(cfg, task_type=task_type)
    worker.init_worker()
    return worker.embodied


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
