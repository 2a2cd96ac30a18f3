"""How the tabletop world moves on by one step, and what it is then worth; all environments at once.

A step lasts 50 ms. The gripper follows its commanded velocity with a first-order lag, so that stopping takes
a step or two. The fingers close at a limited rate; a cube between them is centred and then held. What is not
held falls. Fingers that come down on a cube rest on it, fingers that run into it push it along.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from guerdon.config.tabletop import EnvRewardKind
from guerdon.core.types import BoolArray, FloatArray
from guerdon.envs.tabletop.scene import (
    CUBE,
    CUBE_HALF,
    CUBE_REACH,
    CUBE_TO_GOAL,
    FALL_SPEED,
    FINGER_BELOW,
    FINGER_DEPTH,
    FINGER_THICKNESS,
    GOAL_TOLERANCE,
    GRASP_OFFSET,
    GRASPED,
    GRIPPER,
    GRIPPER_TO_CUBE,
    MAX_GAP,
    OPENING,
    STILL,
    VELOCITY,
    WORKSPACE_HIGH,
    WORKSPACE_LOW,
    Rows,
    update_relations,
)

STEP_SECONDS = 0.05
MAX_SPEED = 0.4
"""Metres per second along each axis, at a command of 1."""
LAG = 0.7
"""The share of a change of velocity that happens within one step."""
STILL_SPEED = 0.05
"""Below this speed, in metres per second, the gripper counts as still and its lamp is blue."""
OPENING_RATE = 0.25
CUBE_OPENING = 2.0 * CUBE_HALF / MAX_GAP
RELEASE_MARGIN = 0.05
GRASP_REACH = 0.018
"""How far from the middle of the fingers, along x and z, a cube can still be gripped."""
GRAVITY = 9.81


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a moment of N worlds counts as; all bool [N]."""

    success: BoolArray
    """The cube is at the goal and the gripper is still."""
    is_obj_placed: BoolArray
    """The centre of the cube is within the tolerance of the goal."""
    is_robot_static: BoolArray
    """The gripper is slower than `STILL_SPEED`."""
    is_grasped: BoolArray
    """The cube is held."""


def _length(vectors: Rows) -> Rows:
    """Euclidean length of [3, N] -> [N]; the order of additions is fixed."""
    squares = vectors * vectors
    total: Rows = np.sqrt(squares[0] + squares[1] + squares[2])
    return total


def advance(rows: Rows, action: NDArray[np.float64]) -> None:
    """Move all worlds on by one step, in place.

    Args:
        rows: float64 [NUM_ROWS, N].
        action: float64 [4, N] in [-1, 1]: velocity along x, y and z, and the fingers (+1 opens, -1 closes).
    """
    gripper, velocity, cube = rows[GRIPPER], rows[VELOCITY], rows[CUBE]
    grasped = rows[GRASPED] > 0.5
    wanted_opening = 0.5 * (action[3] + 1.0)
    grasped &= wanted_opening <= CUBE_OPENING + RELEASE_MARGIN

    # The gripper moves; what it holds must not be pressed into the table.
    velocity += LAG * (MAX_SPEED * action[:3] - velocity)
    target = gripper + STEP_SECONDS * velocity
    np.clip(target, WORKSPACE_LOW, WORKSPACE_HIGH, out=target)
    np.maximum(target[2], np.where(grasped, CUBE_HALF - rows[GRASP_OFFSET][2], 0.0), out=target[2])
    _touch(rows, target, grasped)
    np.subtract(target, gripper, out=velocity)
    gripper[...] = target
    velocity /= STEP_SECONDS

    # The fingers move; a cube between them is centred, and held once they close on it.
    opening = rows[OPENING]
    opening += np.clip(wanted_opening - opening, -OPENING_RATE, OPENING_RATE)
    offset = cube - gripper
    reach = np.abs(offset)
    half_gap = 0.5 * MAX_GAP * opening
    between = (reach[0] < GRASP_REACH) & (reach[2] < GRASP_REACH) & (reach[1] < 0.5 * MAX_GAP)
    between &= reach[1] < np.maximum(half_gap, CUBE_HALF) + 0.5 * FINGER_THICKNESS
    between &= ~grasped
    play = np.where(between, np.maximum(half_gap - CUBE_HALF, 0.0), 1.0)
    np.clip(offset[1], -play, play, out=offset[1])
    newly = between & (opening <= CUBE_OPENING) & (wanted_opening < CUBE_OPENING)
    rows[GRASP_OFFSET] = np.where(newly, offset, rows[GRASP_OFFSET])
    grasped |= newly
    np.maximum(opening, np.where(grasped, CUBE_OPENING, 0.0), out=opening)

    # The cube follows the gripper, or falls.
    fall_speed = np.where(grasped, 0.0, rows[FALL_SPEED] + GRAVITY * STEP_SECONDS)
    held = gripper + rows[GRASP_OFFSET]
    cube[0] = np.where(grasped, held[0], cube[0])
    cube[1] = np.where(grasped, held[1], np.where(between, gripper[1] + offset[1], cube[1]))
    fallen = np.maximum(cube[2] - STEP_SECONDS * fall_speed, CUBE_HALF)
    cube[2] = np.where(grasped, held[2], fallen)
    rows[FALL_SPEED] = np.where(fallen > CUBE_HALF, fall_speed, 0.0)
    rows[GRASPED] = grasped
    update_relations(rows)
    rows[STILL] = _length(velocity) < STILL_SPEED


def _touch(rows: Rows, target: Rows, grasped: BoolArray) -> None:
    """Let fingers rest on a cube that they come down on, and push one that they run into.

    `target` [3, N] is where the gripper is about to be; its height, and the cube, may be changed.
    """
    cube, gripper = rows[CUBE], rows[GRIPPER]
    away = np.abs(cube[:2] - target[:2])
    half_gap = 0.5 * MAX_GAP * rows[OPENING]
    rest = cube[2] + (CUBE_HALF + FINGER_BELOW)
    hit = (away[0] < CUBE_HALF + 0.5 * FINGER_DEPTH) & (target[2] < rest) & ~grasped
    hit &= (away[1] + CUBE_HALF > half_gap + 1e-6) & (away[1] - CUBE_HALF < half_gap + FINGER_THICKNESS)
    from_above = hit & (gripper[2] >= rest - 1e-9)
    target[2] = np.where(from_above, rest, target[2])
    pushed = hit & ~from_above
    moved = cube[:2] + (target[:2] - gripper[:2])
    cube[:2] = np.where(pushed, np.clip(moved, -CUBE_REACH, CUBE_REACH), cube[:2])


def evaluate(rows: Rows) -> Outcome:
    """Whether the N worlds are as they should be at this moment."""
    placed = _length(rows[CUBE_TO_GOAL]) <= GOAL_TOLERANCE
    still = rows[STILL] > 0.5
    return Outcome(
        success=placed & still,
        is_obj_placed=placed,
        is_robot_static=still,
        is_grasped=rows[GRASPED] > 0.5,
    )


def compute_env_reward(rows: Rows, outcome: Outcome, kind: EnvRewardKind) -> FloatArray:
    """The env reward of this moment, float32 [N].

    `dense` adds up reaching, grasping, carrying and stopping, a fifth each, and is 1 on success.
    """
    if kind == "none":
        return np.zeros(rows.shape[1], np.float32)
    if kind == "sparse":
        return outcome.success.astype(np.float32)
    reach = 1.0 / (1.0 + 10.0 * _length(rows[GRIPPER_TO_CUBE]))
    carry = 1.0 / (1.0 + 10.0 * _length(rows[CUBE_TO_GOAL]))
    stop = 1.0 / (1.0 + 10.0 * _length(rows[VELOCITY]))
    staged = reach + outcome.is_grasped * (1.0 + carry) + outcome.is_obj_placed * stop
    return np.where(outcome.success, 1.0, 0.2 * staged).astype(np.float32)
