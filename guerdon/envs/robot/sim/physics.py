"""A compliant arm that holds a peg over a board with a hole.

The controller pulls the end effector towards the commanded pose like a spring with a damper. Masses are left
out: in free space the arm closes a fixed share of the distance per unit of time, and in contact the springs,
the contact forces and dry friction are in balance. Lengths are in metres, forces in newtons, times in
seconds of the robot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from guerdon.config.schema_robot import Pose6
from guerdon.envs.robot.poses import Vector, euler_from_quat, quat_from_euler, wrap

PEG_LENGTH = 0.05
"""From the end effector to the tip."""
PEG_RADIUS = 0.008
HOLE_RADIUS = 0.009
CHAMFER = 0.003
"""Width of the slope around the hole; it guides a peg that is a little off."""
HOLE_DEPTH = 0.03
INSERTED_DEPTH = 0.9 * HOLE_DEPTH
ENTRY_TILT = 0.15
"""A peg that leans more does not go in."""
STIFFNESS, TURN_STIFFNESS = 2000.0, 150.0
FRICTION = 0.3
TIME_CONSTANT = 0.05
"""Of the arm's way to the commanded pose."""
MAX_SPEED, MAX_TURN_SPEED = 0.5, 2.0
TIME_STEP = 0.01
REST_HEIGHT = 0.08
"""How far above the target a joint reset leaves the end effector."""
GRIPPER_SPEED = 3.0
_REST_JOINTS = np.array([0.0, 0.0, 0.0, -1.9, 0.0, 2.0, 0.0])
_CLEARANCE = HOLE_RADIUS - PEG_RADIUS


JACOBIAN: Vector = np.column_stack(
    [np.diag([0.55, 0.5, 0.45, 1.0, 1.0, 1.0]), [0.05, -0.04, 0.03, 0.1, 0.0, 0.2]]
)
"""A fixed matrix [6, 7] of full rank: joints are not simulated, but `vel = jacobian @ dq` holds."""
_INVERSE = np.linalg.pinv(JACOBIAN)


class PegArm:
    """The arm, the peg and the board; `advance` lets time pass."""

    def __init__(self, target_ee_pose: Pose6, seed: int = 0) -> None:
        x, y, z = target_ee_pose[:3]
        self.hole: tuple[float, float] = (x, y)
        self.board_top = z - PEG_LENGTH + HOLE_DEPTH
        self.upright: Vector = np.asarray(target_ee_pose[3:], np.float64)
        """Euler angles at which the peg points straight down."""
        self._rest_position = [x, y, z + REST_HEIGHT]
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """The arm at rest above the hole with the peg in its gripper, and noise from a new seed."""
        self.rng = np.random.default_rng(seed)
        self.turn = [0.0, 0.0, 0.0]
        """Euler angles away from `upright`."""
        self.gripper = self.gripper_target = 0.0
        self.held = True
        self.released: tuple[float, float, float] | None = None
        """Where the tip of a peg was that the gripper let go."""
        self.inserted_once = False
        self.stiffness, self.turn_stiffness = STIFFNESS, TURN_STIFFNESS
        self.rest()

    # What the server asks for

    def command(self, pose: Sequence[float]) -> None:
        """Pull towards a pose [7] from now on; ignored while the controller is off or has failed."""
        if self.running and not self.failed:
            self.target_position = [float(value) for value in pose[:3]]
            self.target_turn = wrap(euler_from_quat(pose[3:]) - self.upright).tolist()

    def rest(self) -> None:
        """Joint reset: to the resting place at once, with the peg if it is held."""
        self.failed, self.running = False, True
        self.position = list(self._rest_position)
        self.turn, self.velocity = [0.0] * 3, [0.0] * 6
        self.force, self.torque = [0.0] * 3, [0.0] * 3
        self.hold()

    def hold(self) -> None:
        """Pull towards where the arm is."""
        self.target_position, self.target_turn = list(self.position), list(self.turn)

    def fail(self) -> None:
        """The controller gives up; the arm stands still until `clear`."""
        self.failed = True
        self.hold()

    def clear(self) -> None:
        """Let the controller go on, from where the arm is."""
        if self.failed:
            self.failed = False
            self.hold()

    def start(self) -> None:
        """Start the controller, without its errors; the arm stays where it is."""
        self.running, self.failed = True, False
        self.hold()

    def stop(self) -> None:
        """Stop the controller; the arm stays where it is."""
        self.running = False
        self.hold()

    def set_gripper(self, opening: float) -> None:
        """Open the gripper to a share from 0 to 1 from now on."""
        self.gripper_target = min(max(opening, 0.0), 1.0)

    def state(self) -> dict[str, Any]:
        """What `/getstate` answers; force and torque in the base frame, with a sensor's noise."""
        quat = quat_from_euler(self.upright + self.turn)
        noise = self.rng.normal(0.0, 1.0, 6)
        away = np.concatenate([np.subtract(self.position, self._rest_position), self.turn])
        return {
            "pose": [*self.position, *quat.tolist()],
            "vel": list(self.velocity),
            "force": (np.array(self.force) + 0.2 * noise[:3]).tolist(),
            "torque": (np.array(self.torque) + 0.02 * noise[3:]).tolist(),
            "q": (_REST_JOINTS + _INVERSE @ away).tolist(),
            "dq": (_INVERSE @ np.array(self.velocity)).tolist(),
            "jacobian": JACOBIAN.tolist(),
            "gripper_pos": self.gripper,
        }

    # What no sensor tells

    def truth(self) -> dict[str, Any]:
        """Where the peg really is, and whether the controller works."""
        return {
            "inserted": self.inserted(),
            "inserted_once": self.inserted_once,
            "depth": self.depth(),
            "tip": list(self.tip()),
            "peg_held": self.held,
            "controller_failed": self.failed,
            "controller_running": self.running,
        }

    def tip(self) -> tuple[float, float, float]:
        """Where the peg's tip is."""
        if self.released is not None:
            return self.released
        return self._tip(self.position, self.turn)

    def depth(self) -> float:
        """How deep the tip is in the hole; negative above the board."""
        x, y, z = self.tip()
        below = self.board_top - z
        aside = math.hypot(x - self.hole[0], y - self.hole[1])
        return below if aside <= _CLEARANCE + CHAMFER or below <= 0.0 else 0.0

    def inserted(self) -> bool:
        """Whether the peg is in the hole."""
        return self.depth() >= INSERTED_DEPTH

    # Time

    def advance(self, steps: int) -> None:
        """Let `steps` time steps pass."""
        for _ in range(steps):
            self._step()
            self.inserted_once = self.inserted_once or self.inserted()

    def _step(self) -> None:
        move = GRIPPER_SPEED * TIME_STEP
        self.gripper += min(max(self.gripper_target - self.gripper, -move), move)
        self._grip()
        before, turned = list(self.position), list(self.turn)
        share = 1.0 - math.exp(-TIME_STEP / TIME_CONSTANT)
        wanted = _approach(self.position, self.target_position, share, MAX_SPEED * TIME_STEP)
        self.turn = _approach(self.turn, self.target_turn, share, MAX_TURN_SPEED * TIME_STEP)
        self.force, self.torque = [0.0] * 3, [0.0] * 3
        if self.held:
            self._contact(before, wanted, turned, share)
        else:
            self.position = wanted
        moved = [now - then for now, then in zip(self.position, before, strict=True)]
        turned = [now - then for now, then in zip(self.turn, turned, strict=True)]
        self.velocity = [value / TIME_STEP for value in moved + turned]

    def _grip(self) -> None:
        """An open gripper lets the peg go: it stays in the hole, or drops on the board."""
        if self.held and self.gripper > 0.5:
            x, y, z = self.tip()
            self.released = (x, y, z if self.depth() > 0.0 else self.board_top)
            self.held = False
        elif not self.held and self.gripper < 0.2 and self.released is not None:
            here = self._tip(self.position, self.turn)
            if math.dist(here, self.released) < 0.01:
                self.held, self.released = True, None

    def _tip(self, position: Sequence[float], turn: Sequence[float]) -> tuple[float, float, float]:
        """A lean about x takes the tip along y, one about y along -x; then the turn about z."""
        (sa, sb, sc), (ca, cb, cc) = (
            [function(angle) for angle in turn] for function in (math.sin, math.cos)
        )
        along = (-ca * sb, sa)
        x = position[0] + PEG_LENGTH * (cc * along[0] - sc * along[1])
        y = position[1] + PEG_LENGTH * (sc * along[0] + cc * along[1])
        return x, y, position[2] - PEG_LENGTH * ca * cb

    def _contact(self, before: list[float], wanted: list[float], turned: list[float], share: float) -> None:
        """Where the end effector gets to on its way from `before` to `wanted`, and the forces there."""
        tip_before = self._tip(before, turned)
        depth = self.board_top - tip_before[2]
        if depth > 1e-6:
            self._in_hole(depth, before, wanted, share)
            return
        self.position = wanted
        x, y, z = self._tip(wanted, self.turn)
        below = self.board_top - z
        if below <= 0.0:
            return
        aside = math.hypot(x - self.hole[0], y - self.hole[1])
        lean = math.hypot(self.turn[0], self.turn[1])
        room = _CLEARANCE + CHAMFER - aside
        if room > 0.0 and lean <= ENTRY_TILT:
            if aside > _CLEARANCE:  # on the slope: what is too deep goes half down and half inwards
                inwards = min(max(below - room, 0.0) / 2.0 + 1e-5, aside - _CLEARANCE)
                self.position[0] += (self.hole[0] - x) / aside * inwards
                self.position[1] += (self.hole[1] - y) / aside * inwards
                self.position[2] += max(below - room - inwards, 0.0)
                self.force[2] = self.stiffness * max(self.position[2] - self.target_position[2], 0.0)
            return
        self._on_board(before, below, share)

    def _on_board(self, before: list[float], below: float, share: float) -> None:
        """The tip stands on the board: it slides only as far as the spring beats friction."""
        self.position[2] += below
        normal = self.stiffness * max(self.position[2] - self.target_position[2], 0.0)
        x, y = _slide(before[:2], self.target_position[:2], FRICTION * normal / self.stiffness, share)
        self.position[0], self.position[1] = x, y
        goal = self.target_position
        pull = [self.stiffness * (x - goal[0]), self.stiffness * (y - goal[1])]
        size, most = math.hypot(*pull), FRICTION * normal
        scale = min(1.0, most / size) if size > 0.0 else 0.0
        self.force = [pull[0] * scale, pull[1] * scale, normal]

    def _in_hole(self, depth: float, before: list[float], wanted: list[float], share: float) -> None:
        """The walls keep the peg from leaning and from moving aside, and rub on it."""
        most = 0.02 + 2.0 * _CLEARANCE / max(depth, 0.01)
        lean = math.hypot(self.turn[0], self.turn[1])
        if lean > most:
            self.turn[0] *= most / lean
            self.turn[1] *= most / lean
        self.torque = [
            self.turn_stiffness * (self.turn[axis] - self.target_turn[axis]) if lean > most else 0.0
            for axis in (0, 1)
        ] + [0.0]
        x, y, _ = self._tip(wanted, self.turn)
        gap = _CLEARANCE + max(CHAMFER - depth, 0.0)
        aside = math.hypot(x - self.hole[0], y - self.hole[1])
        wall = [0.0, 0.0]
        self.position = list(wanted)
        if aside > gap:
            for axis, value in enumerate((x, y)):
                self.position[axis] += (value - self.hole[axis]) * (gap / aside - 1.0)
                wall[axis] = self.stiffness * (self.position[axis] - self.target_position[axis])
        rub = FRICTION * (math.hypot(*wall) + math.hypot(*self.torque) / PEG_LENGTH)
        goal = self.target_position[2]
        (height,) = _slide(before[2:], [goal], rub / self.stiffness, share)
        bottom = self.board_top - HOLE_DEPTH
        lowest = bottom + (before[2] - (self.board_top - depth))  # of the end effector, as it leans
        self.position[2] = max(height, lowest)
        push = self.stiffness * max(self.position[2] - goal, 0.0) if height < lowest else 0.0
        drag = min(max(self.stiffness * (self.position[2] - goal), -rub), rub)
        self.force = [*wall, push + (drag if push == 0.0 else 0.0)]


def _approach(here: list[float], goal: list[float], share: float, most: float) -> list[float]:
    """`share` of the way from `here` to `goal`, but not further than `most`."""
    way = [(end - start) * share for start, end in zip(here, goal, strict=True)]
    length = math.sqrt(sum(value * value for value in way))
    scale = most / length if length > most else 1.0
    return [start + value * scale for start, value in zip(here, way, strict=True)]


def _slide(here: Sequence[float], goal: Sequence[float], stick: float, share: float) -> list[float]:
    """`share` of the way to `goal` less its last bit `stick`, which friction holds."""
    way = [end - start for start, end in zip(here, goal, strict=True)]
    length = math.sqrt(sum(value * value for value in way))
    if length <= stick:
        return list(here)
    scale = min(share * (length - stick), MAX_SPEED * TIME_STEP) / length
    return [start + value * scale for start, value in zip(here, way, strict=True)]
