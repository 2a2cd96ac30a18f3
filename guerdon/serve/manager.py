"""`RewardManager`: a checkpoint turned into rewards."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from guerdon.collect.observations import images_from
from guerdon.config import RewardConfig
from guerdon.datasets.pictures import save_picture
from guerdon.errors import ConfigError, DataError
from guerdon.fit.calibrate import Calibration
from guerdon.images import latest_frames
from guerdon.models import load_checkpoint
from guerdon.models.accelerate import Scorer, make_scorer
from guerdon.models.base import pool_features
from guerdon.models.contract import Contract, changed_settings
from guerdon.models.int8 import int8_scorer
from guerdon.models.int8_file import int8_path, load_int8
from guerdon.serve.relabel import map_rewards
from guerdon.store.atomic import make_directory
from guerdon.types import FloatArray, UInt8Array, display_path

log = logging.getLogger("guerdon")

DEBUG_VARIABLE = "DEBUG_IMAGE_SAVE_DIR"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the model says of N frames."""

    prob_success: FloatArray
    """float32 [N], calibrated."""
    disagreement: FloatArray
    """float32 [N]; deviation between ensemble members, 0 for a single one."""


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

    def __init__(self, cfg: RewardConfig, *, device: str = "cpu") -> None:
        """Load `cfg.model.checkpoint_path`.

        Args:
            cfg: the `reward` section. The checkpoint knows its model; a setting of `cfg.model` that differs
                from both the checkpoint and the default was set by hand, and is refused.
            device: where to compute.
        """
        if cfg.model.checkpoint_path is None:
            raise ConfigError("reward.model.checkpoint_path is not set: which reward model should be used?")
        self.cfg = cfg
        path = Path(cfg.model.checkpoint_path)
        self.model, self.contract, _ = load_checkpoint(path, cfg.model, changed_settings(cfg.model))
        broken = [name for name, value in self.model.state_dict().items() if not bool(value.isfinite().all())]
        if broken:  # a fused ReLU would turn NaN into 0 and hide it
            raise DataError(f"{display_path(path)}: the weights {broken[0]} are not finite")
        self.image_keys = self.model.config.image_keys
        stored = (self.contract.calibration or {}).get("map")
        self._calibration = Calibration() if stored is None else Calibration.from_dict(stored)
        self.threshold = self._threshold(path)
        self.version = f"{self.contract.data_hash or 'unknown'}/{display_path(path)}"
        self._device = device
        self._scorer = self._make_scorer(path)
        self._checked = False
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

    def _threshold(self, path: Path) -> float:
        if self.cfg.reward_threshold != "calibrated":
            return float(self.cfg.reward_threshold)
        if self.contract.threshold is None:
            log.warning("%s has no calibrated threshold; 0.5 is used", display_path(path))
            return 0.5
        return self.contract.threshold

    def _make_scorer(self, path: Path) -> Scorer:
        precision = self.cfg.model.precision
        if precision != "int8":
            return make_scorer(self.model, precision, device=self._device)
        if torch.device(self._device).type != "cpu":
            raise ConfigError(f"int8 scoring runs on the CPU alone, not on {self._device}: use bf16 or fp32")
        decides = self.cfg.reward_type == "binary"
        threshold_logit = self._calibration.logit_at(self.threshold) if decides else None
        return int8_scorer(self.model, load_int8(int8_path(path), self.model, threshold_logit))

    def to_device(self, device: str) -> RewardManager:
        """Move the model; returns self."""
        self._device = device
        self._scorer = self._make_scorer(Path(str(self.cfg.model.checkpoint_path)))
        return self

    def images(self, observations: Any) -> dict[str, UInt8Array]:
        """The model's cameras in a batched observation -> uint8 [N, H, W, C] each.

        A model that judges stacks of k frames needs them in the observation, [N, k, H, W, C], oldest first.
        """
        found = images_from(observations, self.image_keys)
        if not self._checked:
            self.contract.check_frames(found)
            self._checked = True
        return found

    def judge(self, frames: Mapping[str, UInt8Array]) -> Verdict:
        """Calibrated probabilities of frames, camera -> uint8 [N, H, W, C], or of stacks [N, k, H, W, C]."""
        logits, disagreement = self._scorer(frames)
        if not bool(np.isfinite(logits).all()):
            bad = int(np.flatnonzero(~np.isfinite(logits))[0])
            raise DataError(f"the reward model's verdict on frame {bad} of {len(logits)} is not finite")
        prob = self._calibration.apply(logits).astype(np.float32)
        if self._debug is not None:
            self._debug.save(latest_frames(frames[self.image_keys[0]]), prob, self.threshold)
        return Verdict(prob_success=prob, disagreement=disagreement.astype(np.float32))

    @torch.no_grad()
    def features(self, frames: Mapping[str, UInt8Array]) -> FloatArray:
        """Pooled encoder features of frames -> float32 [N, F], comparable with the contract's statistics."""
        pixels = self.model.preprocess(frames).to(next(self.model.parameters()).device)
        pooled: FloatArray = pool_features(self.model.encode(pixels)).float().cpu().numpy()
        return pooled

    def compute_rewards(self, observations: Any) -> FloatArray:
        """Learned rewards of a batched observation -> float32 [N]."""
        return map_rewards(self.judge(self.images(observations)).prob_success, self.cfg, self.threshold)


class DebugPictures:
    """Saves judged frames as `resnet_success|resnet_fail/{id:06d}_prob{p:.4f}.png`."""

    def __init__(self, folder: Path) -> None:
        self._folders = {True: folder / "resnet_success", False: folder / "resnet_fail"}
        existing = [make_directory(place) for place in self._folders.values()]
        self._next = sum(1 for place in existing for _ in place.glob("*.png"))

    def save(self, frames: UInt8Array, prob_success: FloatArray, threshold: float) -> None:
        """One picture per frame."""
        for frame, prob in zip(frames, prob_success.tolist(), strict=True):
            save_picture(self._folders[prob > threshold] / f"{self._next:06d}_prob{prob:.4f}.png", frame)
            self._next += 1


def available_device() -> str:
    """`cuda` where there is a GPU, `cpu` otherwise."""
    return "cuda" if torch.cuda.is_available() else "cpu"
