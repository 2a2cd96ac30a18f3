"""A robot arm as a Gymnasium environment.

An observation has `states` (float32 [19], see `STATE_NAMES`), `main_images` of the first camera and one entry
for each further camera by its name, all uint8 [H, W, 3]. An action is float32 in [-1, 1]: how far the target
moves from the measured pose along `axes`, in units of `action_scale`, and perhaps the gripper.

The infos of a step:

| key | is |
|---|---|
| `success` | the task is done: held long enough, key `c`, or (standalone) the reward model says so |
| `at_target`, `hold_steps` | this frame is at the target; for how many steps in a row |
| `intervened`, `action_taken` | a person steered; the action that counted, float32 [A] |
| `operator_key` | `c`, `a` or nothing |
| `elapsed_steps`, `is_robot_static` | as in the embedded environment |
| `ee_pose` | float64 [7], as measured |
| `force_limited` | a force was too high: the arm stays |
| `refused` | the target was too far from the last one, as a wrong measurement makes it: nothing was sent |
| `recoveries` | errors cleared and cameras opened again during this step |
| `frame_time`, `frame_age` | the oldest picture of the observation, in the robot's seconds |

Whatever goes wrong for good, and Ctrl-C or SIGTERM, stops the arm before the error is handed on; `reset`
starts it.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from guerdon.config.schema_robot import AXES, RobotEnvConfig
from guerdon.core.errors import ConfigError, DataError, EmergencyStopError, StaleFrameError
from guerdon.core.types import FloatArray
from guerdon.envs.robot.arm import GuardedArm, raise_on_sigterm
from guerdon.envs.robot.cameras import Camera, Frame, make_cameras
from guerdon.envs.robot.clock import Clock, Ticker, Timing
from guerdon.envs.robot.driver import Driver, RobotState, make_driver
from guerdon.envs.robot.operators import FAILURE_KEY, STOP_KEY, SUCCESS_KEY, Operator
from guerdon.envs.robot.poses import Vector, multiply, pose6, pose7, pose_offset, quat_from_euler

log = logging.getLogger("guerdon")

Observation: TypeAlias = dict[str, Any]
Info: TypeAlias = dict[str, Any]
SuccessDetector: TypeAlias = Callable[[Observation], bool]
"""Whether an observation shows success."""

STATE_NAMES = (
    *(f"{axis} from target" for axis in AXES),
    *(f"velocity {axis}" for axis in AXES),
    *(f"force {axis}" for axis in "xyz"),
    *(f"torque {axis}" for axis in "xyz"),
    "gripper",
)
STATE_SCALE: Vector = np.array(
    [0.05] * 3 + [0.25] * 3 + [0.1] * 3 + [0.5] * 3 + [10.0] * 3 + [2.0] * 3 + [1.0]
)
"""What is 1 in `states`, in metres, radians, newtons and so on."""
_STILL = 0.01


class RobotEnv(gym.Env[Observation, FloatArray]):
    """One arm with its cameras; it is met, but not moved, when the environment is made.

    Args:
        config: settings.
        driver: who moves the arm; None: as the settings say.
        cameras: who takes pictures; None: as the settings say.
        operator: who may take over; None: nobody.
        success_detector: says whether an observation shows success, for `standalone`; may be set later.
        clock: the robot's time.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(
        self,
        config: RobotEnvConfig,
        *,
        driver: Driver | None = None,
        cameras: Sequence[Camera] | None = None,
        operator: Operator | None = None,
        success_detector: SuccessDetector | None = None,
        clock: Clock | None = None,
        render_mode: str | None = "rgb_array",
    ) -> None:
        self.config, self.operator, self.render_mode = config, operator, render_mode
        self.success_detector = success_detector
        self.clock = Clock(config.time_scale) if clock is None else clock
        image = spaces.Box(0, 255, (*config.image_size, 3), np.uint8)
        states = spaces.Box(-np.inf, np.inf, (len(STATE_NAMES),), np.float32)
        self.observation_space = spaces.Dict({"states": states, **dict.fromkeys(self.image_keys, image)})
        self.spec = EnvSpec(
            "guerdon/Robot-v0",
            entry_point="guerdon.envs.robot.env:RobotEnv",
            nondeterministic=True,
            max_episode_steps=config.max_episode_steps,
            kwargs={"config": config},
        )
        self.action_space = spaces.Box(-1.0, 1.0, (config.action_size,), np.float32)
        self._target: Vector = np.asarray(config.target_ee_pose, np.float64)
        self._ticker = Ticker(self.clock, config.control_hz)
        self._frames: list[Frame] = []
        self._episodes = self._elapsed = self._hold = self._reopened = 0
        self._going_on = self._closed = False
        self._gripper_open: bool | None = None
        self.driver = make_driver(config) if driver is None else driver
        self.cameras: list[Camera] = []
        self.arm = GuardedArm(self.driver, config, self.clock)
        try:
            self._check_time()
            self.arm.connect()
            for camera in make_cameras(config, self.clock) if cameras is None else cameras:
                self.cameras.append(camera)
                camera.open()
        except BaseException:
            self._let_go()
            raise
        atexit.register(self.close)
        raise_on_sigterm()

    @property
    def image_keys(self) -> list[str]:
        """Where the pictures of the cameras are in observations."""
        return ["main_images", *(camera.name for camera in self.config.cameras[1:])]

    def _check_time(self) -> None:
        """A real arm's time cannot be scaled, and a simulated one must agree."""
        simulated = self.driver.time_scale()
        scale, whose = (1.0, "a real arm") if simulated is None else (simulated, "this simulated robot")
        if scale != self.config.time_scale:
            raise ConfigError(
                f"time_scale must be {scale:g}, that of {whose}, not {self.config.time_scale:g}"
            )

    # Episodes

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Clear errors, lift the arm and bring it to where the episode begins."""
        super().reset(seed=seed)
        if self._closed:
            raise DataError("the environment is closed")
        if self.config.standalone and self.success_detector is None:
            raise ConfigError("standalone needs a reward model: set success_detector before reset")
        self._going_on = False
        before = self._recoveries()
        try:
            self._travel()
            if self.operator is not None:
                self.operator.reset()
            self._keys()
            obs = self._observe(self.arm.measure())
        except BaseException:
            self.arm.halt()
            raise
        self._episodes += 1
        self._elapsed = self._hold = 0
        self._going_on = True
        self._ticker.start()
        return obs, self._info(np.zeros(self.config.action_size, np.float32), before)

    def _travel(self) -> None:
        config, arm = self.config, self.arm
        arm.prepare()
        if config.precision_param:
            arm.insist(lambda: self.driver.update_param(config.precision_param))
        if config.joint_reset_cycle and self._episodes % config.joint_reset_cycle == 0 and self._episodes:
            arm.reset_joints()
        goal = np.asarray(config.reset_pose, np.float64)
        if config.enable_random_reset:
            goal[:2] += self.np_random.uniform(-config.random_xy_range, config.random_xy_range, 2)
            goal[5] += self.np_random.uniform(-config.random_rz_range, config.random_rz_range)
        ticker = Ticker(self.clock, config.control_hz)
        ticker.start()
        here = pose6(arm.commanded)
        if here[2] < goal[2]:  # what is in a hole comes out of it the way it went in
            arm.go_to(pose7([*here[:2], goal[2], *self._target[3:5], here[5]]), ticker.wait)
        arm.go_to(pose7(goal), ticker.wait)
        if config.compliance_param:
            arm.insist(lambda: self.driver.update_param(config.compliance_param))

    def step(self, action: FloatArray) -> tuple[Observation, float, bool, bool, Info]:
        """Act for one period.

        Args:
            action: float [A]; values beyond [-1, 1] are clipped.

        Returns:
            Observation, env reward (1 on success), terminated, truncated, info.
        """
        if not self._going_on:
            raise DataError("the episode is over or has not started: reset the environment first")
        wanted = self._check_action(action)
        try:
            return self._step(wanted)
        except BaseException:  # whatever it is, Ctrl-C too: the arm must not go on by itself
            self._going_on = False
            self.arm.halt()
            raise

    def _step(self, action: FloatArray) -> tuple[Observation, float, bool, bool, Info]:
        before, refusals = self._recoveries(), self.arm.refusals
        self.arm.refresh()  # deciding on the action may have taken a while
        keys = self._keys()
        intervened = False
        if self.operator is not None and (steered := self.operator.read(self.arm.state)) is not None:
            action, intervened = self._check_action(steered.action), True
        allowed = self.arm.command(self._pose_for(action))
        self._move_gripper(action)
        self._ticker.wait()
        state = self.arm.settle()
        obs = self._observe(state)
        self._elapsed += 1
        self._hold = self._hold + 1 if self._at_target(state) else 0
        keys += self._keys()
        said = next((key for key in keys if key in (SUCCESS_KEY, FAILURE_KEY)), "")
        if said:
            success = said == SUCCESS_KEY
        elif self.config.standalone:
            assert self.success_detector is not None
            success = bool(self.success_detector(obs))
        else:
            success = self._hold >= self.config.success_hold_steps
        terminated = success or bool(said)
        truncated = not terminated and self._elapsed >= self.config.max_episode_steps
        self._going_on = not (terminated or truncated)
        refused = self.arm.refusals > refusals
        info = self._info(action, before) | {"success": success, "intervened": intervened}
        info |= {"operator_key": said, "refused": refused, "force_limited": not (allowed or refused)}
        return obs, float(success), terminated, truncated, info

    def _check_action(self, action: Any) -> FloatArray:
        array = np.asarray(action, np.float32)
        if array.shape != (self.config.action_size,):
            raise DataError(f"an action must have shape [{self.config.action_size}], not {list(array.shape)}")
        if not np.isfinite(array).all():
            raise DataError(f"the action is not finite: {array.tolist()}")
        return np.clip(array, -1.0, 1.0)

    def _keys(self) -> list[str]:
        """What the operator has pressed; EmergencyStopError if that is a stop."""
        keys = [] if self.operator is None else self.operator.keys()
        if STOP_KEY in keys:
            raise EmergencyStopError("the operator stopped the arm")
        return keys

    def _pose_for(self, action: FloatArray) -> Vector:
        """The target [7] that an action asks for."""
        change = np.zeros(6)
        change[[AXES.index(axis) for axis in self.config.axes]] = action[: len(self.config.axes)]
        metres, radians = self.config.action_scale
        pose = self.arm.state.pose.copy()
        pose[:3] += change[:3] * metres
        pose[3:] = multiply(quat_from_euler(change[3:] * radians), pose[3:])
        return pose

    def _move_gripper(self, action: FloatArray) -> None:
        """Commanded only when it changes, as it takes the gripper a while."""
        if not self.config.use_gripper or abs(action[-1]) < self.config.gripper_threshold:
            return
        wanted = bool(action[-1] > 0.0)
        if wanted != self._gripper_open:
            self.arm.insist(self.driver.open_gripper if wanted else self.driver.close_gripper)
            self._gripper_open = wanted

    # What is seen

    def _observe(self, state: RobotState) -> Observation:
        for camera in self.cameras:
            camera.ask()
        self._frames = [self._frame(camera) for camera in self.cameras]
        away = pose_offset(pose6(state.pose), self._target)
        values = np.concatenate([away, state.vel, state.force, state.torque, [state.gripper_pos]])
        images = {key: frame.image for key, frame in zip(self.image_keys, self._frames, strict=True)}
        return {"states": (values / STATE_SCALE).astype(np.float32), **images}

    def _frame(self, camera: Camera) -> Frame:
        """A fresh picture; a camera that has none is opened again, while the arm stays where it is."""
        for attempt in range(self.config.max_recoveries + 1):
            try:
                return camera.frame()
            except StaleFrameError as error:
                if attempt == self.config.max_recoveries:
                    raise
                log.warning("robot: %s; it is opened again", error)
                if attempt == 0:
                    self.arm.command(self.arm.measure().pose)
                else:
                    self.clock.sleep(self.config.recovery_seconds)
                self._reopened += 1
                camera.open()
                camera.ask()
        raise AssertionError("unreachable")

    def _at_target(self, state: RobotState) -> bool:
        away = pose_offset(pose6(state.pose), self._target)
        return bool((np.abs(away) <= self.config.reward_threshold).all())

    def _recoveries(self) -> int:
        return self.arm.recoveries + self._reopened

    def _info(self, action: FloatArray, before: int) -> Info:
        """Of a step in which nothing was out of the ordinary; `before` it, so often errors were cleared."""
        state = self.arm.state
        oldest = min(frame.time for frame in self._frames)
        return {
            "success": False,
            "at_target": self._at_target(state),
            "hold_steps": self._hold,
            "intervened": False,
            "action_taken": action.copy(),
            "operator_key": "",
            "elapsed_steps": self._elapsed,
            "is_robot_static": bool(np.linalg.norm(state.vel) < _STILL),
            "ee_pose": state.pose.copy(),
            "force_limited": False,
            "refused": False,
            "recoveries": self._recoveries() - before,
            "frame_time": oldest,
            "frame_age": self.clock.now() - oldest,
        }

    def timing(self) -> Timing:
        """How regular the steps were."""
        return self._ticker.timing()

    def render(self) -> Any:
        """The last picture of the first camera, uint8 [H, W, 3]."""
        return self._frames[0].image if self.render_mode is not None and self._frames else None

    def stop(self) -> None:
        """Emergency stop; `reset` goes on."""
        self._going_on = False
        self.arm.halt()

    def close(self) -> None:
        """Tell the arm to stay where it is and let go of everything."""
        if self._closed:
            return
        self._closed = True
        self._going_on = False
        atexit.unregister(self.close)
        if not self.arm.stopped:
            self.arm.rest()
        self._let_go()

    def _let_go(self) -> None:
        for camera in self.cameras:
            camera.close()
        if self.operator is not None:
            self.operator.close()
        self.driver.close()
