"""An arm that is driven directly, over the `franky-control` package (extra `franky`).

The arm follows poses through franky's Cartesian impedance tracker, which runs at 1 kHz in a thread of that
package. It begins with the first pose and not before: connecting moves nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from guerdon.config.schema_robot import RobotEnvConfig
from guerdon.core.errors import RobotError, RobotUnreachableError
from guerdon.envs.robot.driver import RobotState, import_extra
from guerdon.envs.robot.poses import Vector

log = logging.getLogger("guerdon")

REST_JOINTS = (0.0, 0.0, 0.0, -1.9, 0.0, 2.0, 0.0)
"""The same as of SERL's server."""
GRIPPER_SPEED, GRIPPER_FORCE = 0.1, 20.0
STOP_SECONDS = 5.0
"""How long the controller may take to end."""
_BUILD_NOTE = ", in the build of franky-control for the version of your arm's system"
_GAINS = ("translational_stiffness", "rotational_stiffness")


class FrankyDriver:
    """An arm and its hand at one address.

    Args:
        robot_ip: address of the arm's control interface (FCI).
        realtime: insist on a real-time kernel; without one, motions may break off.
        dynamics: share of the arm's speed limits for joint resets.
    """

    def __init__(self, robot_ip: str, *, realtime: bool = True, dynamics: float = 0.1) -> None:
        franky = self._franky = import_extra("franky", "franky", _BUILD_NOTE)
        self._ip = robot_ip
        self._gains: dict[str, float] = {"translational_stiffness": 2000.0, "rotational_stiffness": 150.0}
        self._tracker: Any = None
        self._gripper: Any = None
        config = franky.RealtimeConfig.Enforce if realtime else franky.RealtimeConfig.Ignore
        with self._explained("be used"):
            self._robot: Any = franky.Robot(robot_ip, realtime_config=config)
        self._robot.relative_dynamics_factor = dynamics

    @classmethod
    def from_config(cls, config: RobotEnvConfig) -> FrankyDriver:
        """The arm at `robot_ip`."""
        return cls(str(config.robot_ip), realtime=config.realtime_kernel)

    def state(self) -> RobotState:
        """Measure."""
        with self._explained("be measured"):
            state = self._robot.state
            jacobian = self._robot.model.zero_jacobian(self._franky.Frame.EndEffector, state)
            wrench, velocity, place = _flat(state.K_F_ext_hat_K), _flat(state.dq), state.O_T_EE
            return RobotState.from_answer(
                {
                    "pose": np.concatenate([_flat(place.translation), _flat(place.quaternion)]),
                    "vel": jacobian @ velocity,
                    "force": wrench[:3],
                    "torque": wrench[3:],
                    "q": state.q,
                    "dq": velocity,
                    "jacobian": jacobian,
                    "gripper_pos": self._opening(),
                }
            )

    def move(self, pose: Vector) -> None:
        """Give the tracker a new target; starts it if it does not run."""
        if self._tracker is None:
            self.start()
        elif not self._tracker.is_running:
            raise RobotError("the arm's controller has stopped; its errors have to be cleared")
        with self._explained("be moved"):
            self._tracker.set_target(self._franky.Affine(pose[:3], pose[3:]))

    def open_gripper(self) -> None:
        """Open the hand; returns at once."""
        with self._explained("open its hand"):
            self._hand().open_async(GRIPPER_SPEED)

    def close_gripper(self) -> None:
        """Close the hand on whatever is there; returns at once."""
        with self._explained("close its hand"):
            self._hand().grasp_async(0.0, GRIPPER_SPEED, GRIPPER_FORCE, epsilon_outer=1.0)

    def move_gripper(self, position: float) -> None:
        """Open the hand to a share of its width; returns at once."""
        with self._explained("move its hand"):
            hand = self._hand()
            hand.move_async(min(max(position, 0.0), 1.0) * hand.max_width, GRIPPER_SPEED)

    def reset(self) -> None:
        """Joints to their resting place."""
        self.stop()
        self.clear_errors()
        with self._explained("reset its joints"):
            self._robot.move(self._franky.JointMotion(list(REST_JOINTS)))
        self.start()

    def clear_errors(self) -> None:
        """Recover, and start the tracker again if it was running."""
        ended = self._tracker is not None and not self._tracker.is_running
        if ended:
            self.stop()
        if ended or self._robot.has_errors:
            with self._explained("recover"):
                self._robot.recover_from_errors()
        if ended:
            self.start()

    def start(self) -> None:
        """Track from where the arm is."""
        if self._tracker is None:
            with self._explained("start its controller"):
                self._tracker = self._franky.CartesianImpedanceTracker(self._robot, **self._gains)

    def stop(self) -> None:
        """End tracking; the arm then holds by itself. RobotError if that takes longer than `STOP_SECONDS`."""
        if self._tracker is None:
            return
        tracker, self._tracker = self._tracker, None
        ended = threading.Thread(target=self._end, args=(tracker,), daemon=True, name="franky-stop")
        ended.start()
        ended.join(STOP_SECONDS)  # franky waits for the control loop without limit
        if ended.is_alive():
            raise RobotError(
                f"the controller of the arm at {self._ip} did not stop in {STOP_SECONDS:g} s: use the red "
                "button"
            )

    def _end(self, tracker: Any) -> None:
        try:
            tracker.stop()
        except (self._franky.Exception, RuntimeError) as error:  # why it had ended before
            log.warning("the arm's controller had ended: %s", error)

    def update_param(self, parameters: Mapping[str, Any]) -> None:
        """Stiffness; other settings of SERL's controller do not exist here."""
        known = {name: float(value) for name, value in parameters.items() if name in _GAINS}
        if left := sorted(set(parameters) - set(known)):
            log.warning("the franky driver has no controller settings %s; they are left out", ", ".join(left))
        self._gains.update(known)
        if self._tracker is not None and known:
            with self._explained("change its stiffness"):
                self._tracker.set_gains(**known)

    def time_scale(self) -> None:
        """A real arm's time is the wall clock's."""

    def close(self) -> None:
        """End tracking and let go of the arm; said, not raised, if that fails."""
        try:
            self.stop()
        except RobotError as error:
            log.error("%s", error)

    def _hand(self) -> Any:
        if self._gripper is None:
            with self._explained("find its hand"):
                self._gripper = self._franky.Gripper(self._ip)
        return self._gripper

    def _opening(self) -> float:
        """Share of the hand's width; 0 as long as nobody has used the hand."""
        if self._gripper is None:
            return 0.0
        return float(self._gripper.width) / max(float(self._gripper.max_width), 1e-6)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """Errors of franky as ours."""
        try:
            yield
        except self._franky.NetworkException as error:
            raise RobotUnreachableError(f"the arm at {self._ip} does not answer: {error}") from error
        except (self._franky.Exception, RuntimeError) as error:
            raise RobotError(f"the arm at {self._ip} could not {what}: {error}") from error


def _flat(values: Any) -> Vector:
    return np.asarray(values, np.float64).reshape(-1)
