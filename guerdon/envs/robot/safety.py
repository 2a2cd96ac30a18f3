"""What may be commanded: poses in a box, and nothing while a force is too high."""

from __future__ import annotations

import numpy as np

from guerdon.config.schema_robot import RobotEnvConfig, outside_box
from guerdon.envs.robot.driver import RobotState
from guerdon.envs.robot.poses import Vector, pose6, pose7, wrap
from guerdon.errors import EmergencyStopError

_INSET = 1e-6
"""Commands stay so far inside the box that the way to the robot and back cannot round them out of it."""


class SafetyBox:
    """The positions and Euler angles between two poses."""

    def __init__(self, config: RobotEnvConfig) -> None:
        self.low, self.high = (np.asarray(corner, np.float64) for corner in config.box)
        self._middle, self._half = (self.low + self.high) / 2.0, (self.high - self.low) / 2.0 - _INSET

    def clip(self, pose: Vector) -> Vector:
        """The pose [7] in the box that is nearest, axis by axis."""
        if not np.isfinite(pose).all():
            raise EmergencyStopError(f"a pose that is not finite was to be commanded: {pose.tolist()}")
        away = pose6(pose) - self._middle
        away[3:] = wrap(away[3:])
        clipped = pose7(self._middle + np.clip(away, -self._half, self._half))
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


class ForceLimits:
    """Counts how long forces have been too high."""

    def __init__(self, config: RobotEnvConfig) -> None:
        self._force, self._torque = config.force_limit, config.torque_limit
        self._most = config.max_overloads
        self.overloads = 0
        """Commands in a row at which a force was too high."""

    def exceeded(self, state: RobotState) -> bool:
        """Whether motion has to stop; EmergencyStopError if that has been so for too long."""
        force, torque = float(np.linalg.norm(state.force)), float(np.linalg.norm(state.torque))
        if force <= self._force and torque <= self._torque:
            self.overloads = 0
            return False
        self.overloads += 1
        if self.overloads >= self._most:
            raise EmergencyStopError(
                f"forces were too high for {self.overloads} steps in a row: {force:.1f} N of "
                f"{self._force:g} N, {torque:.1f} Nm of {self._torque:g} Nm"
            )
        return True
