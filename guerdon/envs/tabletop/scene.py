"""The tabletop world: its measures, its state as arrays, how an episode starts and how it moves on.

Everything of `N` environments is one float64 array `[rows, N]`; the names below say which rows hold what.
The first `STATE_SIZE` rows are, in this order, the state vector that policies see.

Random numbers come from a counter-based hash of (seed of the environment, number of the episode, number of
the draw). An environment therefore depends on its own seed alone, however many others run beside it, and
each draw has a fixed number, so that switching one feature on leaves all other draws as they were. Only
`+ - * /` and square roots are used on the way, whose results do not depend on the batch size.

A step lasts 50 ms. The gripper follows its commanded velocity with a first-order lag, so that stopping takes
a step or two. The fingers close at a limited rate; a cube between them is centred and then held. What is not
held falls. Fingers that come down on a cube rest on it, fingers that run into it push it along.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from guerdon.config.tabletop import EnvRewardKind, TabletopConfig
from guerdon.core.types import BoolArray, FloatArray, IntArray

Rows: TypeAlias = NDArray[np.float64]
"""[rows, N]."""
SeedArray: TypeAlias = NDArray[np.uint64]

# Measures, in metres. x points away from the base camera, y to its left, z up; the table is z = 0.
CUBE_HALF = 0.02
GOAL_TOLERANCE = 0.025
MAX_GAP = 0.08
"""Between the fingers when fully open."""
FINGER_THICKNESS = 0.016
FINGER_DEPTH = 0.02
FINGER_BELOW = 0.014
"""How far the fingers reach below the gripper position, which lies between the finger pads."""
WORKSPACE_LOW = np.array([[-0.11], [-0.11], [0.016]])
WORKSPACE_HIGH = np.array([[0.11], [0.11], [0.16]])
CUBE_REACH = 0.12
"""A pushed cube stays within this |x| and |y|."""
SPAWN_REACH = 0.08
"""Cubes start and goals lie within this |x| and |y|."""
GOAL_HEIGHTS = (0.055, 0.13)
TABLE_GOAL_SHARE = 0.25
DECOY_DISTANCES = (0.035, 0.06)


# Motion.
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

# Rows of the state vector.
GRIPPER = slice(0, 3)
VELOCITY = slice(3, 6)
OPENING = 6
CUBE = slice(7, 10)
GOAL = slice(10, 13)
GRIPPER_TO_CUBE = slice(13, 16)
CUBE_TO_GOAL = slice(16, 19)
GRASPED = 19
STATE_SIZE = 20
STATE_NAMES = (
    *(f"gripper_{axis}" for axis in "xyz"),
    *(f"velocity_{axis}" for axis in "xyz"),
    "opening",
    *(f"cube_{axis}" for axis in "xyz"),
    *(f"goal_{axis}" for axis in "xyz"),
    *(f"gripper_to_cube_{axis}" for axis in "xyz"),
    *(f"cube_to_goal_{axis}" for axis in "xyz"),
    "is_grasped",
)
"""The layout of the state vector: metres, metres per second, opening from 0 (closed) to 1, flag 0 or 1."""

# Rows that policies do not see.
FALL_SPEED = 20
GRASP_OFFSET = slice(21, 24)
STILL = 24
DECOY = slice(25, 28)
HAS_DECOY = 28
TABLE_RGB = slice(29, 32)
MAT_RGB = slice(32, 35)
CUBE_RGB = slice(35, 38)
GRIPPER_RGB = slice(38, 41)
FACE_LIGHT = slice(41, 44)
"""Brightness of faces that point up, towards the base camera, and sideways."""
CAMERA_SHIFT = slice(44, 47)
AIM_SHIFT = slice(47, 50)
ZOOM = 50
SHADOW = 51
GLOW_CENTRE = slice(52, 54)
"""Where on the table the light is brightest, x and y."""
LOOK = slice(29, 54)
"""All rows that domain randomization changes."""
NUM_ROWS = 54

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_EPISODE_STEP = np.uint64(0xD1B54A32D192ED03)
# Numbers of the draws; each group starts at a fixed one.
_TASK_DRAWS, _DECOY_DRAWS, _LOOK_DRAWS, _EASY_DRAWS = (0, 9), (16, 2), (32, 28), (64, 3)
_ANGLES = np.arange(64) * (2.0 * np.pi / 64.0)
_COMPASS = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)])  # [2, 64]


def _hash(values: SeedArray) -> SeedArray:
    """The finaliser of splitmix64, element by element."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: SeedArray = mixed ^ (mixed >> np.uint64(31))
    return result


def stream_keys(seeds: SeedArray, counters: SeedArray) -> SeedArray:
    """One key for each pair of a seed and a counter, uint64 [N]."""
    return _hash(_hash(seeds + _GOLDEN) + (counters + np.uint64(1)) * _EPISODE_STEP)


def uniforms(keys: SeedArray, first: int, count: int) -> Rows:
    """Draws number `first` to `first + count - 1` of each key's stream, float64 [count, N] in [0, 1)."""
    numbers = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * _GOLDEN
    bits = _hash(keys[None, :] + numbers[:, None]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def initial_rows(seeds: SeedArray, episodes: IntArray, config: TabletopConfig) -> Rows:
    """The first moment of n episodes, [NUM_ROWS, n]: the `episodes`-th ones of environments with `seeds`."""
    keys = stream_keys(seeds, episodes.astype(np.uint64))
    rows = np.zeros((NUM_ROWS, len(keys)))
    draw = uniforms(keys, *_TASK_DRAWS)
    rows[CUBE][:2] = (2.0 * draw[0:2] - 1.0) * SPAWN_REACH
    rows[CUBE][2] = CUBE_HALF
    rows[GOAL] = _draw_goals(draw[2:6], rows[CUBE])
    rows[GRIPPER][:2] = (2.0 * draw[6:8] - 1.0) * 0.05
    rows[GRIPPER][2] = 0.09 + 0.04 * draw[8]
    rows[OPENING] = 1.0
    rows[STILL] = 1.0
    rows[HAS_DECOY] = float(config.decoy)
    rows[DECOY] = _draw_decoys(uniforms(keys, *_DECOY_DRAWS), rows[CUBE], rows[GOAL])
    _draw_looks(rows, uniforms(keys, *_LOOK_DRAWS), config.domain_randomization)
    _ease(rows, uniforms(keys, *_EASY_DRAWS), config.easy_starts)
    update_relations(rows)
    return rows


def _ease(rows: Rows, draw: Rows, share: float) -> None:
    """Let a share of the episodes start part-way, in place; from three draws [3, n].

    In a quarter of them the gripper holds the cube, anywhere from its place to the goal, so that some begin
    with success; in the others it is open and above the cube, up to the usual height. So each leads to the
    next.
    """
    easy, first_quarter, way = draw[0] < share, draw[1] < 0.25, draw[2]
    held, above = easy & first_quarter, easy & ~first_quarter
    rows[CUBE] += np.where(held, way, 0.0) * (rows[GOAL] - rows[CUBE])
    rows[GRIPPER] = np.where(easy, rows[CUBE], rows[GRIPPER])
    rows[GRIPPER][2] += np.where(above, 0.1 * way, 0.0)
    rows[OPENING] = np.where(held, CUBE_OPENING, rows[OPENING])
    rows[GRASPED] = held


def update_relations(rows: Rows) -> None:
    """Bring the relative vectors of the state up to date."""
    np.subtract(rows[CUBE], rows[GRIPPER], out=rows[GRIPPER_TO_CUBE])
    np.subtract(rows[GOAL], rows[CUBE], out=rows[CUBE_TO_GOAL])


def _draw_goals(draw: Rows, cube: Rows) -> Rows:
    """Goals [3, n] from four draws: mostly in the air, some on the table, none reached from the start."""
    goal = np.empty_like(cube)
    goal[:2] = (2.0 * draw[0:2] - 1.0) * SPAWN_REACH
    low, high = GOAL_HEIGHTS
    on_table = draw[3] < TABLE_GOAL_SHARE
    goal[2] = np.where(on_table, CUBE_HALF, low + (high - low) * draw[2])
    away = goal[:2] - cube[:2]
    too_near = on_table & (away[0] * away[0] + away[1] * away[1] < 0.06**2)
    goal[0] -= np.where(too_near, np.copysign(0.11, goal[0]), 0.0)
    return goal


def _draw_decoys(draw: Rows, cube: Rows, goal: Rows) -> Rows:
    """False goals [3, n] on the table beside the cube, on the first of four sides that has room."""
    near, far = DECOY_DISTANCES
    step = _COMPASS[:, (draw[1] * 64.0).astype(np.int64)] * (near + (far - near) * draw[0])
    turned = np.stack([-step[1], step[0]])
    places = cube[None, :2] + np.stack([step, -step, turned, -turned])  # [4, 2, n]
    inside = np.abs(places).max(axis=1) <= SPAWN_REACH + 0.02
    away = places - goal[None, :2]
    clear = (away * away).sum(axis=1) >= (2.0 * GOAL_TOLERANCE + 0.01) ** 2
    choice = np.argmax(2 * (clear & inside) + clear, axis=0)
    decoy = np.full_like(cube, CUBE_HALF)
    decoy[:2] = places[choice, :, np.arange(len(choice))].T
    return decoy


def _hue_to_rgb(hue: Rows, saturation: Rows | float, value: Rows | float) -> Rows:
    """Colours [3, n] in [0, 1] from hue (1 is a full turn), saturation and value."""
    phase = np.array([[1.0], [2.0 / 3.0], [1.0 / 3.0]])
    ramp = np.abs(((hue + phase) % 1.0) * 6.0 - 3.0) - 1.0
    result: Rows = value * (1.0 - saturation + saturation * np.clip(ramp, 0.0, 1.0))
    return result


def _draw_looks(rows: Rows, draw: Rows, amount: float) -> None:
    """Colours, light and camera poses; `amount` 0 gives every episode the same look.

    The cube keeps to reds and purples, and table and gripper to dull colours, so that neither can be taken
    for the green goal or for a lamp.
    """
    swing = (2.0 * draw - 1.0) * amount  # [-amount, amount)
    exposure = 1.0 + 0.2 * swing[0]
    tint = exposure * (1.0 + 0.08 * swing[1:4])

    def vary(plain: list[float], drawn: Rows) -> Rows:
        mixed: Rows = (1.0 - amount) * np.array(plain)[:, None] + amount * drawn
        return mixed

    table = vary([0.76, 0.70, 0.62], _hue_to_rgb(draw[4], 0.25 * draw[5], 0.45 + 0.45 * draw[6]))
    mat = vary([0.42, 0.46, 0.52], _hue_to_rgb(draw[7], 0.2 * draw[8], 0.4 + 0.3 * draw[9]))
    gripper = vary([0.90, 0.91, 0.93], _hue_to_rgb(draw[10], 0.15 * draw[11], 0.65 + 0.3 * draw[12]))
    rows[TABLE_RGB] = 255.0 * table * tint
    rows[MAT_RGB] = 255.0 * mat * tint
    rows[GRIPPER_RGB] = np.minimum(255.0 * gripper * tint, 255.0)
    cube = _hue_to_rgb(-0.065 + 0.085 * swing[13], 0.82, 0.9 + 0.1 * swing[14])
    rows[CUBE_RGB] = np.minimum(255.0 * cube * tint, 255.0)
    rows[FACE_LIGHT] = np.array([[1.0], [0.78], [0.6]]) * (1.0 - 0.2 * amount * draw[15:18])
    rows[CAMERA_SHIFT] = 0.025 * swing[18:21]
    rows[AIM_SHIFT] = 0.008 * swing[21:24]
    rows[ZOOM] = 1.0 + 0.03 * swing[24]
    rows[SHADOW] = 0.6 + 0.12 * swing[25]
    rows[GLOW_CENTRE] = 0.12 * swing[26:28]


PLAIN_LOOK: Rows = initial_rows(np.zeros(1, np.uint64), np.zeros(1, np.int64), TabletopConfig())[LOOK]
"""What all episodes look like without domain randomization, [LOOK, 1]."""


def _length(vectors: Rows) -> Rows:
    """Euclidean length of [3, N] -> [N]; the order of additions is fixed."""
    squares = vectors * vectors
    total: Rows = np.sqrt(squares[0] + squares[1] + squares[2])
    return total


def advance(rows: Rows, action: NDArray[np.float64]) -> None:
    """Move all worlds on by one step, in place.

    `action` is float64 [4, N] in [-1, 1]: velocity along x, y and z, and the fingers (+1 opens, -1 closes).
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


def evaluate(rows: Rows) -> dict[str, BoolArray]:
    """Whether the N worlds are as they should be at this moment, under the names of infos, bool [N] each.

    Success: the centre of the cube is within the tolerance of the goal (`is_obj_placed`), and the gripper is
    slower than `STILL_SPEED` (`is_robot_static`).
    """
    placed = _length(rows[CUBE_TO_GOAL]) <= GOAL_TOLERANCE
    still, grasped = rows[STILL] > 0.5, rows[GRASPED] > 0.5
    flags: dict[str, BoolArray] = {"success": placed & still, "is_grasped": grasped}
    return flags | {"is_obj_placed": placed, "is_robot_static": still}


def compute_env_reward(rows: Rows, flags: dict[str, BoolArray], kind: EnvRewardKind) -> FloatArray:
    """The env reward of this moment, float32 [N].

    `dense` adds up reaching, grasping, carrying and stopping, a fifth each, and is 1 on success.
    """
    if kind == "none":
        return np.zeros(rows.shape[1], np.float32)
    if kind == "sparse":
        return flags["success"].astype(np.float32)
    reach = 1.0 / (1.0 + 10.0 * _length(rows[GRIPPER_TO_CUBE]))
    carry = 1.0 / (1.0 + 10.0 * _length(rows[CUBE_TO_GOAL]))
    stop = 1.0 / (1.0 + 10.0 * _length(rows[VELOCITY]))
    staged = reach + flags["is_grasped"] * (1.0 + carry) + flags["is_obj_placed"] * stop
    return np.where(flags["success"], 1.0, 0.2 * staged).astype(np.float32)
