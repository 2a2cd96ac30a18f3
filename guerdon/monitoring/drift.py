"""What a run is compared with: numbers that a checkpoint carries, and when they raise an alarm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from guerdon.core.errors import DataError
from guerdon.core.types import FloatArray
from guerdon.rewards.image.contract import Contract

CLEAR_SHARE = 0.8
"""An alarm ends below this share of its limit."""
MAX_DEVIATIONS = 10.0
"""A single feature counts for no more in a distance, so that a few odd ones do not speak for all."""
MIN_DEVIATION = 0.05
"""Features that hardly varied are measured by this share of the median deviation instead."""


@dataclass(kw_only=True)
class Signal:
    """One thing that is watched: what was counted since the last check, and how the last checks ended."""

    limit: float
    total: float = 0.0
    count: float = 0.0
    episodes: int = 0
    value: float = math.nan
    """Of the last check."""
    above: int = 0
    below: int = 0
    raised: bool = False

    def add(self, total: float, count: float, episodes: int) -> None:
        """Sum `total` over `count` cases, seen in `episodes` that have ended since."""
        self.total += total
        self.count += count
        self.episodes += episodes

    def ready(self, min_episodes: int) -> bool:
        """Whether there is enough for a check."""
        return self.episodes >= min_episodes and self.count > 0

    def check(self, value: float, patience: int) -> bool:
        """Take in the value of a check and start anew; True if the alarm rises now."""
        self.value, self.total, self.count, self.episodes = value, 0.0, 0.0, 0
        self.above = self.above + 1 if value > self.limit else 0
        self.below = self.below + 1 if value < CLEAR_SHARE * self.limit else 0
        rises = not self.raised and self.above >= patience
        self.raised = rises or (self.raised and self.below < patience)
        return rises


class FeatureDrift:
    """Distances of frames from those that the reward model was calibrated on, in its encoder's eyes.

    The distance of a frame is the mean over the features of how many deviations each lies from its mean.

    Medians over the frames of a policy, measured on Tabletop. Through a frozen encoder: 0.8 for honest
    policies from random to perfect, 1.1 under random looks, 3.6 to 5.8 for black, white and noise. Through
    encoders that were fitted end to end: 0.4 to 1.5 for honest policies, depending on how often they succeed,
    and no more for anything else, since such an encoder has learned to ignore whatever does not tell success
    from failure. So a limit of 2.5 is safe; a high value means foreign input, a low one proves nothing.

    Args:
        mean: [F], per feature.
        std: [F], per feature.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, deviation = np.asarray(mean, np.float64), np.asarray(std, np.float64)
        if self._mean.ndim != 1 or self._mean.shape != deviation.shape or not len(self._mean):
            raise DataError(
                f"feature_mean and feature_std must have one shape [F], not {list(self._mean.shape)} "
                f"and {list(deviation.shape)}"
            )
        if not (np.isfinite(self._mean).all() and np.isfinite(deviation).all() and deviation.max() > 0):
            raise DataError("the checkpoint's feature statistics are not finite, or its features never vary")
        typical = float(np.median(deviation[deviation > 0]))
        self._std = np.maximum(deviation, MIN_DEVIATION * typical)

    def distances(self, features: FloatArray) -> FloatArray:
        """Distance of each of K frames, features float32 [K, F] -> float32 [K]."""
        if features.ndim != 2 or features.shape[1] != len(self._mean):
            raise DataError(f"features must have shape [K, {len(self._mean)}], not {list(features.shape)}")
        deviations = np.minimum(np.abs(features - self._mean) / self._std, MAX_DEVIATIONS)
        distances: FloatArray = deviations.mean(axis=1).astype(np.float32)
        return distances


def promised_rate(contract: Contract, threshold: float) -> tuple[float, str]:
    """The highest rate of wrong fires that calibration allows for, or why it says nothing here."""
    promise = (contract.calibration or {}).get("threshold") or {}
    interval = promise.get("false_positive_interval") or (None, None)
    upper = number(interval[1])
    if math.isnan(upper):
        return upper, "the checkpoint is not calibrated"
    if contract.threshold is not None and threshold < contract.threshold:
        return upper, f"the threshold {threshold:g} is below the calibrated one of {contract.threshold:g}"
    return upper, ""


def success_share(metrics: Mapping[str, Any]) -> tuple[float, str]:
    """The share of frames that show success in a success episode of calibration, or why it is not known.

    A policy that always succeeds fires about so often; firing many times as often is not success.
    """
    names = ("num_positive_frames", "num_success_episodes", "num_frames", "num_episodes")
    positive, successes, frames, episodes = (number(metrics.get(name)) for name in names)
    if not (positive > 0 and successes > 0 and frames > 0 and episodes > 0):
        return math.nan, "the checkpoint does not say how often success was seen"
    return positive / (successes * frames / episodes), ""


def number(value: Any) -> float:
    """A number of a checkpoint; NaN where it has none."""
    return math.nan if value is None else float(value)
