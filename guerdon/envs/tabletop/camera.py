"""Where the cameras of the tabletop world are, and where a point appears in their images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from guerdon.core.types import IntArray
from guerdon.envs.tabletop.scene import AIM_SHIFT, CAMERA_SHIFT, GRIPPER, ZOOM, Rows

_BASE_AT = np.array([[-0.56], [0.13], [0.66]])
_BASE_AIM = np.array([[0.01], [-0.006], [0.08]])
_BASE_FOCAL = 2.5
"""Focal length as a multiple of the image's shorter side."""
_WRIST_AT = np.array([[-0.055], [0.0], [0.125]])
"""The wrist camera's place relative to the gripper position."""
_WRIST_FOCAL = 0.62
_WRIST_CENTRE = 0.72
"""Where the wrist camera's axis meets the image, as a share of its height from the top."""
_NEAREST = 0.02


@dataclass(frozen=True, kw_only=True)
class Camera:
    """A pinhole camera for each of n images."""

    at: Rows
    """[3, n]."""
    right: Rows
    """[3, n], unit length, like `up` and `forward`."""
    up: Rows
    forward: Rows
    focal: Rows
    """[n], in pixels."""
    centre: tuple[float, float]
    """Where the axis meets the image: x, y in pixels."""

    def take(self, ids: IntArray) -> Camera:
        """The cameras of the images `ids`, int [m]."""
        at, right, up, forward = (each[:, ids] for each in (self.at, self.right, self.up, self.forward))
        return Camera(at=at, right=right, up=up, forward=forward, focal=self.focal[ids], centre=self.centre)

    def depth(self, points: Rows) -> Rows:
        """Distance of points [3, ..., n] along the axis, in metres, [..., n]."""
        x, y, z = points[0] - self.at[0], points[1] - self.at[1], points[2] - self.at[2]
        result: Rows = x * self.forward[0] + y * self.forward[1] + z * self.forward[2]
        return result

    def height_at_top(self, points: Rows) -> Rows:
        """Up to which z the verticals through `points` [3, n] are in the image, [n]."""
        slope = (self.centre[1] + 3.0) / self.focal
        side = self.up - slope * self.forward  # normal of the plane through the image's upper edge
        x, y = points[0] - self.at[0], points[1] - self.at[1]
        result: Rows = self.at[2] - (x * side[0] + y * side[1]) / side[2]
        return result

    def project(self, points: Rows) -> tuple[Rows, Rows, Rows]:
        """Points [3, ..., n] -> x, y in pixels and depth in metres, [..., n] each."""
        x, y, z = points[0] - self.at[0], points[1] - self.at[1], points[2] - self.at[2]
        depth = x * self.forward[0] + y * self.forward[1] + z * self.forward[2]
        scale = self.focal / np.maximum(depth, _NEAREST)
        u = self.centre[0] + scale * (x * self.right[0] + y * self.right[1] + z * self.right[2])
        v = self.centre[1] - scale * (x * self.up[0] + y * self.up[1] + z * self.up[2])
        return u, v, depth


def _normalise(vectors: Rows) -> Rows:
    squares = vectors * vectors
    unit: Rows = vectors / np.sqrt(squares[0] + squares[1] + squares[2])
    return unit


def base_camera(rows: Rows, size: tuple[int, int]) -> Camera:
    """The camera that looks at the table from the front, with each episode's own small shift."""
    at = _BASE_AT + rows[CAMERA_SHIFT]
    forward = _normalise(_BASE_AIM + rows[AIM_SHIFT] - at)
    right = _normalise(np.stack([forward[1], -forward[0], np.zeros_like(forward[0])]))
    up_z = right[0] * forward[1] - right[1] * forward[0]
    up = np.stack([right[1] * forward[2], -right[0] * forward[2], up_z])
    focal = _BASE_FOCAL * min(size) * rows[ZOOM]
    centre = (0.5 * size[1], 0.5 * size[0])
    return Camera(at=at, right=right, up=up, forward=forward, focal=focal, centre=centre)


def wrist_camera(rows: Rows, size: tuple[int, int]) -> Camera:
    """The camera that the gripper carries; it looks straight down, the far side of the table is up."""
    at = rows[GRIPPER] + _WRIST_AT + 0.2 * rows[CAMERA_SHIFT]
    ones = np.ones_like(at)
    return Camera(
        at=at,
        right=ones * [[0.0], [-1.0], [0.0]],
        up=ones * [[1.0], [0.0], [0.0]],
        forward=ones * [[0.0], [0.0], [-1.0]],
        focal=_WRIST_FOCAL * min(size) * rows[ZOOM],
        centre=(0.5 * size[1], _WRIST_CENTRE * size[0]),
    )
