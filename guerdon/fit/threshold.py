"""A threshold on success probabilities with a known false-positive rate, and what any threshold costs.

Frames of one episode resemble each other, so everything here that resamples does so by episode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core import strict_json
from guerdon.core.errors import DataError
from guerdon.core.types import FloatArray, fields_of, known_fields
from guerdon.fit.metrics import Float64Array, LabelledScores, confusion
from guerdon.rewards.relabel import fires

MIN_EPISODES = 20
"""With fewer episodes of a kind no interval that is resampled by episode means much."""
GRID = 2048
"""Thresholds that a replay of the choice considers."""
DEFAULT_TARGET = 0.01
"""Wrong fires on failure frames, where nothing else was asked for."""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A threshold on `prob_success`, and what it costs. Intervals are [low, high]; see `choose_threshold`."""

    threshold: float
    target_false_positive_rate: float
    confidence: float
    false_positive_rate: float
    """Share of negative frames (of all episodes) that fire, as observed."""
    false_positive_interval: tuple[float, float]
    failure_episode_rate: float
    """The same over the frames of failure episodes alone; NaN without such an episode."""
    failure_episode_interval: tuple[float, float]
    true_positive_rate: float
    """Share of positive frames that fire, as observed; NaN without such a frame."""
    true_positive_interval: tuple[float, float]
    num_failure_episodes: int
    num_success_episodes: int
    enough_data: bool
    """Whether the false-positive rate is known to lie below twice its target."""
    caveat: str = ""
    """What a person must know before trusting it, in sentences; empty if there is nothing."""

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for strict JSON: NaN becomes None."""
        plain: dict[str, Any] = json.loads(strict_json.dumps(fields_of(self)))
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Threshold:
        """The inverse of `to_dict`."""
        return cls(**{name: _with_nan(value) for name, value in known_fields(cls, plain).items()})


def choose_threshold(
    scores: LabelledScores,
    *,
    target_fpr: float = DEFAULT_TARGET,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int,
    raise_to: float | None = None,
) -> Threshold:
    """The smallest threshold at which at most `target_fpr` of the negative frames fire, and what it costs.

    What the intervals say: measure the rate again on as many fresh episodes of the same distribution, and
    it lies inside with probability `confidence`; all the more so for more episodes, and in the long run.

    How: the whole procedure is replayed `num_resamples` times. One resample of the episodes (with
    replacement, successes and failures apart) chooses a threshold, a second, independent one measures it.
    So the intervals hold the noise of the fresh episodes and that of a threshold which was chosen on the
    very frames it is reported for. The percentiles of the replays are widened to what a t-distribution asks
    for that has as many degrees of freedom as there are episodes with an error: few such episodes tell
    little, however many frames there are. The upper end of an error rate is never below the Clopper-Pearson
    bound on the share of episodes with an error (3.7 of n if there is none) times the share of their frames
    that have it (1 if there is none).

    In simulations with frames that depend on each other within an episode this held in 90 to 99 of 100 data
    sets, from 10 to 100 episodes of each kind on (tests/fit/test_calibrate.py repeats the main ones).

    Args:
        scores: held-out frames with calibrated probabilities.
        target_fpr: wanted share of firing frames among those with label < 0.5.
        confidence: of the intervals.
        num_resamples: replays.
        seed: of the replays.
        raise_to: raise the threshold as far as this value, as long as no success frame in `scores` is lost
            by it. A model that separates the classes would otherwise fire on `target_fpr` of the negative
            frames for no gain; 0.5 is a sensible value for calibrated probabilities.
    """
    if not 0.0 < target_fpr < 1.0 or not 0.0 < confidence < 1.0:
        raise DataError(f"target_fpr and confidence must lie in (0, 1), not {target_fpr} and {confidence}")
    prob, positive = scores.prob_success, scores.positive
    if bool(positive.all()):
        raise DataError("a threshold needs failure frames, but every frame is labelled as success")
    caveats: list[str] = []
    negatives = prob[~positive]
    place = len(negatives) - 1 - math.floor(target_fpr * len(negatives) + 1e-9)  # so many may fire
    threshold = lowest = float(np.partition(negatives, place)[place])
    if lowest >= float(prob.max()):
        lower = prob[prob < lowest]
        threshold = float(lower.max() if len(lower) else np.nextafter(np.float32(lowest), np.float32(-1)))
        caveats.append(
            f"No threshold keeps the target of {target_fpr:.2%}: failure frames have the highest probability "
            "of all, so that nothing would fire. The threshold was lowered until something does."
        )
    elif raise_to is not None:
        kept = prob[positive & (prob > lowest)]
        free = float(np.nextafter(kept.min(), np.float32(-1))) if len(kept) else lowest
        threshold = max(lowest, min(float(np.float32(raise_to)), free))
    replayed = _replay(scores, threshold, lowest, target_fpr, num_resamples, seed)
    return _measured(scores, threshold, replayed, target_fpr, confidence, caveats)


def measure_threshold(
    scores: LabelledScores,
    threshold: float,
    *,
    target_fpr: float | None = None,
    confidence: float = 0.95,
    num_resamples: int = 1000,
    seed: int,
) -> Threshold:
    """What a given threshold costs on `scores`: the rates there, in intervals that hold them.

    The threshold was not chosen on these frames, so the intervals have the noise of the episodes alone.

    Args:
        scores: frames with calibrated probabilities.
        threshold: the one to measure.
        target_fpr: what was asked for; None: the rate that is seen, or 0.01 if that is larger.
        confidence: of the intervals.
        num_resamples: of the episodes.
        seed: of the resamples.
    """
    observed = confusion(scores.prob_success, scores.labels, threshold).false_positive_rate
    if math.isnan(observed):
        raise DataError("a threshold needs failure frames, but every frame is labelled as success")
    target = max(observed, DEFAULT_TARGET) if target_fpr is None else target_fpr
    exact = float(np.float32(threshold))  # as probabilities are compared with it
    replayed = _replay(scores, exact, math.inf, target, num_resamples, seed)
    return _measured(scores, float(threshold), replayed, target, confidence, [])


def _measured(
    scores: LabelledScores,
    threshold: float,
    replayed: Float64Array,
    target_fpr: float,
    confidence: float,
    caveats: list[str],
) -> Threshold:
    """The record of a threshold, from the replays of `_replay`."""
    prob, positive = scores.prob_success, scores.positive
    fired, failure = fires(prob, threshold), ~scores.success[scores.episode]
    false_positive = _rare_interval(replayed[0], scores, fired, ~positive, confidence)
    on_failures = _rare_interval(replayed[1], scores, fired, ~positive & failure, confidence)
    missed = _rare_interval(1 - replayed[2], scores, ~fired, positive, confidence)
    observed = confusion(prob, scores.labels, threshold)
    missing = _missing_data(scores, observed.false_positive_rate, false_positive[1], target_fpr)
    return Threshold(
        threshold=threshold,
        target_false_positive_rate=target_fpr,
        confidence=confidence,
        false_positive_rate=observed.false_positive_rate,
        false_positive_interval=false_positive,
        failure_episode_rate=confusion(prob[failure], scores.labels[failure], threshold).false_positive_rate,
        failure_episode_interval=on_failures,
        true_positive_rate=observed.true_positive_rate,
        true_positive_interval=(1 - missed[1], 1 - missed[0]),
        num_failure_episodes=int((~scores.success).sum()),
        num_success_episodes=int(scores.success.sum()),
        enough_data=not missing,
        caveat=" ".join(caveats + missing),
    )


def _replay(
    scores: LabelledScores, threshold: float, lowest: float, target_fpr: float, num_resamples: int, seed: int
) -> Float64Array:
    """Choose on one resample of the episodes, measure on another.

    A threshold that was lowered or raised from `lowest`, the one that the target asks for, is not chosen
    again: below it stays what it is (always, with `lowest` infinite), above it is a floor.

    Returns:
        float64 [3, R]: false-positive rate on all negative frames, the same on those of failure episodes,
        and true-positive rate; NaN where a resample has no such frame.
    """
    rng = np.random.default_rng(seed)
    negative, failure = ~scores.positive, ~scores.success[scores.episode]
    grid = _grid(scores.prob_success[negative], threshold, target_fpr)  # [G], descending
    here = int(np.searchsorted(-grid, -threshold))
    chooser, measurer = (_resample(scores, num_resamples, rng) for _ in range(2))  # [R, E]
    allowed = target_fpr * (chooser @ scores.per_episode(negative)) + 1e-9  # [R]
    keeps_target = chooser @ _fires_per_episode(scores, negative, grid) <= allowed[:, None]  # [R, G]
    chosen = keeps_target.sum(axis=1) - 1
    if threshold < lowest:
        chosen[:] = here
    elif threshold > lowest:
        chosen = np.minimum(chosen, here)
    rates = np.full((3, num_resamples), np.nan)
    for rate, frames in zip(rates, (negative, negative & failure, scores.positive), strict=True):
        fires = np.einsum("re,er->r", measurer, _fires_per_episode(scores, frames, grid)[:, chosen])
        total = measurer @ scores.per_episode(frames)
        np.divide(fires, total, out=rate, where=total > 0)
    return rates


def _grid(negatives: FloatArray, threshold: float, target_fpr: float) -> Float64Array:
    """Thresholds that a resample may choose: values of the highest negative frames -> [G], descending."""
    top = np.sort(negatives)[::-1][: math.ceil(20 * target_fpr * len(negatives)) + 1]
    thinned = top[np.unique(np.linspace(0, len(top) - 1, GRID).astype(np.int64))]
    values = np.concatenate([thinned, [negatives.min(), np.float32(threshold)]]).astype(np.float64)
    return np.unique(values)[::-1]


def _resample(scores: LabelledScores, num_resamples: int, rng: np.random.Generator) -> Float64Array:
    """How often each episode is drawn; successes and failures keep their numbers -> [R, E]."""
    drawn = np.zeros((num_resamples, scores.num_episodes))
    for kind in (scores.success, ~scores.success):
        count = int(kind.sum())
        if count:
            drawn[:, kind] = rng.multinomial(count, np.full(count, 1 / count), num_resamples)
    return drawn


def _fires_per_episode(scores: LabelledScores, frames: NDArray[np.bool_], grid: Float64Array) -> Float64Array:
    """How many of the chosen frames exceed each threshold of a descending grid -> [E, G]."""
    first = np.searchsorted(-grid, -scores.prob_success[frames].astype(np.float64), side="right")
    size = len(grid) + 1  # a frame fires at grid[first] and at all lower thresholds
    cells = scores.episode[frames] * size + first
    counts = np.bincount(cells, minlength=scores.num_episodes * size).reshape(-1, size)
    result: Float64Array = np.cumsum(counts, axis=1)[:, :-1].astype(np.float64)
    return result


def _rare_interval(
    samples: Float64Array,
    scores: LabelledScores,
    hits: NDArray[np.bool_],
    frames: NDArray[np.bool_],
    confidence: float,
) -> tuple[float, float]:
    """Interval of the share of `frames` that are `hits` (both bool [F]), made for shares that are small.

    `samples` (float64 [R]) is the share in each replay.
    """
    total, hit = scores.per_episode(frames), scores.per_episode(frames & hits)
    num_episodes, num_hit = int((total > 0).sum()), int((hit > 0).sum())
    samples = samples[np.isfinite(samples)]
    if not num_episodes or not len(samples):
        return float("nan"), float("nan")
    tail = (1 - confidence) / 2
    # The noise of a rate grows with its root, so it is the root that has an interval of even width.
    low, middle, high = np.sqrt(np.quantile(samples, [tail, 0.5, 1 - tail])).tolist()
    free = max(num_hit, 2)  # as few episodes as have a hit tell of it
    z = NormalDist().inv_cdf(1 - tail)
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    # The ratio of the t to the normal quantile, and of the unbiased to the resampled standard deviation.
    widen = t / z * math.sqrt((free + 1) / free)
    lower_end = max(0.0, middle - widen * (middle - low)) ** 2
    upper_end = (middle + widen * max((high - low) / 2, high - middle)) ** 2
    share = float(hit.sum() / total[hit > 0].sum()) if num_hit else 1.0
    bound = share * binomial_upper_bound(num_hit, num_episodes, tail)
    rate = float(hit.sum() / total.sum())
    return min(rate, lower_end), min(1.0, max(rate, upper_end, bound))


def binomial_upper_bound(hits: int, trials: int, tail: float) -> float:
    """Clopper-Pearson: the share at which so few hits have probability `tail`."""
    if hits >= trials:
        return 1.0
    k = np.arange(hits + 1)
    lgamma = np.vectorize(math.lgamma, otypes=[np.float64])
    choose = lgamma(trials + 1) - lgamma(k + 1) - lgamma(trials - k + 1)
    low, high = 0.0, 1.0
    for _ in range(50):
        share = (low + high) / 2
        below = float(np.exp(choose + k * math.log(share) + (trials - k) * math.log1p(-share)).sum())
        low, high = (share, high) if below > tail else (low, share)
    return high


def _missing_data(scores: LabelledScores, rate: float, upper_end: float, target_fpr: float) -> list[str]:
    """What the episodes lack to support the promise, in sentences; nothing if they do."""
    counts = {"failure": int((~scores.success).sum()), "success": int(scores.success.sum())}
    reasons = [
        f"Only {count} {kind} episodes: at least {MIN_EPISODES} are needed for an interval that "
        "means anything."
        for kind, count in counts.items()
        if count < MIN_EPISODES
    ]
    limit = 2 * target_fpr
    if upper_end > limit:
        there = int((scores.per_episode(~scores.positive) > 0).sum())
        # The part above the rate shrinks with the root of the number of episodes; a bound without any
        # fire shrinks with the number itself.
        ratio = (upper_end - rate) / (limit - rate) if rate < limit else math.inf
        needed = there * ratio**2 if rate > 0 else there * ratio
        more = ""
        if math.isfinite(needed):
            unit = 10.0 ** max(0, math.floor(math.log10(needed)) - 1)  # two significant digits
            more = f" About {math.ceil(needed / unit) * round(unit)} such episodes would be enough."
        reasons.append(
            f"With {there} episodes the false-positive rate is only known to lie below {upper_end:.2%}, "
            f"more than twice the target of {target_fpr:.2%}.{more}"
        )
    return reasons


def _with_nan(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_with_nan(item) for item in value)
    return float("nan") if value is None else value
