"""The settings of a robot environment, and of the simulated robot that speaks the same protocol.

Names follow RLinf's reward workflow, as robot people know them (`target_ee_pose`, `success_hold_steps`,
`ee_pose_limit_min`). A pose of six numbers is x, y, z in metres and the Euler angles about the fixed axes
x, y, z in radians.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from guerdon.config.build import Checked
from guerdon.config.limits import (
    CameraSide,
    Fraction,
    NameOrPlugin,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Region,
)
from guerdon.core.errors import ConfigError

Pose6: TypeAlias = tuple[float, float, float, float, float, float]
Axis: TypeAlias = Literal["x", "y", "z", "rx", "ry", "rz"]

AXES: tuple[Axis, ...] = ("x", "y", "z", "rx", "ry", "rz")
TARGET_POSE: Pose6 = (0.5, 0.0, 0.1, -3.14, 0.0, 0.0)
"""Where the peg is in the hole: the example of RLinf's reward workflow, and the simulated robot's."""
DRIVER_PLUGINS = "guerdon.robot_drivers"
SERVER_PORT = 5000
"""The port on which SERL's robot server listens."""
_MARGIN_LOW = (0.06, 0.06, 0.01, 0.25, 0.25, 0.25)
_MARGIN_HIGH = (0.06, 0.06, 0.10, 0.25, 0.25, 0.25)
_RESET_ABOVE = 0.07
_LONGEST = math.sqrt(3.0)
"""The length of an action of 1 along x, y and z."""
_LEAST_STEP = (0.02, 0.15)
"""A way begins where the one before has ended, which is near its goal and not at it."""


def wrap_angle(angle: float) -> float:
    """The same angle between -pi and pi."""
    return math.remainder(angle, 2.0 * math.pi)


def outside_box(pose: Sequence[float], low: Sequence[float], high: Sequence[float]) -> str | None:
    """What of a pose of six numbers lies outside a box, in words; None if nothing does.

    Angles are compared by the shortest way round, so that -3.14 and 3.14 are neighbours.
    """
    for axis, name in enumerate(AXES):
        if axis < 3:
            if not low[axis] - 1e-9 <= pose[axis] <= high[axis] + 1e-9:
                return f"{name} = {pose[axis]:.4g} m is not between {low[axis]:.4g} and {high[axis]:.4g}"
            continue
        middle, half = (low[axis] + high[axis]) / 2.0, (high[axis] - low[axis]) / 2.0
        if abs(wrap_angle(pose[axis] - middle)) > half + 1e-9:
            return f"{name} = {pose[axis]:.4g} rad is not between {low[axis]:.4g} and {high[axis]:.4g}"
    return None


@dataclass(frozen=True, kw_only=True)
class CameraConfig(Checked):
    """An entry of `cameras`."""

    name: str = "front_camera"
    """What it is called in observations and data."""
    source: Literal["http", "opencv", "realsense"] = "http"
    """Who takes the pictures: the simulated robot, a device that OpenCV opens, or a RealSense (extra)."""
    device: str | int | None = None
    """OpenCV: number or path of the device. RealSense: serial number. http: the camera's name at the robot's
    address, or a URL of its own; null: the name above."""
    capture_size: tuple[CameraSide, CameraSide] = (480, 640)
    """(height, width) asked of the device."""
    fps: PositiveInt = 30
    """Pictures a second asked of the device."""
    crop: Region | None = None
    """The part to keep, before it is resized."""
    max_age: PositiveFloat = 0.5
    """A picture older than so many seconds is stale, which is an error."""


@dataclass(frozen=True, kw_only=True)
class RobotEnvConfig(Checked):
    """`env.*.override_cfg` of a robot environment."""

    driver: Annotated[str, NameOrPlugin(("serl_http", "franky"), DRIVER_PLUGINS)] = "serl_http"
    """Who moves the arm: the HTTP server of SERL and HIL-SERL, `franky-control` (extra), or a plugin of the
    entry-point group `guerdon.robot_drivers`."""
    robot_ip: str | None = None
    """serl_http: host, or host:port, of the robot server (port 5000). franky: address of the arm."""
    url: str | None = None
    """serl_http: the server's URL, instead of `robot_ip`."""
    realtime_kernel: bool = True
    """franky: insist on a real-time kernel on this machine."""
    timeout: PositiveFloat = 1.0
    """Seconds to wait for one answer, by the wall clock."""
    retries: NonNegativeInt = 4
    """How often a request without an answer is sent again."""
    cameras: tuple[CameraConfig, ...] = (
        CameraConfig(name="front_camera"),
        CameraConfig(name="wrist_camera"),
    )
    """The first is `main_images` in observations, the others go by their names."""
    image_size: tuple[CameraSide, CameraSide] = (64, 64)
    """(height, width) of observed pictures."""
    control_hz: PositiveFloat = 10.0
    """Actions a second."""
    time_scale: PositiveFloat = 1.0
    """How much faster than the wall clock the robot's time passes; for simulated robots alone."""
    axes: tuple[Axis, ...] = AXES
    """What an action moves, in this order."""
    use_gripper: bool = False
    """A further number of an action: above `gripper_threshold` opens the gripper, below minus that closes."""
    gripper_threshold: Fraction = 0.5
    """See `use_gripper`."""
    action_scale: tuple[PositiveFloat, PositiveFloat] = (0.01, 0.05)
    """Metres and radians that an action of 1 moves the target away from the measured pose."""
    target_ee_pose: Pose6 = TARGET_POSE
    """The calibrated pose at which the task is done."""
    reward_threshold: Pose6 = (0.005, 0.005, 0.003, 0.3, 0.3, 0.3)
    """How far from it still counts, per axis."""
    success_hold_steps: PositiveInt = 20
    """Steps in a row at the target that make a success; leaving it starts the count again."""
    max_episode_steps: PositiveInt = 100
    """Steps after which an episode is truncated."""
    standalone: bool = False
    """The reward model's success ends the episode, and not the pose."""
    reset_ee_pose: Pose6 | None = None
    """Where episodes begin; null: 7 cm above the target."""
    enable_random_reset: bool = True
    """Begin each episode at a random pose near `reset_ee_pose`."""
    random_xy_range: NonNegativeFloat = 0.03
    """Metres to either side of it along x and y."""
    random_rz_range: NonNegativeFloat = 0.1
    """Radians to either side about z."""
    reset_speed: PositiveFloat = 0.2
    """Metres a second on the way there."""
    joint_reset_cycle: NonNegativeInt = 0
    """A joint reset before every so many episodes; 0: never. The joints' resting place must be in the box."""
    compliance_param: dict[str, Any] = field(default_factory=dict)
    """Controller settings of episodes, as the server's `/update_param` takes them; empty: as they are."""
    precision_param: dict[str, Any] = field(default_factory=dict)
    """Those of resets."""
    ee_pose_limit_min: Pose6 | None = None
    """Lower corner of the safety box: no command goes beyond it; null: around the target."""
    ee_pose_limit_max: Pose6 | None = None
    """Upper corner of the safety box."""
    max_outside: NonNegativeFloat = 0.02
    """Metres that the arm itself may be found outside of the box; further off nothing is moved."""
    max_outside_angle: NonNegativeFloat = 0.2
    """Radians about an axis that it may be found turned out of the box, likewise."""
    max_command_step: tuple[PositiveFloat, PositiveFloat] | None = None
    """Metres and radians between one commanded pose and the next; what goes further is not sent. null: twice
    the longest action, and at least what resets need."""
    max_state_age: PositiveFloat = 0.5
    """Seconds, by the wall clock, from asking for a state to its arrival; a later one is asked for again, and
    nothing is commanded by it."""
    force_limit: PositiveFloat = 30.0
    """Newtons at which motion stops until the force is lower."""
    torque_limit: PositiveFloat = 10.0
    """Newton metres, likewise."""
    max_overloads: PositiveInt = 20
    """Steps in a row over a limit after which the arm is stopped for good."""
    max_recoveries: PositiveInt = 5
    """How often in a row errors are cleared, or cameras opened again, before an episode is given up."""
    recovery_seconds: PositiveFloat = 1.0
    """Seconds for the controller or a camera to come back, each time."""

    def __post_init__(self) -> None:
        """Find out what contradicts itself before anything moves."""
        super().__post_init__()
        if self.robot_ip == "ROBOT_IP":  # as RLinf's reward workflow has it
            raise ConfigError("robot_ip is still 'ROBOT_IP': replace it with your robot's address")
        if self.driver == "franky" and not self.robot_ip:
            raise ConfigError("robot_ip is missing: the franky driver needs the address of the arm")
        if self.driver == "serl_http" and not (self.robot_ip or self.url):
            raise ConfigError("robot_ip is missing: give it the robot server's address (or give url)")
        if self.driver != "serl_http" and self.time_scale != 1.0:
            raise ConfigError(f"time_scale must be 1 on a real arm, not {self.time_scale:g}")
        if not self.axes or len(set(self.axes)) != len(self.axes):
            raise ConfigError(f"axes must name at least one axis and none twice, not {list(self.axes)}")
        names = [camera.name for camera in self.cameras]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"cameras must list at least one camera and no name twice, not {names}")
        if reserved := {"states", "main_images"} & set(names):
            raise ConfigError(f"a camera cannot be called {sorted(reserved)[0]!r}")
        if any(most < _LONGEST * one for most, one in zip(self.step_limit, self.action_scale, strict=True)):
            raise ConfigError(
                f"max_command_step {list(self.step_limit)} is shorter than an action along all axes: it must "
                f"be at least {_LONGEST:.3g} times action_scale {list(self.action_scale)}"
            )
        low, high = self.box
        if self.ee_pose_limit_min is not None or self.ee_pose_limit_max is not None:
            for axis, name in enumerate(AXES):
                if not low[axis] < high[axis]:
                    raise ConfigError(
                        f"ee_pose_limit_min must be below ee_pose_limit_max, but along {name} they are "
                        f"{low[axis]:g} and {high[axis]:g}"
                    )
        self._check_inside("target_ee_pose", self.target_ee_pose)
        self._check_inside("reset_ee_pose", self.reset_pose)
        if self.enable_random_reset:
            x, y, z, rx, ry, rz = self.reset_pose
            for sign in (-1.0, 1.0):
                corner = (x + sign * self.random_xy_range, y + sign * self.random_xy_range, z)
                turned = (rx, ry, rz + sign * self.random_rz_range)
                self._check_inside("reset_ee_pose with random_xy_range and random_rz_range", corner + turned)

    def _check_inside(self, name: str, pose: Pose6) -> None:
        low, high = self.box
        if (wrong := outside_box(pose, low, high)) is not None:
            raise ConfigError(
                f"{name} lies outside the safety box (ee_pose_limit_min, ee_pose_limit_max): {wrong}"
            )

    @property
    def box(self) -> tuple[Pose6, Pose6]:
        """The safety box: its lowest and its highest pose."""
        low: Any = [value - margin for value, margin in zip(self.target_ee_pose, _MARGIN_LOW, strict=True)]
        high: Any = [value + margin for value, margin in zip(self.target_ee_pose, _MARGIN_HIGH, strict=True)]
        return self.ee_pose_limit_min or tuple(low), self.ee_pose_limit_max or tuple(high)

    @property
    def step_limit(self) -> tuple[float, float]:
        """Metres and radians between one commanded pose and the next."""
        if self.max_command_step is not None:
            return self.max_command_step
        metres, radians = (2.0 * _LONGEST * one for one in self.action_scale)
        return max(metres, 2.0 * self.reset_speed / self.control_hz, _LEAST_STEP[0]), max(
            radians, _LEAST_STEP[1]
        )

    @property
    def reset_pose(self) -> Pose6:
        """Where episodes begin, before chance moves it."""
        x, y, z, rx, ry, rz = self.target_ee_pose
        return self.reset_ee_pose or (x, y, z + _RESET_ABOVE, rx, ry, rz)

    @property
    def server_url(self) -> str:
        """Where the robot server is."""
        if self.url:
            return self.url.rstrip("/")
        host = str(self.robot_ip)
        return f"http://{host}" if ":" in host else f"http://{host}:{SERVER_PORT}"

    @property
    def action_size(self) -> int:
        """Numbers in an action."""
        return len(self.axes) + int(self.use_gripper)


@dataclass(frozen=True, kw_only=True)
class FaultsConfig(Checked):
    """What goes wrong at the simulated robot; shares are of the requests of that kind."""

    drop_rate: Fraction = 0.0
    """Requests whose connection is closed without an answer, half of them before and half after the work."""
    latency_rate: Fraction = 0.0
    """Requests that are answered late ..."""
    latency_seconds: NonNegativeFloat = 0.2
    """... by so much, in the robot's time."""
    controller_error_rate: Fraction = 0.0
    """Pose commands at which the controller gives up: the arm stands still until errors are cleared."""
    freeze_rate: Fraction = 0.0
    """Pictures at which a camera freezes: the same one again and again ..."""
    freeze_seconds: NonNegativeFloat = 3.0
    """... for so long, in the robot's time, or until it is opened again."""


@dataclass(frozen=True, kw_only=True)
class RobotSimConfig(Checked):
    """`guerdon robot-sim`: a simulated arm with a peg, a board with a hole, and two cameras."""

    host: str = "127.0.0.1"
    port: NonNegativeInt = SERVER_PORT
    """0 takes any port that is free."""
    seed: NonNegativeInt = 0
    """Of sensor noise and of faults."""
    time_scale: PositiveFloat = 1.0
    """How much faster than the wall clock the robot's time passes."""
    image_size: tuple[CameraSide, CameraSide] = (64, 64)
    """(height, width) of the cameras' pictures."""
    target_ee_pose: Pose6 = TARGET_POSE
    """The pose at which the peg is in the hole."""
    faults: FaultsConfig = field(default_factory=FaultsConfig)
