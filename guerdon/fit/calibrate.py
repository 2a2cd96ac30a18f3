"""From logits to probabilities that mean what they say; `threshold.py` finds the threshold on them.

Frames of one episode resemble each other, so everything here that compares does so by episode.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from guerdon.core.errors import DataError
from guerdon.fit.metrics import Float64Array, is_success, log_loss_per_frame
from guerdon.fit.threshold import Threshold as Threshold
from guerdon.fit.threshold import choose_threshold as choose_threshold
from guerdon.rewards.relabel import Calibration, sigmoid

TEMPERATURES = (0.05, 20.0)
"""The range in which a temperature is looked for."""
MAX_FOLDS = 5
MIN_ISOTONIC_EPISODES = 20
"""With fewer episodes isotonic calibration is not considered: it has too many degrees of freedom."""


def calibrate(logits: ArrayLike, labels: ArrayLike, episode: ArrayLike, *, seed: int) -> Calibration:
    """Fit a temperature and an isotonic map; keep the better by cross-validated log loss.

    Folds are made of whole episodes (5, or fewer if there are fewer episodes). Isotonic wins only if its
    gain exceeds one standard error over episodes and there are at least `MIN_ISOTONIC_EPISODES` of them;
    otherwise temperature does. With one class only nothing can be fitted: the identity is returned.

    Args:
        logits: float [F], high where success is likely.
        labels: float [F] in [0, 1].
        episode: int [F], any numbers; equal numbers are one episode.
        seed: of the folds.
    """
    x, y = np.asarray(logits, np.float64), np.asarray(labels, np.float64)
    if x.ndim != 1 or x.shape != y.shape or x.shape != np.shape(episode):
        raise DataError("calibrate needs logits, labels and episode of one length")
    if not bool(np.isfinite(x).all()):
        raise DataError("calibrate was given logits that are NaN or infinite")
    positive = is_success(y)
    if not len(x) or bool(positive.all()) or not bool(positive.any()):
        return Calibration()
    _, number = np.unique(np.asarray(episode), return_inverse=True)
    num_episodes = int(number.max()) + 1
    if num_episodes < 2:
        return _fit_temperature(x, y)
    fits = {"temperature": _fit_temperature}
    if num_episodes >= MIN_ISOTONIC_EPISODES:
        fits["isotonic"] = _fit_isotonic
    folds = min(MAX_FOLDS, num_episodes)
    fold = (np.random.default_rng(seed).permutation(num_episodes) % folds)[number]
    losses = {"identity": log_loss_per_frame(sigmoid(x), y)}
    for name, fit in fits.items():
        losses[name] = np.zeros(len(x))
        for held_out in (fold == k for k in range(folds)):
            fitted = fit(x[~held_out], y[~held_out])
            losses[name][held_out] = log_loss_per_frame(fitted.apply(x[held_out]), y[held_out])
    best = "temperature"
    if "isotonic" in losses:
        gain = np.bincount(number, losses["temperature"] - losses["isotonic"])  # [E], summed over frames
        if gain.sum() > gain.std(ddof=1) * math.sqrt(num_episodes):
            best = "isotonic"
    means = {name: float(loss.mean()) for name, loss in losses.items()}
    return replace(fits[best](x, y), held_out_log_loss=means)


def _fit_temperature(logits: Float64Array, labels: Float64Array) -> Calibration:
    """Minimise the log loss over the logarithm of the temperature by golden section (it has one minimum)."""
    positive = is_success(labels)
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    # Platt's targets: without them separated classes would drive the temperature to zero.
    target = np.where(positive, (num_positive + 1) / (num_positive + 2), 1 / (num_negative + 2))

    def loss(log_temperature: float) -> float:
        z = logits / math.exp(log_temperature)
        return float(np.mean(np.logaddexp(0.0, z) - target * z))

    low, high = math.log(TEMPERATURES[0]), math.log(TEMPERATURES[1])
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = loss(left), loss(right)
    while high - low > 1e-5:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = loss(right)
    return Calibration(kind="temperature", temperature=math.exp((low + high) / 2))


def _fit_isotonic(logits: Float64Array, labels: Float64Array) -> Calibration:
    """Pool adjacent violators; the knots are both ends of each pool."""
    x, inverse, weight = np.unique(logits, return_inverse=True, return_counts=True)
    total = np.bincount(inverse, labels)
    first = np.arange(len(x))  # where each pool begins
    weight = weight.astype(np.float64)
    while True:
        mean = total / weight
        # Neighbours that do not ascend end up in one pool, so a whole descending run is merged at once.
        starts = np.flatnonzero(np.append(True, np.diff(mean) > 0))
        if len(starts) == len(mean):
            break
        total, weight = np.add.reduceat(total, starts), np.add.reduceat(weight, starts)
        first = first[starts]
    floor = 1 / (len(logits) + 2)
    mean = np.clip(mean, floor, 1 - floor)
    last = np.append(first[1:], len(x)) - 1
    ends = np.stack([x[first], x[last]], axis=1).ravel()
    value = np.repeat(np.log(mean) - np.log1p(-mean), 2)
    keep = np.append(True, np.diff(ends) > 0)  # a pool of one value has one end
    return Calibration(kind="isotonic", knots=tuple(ends[keep].tolist()), values=tuple(value[keep].tolist()))
