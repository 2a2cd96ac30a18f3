"""How good success probabilities are: per frame, per episode, and over thresholds.

A frame is positive if its label is at least 0.5, negative otherwise. A fire is `prob_success > threshold`,
strictly, as everywhere in Guerdon. Where a number needs both classes (or a class at all) and the data do
not have them, it is NaN; nothing raises. All arithmetic is float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import BoolArray, FloatArray, IntArray
from guerdon.rewards.relabel import fires

Float64Array: TypeAlias = NDArray[np.float64]
RATES = (0.005, 0.01, 0.02, 0.05, 0.1)
"""False-positive rates that are compared when a threshold is chosen."""
PROB_FLOOR = 1e-7
"""Probabilities are clipped to [PROB_FLOOR, 1 - PROB_FLOOR] before a logarithm."""


@dataclass(frozen=True, kw_only=True)
class LabelledScores:
    """Success probabilities of F frames out of E episodes, with what is true of them; any order."""

    prob_success: FloatArray
    """float32 [F] in [0, 1]."""
    labels: FloatArray
    """float32 [F] in [0, 1]; 1 where the frame shows success."""
    episode: IntArray
    """int64 [F] in 0..E-1."""
    step: IntArray
    """int64 [F]; the step within the episode, each at most once."""
    success: BoolArray
    """bool [E]; whether the episode counts as a success."""

    def __post_init__(self) -> None:
        names = ("prob_success", "labels", "episode", "step", "success")
        for name, dtype in zip(names, ("float32", "float32", "int64", "int64", "bool"), strict=True):
            value, count = getattr(self, name), len(self.labels)
            if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
                raise DataError(f"LabelledScores.{name} must be a numpy array {dtype} [*]")
            if name != "success" and len(value) != count:
                raise DataError(f"LabelledScores.{name} has {len(value)} frames, labels has {count}")
        if not len(self.labels):
            raise DataError("LabelledScores holds no frame")
        for name in ("prob_success", "labels"):
            value = getattr(self, name)
            if not bool(np.all((value >= 0.0) & (value <= 1.0))):  # also catches NaN
                raise DataError(f"LabelledScores.{name} must lie in [0, 1]")
        if int(self.episode.min()) < 0 or int(self.episode.max()) >= len(self.success):
            raise DataError(f"LabelledScores.episode must lie in 0..{len(self.success) - 1}")
        order = self.order
        same = (np.diff(self.episode[order]) == 0) & (np.diff(self.step[order]) == 0)
        if bool(same.any()):
            row = order[int(np.argmax(same))]
            raise DataError(f"LabelledScores has step {self.step[row]} of episode {self.episode[row]} twice")

    @cached_property
    def order(self) -> IntArray:
        """int64 [F]: the frames by episode, then by step."""
        return np.lexsort((self.step, self.episode)).astype(np.int64)

    @property
    def positive(self) -> BoolArray:
        """Which frames show success -> bool [F]."""
        return is_success(self.labels)

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.success)

    def per_episode(self, frames: NDArray[Any]) -> IntArray:
        """How many of the chosen frames (bool [F]) lie in each episode -> int64 [E]."""
        return np.bincount(self.episode[frames], minlength=self.num_episodes).astype(np.int64)


class Confusion(NamedTuple):
    """Counts of frames, and the rates that follow (NaN where there is nothing to divide by)."""

    true_positive: int
    false_positive: int
    true_negative: int
    false_negative: int

    @property
    def true_positive_rate(self) -> float:
        """Share of success frames that fire."""
        return float(_ratio(self.true_positive, self.true_positive + self.false_negative))

    @property
    def false_positive_rate(self) -> float:
        """Share of failure frames that fire."""
        return float(_ratio(self.false_positive, self.false_positive + self.true_negative))

    @property
    def precision(self) -> float:
        """Share of fires that are right."""
        return float(_ratio(self.true_positive, self.true_positive + self.false_positive))


class Curve(NamedTuple):
    """A curve over thresholds; point i fires where `prob > thresholds[i]`."""

    x: Float64Array
    """float64 [K]: false-positive rate (ROC) or recall (PR), ascending."""
    y: Float64Array
    """float64 [K]: true-positive rate (ROC) or precision (PR)."""
    thresholds: Float64Array
    """float64 [K], descending."""


class OperatingPoint(NamedTuple):
    """A threshold and what it gives on some frames."""

    false_positive_rate: float
    true_positive_rate: float
    threshold: float


class Reliability(NamedTuple):
    """Said against seen, over the bins that hold frames."""

    prob: Float64Array
    """float64 [B]: mean probability."""
    share: Float64Array
    """float64 [B]: mean label."""
    num_frames: IntArray
    """int64 [B]."""


class FalseFires(NamedTuple):
    """Fires on negative frames of each episode."""

    runs: IntArray
    """int64 [E]: unbroken runs of such fires."""
    frames: IntArray
    """int64 [E]: frames that fire so."""


def is_success(labels: ArrayLike) -> BoolArray:
    """The one rule that makes a label a class: at least 0.5 -> bool [F]."""
    return np.asarray(labels) >= 0.5


def auc(prob: ArrayLike, labels: ArrayLike) -> float:
    """Probability that a success frame scores above a failure frame; ties count half. NaN with one class."""
    values, positive = np.asarray(prob, np.float64), is_success(labels)
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    if not num_positive or not num_negative:
        return float("nan")
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    midranks = np.cumsum(counts) - (counts - 1) / 2  # ranks from 1; equal values share their mean rank
    rank_sum = float(midranks[inverse][positive].sum())
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def roc_curve(prob: ArrayLike, labels: ArrayLike) -> Curve:
    """True- over false-positive rate, from nothing fires (0, 0) to everything fires (1, 1)."""
    thresholds, fired, hits = _sweep(prob, labels)
    num_negative = fired[-1] - hits[-1]
    return Curve(_ratio(fired - hits, num_negative), _ratio(hits, hits[-1]), thresholds)


def trade_off(scores: LabelledScores, rates: Sequence[float] = RATES) -> list[OperatingPoint]:
    """The highest recall that is possible with at most each of these false-positive rates.

    Rates at which nothing fires are left out, and so is everything if the frames have one class.
    """
    curve, found = roc_curve(scores.prob_success, scores.labels), list[OperatingPoint]()
    for rate in rates:
        last = int(np.searchsorted(curve.x, rate + 1e-12, side="right")) - 1
        if last > 0 and curve.y[last] > 0.0 and np.isfinite(curve.x[last]):
            found.append(
                OperatingPoint(float(curve.x[last]), float(curve.y[last]), float(curve.thresholds[last]))
            )
    return found


def better_recall(scores: LabelledScores, threshold: float, wanted: float) -> OperatingPoint | None:
    """The least more false fires for which about `wanted` of the success frames fire; None: nothing helps."""
    now = confusion(scores.prob_success, scores.labels, threshold)
    more = [
        point
        for point in trade_off(scores)
        if point.threshold < threshold and point.true_positive_rate >= now.true_positive_rate + 0.05
    ]
    enough = [point for point in more if point.true_positive_rate >= wanted]
    return enough[0] if enough else more[-1] if more else None


def round_up(rate: float) -> float:
    """A rate for a command: two digits, not below it."""
    unit = 10.0 ** (math.floor(math.log10(rate)) - 1) if rate > 0 else 0.001
    return float(f"{math.ceil(rate / unit - 1e-9) * unit:.6g}") if rate > 0 else unit


def pr_curve(prob: ArrayLike, labels: ArrayLike) -> Curve:
    """Precision over recall; begins at recall 0 with precision 1 by convention."""
    thresholds, fired, hits = _sweep(prob, labels)
    precision = np.concatenate([[1.0], hits[1:] / fired[1:]])
    return Curve(_ratio(hits, hits[-1]), precision, thresholds)


def average_precision(prob: ArrayLike, labels: ArrayLike) -> float:
    """Area under the precision-recall steps: sum of precision times gain in recall. NaN without successes."""
    curve = pr_curve(prob, labels)
    return float(np.sum(np.diff(curve.x) * curve.y[1:]))


def log_loss(prob: ArrayLike, labels: ArrayLike) -> float:
    """Mean cross entropy in nats; soft labels count as they are."""
    return float(log_loss_per_frame(prob, labels).mean())


def log_loss_per_frame(prob: ArrayLike, labels: ArrayLike) -> Float64Array:
    """Cross entropy of each frame in nats -> float64 [F]."""
    values = np.clip(np.asarray(prob, np.float64), PROB_FLOOR, 1 - PROB_FLOOR)
    truth = np.asarray(labels, np.float64)
    result: Float64Array = -(truth * np.log(values) + (1 - truth) * np.log1p(-values))
    return result


def accuracy(prob: ArrayLike, labels: ArrayLike, threshold: float = 0.5) -> float:
    """Share of frames on the right side of the threshold."""
    return float(np.mean(fires(prob, threshold) == is_success(labels)))


def confusion(prob: ArrayLike, labels: ArrayLike, threshold: float) -> Confusion:
    """Count fires and silences against the labels."""
    fired, positive = fires(prob, threshold), is_success(labels)
    return Confusion(
        true_positive=int(np.sum(fired & positive)),
        false_positive=int(np.sum(fired & ~positive)),
        true_negative=int(np.sum(~fired & ~positive)),
        false_negative=int(np.sum(~fired & positive)),
    )


def reliability(prob: ArrayLike, labels: ArrayLike, bins: int = 15) -> Reliability:
    """Mean probability and mean label in `bins` bins of equal width over [0, 1]; empty bins are left out."""
    values, truth = np.asarray(prob, np.float64), np.asarray(labels, np.float64)
    index = np.minimum((values * bins).astype(np.int64), bins - 1)
    count = np.bincount(index, minlength=bins)
    used = count > 0
    mean_prob = np.bincount(index, values, bins)[used] / count[used]
    mean_label = np.bincount(index, truth, bins)[used] / count[used]
    return Reliability(mean_prob, mean_label, count[used].astype(np.int64))


def ece(prob: ArrayLike, labels: ArrayLike, bins: int = 15) -> float:
    """Expected calibration error: mean distance of said and seen over the bins of `reliability`."""
    said = reliability(prob, labels, bins)
    return float(np.average(np.abs(said.prob - said.share), weights=said.num_frames))


def detection_delay(scores: LabelledScores, threshold: float) -> Float64Array:
    """Steps from the first positive frame to the first fire at or after it, per success episode.

    Returns:
        float64 [number of success episodes], in the order of the episodes; NaN where it never fires, or
        where no frame is positive.
    """
    first = _first_step(scores, scores.positive)
    late = fires(scores.prob_success, threshold) & (scores.step >= first[scores.episode])
    fire = _first_step(scores, late)
    delay: Float64Array = np.where(np.isfinite(fire), fire, np.nan) - np.where(
        np.isfinite(first), first, np.nan
    )
    return delay[scores.success]


def early_fires(scores: LabelledScores, threshold: float) -> IntArray:
    """Frames that fire before the first positive one, per success episode -> int64 [success episodes].

    In a success episode without a positive frame every fire is early.
    """
    first = _first_step(scores, scores.positive)
    early = fires(scores.prob_success, threshold) & (scores.step < first[scores.episode])
    return scores.per_episode(early)[scores.success]


def false_fires_per_episode(scores: LabelledScores, threshold: float) -> FalseFires:
    """Fires on negative frames, counted as runs (a fire that stays on is one) and as frames."""
    fired = fires(scores.prob_success, threshold) & ~scores.positive
    ordered, episode = fired[scores.order], scores.episode[scores.order]
    continues = np.zeros(len(ordered), np.bool_)
    continues[1:] = ordered[:-1] & (episode[1:] == episode[:-1])
    runs = np.bincount(episode[ordered & ~continues], minlength=scores.num_episodes)
    return FalseFires(runs.astype(np.int64), scores.per_episode(fired))


def final_frames(scores: LabelledScores) -> IntArray:
    """The last frame of each episode that has frames -> int64 [at most E]."""
    order = scores.order
    ends = np.append(np.diff(scores.episode[order]) != 0, True)
    last: IntArray = order[ends]
    return last


def phases(scores: LabelledScores) -> dict[str, BoolArray]:
    """Parts of an episode, each as a mask bool [F]: thirds by step, and before and from the first success."""
    last = np.full(scores.num_episodes, 0, np.int64)
    np.maximum.at(last, scores.episode, scores.step)
    third = np.minimum(3 * scores.step // (last[scores.episode] + 1), 2)
    first = _first_step(scores, scores.positive)[scores.episode]
    succeeds = np.isfinite(first)
    return {
        "first third": third == 0,
        "middle third": third == 1,
        "last third": third == 2,
        "before the first success": succeeds & (scores.step < first),
        "from the first success on": succeeds & (scores.step >= first),
        "episodes without success": ~succeeds,
    }


def summarize(scores: LabelledScores, threshold: float) -> dict[str, float]:
    """All numbers of a validation under names that stay: they are stored in checkpoints and logs.

    Rates are shares of frames, delays are steps, `false_fires_per_episode` counts runs and is a mean over
    all episodes; `missed_episode_rate` is the share of success episodes that never fire once they succeed;
    the `final` rates are those of the last frames of the episodes, which terminal rewards are made of.
    """
    prob, labels = scores.prob_success, scores.labels
    counts = confusion(prob, labels, threshold)
    delay, false_fires = detection_delay(scores, threshold), false_fires_per_episode(scores, threshold)
    seen = delay[np.isfinite(delay)]
    failures, last = ~scores.success, final_frames(scores)
    at_end = confusion(prob[last], labels[last], threshold)
    return {
        "threshold": float(threshold),
        "auc": auc(prob, labels),
        "average_precision": average_precision(prob, labels),
        "log_loss": log_loss(prob, labels),
        "accuracy": accuracy(prob, labels, threshold),
        "ece": ece(prob, labels),
        "true_positive_rate": counts.true_positive_rate,
        "false_positive_rate": counts.false_positive_rate,
        "precision": counts.precision,
        "detection_delay_median": float(np.median(seen)) if len(seen) else float("nan"),
        "detection_delay_p90": float(np.quantile(seen, 0.9)) if len(seen) else float("nan"),
        "missed_episode_rate": _mean(np.isnan(delay)),
        "early_fire_episode_rate": _mean(early_fires(scores, threshold) > 0),
        "false_fires_per_episode": _mean(false_fires.runs),
        "false_fire_frames_per_episode": _mean(false_fires.frames),
        "failure_episode_fire_rate": _mean(false_fires.frames[failures] > 0),
        "num_frames": float(len(labels)),
        "num_positive_frames": float(np.sum(scores.positive)),
        "num_episodes": float(scores.num_episodes),
        "num_success_episodes": float(np.sum(scores.success)),
        "final_true_positive_rate": at_end.true_positive_rate,
        "final_false_positive_rate": at_end.false_positive_rate,
    }


def _first_step(scores: LabelledScores, frames: BoolArray) -> Float64Array:
    """The lowest step among the chosen frames of each episode -> float64 [E]; inf where there is none."""
    first = np.full(scores.num_episodes, np.inf)
    np.minimum.at(first, scores.episode[frames], scores.step[frames].astype(np.float64))
    return first


def _sweep(prob: ArrayLike, labels: ArrayLike) -> tuple[Float64Array, IntArray, IntArray]:
    """Lower the threshold over all distinct values: thresholds, fires and true fires, each [K + 1]."""
    values, positive = np.asarray(prob, np.float64), is_success(labels)
    order = np.argsort(-values, kind="stable")
    values, hits = values[order], np.cumsum(positive[order])
    ends = np.flatnonzero(np.append(np.diff(values) != 0, True))  # equal values fire together
    below = np.append(values[ends[1:]], -np.inf)  # firing above the next value fires exactly these
    thresholds = np.concatenate([values[:1], below])
    return thresholds, np.append(0, ends + 1), np.append(0, hits[ends])


def _ratio(value: Any, total: int) -> Any:
    return value / total if total else value * np.nan


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else float("nan")
