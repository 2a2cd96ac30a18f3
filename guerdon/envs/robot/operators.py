"""Operators: what they steer overrides the policy, and keys say how an episode went.

`c` ends the episode as a success, `a` as a failure, the space bar stops the arm at once.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any, Protocol

import numpy as np

from guerdon.config.schema_robot import AXES, RobotEnvConfig
from guerdon.core.errors import RobotError
from guerdon.core.types import FloatArray
from guerdon.envs.robot.driver import RobotState, import_extra
from guerdon.envs.robot.poses import Vector, pose6, pose_offset

log = logging.getLogger("guerdon")

SUCCESS_KEY, FAILURE_KEY, STOP_KEY = "c", "a", " "
_MOVES = {
    "i": ("x", 1.0), "k": ("x", -1.0), "j": ("y", 1.0), "l": ("y", -1.0), "u": ("z", 1.0), "o": ("z", -1.0),
    "I": ("rx", 1.0), "K": ("rx", -1.0), "J": ("ry", 1.0), "L": ("ry", -1.0), "U": ("rz", 1.0),
    "O": ("rz", -1.0),
    "]": ("gripper", 1.0), "[": ("gripper", -1.0),
}  # fmt: skip
KEYBOARD_HELP = (
    "i/k x, j/l y, u/o z; with shift: turn about them; [ ] gripper; c success, a failure, space: stop"
)

_SILENCE = 0.5
"""Seconds after which the last word of a SpaceMouse no longer counts; deflected, it talks all the time."""


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """A person steers."""

    action: FloatArray
    """[A] in the environment's units, from -1 to 1."""


class Operator(Protocol):
    """Somebody, or something, that watches the robot and may take over."""

    def reset(self) -> None:
        """A new episode starts."""

    def read(self, state: RobotState) -> Intervention | None:
        """What is steered now; None leaves it to the policy."""

    def keys(self) -> list[str]:
        """The keys pressed since the last time this was asked."""

    def close(self) -> None:
        """Go."""


def _action_names(config: RobotEnvConfig) -> list[str]:
    return [*config.axes, "gripper"] if config.use_gripper else [*config.axes]


def _steer(config: RobotEnvConfig, moves: dict[str, float]) -> Intervention:
    """An action [A] from the axes that are steered; those that actions do not have are left out."""
    values = [np.clip(moves.get(name, 0.0), -1.0, 1.0) for name in _action_names(config)]
    return Intervention(action=np.array(values, np.float32))


class KeyboardOperator:
    """Steers with the keys of the terminal (`KEYBOARD_HELP`).

    A terminal tells of pressed keys but not of released ones: a key counts for a moment, as long as keys
    repeat while they are held.

    Args:
        config: settings of the environment.
        descriptor: the terminal to read; None: standard input.
        hold_seconds: how long a key counts, by the wall clock.
    """

    def __init__(
        self, config: RobotEnvConfig, descriptor: int | None = None, hold_seconds: float = 0.2
    ) -> None:
        self._config, self._hold = config, hold_seconds
        self._descriptor = sys.stdin.fileno() if descriptor is None else descriptor
        if not os.isatty(self._descriptor):
            raise RobotError("the keyboard operator needs a terminal: standard input is not one")
        try:
            import termios
            import tty
        except ImportError as error:
            raise RobotError("the keyboard operator needs a terminal of Linux or macOS") from error
        self._before: list[Any] | None = termios.tcgetattr(self._descriptor)
        tty.setcbreak(self._descriptor)
        self._until: dict[str, float] = {}
        self._keys: list[str] = []
        log.info("keys: %s", KEYBOARD_HELP)

    def reset(self) -> None:
        """Forget what was pressed before, but not a stop."""
        self._poll()
        self._until.clear()
        self._keys = [key for key in self._keys if key == STOP_KEY]

    def read(self, state: RobotState) -> Intervention | None:
        """The sum of the keys that are held."""
        self._poll()
        now = time.monotonic()
        moves: dict[str, float] = {}
        for key, until in self._until.items():
            if until >= now:
                axis, direction = _MOVES[key]
                moves[axis] = moves.get(axis, 0.0) + direction
        return _steer(self._config, moves) if moves else None

    def keys(self) -> list[str]:
        """Keys that steer nothing."""
        self._poll()
        pressed, self._keys = self._keys, []
        return pressed

    def _poll(self) -> None:
        while select.select([self._descriptor], [], [], 0.0)[0]:
            text = os.read(self._descriptor, 256).decode(errors="ignore")
            if not text:
                return
            for key in text:
                if key in _MOVES:
                    self._until[key] = time.monotonic() + self._hold
                else:
                    self._keys.append(key)

    def close(self) -> None:
        """Give the terminal back as it was."""
        if self._before is not None:
            import termios

            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)
            self._before = None


class SpaceMouseOperator:
    """Steers with a 3Dconnexion SpaceMouse; keys come from `keyboard`, if there is one.

    Deflections below the share `dead_zone` are no steering.
    """

    def __init__(
        self, config: RobotEnvConfig, keyboard: Operator | None = None, dead_zone: float = 0.05
    ) -> None:
        pyspacemouse = import_extra("pyspacemouse", "spacemouse")
        self._config, self._keyboard, self._dead = config, keyboard, dead_zone
        try:
            self._device = pyspacemouse.open(axis_convention=pyspacemouse.AxisConvention.ROS)
        except Exception as error:  # the package raises what its USB library does
            raise RobotError(f"no SpaceMouse can be opened: {error}") from error
        self._closing = Event()
        self._moves: dict[str, float] = {}
        self._reported = time.monotonic()
        self._thread = Thread(target=self._watch, daemon=True, name="SpaceMouse")
        self._thread.start()

    def reset(self) -> None:
        """A new episode starts."""
        if self._keyboard is not None:
            self._keyboard.reset()

    def read(self, state: RobotState) -> Intervention | None:
        """The newest deflection; x is away from the person, y to the left, z up."""
        moves = self._moves
        # A mouse that is pulled out says nothing more: its last deflection must not steer on.
        fresh = time.monotonic() - self._reported < _SILENCE or set(moves) <= {"gripper"}
        if not fresh or not any(name in moves for name in _action_names(self._config)):
            return self._keyboard.read(state) if self._keyboard is not None else None
        return _steer(self._config, moves)

    def _watch(self) -> None:
        """What the thread does: the device queues a report for every movement, and only the last counts."""
        last = None
        while not self._closing.wait(0.002):
            try:
                seen = self._device.read()
            except Exception as error:  # the package raises what its USB library does
                log.warning("the SpaceMouse has gone: %s", error)
                self._moves = {}
                return
            if seen.t == last:
                continue
            last = seen.t
            values = dict(zip(AXES, (seen.x, seen.y, seen.z, seen.roll, seen.pitch, seen.yaw), strict=True))
            moves = {axis: float(value) for axis, value in values.items() if abs(value) > self._dead}
            if any(seen.buttons):  # the left one closes, the right one opens
                moves["gripper"] = -1.0 if seen.buttons[0] else 1.0
            self._moves, self._reported = moves, time.monotonic()

    def keys(self) -> list[str]:
        """Those of the keyboard."""
        return [] if self._keyboard is None else self._keyboard.keys()

    def close(self) -> None:
        """Let go of the device."""
        self._closing.set()
        self._thread.join(timeout=1.0)
        self._device.close()
        if self._keyboard is not None:
            self._keyboard.close()


class ScriptedOperator:
    """For simulated robots: it sees the arm's state and knows the target.

    Moves over the target, then down, and holds there; some episodes fail on purpose.

    Args:
        config: settings of the environment.
        noise: deviation of the noise on its actions.
        failure_rate: share of the episodes in which it puts the peg down beside the hole, or waits above it.
        intervene_rate: share of the steps at which it takes over; the others are left to the policy.
        press_keys: press `c` or `a` at the end, instead of leaving that to `success_hold_steps`.
        approach_height: metres above the target below which it moves straight down only.
        seed: of all that is drawn.
    """

    def __init__(
        self,
        config: RobotEnvConfig,
        *,
        noise: float = 0.15,
        failure_rate: float = 0.0,
        intervene_rate: float = 1.0,
        press_keys: bool = False,
        approach_height: float = 0.04,
        seed: int = 0,
    ) -> None:
        self._config, self._noise, self._failure_rate = config, noise, failure_rate
        self._intervene_rate, self._press_keys, self._height = intervene_rate, press_keys, approach_height
        self._rng = np.random.default_rng(seed)
        self._plans = np.random.default_rng([seed, 1])  # apart: the clock decides on steps
        self._target: Vector = np.asarray(config.target_ee_pose, np.float64)
        self._keys: list[str] = []
        self.reset()

    def reset(self) -> None:
        """Decide how this one shall go."""
        self.will_fail = bool(self._plans.random() < self._failure_rate)
        self._goal = self._target.copy()
        self._steps = self._held = 0
        self._keys = []
        if self.will_fail:
            angle, away = self._plans.uniform(0.0, 2.0 * np.pi), self._plans.uniform(0.01, 0.03)
            self._goal[:2] += away * np.array([np.cos(angle), np.sin(angle)])
            if self._plans.random() < 0.3:
                self._goal[2] += self._height + self._plans.uniform(0.0, 0.02)

    def read(self, state: RobotState) -> Intervention | None:
        """The next bit of the way."""
        here = pose6(state.pose)
        away = pose_offset(self._goal, here)
        aside = float(np.linalg.norm(away[:2]))
        if aside > 0.0025 and here[2] > self._target[2] + 0.8 * self._height:  # first sideways
            away[2] = max(away[2], self._target[2] + self._height - here[2])
        self._steps += 1
        there = np.abs(pose_offset(self._target, here)) <= self._config.reward_threshold
        self._held = self._held + 1 if there.all() else 0
        success = self._held >= self._config.success_hold_steps
        given_up = self.will_fail and self._steps >= min(30, self._config.max_episode_steps - 1)
        if self._press_keys and (success or given_up):
            self._keys.append(SUCCESS_KEY if success else FAILURE_KEY)
        if self._rng.random() >= self._intervene_rate:
            return None
        scale = np.repeat(self._config.action_scale, 3)
        noise = self._rng.normal(0.0, self._noise, 6) * (1.0 if aside > 0.005 else 0.5)
        moves: dict[str, float] = dict(zip(AXES, (away / scale + noise).tolist(), strict=True))
        return _steer(self._config, {**moves, "gripper": -1.0})

    def keys(self) -> list[str]:
        """What it pressed."""
        pressed, self._keys = self._keys, []
        return pressed

    def close(self) -> None:
        """Nothing to do."""
