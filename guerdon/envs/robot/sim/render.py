"""Pictures of the simulated scene: board, hole, peg with its shadow, and gripper, from two cameras.

Shapes are projected and filled as polygons from the farthest to the nearest. A picture has a sensor's noise:
as with a real camera no two are the same, so a picture that repeats to the byte is a frozen one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from guerdon.core.types import UInt8Array
from guerdon.envs.robot.poses import Vector
from guerdon.envs.robot.sim.physics import HOLE_RADIUS, PEG_LENGTH, PEG_RADIUS, PegArm

CAMERAS = ("front_camera", "wrist_camera")
NOISE = 2.0
"""Deviation of the sensor's noise, in grey levels."""
_FINE = 2
"""Drawn so much larger, then averaged: smooth edges let a model see shifts of less than a pixel."""
_ROUND = [(math.cos(angle), math.sin(angle)) for angle in np.linspace(0.0, 2.0 * math.pi, 16, endpoint=False)]
_TABLE, _BOARD, _BOARD_SIDE, _HOLE = (96, 88, 80), (202, 178, 136), (150, 128, 96), (28, 24, 22)
_SHADOW, _PEG, _PEG_DARK, _GRIPPER, _FINGER = (
    (150, 130, 98),
    (214, 48, 40),
    (150, 30, 26),
    (72, 78, 92),
    (40, 44, 54),
)
_BOARD_HALF, _BOARD_THICK = 0.07, 0.035


class View:
    """A pinhole camera that looks from `eye` to `look`, with `up` upwards in the picture."""

    def __init__(
        self,
        eye: Sequence[float],
        look: Sequence[float],
        up: Sequence[float],
        field: float,
        size: tuple[int, int],
    ) -> None:
        self.eye: Vector = np.asarray(eye, np.float64)
        forward = np.asarray(look, np.float64) - self.eye
        forward /= np.linalg.norm(forward)
        right = _cross(forward, up)
        right /= np.linalg.norm(right)
        self._frame = np.stack([right, _cross(forward, right), forward])
        self.height, self.width = size[0] * _FINE, size[1] * _FINE
        self._focal = 0.5 * min(self.height, self.width) / math.tan(field / 2.0)

    def project(self, points: Sequence[Sequence[float] | Vector]) -> list[tuple[float, float]]:
        """World points -> pixels (column, row)."""
        seen = (np.asarray(points, np.float64) - self.eye) @ self._frame.T
        depth = np.maximum(seen[:, 2], 1e-3)
        columns = self._focal * seen[:, 0] / depth + self.width / 2.0
        rows = self._focal * seen[:, 1] / depth + self.height / 2.0
        return list(zip(columns.tolist(), rows.tolist(), strict=True))


def _cross(left: Vector | Sequence[float], right: Vector | Sequence[float]) -> Vector:
    """The product of two vectors [3]; NumPy's own takes ten times as long for so few numbers."""
    (a, b, c), (x, y, z) = left, right
    return np.array([b * z - c * y, c * x - a * z, a * y - b * x], np.float64)


def view_of(arm: PegArm, camera: str, size: tuple[int, int]) -> View:
    """The camera of that name: one in front of the board, or one that rides on the wrist."""
    x, y = arm.hole
    if camera == "front_camera":
        eye = (x + 0.26, y + 0.09, arm.board_top + 0.13)
        return View(eye, (x, y, arm.board_top + 0.03), (0.0, 0.0, 1.0), 0.62, size)
    ex, ey, ez = arm.position
    yaw = arm.turn[2]
    back = (math.cos(yaw) * 0.07, math.sin(yaw) * 0.07)
    eye = (ex + back[0], ey + back[1], ez + 0.03)
    return View(eye, (ex - 0.1 * back[0], ey - 0.1 * back[1], ez - PEG_LENGTH), (-1.0, 0.0, 0.0), 1.1, size)


def draw(arm: PegArm, camera: str, size: tuple[int, int]) -> UInt8Array:
    """A picture uint8 [H, W, 3]."""
    view = view_of(arm, camera, size)
    image = Image.new("RGB", (view.width, view.height), _TABLE)
    brush = ImageDraw.Draw(image)
    _draw_board(brush, view, arm)
    _draw_peg(brush, view, arm)
    _draw_gripper(brush, view, arm)
    pixels = np.asarray(image.reduce(_FINE), np.float32)
    pixels = pixels + arm.rng.standard_normal(pixels.shape, np.float32) * NOISE
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def _draw_board(brush: ImageDraw.ImageDraw, view: View, arm: PegArm) -> None:
    (x, y), top, half = arm.hole, arm.board_top, _BOARD_HALF
    corners = [(x + half, y - half), (x + half, y + half), (x - half, y + half), (x - half, y - half)]
    for first, second in ((0, 1), (1, 2)):
        low = [(*corners[first], top - _BOARD_THICK), (*corners[second], top - _BOARD_THICK)]
        brush.polygon(
            view.project([(*corners[first], top), (*corners[second], top), *low[::-1]]), _BOARD_SIDE
        )
    brush.polygon(view.project([(*corner, top) for corner in corners]), _BOARD)
    brush.polygon(_circle(view, (x, y, top), HOLE_RADIUS + 0.003), (120, 100, 74))
    brush.polygon(_circle(view, (x, y, top), HOLE_RADIUS), _HOLE)


def _draw_peg(brush: ImageDraw.ImageDraw, view: View, arm: PegArm) -> None:
    tip = np.array(arm.tip())
    end = np.array(arm.position) if arm.held else tip + np.array([0.0, 0.0, PEG_LENGTH])
    top = arm.board_top
    if tip[2] > top + 0.001:
        brush.polygon(_circle(view, (tip[0], tip[1], top), PEG_RADIUS), _SHADOW)
    elif tip[2] < top:  # what is in the hole cannot be seen
        share = (top - tip[2]) / max(end[2] - tip[2], 1e-6)
        tip = tip + (end - tip) * min(share, 1.0)
    _rod(brush, view, tip, end, PEG_RADIUS, _PEG, _PEG_DARK)


def _draw_gripper(brush: ImageDraw.ImageDraw, view: View, arm: PegArm) -> None:
    x, y, z = arm.position
    yaw, opening = arm.turn[2], PEG_RADIUS + 0.006 + 0.02 * arm.gripper
    across = np.array([-math.sin(yaw), math.cos(yaw), 0.0])
    for side in (-1.0, 1.0):
        base = np.array([x, y, z + 0.03]) + across * side * opening
        _rod(brush, view, base - [0.0, 0.0, 0.045], base, 0.005, _FINGER, _FINGER)
    if np.linalg.norm(view.eye - [x, y, z + 0.06]) > 0.12:  # the wrist camera sits below the hand
        _rod(brush, view, np.array([x, y, z + 0.03]), np.array([x, y, z + 0.12]), 0.028, _GRIPPER, _GRIPPER)


def _circle(view: View, centre: Sequence[float] | Vector, radius: float) -> list[tuple[float, float]]:
    x, y, z = centre
    return view.project([(x + radius * c, y + radius * s, z) for c, s in _ROUND])


def _rod(
    brush: ImageDraw.ImageDraw,
    view: View,
    low: Vector,
    high: Vector,
    radius: float,
    colour: tuple[int, int, int],
    shade: tuple[int, int, int],
) -> None:
    """An upright round rod: its foot, its side, its head, and a darker stripe on one side."""
    aside = _cross(high - low, view.eye - low)
    aside *= radius / max(float(np.linalg.norm(aside)), 1e-9)
    brush.polygon(_circle(view, low, radius), shade)
    brush.polygon(view.project([low - aside, low + aside, high + aside, high - aside]), colour)
    brush.polygon(view.project([low, low + aside, high + aside, high]), shade)
    brush.polygon(_circle(view, high, radius), colour)
