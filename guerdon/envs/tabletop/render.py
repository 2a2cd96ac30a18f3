"""The pictures of the tabletop scene.

`base_camera` looks down at the table at an angle, `wrist_camera` straight down from the gripper. One image
shows all that success depends on: the goal is a translucent ball as large as the tolerance, drawn over
everything else and brightest where it pokes through the cube, with a stem down to a ring on the table; cube
and gripper cast their shadows straight down, so that shadow and ring give the place on the table and the stem
gives the height; and the lamp on the gripper is blue while it is still and amber while it moves, and nothing
ever hides it.
"""

from __future__ import annotations

import numpy as np

from guerdon.core.errors import DataError
from guerdon.core.types import IntArray, UInt8Array
from guerdon.envs.tabletop import scene
from guerdon.envs.tabletop.camera import Camera, base_camera, wrist_camera
from guerdon.envs.tabletop.draw import Canvas, Scratch
from guerdon.envs.tabletop.scene import Rows
from guerdon.envs.tabletop.table import draw_table_below, draw_tables

BLUE = (50.0, 120.0, 255.0)
"""The lamp while the gripper is still."""
AMBER = (255.0, 165.0, 10.0)
"""The lamp while it moves."""
GREEN = (40.0, 245.0, 90.0)


def _column(*values: float) -> Rows:
    return np.array(values)[:, None]


# Parts of the gripper, relative to its position.
_PALM_LOW, _PALM_HIGH = _column(-0.02, -0.056, 0.06), _column(0.02, 0.056, 0.096)
_ARM_FOOT, _ARM_RADIUS = _column(0.012, 0.0, 0.085), 0.015
_FINGER_HIGH = _column(0.5 * scene.FINGER_DEPTH, 0.5 * scene.FINGER_THICKNESS, 0.06)
_FINGER_LOW = _column(-0.5 * scene.FINGER_DEPTH, -0.5 * scene.FINGER_THICKNESS, -scene.FINGER_BELOW)
_LAMP, _LAMP_RADIUS = _column(-0.022, 0.0, 0.082), 0.0165

_CHUNK_PIXELS = 256 * 64 * 64
_MAX_KEPT_BYTES = 64 << 20


class TabletopRenderer:
    """Draws worlds; keeps a picture of the empty table for each environment's look.

    The pictures, uint8 [num_envs, H, W, 3] per image size, are made once they are needed, unless they would
    take more than 64 MB; without domain randomization one is enough for all.
    """

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.num_frames = 0
        """How many frames have been rendered so far."""
        self._scratch = Scratch()
        self._plain: dict[tuple[int, int], UInt8Array] = {}
        self._own: dict[tuple[int, int], tuple[UInt8Array, Rows]] = {}

    def render(
        self,
        rows: Rows,
        env_ids: IntArray,
        camera: str,
        size: tuple[int, int],
        out: UInt8Array | None = None,
    ) -> UInt8Array:
        """Images uint8 [n, H, W, 3] of n worlds, which belong to the environments `env_ids`, int [n].

        They are written to `out` if that is given; only its first axis may be strided.
        """
        shape = (rows.shape[1], *size, 3)
        if out is None:
            out = np.empty(shape, np.uint8)
        elif out.shape != shape or out.dtype != np.uint8:
            raise DataError(f"out must be uint8 {list(shape)}, not {out.dtype} {list(out.shape)}")
        elif not out.flags.writeable or (len(out) and not out[0].flags.c_contiguous):
            raise DataError("out must be writeable and hold each image in one piece")
        step = max(1, _CHUNK_PIXELS // (size[0] * size[1]))  # what stays in the processor's cache
        for start in range(0, len(out), step):
            part = slice(start, start + step)
            frames, some = out[part], rows[:, part]
            if camera == "base_camera":
                frames[...] = self._empty_tables(some, env_ids[part], size)
                _draw_base_view(Canvas(frames, self._scratch), some, base_camera(some, size))
            else:
                _draw_wrist_view(Canvas(frames, self._scratch), some, wrist_camera(some, size))
        self.num_frames += len(out)
        return out

    def _empty_tables(self, rows: Rows, env_ids: IntArray, size: tuple[int, int]) -> UInt8Array:
        """Pictures of the empty table, [n, H, W, 3] or [1, H, W, 3]; drawn again where a look has changed."""
        looks = rows[scene.LOOK]
        if (looks == scene.PLAIN_LOOK).all():
            if size not in self._plain:
                self._plain[size] = draw_tables(rows[:, :1], size)
            return self._plain[size]
        if self.num_envs * size[0] * size[1] * 3 > _MAX_KEPT_BYTES:
            return draw_tables(rows, size)
        if size not in self._own:
            unknown = np.full((len(looks), self.num_envs), np.nan)
            self._own[size] = np.zeros((self.num_envs, *size, 3), np.uint8), unknown
        pictures, known = self._own[size]
        stale = np.flatnonzero((known[:, env_ids] != looks).any(axis=0))
        if len(stale):
            pictures[env_ids[stale]] = draw_tables(rows[:, stale], size)
            known[:, env_ids[stale]] = looks[:, stale]
        first = int(env_ids[0])
        in_a_row = (env_ids == np.arange(first, first + len(env_ids))).all()
        return pictures[first : first + len(env_ids)] if in_a_row else pictures[env_ids]


def _draw_base_view(canvas: Canvas, rows: Rows, camera: Camera) -> None:
    """What `base_camera` sees, over pictures of the empty table."""
    gripper, cube = rows[scene.GRIPPER], rows[scene.CUBE]
    height, width = canvas.frames.shape[1:3]
    _draw_shadows(canvas, rows, camera)
    # Far things first. A cube between the fingers hides the far one and is hidden by the near one.
    reach = np.abs(cube - gripper)
    between = (reach[0] < 0.03) & (reach[1] < 0.5 * scene.MAX_GAP) & (reach[2] < 0.06)
    in_front = (camera.depth(cube) < camera.depth(gripper)) & ~between
    near_side = np.where(camera.at[1] > gripper[1], 1.0, -1.0)
    _draw_cube(canvas, np.flatnonzero(~in_front & ~between), rows, camera)
    no_top = rows[scene.FACE_LIGHT] * _column(0.0, 1.0, 1.0)  # it is under the palm
    _draw_finger(canvas, rows, camera, -near_side, no_top)
    _draw_cube(canvas, np.flatnonzero(between), rows, camera)
    _draw_finger(canvas, rows, camera, near_side, no_top)
    _draw_arm(canvas, rows, camera)
    palm = gripper + _PALM_LOW, gripper + _PALM_HIGH
    _draw_solid(canvas, canvas.everyone, camera, palm, rows[scene.FACE_LIGHT], rows[scene.GRIPPER_RGB])
    _draw_cube(canvas, np.flatnonzero(in_front), rows, camera)
    _draw_markers(canvas, rows, camera)
    u, v, depth = camera.project(gripper + _LAMP)
    radius = _LAMP_RADIUS * camera.focal / depth
    u = np.clip(u, radius, width - radius)
    v = np.clip(v, radius, height - radius)
    canvas.lamp(canvas.everyone, np.array([u, v, radius]), _lamp_rgb(rows))


def _draw_wrist_view(canvas: Canvas, rows: Rows, camera: Camera) -> None:
    """What `wrist_camera` sees, table included."""
    count, height, width = canvas.frames.shape[:3]
    draw_table_below(canvas.frames, rows, camera)
    _draw_shadows(canvas, rows, camera)
    _draw_cube(canvas, canvas.everyone, rows, camera)
    _draw_finger(canvas, rows, camera, np.ones(count), rows[scene.FACE_LIGHT])
    _draw_finger(canvas, rows, camera, -np.ones(count), rows[scene.FACE_LIGHT])
    _draw_markers(canvas, rows, camera)
    lamp = _column(0.5 * width, 0.92 * height, 0.045 * min(height, width))
    canvas.lamp(canvas.everyone, lamp + np.zeros(count), _lamp_rgb(rows))


def _lamp_rgb(rows: Rows) -> Rows:
    return np.where(rows[scene.STILL] > 0.5, _column(*BLUE), _column(*AMBER))


def _draw_cube(canvas: Canvas, ids: IntArray, rows: Rows, camera: Camera) -> None:
    if len(ids):
        corners = rows[scene.CUBE] - scene.CUBE_HALF, rows[scene.CUBE] + scene.CUBE_HALF
        _draw_solid(canvas, ids, camera, corners, rows[scene.FACE_LIGHT], rows[scene.CUBE_RGB])


def _draw_finger(canvas: Canvas, rows: Rows, camera: Camera, side: Rows, light: Rows) -> None:
    """One finger; `side` [n] is 1 for the left one (towards +y) and -1 for the right one."""
    middle = rows[scene.GRIPPER].copy()
    middle[1] += side * (0.5 * scene.MAX_GAP * rows[scene.OPENING] + 0.5 * scene.FINGER_THICKNESS)
    corners = middle + _FINGER_LOW, middle + _FINGER_HIGH
    _draw_solid(canvas, canvas.everyone, camera, corners, light, 0.5 * rows[scene.GRIPPER_RGB])


def _draw_arm(canvas: Canvas, rows: Rows, camera: Camera) -> None:
    """The round arm, from behind the palm up and out of the picture."""
    ends = np.empty((3, 2, len(canvas.frames)))
    ends[:, 0] = ends[:, 1] = rows[scene.GRIPPER] + _ARM_FOOT
    ends[2, 1] = np.maximum(camera.height_at_top(ends[:, 0]), ends[2, 0] + 0.02)
    u, v, depth = camera.project(ends)
    half_widths = _ARM_RADIUS * camera.focal / depth
    canvas.pole(
        canvas.everyone, np.array([u[0], v[0], u[1], v[1]]), half_widths, 0.78 * rows[scene.GRIPPER_RGB]
    )


def _draw_solid(
    canvas: Canvas, ids: IntArray, camera: Camera, corners: tuple[Rows, Rows], light: Rows, rgb: Rows
) -> None:
    """A box between two corners [3, n], in the images `ids`, int [m]; `light` and `rgb` are [3, n]."""
    low, high = corners
    if len(ids) < len(canvas.frames):
        camera, low, high = camera.take(ids), low[:, ids], high[:, ids]
        rgb, light = rgb[:, ids], light[:, ids]
    at = camera.at
    beyond = at > 0.5 * (low + high)
    near, far = np.where(beyond, high, low), np.where(beyond, low, high)
    points = np.empty((3, 7, len(ids)))
    points[0], points[1] = near[0], near[1]
    points[0, [2, 3, 6]], points[1, [1, 2, 5]] = far[0], far[1]
    points[2, :4], points[2, 4:] = high[2], low[2]
    u, v, _ = camera.project(points)
    seen = (at > high) | (at < low)
    canvas.box(ids, u, v, light * seen[[2, 0, 1]], rgb)


def _on_table(camera: Camera, x: Rows, y: Rows, half_x: float, half_y: float) -> Rows:
    """How a rectangle or ellipse on the table appears: [6, n], centre and half axes in pixels."""
    points = np.zeros((3, 5, len(x)))
    points[0] = x + np.array([[0.0], [half_x], [-half_x], [0.0], [0.0]])
    points[1] = y + np.array([[0.0], [0.0], [0.0], [half_y], [-half_y]])
    u, v, _ = camera.project(points)
    du, dv = 0.5 * (u[1::2] - u[2::2]), 0.5 * (v[1::2] - v[2::2])
    return np.array([u[0], v[0], du[0], dv[0], du[1], dv[1]])


def _draw_shadows(canvas: Canvas, rows: Rows, camera: Camera) -> None:
    x, y, z = rows[scene.GRIPPER]
    softness = np.minimum(0.25 + 1.5 * z, 0.45)
    canvas.shadow(canvas.everyone, _on_table(camera, x, y, 0.02, 0.05), softness, 0.3 * rows[scene.SHADOW])
    (x, y, z), half = rows[scene.CUBE], scene.CUBE_HALF
    softness = np.minimum(0.1 + 2.0 * (z - half), 0.6)
    canvas.shadow(canvas.everyone, _on_table(camera, x, y, half, half), softness, rows[scene.SHADOW])


def _draw_markers(canvas: Canvas, rows: Rows, camera: Camera) -> None:
    """The goal, after the false one where there is one; both look the same."""
    cube = rows[scene.CUBE]
    fakes = np.flatnonzero(rows[scene.HAS_DECOY] > 0.5)
    if len(fakes):
        _draw_marker(canvas, fakes, camera.take(fakes), rows[scene.DECOY][:, fakes], cube[:, fakes])
    _draw_marker(canvas, canvas.everyone, camera, rows[scene.GOAL], cube)


def _draw_marker(canvas: Canvas, ids: IntArray, camera: Camera, point: Rows, cube: Rows) -> None:
    """A ball at `point` [3, m], a ring on the table below it, and a stem between them; `cube` [3, m]."""
    x, y, z = point
    rgb = np.broadcast_to(_column(*GREEN), point.shape)
    ring = _on_table(camera, x, y, scene.GOAL_TOLERANCE, scene.GOAL_TOLERANCE)
    thin = 0.006 * min(canvas.frames.shape[1:3])
    canvas.ring(ids, ring, thin, 0.8 * rgb)
    top = np.maximum(np.minimum(z - scene.GOAL_TOLERANCE, camera.at[2] - 0.03), 0.0)
    u, v, _ = camera.project(np.array([x, y, top]))
    canvas.line(ids, np.array([ring[0], ring[1], u, v]), thin, 0.8 * rgb)
    u, v, depth = camera.project(point)
    circle = np.array([u, v, scene.GOAL_TOLERANCE * camera.focal / np.maximum(depth, 0.03)])
    seen = np.flatnonzero(depth > 0.03)  # the wrist camera may be below the ball
    if len(seen):
        solid = _as_solid(camera.take(seen), cube[:, seen], point[:, seen])
        canvas.ball(ids[seen], circle[:, seen], rgb[:, seen], solid)


def _as_solid(camera: Camera, cube: Rows, point: Rows) -> Rows:
    """The cube at `cube` [3, m] as `Canvas.ball` wants it, relative to `point` [3, m]."""
    beyond = camera.at > cube
    near = np.where(beyond, cube + scene.CUBE_HALF, cube - scene.CUBE_HALF) - camera.at
    far = np.where(beyond, cube - scene.CUBE_HALF, cube + scene.CUBE_HALF) - camera.at
    outside = np.where(beyond, near < 0.0, near > 0.0)
    # Along a line of sight the inverse of the depth at which it meets a plane is linear in the pixel.
    planes = np.concatenate([near, far, near])
    planes = np.copysign(np.maximum(np.abs(planes), 1e-3), planes)
    slope = camera.depth(point) / planes
    values = camera.focal * (np.tile(point - camera.at, (3, 1)) / planes - 1.0)
    # A plane that the camera is not in front of is one where lines of sight leave.
    values[:3], slope[:3] = np.where(outside, values[:3], 1e4), np.where(outside, slope[:3], 0.0)
    values[6:], slope[6:] = np.where(outside, -1e4, values[6:]), np.where(outside, 0.0, slope[6:])
    return np.array([slope * np.tile(camera.right, (3, 1)), slope * np.tile(-camera.up, (3, 1)), values])
