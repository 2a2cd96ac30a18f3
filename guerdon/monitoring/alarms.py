"""The alarms of the monitor: one small class each, listed in `ALARMS`.

Those for models that give rewards instead of probabilities are in `reward_alarms.py`.

A new alarm is a class here, its line in the table, its limit in `MonitorConfig`, and a test.
"""

# ruff: noqa: D102 - the base class documents the methods
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from guerdon.core.errors import DataError
from guerdon.core.types import FloatArray
from guerdon.monitoring.alarm_check import AlarmCheck, MonitorSetup, Offenders, RolloutStatistics
from guerdon.monitoring.reward_alarms import NonfiniteRewards, RewardCollapse, SuccessDrop

MAX_DISTANCES = 4096
"""Feature distances that a drift value is made of, at most; later ones replace earlier ones."""
MAX_DEVIATIONS = 10.0
"""A single feature counts for no more in a distance, so that a few odd ones do not speak for all."""
MIN_DEVIATION = 0.05
"""Features that hardly varied are measured by this share of the median deviation instead."""


class SuccessGap(AlarmCheck):
    """The model calls episodes a success that the environment does not."""

    name = "success_gap"
    looks_at = "share of episodes that the model calls a success and the environment does not"
    setting = "max_success_gap"
    remedy = (
        "the model calls episodes a success that the environment does not: label these frames as failures "
        "and refit, or use reward.reward_mode=terminal until then"
    )

    @classmethod
    def missing(cls, setup: MonitorSetup) -> str:
        return "" if setup.knows_success else "the environment does not tell success"

    def count(self, statistics: RolloutStatistics) -> tuple[float, float, int]:
        return statistics.episodes_wrong, statistics.episodes, statistics.episodes


class _FireRatio(AlarmCheck):
    """Frames that fire, relative to the rate that calibration makes plausible."""

    setting = "max_fire_ratio"

    def __init__(self, setup: MonitorSetup) -> None:
        super().__init__(setup)
        self._usual_rate = max(self.usual_rate(setup)[0], 1e-6)

    @classmethod
    def usual_rate(cls, setup: MonitorSetup) -> tuple[float, str]:
        """The rate to compare with, and why it is not known here (empty if it is)."""
        raise NotImplementedError

    @classmethod
    def missing(cls, setup: MonitorSetup) -> str:
        rate, why = cls.usual_rate(setup)
        ratio = setup.cfg.max_fire_ratio
        if not why and rate * ratio >= 1.0:
            why = f"{ratio:g} times the usual rate of {rate:.1%} is more than all frames"
        return why

    def value(self) -> float:
        return super().value() / self._usual_rate


class WrongFires(_FireRatio):
    """The model fires on more failure frames than calibration promised.

    The rate is of the failure frames, or of the frames that fire, where those are more: the few failures of a
    good policy lie at the edge of success, and some that fire there are no reward worth hacking.
    """

    name = "wrong_fires"
    looks_at = "rate of wrong fires over the highest one that calibration promised"
    remedy = (
        "the model fires on failure frames more often than calibration promised: raise "
        "reward.reward_threshold, or label these frames as failures and refit"
    )

    @classmethod
    def applies(cls, setup: MonitorSetup) -> bool:
        return setup.knows_success

    @classmethod
    def usual_rate(cls, setup: MonitorSetup) -> tuple[float, str]:
        contract, threshold = setup.contract, setup.threshold
        promise = (contract.calibration or {}).get("threshold") or {}
        interval = promise.get("false_positive_interval") or (None, None)
        upper = _number(interval[1])
        if math.isnan(upper):
            return upper, "the checkpoint is not calibrated"
        if contract.threshold is not None and threshold < contract.threshold:
            return upper, f"the threshold {threshold:g} is below the calibrated one of {contract.threshold:g}"
        return upper, ""

    def count(self, statistics: RolloutStatistics) -> tuple[float, float, int]:
        failures = statistics.scored & ~statistics.success
        frames = max(failures.sum(), statistics.fired.sum())
        return statistics.wrong.sum(), frames, statistics.episodes


class FireRate(_FireRatio):
    """Where success is unknown: the model fires far more often than on the successes of calibration.

    A policy that always succeeds fires about as often as a success episode of calibration shows success;
    firing many times as often is not success.
    """

    name = "fire_rate"
    looks_at = "rate of fires over that of success frames in the success episodes of calibration"
    remedy = (
        "the model fires far more often than on successes in calibration: look at these frames; if they are "
        "no successes, label them and refit, or raise reward.reward_threshold"
    )

    @classmethod
    def applies(cls, setup: MonitorSetup) -> bool:
        return not setup.knows_success

    @classmethod
    def usual_rate(cls, setup: MonitorSetup) -> tuple[float, str]:
        names = ("num_positive_frames", "num_success_episodes", "num_frames", "num_episodes")
        positive, successes, frames, episodes = (_number(setup.contract.metrics.get(name)) for name in names)
        if not (positive > 0 and successes > 0 and frames > 0 and episodes > 0):
            return math.nan, "the checkpoint does not say how often success was seen"
        return positive / (successes * frames / episodes), ""

    def count(self, statistics: RolloutStatistics) -> tuple[float, float, int]:
        return statistics.fired.sum(), statistics.scored.sum(), statistics.episodes


class EarlyFires(AlarmCheck):
    """The model fires before any success can be there."""

    name = "early_fires"
    looks_at = "share of episodes that fire earlier than any success frame in calibration"
    setting = "max_early_fires"
    remedy = (
        "the model fires before any success can be there: use reward.reward_mode=terminal, or label these "
        "frames as failures and refit"
    )

    @classmethod
    def missing(cls, setup: MonitorSetup) -> str:
        unknown = math.isnan(first_success_step(setup))
        return 'the checkpoint has no metrics["first_success_step"]' if unknown else ""

    def count(self, statistics: RolloutStatistics) -> tuple[float, float, int]:
        return statistics.episodes_early, statistics.episodes, statistics.episodes

    def offenders(self, statistics: RolloutStatistics) -> Offenders:
        return statistics.early & ~statistics.success, statistics.prob_success


class Drift(AlarmCheck):
    """The frames are unlike those of calibration."""

    name = "drift"
    looks_at = "distance of the encoder's features from those of the calibration frames, in deviations"
    setting = "max_drift"
    remedy = (
        "the frames are unlike those that the model was fitted to: check camera and lighting, or label such "
        "frames and refit"
    )

    def __init__(self, setup: MonitorSetup) -> None:
        super().__init__(setup)
        assert setup.contract.feature_mean is not None and setup.contract.feature_std is not None
        self._drift = FeatureDrift(setup.contract.feature_mean, setup.contract.feature_std)
        self.memory["distances"] = []

    @classmethod
    def missing(cls, setup: MonitorSetup) -> str:
        known = setup.contract.feature_mean is not None and setup.contract.feature_std is not None
        return "" if known else "the checkpoint has no feature statistics"

    def count(self, statistics: RolloutStatistics) -> tuple[float, float, int]:
        if statistics.features is None:
            return 0.0, 0, statistics.episodes
        fresh = self._drift.distances(statistics.features)
        self.memory["distances"] = [*self.memory["distances"], *fresh.tolist()][-MAX_DISTANCES:]
        return 0.0, len(fresh), statistics.episodes

    def offenders(self, statistics: RolloutStatistics) -> Offenders:
        return statistics.scored, np.zeros_like(statistics.prob_success)

    def value(self) -> float:
        """The median, so that a few odd frames do not speak for all."""
        distances, self.memory["distances"] = self.memory["distances"], []
        return float(np.median(distances))


class Disagreement(AlarmCheck):
    """The members of an ensemble contradict each other."""

    name = "disagreement"
    looks_at = "mean deviation between the members of an ensemble on frames that fire"
    setting = "max_disagreement"
    remedy = (
        "the members of the ensemble disagree on what fires: raise reward.reward_threshold, or label these "
        "frames and refit"
    )

    @classmethod
    def missing(cls, setup: MonitorSetup) -> str:
        single = int(setup.contract.model.get("num_members", 1)) < 2
        return "the model is no ensemble (reward.model.num_members)" if single else ""

    def count(self, statistics: RolloutStatistics) -> tuple[float, float, int]:
        if statistics.disagreement is None:
            return 0.0, 0, 0
        values = statistics.disagreement[statistics.fired]
        return values.sum(), len(values), statistics.episodes_fired

    def offenders(self, statistics: RolloutStatistics) -> Offenders:
        unsure = statistics.prob_success if statistics.disagreement is None else statistics.disagreement
        return statistics.fired, unsure


ALARMS: tuple[type[AlarmCheck], ...] = (
    SuccessGap,
    WrongFires,
    FireRate,
    EarlyFires,
    Drift,
    Disagreement,
    SuccessDrop,
    RewardCollapse,
    NonfiniteRewards,
)
"""Every alarm there is, in the order in which they are checked."""


class FeatureDrift:
    """Distances of frames from those that the reward model was calibrated on, in its encoder's features.

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


def first_success_step(setup: MonitorSetup) -> float:
    """The earliest step at which calibration saw a success; NaN where the checkpoint does not say."""
    return _number(setup.contract.metrics.get("first_success_step"))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
