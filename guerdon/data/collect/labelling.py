"""Which frames of a robot's episode show success: by how long the target was held, and by an operator's keys.

A single frame at the target pose does not prove success: an arm on its way past the target is there for a
moment. Frames at the target count only if the pose was held, or if the operator called it a success. If the
operator calls an episode a failure, no frame of it shows success, wherever the arm was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from guerdon.core.types import BoolArray, FloatArray

SUCCESS_KEY, FAILURE_KEY = "c", "a"
"""The keys that robot operators are used to."""


@dataclass(frozen=True, kw_only=True)
class HoldLabels:
    """The labels of one episode of T frames."""

    labels: FloatArray
    """float32 [T]; 1 where the frame shows success."""
    doubtful: BoolArray
    """bool [T]; at the target, but not for long enough to tell: of no use to a reward model."""

    @property
    def success(self) -> bool:
        """Whether the episode is one."""
        return bool(self.labels.any())


def label_by_hold(at_target: BoolArray, hold_steps: int, key: str = "") -> HoldLabels:
    """Labels of an episode's frames.

    Args:
        at_target: bool [T]; whether the arm was at the target pose.
        hold_steps: frames in a row at the target that make a success.
        key: what the operator ended the episode with: `c`, `a`, or nothing.
    """
    count = len(at_target)
    labels, doubtful = np.zeros(count, np.float32), np.zeros(count, np.bool_)
    if key == FAILURE_KEY:
        return HoldLabels(labels=labels, doubtful=doubtful)
    for start, stop in _stretches(at_target):
        held = stop - start >= hold_steps or (key == SUCCESS_KEY and stop == count)
        (labels if held else doubtful)[start:stop] = 1
    if key == SUCCESS_KEY:
        labels[-1] = 1.0  # what the operator saw when the key was pressed
    return HoldLabels(labels=labels, doubtful=doubtful)


def _stretches(flags: BoolArray) -> list[tuple[int, int]]:
    """(start, stop) of each run of true values."""
    edges = np.diff(np.concatenate(([0], flags.astype(np.int8), [0])))
    return list(zip(np.flatnonzero(edges > 0).tolist(), np.flatnonzero(edges < 0).tolist(), strict=True))
