"""What may be commanded: poses in a box, near the last one."""

from __future__ import annotations

import numpy as np

from guerdon.config.schema_robot import RobotEnvConfig, outside_box
from guerdon.core.errors import EmergencyStopError
from guerdon.envs.robot.poses import Vector, between, distances, pose6, pose7, pose_fault, pose_offset

_INSET = 1e-6
"""Commands stay so far inside the box that the way to the robot and back cannot round them out of it."""


class SafetyBox:
    """The positions and Euler angles between two poses."""

    def __init__(self, config: RobotEnvConfig) -> None:
        self.low, self.high = (np.asarray(corner, np.float64) for corner in config.box)
        self._middle, self._half = (self.low + self.high) / 2.0, (self.high - self.low) / 2.0 - _INSET

    def clip(self, pose: Vector) -> Vector:
        """The pose [7] in the box that is nearest, axis by axis."""
        if (fault := pose_fault(pose)) is not None:
            raise EmergencyStopError(f"a pose that is none was to be commanded, {fault}: {pose.tolist()}")
        away = np.clip(pose_offset(pose6(pose), self._middle), -self._half, self._half)
        clipped = pose7(self._middle + away)
        if (wrong := self.wrong(clipped)) is not None:
            raise EmergencyStopError(f"a pose outside the safety box was to be commanded: {wrong}")
        return clipped

    def wrong(self, pose: Vector) -> str | None:
        """What of a pose [7] is outside, in words; None if nothing is."""
        return outside_box(pose6(pose).tolist(), self.low.tolist(), self.high.tolist())

    def distance(self, pose: Vector) -> float:
        """Metres from the box to a pose [7]; 0 within."""
        position = pose[:3]
        return float(np.linalg.norm(position - np.clip(position, self.low[:3], self.high[:3])))

    def angle(self, pose: Vector) -> float:
        """Radians that a pose [7] is turned out of the box, about the worst axis; 0 within."""
        away = np.abs(pose_offset(pose6(pose), self._middle)[3:])
        return float(np.max(np.maximum(away - (self.high - self.low)[3:] / 2.0, 0.0)))


class StepLimit:
    """How far a command may be from the one before.

    Whatever is measured wrongly, one command then moves the arm by so much at most. Where the last pose was
    outside of the box, the way back into it is allowed on top.
    """

    def __init__(self, config: RobotEnvConfig, box: SafetyBox) -> None:
        self._most, self._box = config.step_limit, box

    def wrong(self, last: Vector, target: Vector) -> str | None:
        """What of the step between two poses [7] is too long, in words; None if nothing is."""
        for size, most, unit in zip(distances(last, target), self._allowed(last), ("m", "rad"), strict=True):
            if size > most:
                return f"a target {size:.3g} {unit} from the last one, of {most:.3g} {unit} allowed"
        return None

    def limited(self, last: Vector, target: Vector) -> Vector:
        """The pose [7] in the box on the way to `target` that is near enough, or `last` if there is none."""
        sizes = zip(distances(last, target), self._allowed(last), strict=True)
        share = min([1.0, *(most / size for size, most in sizes if size > most)])
        if share == 1.0:
            return target
        near = self._box.clip(between(last, target, share))  # a straight turn may leave a box of Euler angles
        return near if self.wrong(last, near) is None else self._box.clip(last)

    def _allowed(self, last: Vector) -> tuple[float, float]:
        metres, radians = self._most
        return metres + self._box.distance(last), radians + self._box.angle(last)
