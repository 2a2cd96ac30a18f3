"""`RewardWorker`, the reward worker for any task, under the name of RLinf's reward workflow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from guerdon.config import GuerdonConfig
from guerdon.config.schema import TaskType
from guerdon.core.devices import resolve_device
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import FloatArray
from guerdon.fit import FitResult
from guerdon.rewards.image.given import RewardGiven, whole_config
from guerdon.rewards.image.worker import ImageRewardWorker
from guerdon.rewards.text.rules import create_text_reward
from guerdon.training.fit_run import train_reward


class RewardWorker:
    """The reward worker for any task: a fitted model scores images, rules score text."""

    def __init__(
        self,
        cfg: RewardGiven,
        *,
        task_type: TaskType | None = None,
        device: str = "auto",
    ) -> None:
        """Remember the settings; `init_worker` loads what is needed.

        Args:
            cfg: a whole config or its `reward` section (a dataclass, a nested dict or OmegaConf's), or the
                path of a checkpoint. `fit` needs the `fit` section or RLinf's spellings of it.
            task_type: `embodied` or `text`; None: as the config shows, see `task_type_of`.
            device: where to fit and to score: `auto` as the config says, `cpu`, `cuda`, `cuda:1`, ...
        """
        self._config = whole_config(cfg, "RewardWorker")
        self.cfg = self._config.reward
        self.task_type: TaskType = task_type_of(self._config) if task_type is None else task_type
        if self.task_type not in get_args(TaskType):
            raise ConfigError(f"task_type must be one of {get_args(TaskType)}, not {self.task_type!r}")
        if self.task_type == "text" and self.cfg.use_reward_model:
            raise ConfigError(
                "a learned reward model is not supported for text tasks: set reward.use_reward_model=False "
                "and choose rules in reward.text"
            )
        self._images: ImageRewardWorker | None = None
        if self.task_type == "embodied":
            self._config = on_device(self._config, device)
            self._images = ImageRewardWorker(self.cfg, device=device)
        self._rules: Callable[[Sequence[str], Sequence[str]], FloatArray] | None = None

    def init_worker(self) -> None:
        """Load the checkpoint, or make the rules; with data and no checkpoint, `fit` makes the model."""
        if self._images is None:
            self._rules = create_text_reward(self.cfg.text)
        elif self.cfg.model.checkpoint_path is not None or not self._has_data:
            self._images.init_worker()

    @property
    def _has_data(self) -> bool:
        """Whether the config names frames to fit on."""
        data = self._config.fit.data
        return data.path is not None or data.positive_dir is not None

    def fit(self) -> FitResult:
        """Fit the image model as `guerdon train-reward` does with this config; then score with it.

        Returns:
            Where the best model is, and how good it is.
        """
        worker = self.embodied
        result = train_reward(self._config)[1]
        worker.load(str(result.checkpoint))
        return result

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


def on_device(config: GuerdonConfig, device: str) -> GuerdonConfig:
    """The config with the device to fit on that torch's name of it means; `auto` changes nothing."""
    if str(device) == "auto":
        return config
    found = torch.device(resolve_device(device))
    number = config.fit.gpu_id if found.index is None else found.index
    if found.type == "cpu":
        return replace(config, fit=replace(config.fit, device="cpu"))
    if found.type == "cuda":
        return replace(config, fit=replace(config.fit, device="cuda", gpu_id=number))
    raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or such as 'cuda:1', not {device!r:.80}")


def task_type_of(config: GuerdonConfig) -> TaskType:
    """`text` if `runner.task_type` says so, or if there are rules for text and no image model is named."""
    reward = config.reward
    images = reward.use_reward_model or reward.model.checkpoint_path is not None
    return "text" if reward.text and not images else config.runner.task_type
