"""From logits to probabilities that mean what they say.

Frames of one episode resemble each other, so everything here that compares or resamples does so by episode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from guerdon.errors import DataError
from guerdon.fit.metrics import Float64Array, is_success, log_loss_per_frame
from guerdon.types import FloatArray

CalibrationKind: TypeAlias = Literal["identity", "temperature", "isotonic"]
KINDS: tuple[CalibrationKind, ...] = ("identity", "temperature", "isotonic")
TEMPERATURES = (0.05, 20.0)
"""The range in which a temperature is looked for."""
TILT = 0.01
"""Slope (logit per logit) of isotonic calibration where it is flat: the order of frames is never lost."""
MAX_LOGIT = 1000.0
"""Beyond this no logit is looked for."""
MAX_FOLDS = 5
MIN_ISOTONIC_EPISODES = 20
"""With fewer episodes isotonic calibration is not considered: it has too many degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A monotone map from logits to success probabilities; it never changes the order of frames."""

    kind: CalibrationKind = "identity"
    temperature: float = 1.0
    """`temperature`: logits are divided by it."""
    knots: tuple[float, ...] = ()
    """`isotonic` [K]: logits, ascending."""
    values: tuple[float, ...] = ()
    """`isotonic` [K]: calibrated logits at the knots, linear between them and flat outside, plus the tilt."""
    held_out_log_loss: Mapping[str, float] = field(default_factory=dict)
    """Cross-validated log loss of each kind that was tried."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DataError(f"Calibration.kind must be one of {KINDS}, not {self.kind!r}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise DataError(f"Calibration.temperature must be positive, not {self.temperature}")
        if self.kind == "isotonic" and not self.knots:
            raise DataError("an isotonic Calibration needs knots")
        knots, values = np.asarray(self.knots, np.float64), np.asarray(self.values, np.float64)
        if knots.shape != values.shape or not bool(np.isfinite([knots, values]).all()):
            raise DataError("Calibration.knots and values must be finite and of one length")
        if bool((np.diff(knots) <= 0).any() or (np.diff(values) < 0).any()):
            raise DataError("Calibration.knots and values must ascend")

    def apply(self, logits: ArrayLike) -> FloatArray:
        """Calibrated success probabilities: float [N] -> float32 [N]."""
        x = np.asarray(logits, np.float64)
        if self.kind == "temperature":
            x = x / self.temperature
        elif self.kind == "isotonic":
            x = np.interp(x, self.knots, self.values) + TILT * x
        return _sigmoid(x).astype(np.float32)

    def logit_at(self, prob_success: float) -> float:
        """The logit above which `apply` gives more than `prob_success`, within +-`MAX_LOGIT`."""
        low, high = -MAX_LOGIT, MAX_LOGIT
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (low, middle) if float(self.apply([middle])[0]) > prob_success else (middle, high)
        return high

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        lists = {"knots": list(self.knots), "values": list(self.values)}
        return {**fields_of(self), **lists, "held_out_log_loss": dict(self.held_out_log_loss)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_dict`."""
        known = known_fields(cls, plain)
        for name in ("knots", "values"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)


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
    fits = {"temperature": _fit_temperature}
    if num_episodes >= MIN_ISOTONIC_EPISODES:
        fits["isotonic"] = _fit_isotonic
    folds = min(MAX_FOLDS, num_episodes)
    if folds < 2:
        return _fit_temperature(x, y)
    fold = (np.random.default_rng(seed).permutation(num_episodes) % folds)[number]
    losses = {"identity": log_loss_per_frame(_sigmoid(x), y)}
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
    fitted = fits[best](x, y)
    means = {name: float(loss.mean()) for name, loss in losses.items()}
    return Calibration(**{**fields_of(fitted), "held_out_log_loss": means})


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


def _sigmoid(x: Float64Array) -> Float64Array:
    result: Float64Array = np.exp(-np.logaddexp(0.0, -x))
    return result


def fields_of(record: Any) -> dict[str, Any]:
    """A record as a dict, not copied deeply."""
    return {item.name: getattr(record, item.name) for item in fields(record)}


def known_fields(cls: Any, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `plain` that `cls` has; raises if another is there or a needed one is missing."""
    names = {item.name for item in fields(cls)}
    needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    if set(plain) - names or needed - set(plain):
        raise DataError(
            f"{cls.__name__} has the fields {sorted(names)}; unknown: {sorted(set(plain) - names)}, "
            f"missing: {sorted(needed - set(plain))}"
        )
    return dict(plain)
