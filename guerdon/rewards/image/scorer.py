"""From a checkpoint to calibrated probabilities and decisions: the one way from frames to scores.

`RewardManager`, and through it workers, wrappers and cards, score here, and so does `image_success`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from typing_extensions import Self

from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import BoolArray, FloatArray, UInt8Array, display_path
from guerdon.rewards.calibration import fires
from guerdon.rewards.image.accelerate import Scorer, make_scorer
from guerdon.rewards.image.base import RewardModel, pool_features
from guerdon.rewards.image.checkpoint import load_checkpoint
from guerdon.rewards.image.contract import Contract, changed_settings
from guerdon.rewards.image.int8 import int8_scorer
from guerdon.rewards.image.int8_file import int8_path, load_int8
from guerdon.rewards.model import SuccessScores

log = logging.getLogger("guerdon")

Scores: TypeAlias = SuccessScores
"""What is said of N frames; arrays [N]."""
MINI_BATCH = 256
"""Frames that are scored at once."""
COLOUR_FRAMES = 64
"""Batches of so many frames are checked for swapped colours each; fewer may show an odd moment, and only the
first batch is."""


class ImageScorer:
    """Scores frames with a fitted model, its calibration and its threshold; scoring changes nothing.

    Args:
        model: in eval mode.
        contract: of its checkpoint; knows calibration, threshold and what frames must look like.
        source: where it came from, for messages.
        threshold: above which a probability counts as success; None takes the calibrated one.
        int8: the file beside the checkpoint, for `precision: int8`.
        decides: whether decisions are taken; an int8 file is made for one threshold.
        device: where to compute.
    """

    def __init__(
        self,
        model: RewardModel,
        contract: Contract,
        *,
        source: str,
        threshold: float | None = None,
        int8: Path | None = None,
        decides: bool = True,
        device: str = "cpu",
    ) -> None:
        broken = [name for name, value in model.state_dict().items() if not bool(value.isfinite().all())]
        if broken:  # a fused ReLU would turn NaN into 0 and hide it
            raise DataError(f"{source}: the weights {broken[0]} are not finite")
        self.model, self.contract, self.source = model, contract, source
        self.calibration = contract.calibration_map
        self.threshold = self._threshold(threshold)
        self._int8, self._decides = int8, decides
        self._device = device
        self._scorer: Scorer | None = self._make_scorer(device)
        self._checked_colours = False

    @classmethod
    def load(
        cls,
        path: Path | str,
        config: RewardModelConfig | None = None,
        *,
        threshold: float | None = None,
        decides: bool = True,
        device: str = "cpu",
    ) -> Self:
        """Load a checkpoint.

        Args:
            path: a file or folder.
            config: the section of the model, with the precision; a setting that differs from both the
                checkpoint and the default was set by hand, and is refused.
            threshold: see the class.
            decides: see the class.
            device: see the class.
        """
        given = set() if config is None else changed_settings(config)
        model, contract, _ = load_checkpoint(path, config, given)
        int8 = int8_path(path) if model.config.precision == "int8" else None
        source = display_path(path)
        return cls(
            model, contract, source=source, threshold=threshold, int8=int8, decides=decides, device=device
        )

    def _threshold(self, given: float | None) -> float:
        if given is not None:
            return float(given)
        if self.contract.threshold is None:
            log.warning("%s has no calibrated threshold; 0.5 is used", self.source)
            return 0.5
        return self.contract.threshold

    def _make_scorer(self, device: str) -> Scorer:
        precision = self.model.config.precision
        if precision != "int8":
            return make_scorer(self.model, precision, device=device)
        if torch.device(device).type != "cpu":
            raise ConfigError(f"int8 scoring runs on the CPU alone, not on {device}: use bf16 or fp32")
        assert self._int8 is not None
        threshold_logit = self.calibration.logit_at(self.threshold) if self._decides else None
        return int8_scorer(self.model, load_int8(self._int8, self.model, threshold_logit))

    def to_device(self, device: str) -> None:
        """Compute elsewhere from now on; where a scorer can be moved, it is made there when it is needed."""
        self._device = device
        self._scorer = self._make_scorer(device) if self.model.config.precision == "int8" else None

    def check(self, frames: Mapping[str, UInt8Array]) -> None:
        """Raise a `DataError` if a batch is not of the kind that the model was trained on."""
        count = max((len(images) for images in frames.values()), default=0)
        self.contract.check_frames(frames, colours=not self._checked_colours or count >= COLOUR_FRAMES)
        self._checked_colours = True

    def score(self, frames: Mapping[str, UInt8Array]) -> Scores:
        """Calibrated probabilities of frames, camera -> uint8 [N, H, W, C], or of stacks [N, k, H, W, C]."""
        self.check(frames)
        if self._scorer is None:
            self._scorer = self._make_scorer(self._device)
        logits, disagreement = self._scorer(frames)
        if not bool(np.isfinite(logits).all()):
            bad = int(np.flatnonzero(~np.isfinite(logits))[0])
            raise DataError(f"the reward model's score of frame {bad} of {len(logits)} is not finite")
        prob = self.calibration.apply(logits)
        return Scores(prob_success=prob, disagreement=disagreement.astype(np.float32))

    def fires(self, prob_success: FloatArray) -> BoolArray:
        """Which of these probabilities count as success."""
        return fires(prob_success, self.threshold)

    @torch.no_grad()
    def features(self, frames: Mapping[str, UInt8Array]) -> FloatArray:
        """Pooled encoder features of frames -> float32 [N, F], comparable with the contract's statistics."""
        pixels = self.model.preprocess(frames).to(next(self.model.parameters()).device)
        pooled: FloatArray = pool_features(self.model.encode(pixels)).float().cpu().numpy()
        return pooled
