"""`RewardManager`: a checkpoint turned into rewards."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from guerdon.config import RewardConfig, RewardModelConfig
from guerdon.core.atomic import make_directory
from guerdon.core.errors import ConfigError
from guerdon.core.images import latest_frames
from guerdon.core.types import FloatArray, UInt8Array
from guerdon.data.collect.observations import images_from
from guerdon.data.datasets.pictures import save_picture
from guerdon.rewards.calibration import fires
from guerdon.rewards.image.contract import Contract
from guerdon.rewards.image.scorer import ImageScorer, Scores
from guerdon.rewards.relabel import map_rewards

DEBUG_VARIABLE = "DEBUG_IMAGE_SAVE_DIR"
RewardGiven: TypeAlias = "RewardConfig | str | os.PathLike[str]"
"""The `reward` section, or the path of a checkpoint, with all else by default."""


def reward_section(given: RewardGiven, who: str) -> RewardConfig:
    """The `reward` section of what `who` was given."""
    if isinstance(given, RewardConfig):
        return given
    if isinstance(given, str | os.PathLike):
        return RewardConfig(model=RewardModelConfig(checkpoint_path=os.fspath(given)))
    raise ConfigError(f"{who} takes a RewardConfig or the path of a checkpoint, not {type(given).__name__}")


@dataclass(frozen=True, kw_only=True)
class RewardFacts:
    """What others need to know of a loaded reward model."""

    image_keys: tuple[str, ...]
    """The cameras it looks at."""
    threshold: float
    """Above which a probability counts as success in this run."""
    num_members: int
    """Heads of its ensemble."""
    contract: Contract
    version: str
    """The data it was fitted to and where it was loaded from."""


class RewardManager:
    """Loads a reward model and computes learned rewards from images.

    Scoring changes nothing: the same frames give the same rewards, in whatever order and batch.
    """

    def __init__(self, cfg: RewardGiven, *, device: str = "cpu") -> None:
        """Load `cfg.model.checkpoint_path`.

        Args:
            cfg: the `reward` section, or the path of a checkpoint. The checkpoint knows its model; a setting
                of `cfg.model` that differs from both the checkpoint and the default was set by hand, and is
                refused.
            device: where to compute.
        """
        cfg = reward_section(cfg, "RewardManager")
        if cfg.model.checkpoint_path is None:
            raise ConfigError("reward.model.checkpoint_path is not set: which reward model should be used?")
        self.cfg = cfg
        given = None if cfg.reward_threshold == "calibrated" else float(cfg.reward_threshold)
        self._scorer = ImageScorer.load(
            cfg.model.checkpoint_path,
            cfg.model,
            threshold=given,
            decides=cfg.reward_type == "binary",
            device=device,
        )
        self.model, self.contract = self._scorer.model, self._scorer.contract
        self.threshold = self._scorer.threshold
        self.image_keys = self.model.config.image_keys
        self.version = f"{self.contract.data_hash or 'unknown'}/{self._scorer.source}"
        folder = cfg.model.debug_save_dir or os.environ.get(DEBUG_VARIABLE)
        self._debug = None if folder is None else DebugPictures(Path(folder))

    @property
    def facts(self) -> RewardFacts:
        """What others need to know."""
        return RewardFacts(
            image_keys=self.image_keys,
            threshold=self.threshold,
            num_members=self.model.num_members,
            contract=self.contract,
            version=self.version,
        )

    def to_device(self, device: str) -> RewardManager:
        """Move the model; returns self."""
        self._scorer.to_device(device)
        return self

    def images(self, observations: Any) -> dict[str, UInt8Array]:
        """The model's cameras in a batched observation -> uint8 [N, H, W, C] each.

        A model that scores stacks of k frames needs them in the observation, [N, k, H, W, C], oldest first.
        """
        found = images_from(observations, self.image_keys)
        self._scorer.check(found)
        return found

    def score(self, frames: Mapping[str, UInt8Array]) -> Scores:
        """Calibrated probabilities of frames, camera -> uint8 [N, H, W, C], or of stacks [N, k, H, W, C]."""
        scores = self._scorer.score(frames)
        if self._debug is not None:
            shown = latest_frames(frames[self.image_keys[0]])
            self._debug.save(shown, scores.prob_success, self.threshold)
        return scores

    def features(self, frames: Mapping[str, UInt8Array]) -> FloatArray:
        """Pooled encoder features of frames -> float32 [N, F], comparable with the contract's statistics."""
        return self._scorer.features(frames)

    def compute_rewards(self, observations: Any) -> FloatArray:
        """Learned rewards of a batched observation -> float32 [N]."""
        return map_rewards(self.score(self.images(observations)).prob_success, self.cfg, self.threshold)


class DebugPictures:
    """Saves scored frames as `resnet_success|resnet_fail/{id:06d}_prob{p:.4f}.png`."""

    def __init__(self, folder: Path) -> None:
        self._folders = {True: folder / "resnet_success", False: folder / "resnet_fail"}
        existing = [make_directory(place) for place in self._folders.values()]
        self._next = sum(1 for place in existing for _ in place.glob("*.png"))

    def save(self, frames: UInt8Array, prob_success: FloatArray, threshold: float) -> None:
        """One picture per frame."""
        fired = fires(prob_success, threshold).tolist()
        for frame, prob, success in zip(frames, prob_success.tolist(), fired, strict=True):
            save_picture(self._folders[success] / f"{self._next:06d}_prob{prob:.4f}.png", frame)
            self._next += 1


def available_device() -> str:
    """`cuda` where there is a GPU, `cpu` otherwise."""
    return "cuda" if torch.cuda.is_available() else "cpu"
