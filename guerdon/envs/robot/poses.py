"""Poses: positions with quaternions (x, y, z, w) or with Euler angles about the fixed axes x, y, z."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = NDArray[np.float64]


def quat_from_euler(angles: Sequence[float] | Vector) -> Vector:
    """Turns about the fixed axes x, then y, then z, [3] -> quaternion [4]."""
    (sx, sy, sz), (cx, cy, cz) = (
        [function(float(angle) / 2.0) for angle in angles] for function in (math.sin, math.cos)
    )
    return np.array(
        [
            sx * cy * cz - cx * sy * sz,
            cx * sy * cz + sx * cy * sz,
            cx * cy * sz - sx * sy * cz,
            cx * cy * cz + sx * sy * sz,
        ]
    )


def euler_from_quat(quat: Sequence[float] | Vector) -> Vector:
    """Quaternion [4] -> angles about the fixed axes x, y, z [3]; y between -pi/2 and pi/2."""
    x, y, z, w = (float(value) for value in quat)
    sine = 2.0 * (w * y - z * x) / (x * x + y * y + z * z + w * w)
    return np.array(
        [
            math.atan2(2.0 * (w * x + y * z), w * w - x * x - y * y + z * z),
            math.asin(min(max(sine, -1.0), 1.0)),
            math.atan2(2.0 * (w * z + x * y), w * w + x * x - y * y - z * z),
        ]
    )


def multiply(left: Sequence[float] | Vector, right: Sequence[float] | Vector) -> Vector:
    """The turn `right`, then the turn `left`, [4] each -> [4]."""
    x1, y1, z1, w1 = (float(value) for value in left)
    x2, y2, z2, w2 = (float(value) for value in right)
    return np.array(
        [
            w1 * x2 + x1 * w2 + y1 * z2 - z1 * y2,
            w1 * y2 - x1 * z2 + y1 * w2 + z1 * x2,
            w1 * z2 + x1 * y2 - y1 * x2 + z1 * w2,
            w1 * w2 - x1 * x2 - y1 * y2 - z1 * z2,
        ]
    )


def rotvec_from_quat(quat: Sequence[float] | Vector) -> Vector:
    """Quaternion [4] -> axis times angle [3], the angle at most pi."""
    vector, w = np.asarray(quat[:3], np.float64), float(quat[3])
    if w < 0.0:
        vector, w = -vector, -w
    length = float(np.linalg.norm(vector))
    scale = 2.0 if length < 1e-9 else 2.0 * math.atan2(length, w) / length
    return vector * scale


def rotation_between(start: Sequence[float] | Vector, end: Sequence[float] | Vector) -> Vector:
    """The turn in the base frame that leads from quaternion `start` to `end`, axis times angle [3]."""
    x, y, z, w = start
    return rotvec_from_quat(multiply(end, [-x, -y, -z, w]))


def distances(start: Vector, end: Vector) -> tuple[float, float]:
    """Metres and radians between two poses [7]."""
    turn = rotation_between(start[3:], end[3:])
    return float(np.linalg.norm(end[:3] - start[:3])), float(np.linalg.norm(turn))


def pose_fault(pose: Vector) -> str | None:
    """What keeps seven numbers from being a pose, in words; None if nothing does."""
    if not np.isfinite(pose).all():
        return "a number is not finite"
    if not 0.9 < math.hypot(*pose[3:].tolist()) < 1.1:
        return "the orientation is no unit quaternion"
    return None


def pose7(pose: Sequence[float] | Vector) -> Vector:
    """Position and Euler angles [6] -> position and quaternion [7]."""
    return np.concatenate([np.asarray(pose[:3], np.float64), quat_from_euler(pose[3:])])


def pose6(pose: Sequence[float] | Vector) -> Vector:
    """Position and quaternion [7] -> position and Euler angles [6]."""
    return np.concatenate([np.asarray(pose[:3], np.float64), euler_from_quat(pose[3:])])


def wrap(angles: Vector) -> Vector:
    """The same angles between -pi and pi."""
    return np.remainder(angles + math.pi, 2.0 * math.pi) - math.pi


def pose_offset(pose: Vector, target: Vector) -> Vector:
    """From a target to a pose, both position and Euler angles [6], by the shortest turns."""
    away = pose - target
    away[3:] = wrap(away[3:])
    return away


def between(start: Vector, end: Vector, share: float) -> Vector:
    """The pose [7] at a share of the way from `start` to `end`, [7] each."""
    turn = rotation_between(start[3:], end[3:]) * share
    angle = float(np.linalg.norm(turn))
    axis = turn / angle if angle > 1e-12 else np.zeros(3)
    step = np.append(axis * math.sin(angle / 2.0), math.cos(angle / 2.0))
    return np.concatenate([start[:3] + share * (end[:3] - start[:3]), multiply(step, start[3:])])
