"""Reward workers, under the names of RLinf's reward workflow; engines decide in which process they live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from guerdon.config.schema import TaskType
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import FloatArray, IntArray
from guerdon.envs.observations import images_from
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
            cfg: the `reward` section, a whole config as a mapping, or the path of a checkpoint.
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
            return self.manager.compute_rewards(observations)
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


class RewardWorker:
    """The reward worker for any task: a fitted model scores images, rules score text."""

    def __init__(
        self,
        cfg: RewardGiven,
        *,
        task_type: TaskType | None = None,
        device: str | None = None,
    ) -> None:
        """Remember the settings; `init_worker` loads what is needed.

        Args:
            cfg: the `reward` section, a whole config as a mapping, or the path of a checkpoint.
            task_type: `runner.task_type`; None: as the config says, `embodied` if it says nothing.
            device: where to compute; None: a GPU if there is one.
        """
        if task_type is None:
            runner = cfg.get("runner") if isinstance(cfg, Mapping) else None
            named = runner.get("task_type") if isinstance(runner, Mapping) else None
            task_type = "embodied" if named is None else named
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
