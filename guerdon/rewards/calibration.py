"""The calibration map of a checkpoint, and the one rule by which a probability becomes a decision.

`fit/calibrate.py` finds the map; whatever scores frames applies it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import BoolArray, FloatArray

CalibrationKind: TypeAlias = Literal["identity", "temperature", "isotonic"]
KINDS: tuple[CalibrationKind, ...] = ("identity", "temperature", "isotonic")
TILT = 0.01
"""Slope (logit per logit) of isotonic calibration where it is flat: the order of frames is never lost."""
MAX_LOGIT = 1000.0
"""Beyond this no logit is looked for."""


def fires(prob_success: ArrayLike, threshold: float) -> BoolArray:
    """Which frames count as success: those whose probability is above the threshold; bool, any shape.

    Both sides are compared as float32, the type of a score: 0.3 as a Python number is a little less than
    0.3 as float32, and the same frame would fire here and not there. NaN (not scored) never fires.
    """
    above: BoolArray = np.asarray(prob_success, np.float32) > np.float32(threshold)
    return above


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
        return sigmoid(x).astype(np.float32)

    def logit_at(self, prob_success: float) -> float:
        """The logit above which `apply` gives more than `prob_success`, within +-`MAX_LOGIT`."""
        low, high = -MAX_LOGIT, MAX_LOGIT
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (low, middle) if fires(self.apply([middle]), prob_success)[0] else (middle, high)
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


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Elementwise, exact also where it rounds to 0 or 1."""
    result: NDArray[np.float64] = np.exp(-np.logaddexp(0.0, -x))
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
