"""An arm that is only ever commanded within its limits, and that is helped up after errors."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from guerdon.config.schema_robot import RobotEnvConfig
from guerdon.core.errors import EmergencyStopError, RobotError
from guerdon.envs.robot.clock import Clock
from guerdon.envs.robot.driver import Driver, RobotState
from guerdon.envs.robot.poses import Vector, between, distances
from guerdon.envs.robot.safety import SafetyBox, StepLimit

log = logging.getLogger("guerdon")

T = TypeVar("T")

STALL_DISTANCE, STALL_ANGLE = 0.005, 0.04
"""A stall: the arm was to move so far and moved less than a tenth of it, though nothing holds it."""
STALL_FORCE, STALL_TORQUE = 5.0, 1.0
ARRIVED_DISTANCE, ARRIVED_ANGLE, ARRIVED_SPEED = 0.01, 0.05, 0.02
"""A compliant arm stops a little short of where it is pulled; it has arrived when it is near and slow."""
_SETTLE_STEPS = 10
"""Steps to come to rest at the end of a way."""


class GuardedArm:
    """All commands to the driver pass through here; `config` has the arm's limits."""

    def __init__(self, driver: Driver, config: RobotEnvConfig, clock: Clock) -> None:
        self.driver, self.config = driver, config
        self.box = SafetyBox(config)
        self.steps = StepLimit(config, self.box)
        self.recoveries = 0
        """How often errors were cleared, since the beginning."""
        self.refusals = 0
        """How often a target was too far from the last one and was not sent, since the beginning."""
        self.stopped = False
        self._clock = clock
        self._state: RobotState | None = None
        self._asked = -np.inf
        """When the state was asked for, in the robot's time."""
        self._commanded: Vector | None = None
        self._target: Vector | None = None
        self._start: Vector | None = None
        self._refused = self._stalls = self._overloads = 0
        """In a row: refused targets, stalls, commands at which a force was too high."""

    def connect(self) -> RobotState:
        """Measure once, without help after errors, and check that the arm may be moved at all."""
        state = self._ask()
        self._check_place()
        return state

    def _check_place(self) -> None:
        """RobotError if the arm is too far outside the box for a command to be safe."""
        pose = self.state.pose
        distance, angle = self.box.distance(pose), self.box.angle(pose)
        if distance > self.config.max_outside or angle > self.config.max_outside_angle:
            raise RobotError(
                f"the arm is {100 * distance:.1f} cm and {angle:.2f} rad outside the safety box "
                f"({self.box.wrong(pose)}): bring it there by hand, or put ee_pose_limit_min and "
                "ee_pose_limit_max right"
            )

    @property
    def state(self) -> RobotState:
        """What was measured last."""
        if self._state is None:
            raise RobotError("the arm has not been measured yet")
        return self._state

    @property
    def commanded(self) -> Vector:
        """The last commanded pose [7]; before the first command, where the arm was found."""
        if self._commanded is None:
            raise RobotError("the arm is not ready to move")
        return self._commanded

    def measure(self) -> RobotState:
        """Measure now; a state that took too long to arrive tells of the past and is asked for again."""
        for _ in range(self.config.max_recoveries + 1):
            state = self.insist(self._ask)
            age = (self._clock.now() - self._asked) / self._clock.scale
            if age <= self.config.max_state_age:
                return state
            log.warning("robot: the state is %.2f s old when it arrives; it is asked for again", age)
        raise RobotError(
            f"the robot's state is {age:.2f} s old when it arrives; max_state_age is "
            f"{self.config.max_state_age:g} s"
        )

    def _ask(self) -> RobotState:
        self._asked = self._clock.now()
        self._state = self.driver.state()
        return self._state

    def refresh(self) -> None:
        """Measure again if the last state is older than a period."""
        if self._clock.now() - self._asked > 1.0 / self.config.control_hz:
            self.measure()

    def command(self, pose: Vector) -> bool:
        """Pull towards the pose [7], or stay if a force is too high or the pose too far; whether it was sent.

        The target is clipped into the box first. A target that is too far from the last one, as a wrong
        measurement makes it, is not sent; RobotError if that happens too often in a row.
        """
        if self.stopped:
            raise EmergencyStopError("the arm was stopped: reset the environment before it moves again")
        self.refresh()
        self._check_place()
        if self._overloaded():
            self._send(self.steps.limited(self.commanded, self.box.clip(self.state.pose)))
            return False
        target = self.box.clip(pose)
        if (wrong := self.steps.wrong(self.commanded, target)) is not None:
            self._refuse(wrong)
            return False
        self._refused = 0
        self._send(target)
        return True

    def _overloaded(self) -> bool:
        """Whether motion has to stop; EmergencyStopError if that has been so for too long."""
        force, torque = (float(np.linalg.norm(each)) for each in (self.state.force, self.state.torque))
        limits = self.config.force_limit, self.config.torque_limit
        self._overloads = self._overloads + 1 if force > limits[0] or torque > limits[1] else 0
        if self._overloads >= self.config.max_overloads:
            raise EmergencyStopError(
                f"forces were too high for {self._overloads} steps in a row: {force:.1f} N of "
                f"{limits[0]:g} N, {torque:.1f} Nm of {limits[1]:g} Nm"
            )
        return self._overloads > 0

    def _send(self, target: Vector) -> None:
        self.insist(lambda: self.driver.move(target))
        self._target, self._start, self._commanded = target, self.state.pose, target

    def _refuse(self, wrong: str) -> None:
        """Send nothing: the arm holds still at its last target."""
        self.refusals += 1
        self._refused += 1
        self._start = None  # it is not expected to move
        if self._refused > self.config.max_recoveries:
            raise RobotError(f"{wrong}, {self._refused} times in a row: is the arm where it says it is?")
        log.warning("robot: %s; the arm holds still", wrong)

    def settle(self) -> RobotState:
        """Measure what the last command led to; clear errors if the arm does not obey."""
        state = self.measure()
        if self._stands(state):
            self._stalls += 1
            if self._stalls > self.config.max_recoveries:
                raise RobotError(
                    f"the arm does not move, though errors were cleared {self._stalls - 1} times in a row"
                )
            log.warning("robot: the arm does not follow its commands; errors are cleared")
            self._recover()
        else:
            self._stalls = 0
        return state

    def go_to(self, pose: Vector, tick: Callable[[], None]) -> None:
        """Travel to a pose [7] in the box, no faster than allowed; `tick` waits for the next step."""
        goal, start = self.box.clip(pose), self.commanded
        per_step = self.config.reset_speed / self.config.control_hz
        way, turn = distances(start, goal)
        steps = max(int(np.ceil(way / per_step)), int(np.ceil(2.0 * turn / self.config.step_limit[1])), 1)
        self.command(between(start, goal, 1.0 / steps))
        done = 1
        for _ in range(steps + _SETTLE_STEPS * (1 + self.config.max_recoveries)):
            tick()
            before = self.recoveries
            state = self.settle()
            way, turn = distances(state.pose, goal)
            near = way < ARRIVED_DISTANCE and turn < ARRIVED_ANGLE
            if done >= steps and near and np.linalg.norm(state.vel[:3]) < ARRIVED_SPEED:
                return
            if self.recoveries == before:
                done = min(done + 1, steps)
            self.command(
                self.steps.limited(self.commanded, self.box.clip(between(start, goal, done / steps)))
            )
        raise RobotError(
            f"the arm did not get to {np.round(goal, 4).tolist()}; it is at "
            f"{np.round(state.pose, 4).tolist()}"
        )

    def prepare(self) -> None:
        """Make ready to move: errors cleared, the controller started if it was stopped, and the arm found."""
        if self.stopped:
            self.insist(self.driver.start)
            self.stopped = False
        self.insist(self.driver.clear_errors)
        self._target, self._stalls, self._refused, self._overloads = None, 0, 0, 0
        self._find()

    def reset_joints(self) -> None:
        """A joint reset, after which the arm is somewhere else."""
        self.insist(self.driver.reset)
        self._find()

    def _find(self) -> None:
        """Commands start from where the arm is, which two measurements have to agree on."""
        first, second = self.measure().pose, self.measure().pose
        if self.steps.wrong(first, second) is not None:
            raise RobotError(
                f"two measurements of the arm disagree: {np.round(first, 4).tolist()} and "
                f"{np.round(second, 4).tolist()}"
            )
        self._check_place()
        self._commanded = second

    def rest(self) -> None:
        """Stay where the arm is; said, not raised, if that fails."""
        if self._target is None:
            return  # it was never commanded
        try:
            here = self.box.clip(self.driver.state().pose)
            self.driver.move(self.steps.limited(self.commanded, here))
        except RobotError as error:
            log.error("the arm could not be commanded to stay: %s", error)

    def halt(self) -> None:
        """Stop at once, whatever has happened: stay in place, then stop the controller."""
        self.stopped = True
        self.rest()
        try:
            self.driver.stop()
        except RobotError as error:
            log.error("the controller could not be stopped, use the red button: %s", error)

    def _stands(self, state: RobotState) -> bool:
        """Whether the arm stayed where it was though it was commanded to move and nothing holds it."""
        if self._target is None or self._start is None:
            return False
        if np.linalg.norm(state.force) > STALL_FORCE or np.linalg.norm(state.torque) > STALL_TORQUE:
            return False
        wanted, moved = distances(self._start, self._target), distances(self._start, state.pose)
        for way, done, least in zip(wanted, moved, (STALL_DISTANCE, STALL_ANGLE), strict=True):
            if way >= least:
                return done < 0.1 * way
        return False

    def insist(self, act: Callable[[], T]) -> T:
        """Do it, clearing errors and trying again if it fails; the last error if that does not help."""
        for attempt in range(self.config.max_recoveries + 1):
            try:
                return act()
            except EmergencyStopError:
                raise
            except RobotError as error:
                if attempt == self.config.max_recoveries:
                    raise
                log.warning("robot: %s", error)
                self._clock.sleep(self.config.recovery_seconds)
                self._recover()
        raise AssertionError("unreachable")

    def _recover(self) -> None:
        self.recoveries += 1
        try:
            self.driver.clear_errors()
        except RobotError as error:  # the next try of the caller says whether that matters
            log.warning("robot: errors could not be cleared: %s", error)


def raise_on_sigterm() -> None:
    """From now on SIGTERM does what Ctrl-C does: it is raised where the program is, and the arm is stopped.

    By default it would end the process at once, with the arm on its way to the last target. Where somebody
    else has a plan for the signal, theirs is kept; only the main thread can make one.
    """
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
