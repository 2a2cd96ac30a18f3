"""The empty table: a mat with a grid of 4 cm on it, which shows where things are."""

from __future__ import annotations

import numpy as np

from guerdon.core.types import FloatArray, UInt8Array
from guerdon.envs.tabletop.camera import Camera, base_camera
from guerdon.envs.tabletop.draw import column, ramp
from guerdon.envs.tabletop.scene import GLOW_CENTRE, MAT_RGB, TABLE_RGB, Rows

_MAT_HALF = np.float32(0.12)
_GRID = np.float32(0.04)
_TABLE_END = np.float32(0.19)
_LINE_LIGHT = np.float32(20.0)
_AT_ONCE = 16 * 64 * 64
"""Pixels that are painted at once, so that they stay in the processor's cache."""


def draw_tables(rows: Rows, size: tuple[int, int]) -> UInt8Array:
    """The table as `base_camera` sees it, in n looks, uint8 [n, H, W, 3]."""
    frames = np.empty((rows.shape[1], *size, 3), np.uint8)
    step = max(1, _AT_ONCE // (size[0] * size[1]))
    for start in range(0, len(frames), step):
        part = slice(start, start + step)
        _paint(frames[part], rows[:, part])
    return frames


def _paint(frames: UInt8Array, rows: Rows) -> None:
    height, width = frames.shape[1:3]
    camera = base_camera(rows, (height, width))
    across = (np.arange(width) + 0.5 - camera.centre[0])[:, None] / camera.focal  # [W, n]
    along = (camera.centre[1] - np.arange(height) - 0.5)[:, None] / camera.focal  # [H, n]
    # Where each pixel's line of sight meets the table.
    x, y, down = (
        (ahead + across * right).T.astype(np.float32)[:, None, :]
        + (along * up).T.astype(np.float32)[:, :, None]
        for ahead, right, up in zip(camera.forward, camera.right, camera.up, strict=True)
    )
    np.minimum(down, np.float32(-0.05), out=down)
    reach = np.divide(_column(-camera.at[2]), down, out=down)
    for place, at in ((x, camera.at[0]), (y, camera.at[1])):
        place *= reach
        place += _column(at)
    pixel = _column(-camera.at[2] / (camera.focal * camera.forward[2]))  # size of a pixel on the table
    mat = _soft(_MAT_HALF - np.maximum(np.abs(x), np.abs(y)), pixel)
    line = np.minimum(_off_grid(x), _off_grid(y))
    line /= -np.maximum(np.float32(0.6) * pixel, np.float32(0.0008))
    line += np.float32(1.1)
    ramp(line)
    line *= mat
    line *= _LINE_LIGHT
    floor = _soft(x - _TABLE_END, pixel)
    x -= _column(rows[GLOW_CENTRE][0])
    y -= _column(rows[GLOW_CENTRE][1])
    light = np.float32(1.06) - np.float32(2.0) * (x * x + y * y)
    floor *= np.float32(-0.62)
    floor += np.float32(1.0)
    light *= floor
    for channel in range(3):
        colour = _mix(rows, channel, mat, line)
        colour *= light
        np.maximum(colour, np.float32(0.0), out=colour)
        colour += np.float32(0.5)
        frames[..., channel] = np.minimum(colour, np.float32(255.0), out=colour)


def draw_table_below(frames: UInt8Array, rows: Rows, camera: Camera) -> None:
    """Fill `frames` [n, H, W, 3] with the table as `wrist_camera` sees it.

    It looks straight down: rows and columns of the image are lines of equal x and of equal y.
    """
    height, width = frames.shape[1:3]
    pixel = (camera.at[2] / camera.focal)[:, None].astype(np.float32)
    x = camera.at[0][:, None] + pixel * (camera.centre[1] - np.arange(height) - 0.5)  # [n, H]
    y = camera.at[1][:, None] - pixel * (np.arange(width) + 0.5 - camera.centre[0])  # [n, W]
    inside, lines = [], []
    for place in (x.astype(np.float32), y.astype(np.float32)):
        inside.append(_soft(_MAT_HALF - np.abs(place), pixel))
        away = _off_grid(place) / np.maximum(np.float32(0.6) * pixel, np.float32(0.0012))
        lines.append(_LINE_LIGHT * ramp(np.float32(1.1) - away))
    mat = inside[0][:, :, None] * inside[1][:, None, :]
    line = np.maximum(lines[0][:, :, None], lines[1][:, None, :])
    line *= mat
    for channel in range(3):
        colour = _mix(rows, channel, mat, line)
        colour += np.float32(0.5)
        frames[..., channel] = np.minimum(colour, np.float32(255.0), out=colour)


def _mix(rows: Rows, channel: int, mat: FloatArray, line: FloatArray) -> FloatArray:
    """One channel of the colours of table, mat and lines, [n, H, W], before the light falls on them."""
    table, cloth = _column(rows[TABLE_RGB][channel]), _column(rows[MAT_RGB][channel])
    colour: FloatArray = mat * (cloth - table)
    colour += table
    colour += line
    return colour


def _column(values: Rows) -> FloatArray:
    """[n] -> float32 [n, 1, 1]."""
    return column(values)[:, :, None]


def _off_grid(places: FloatArray) -> FloatArray:
    """Distance from the nearest line of the grid."""
    off = places - _GRID * np.round(places / _GRID)
    return np.abs(off, out=off)


def _soft(inside: FloatArray, pixel: FloatArray) -> FloatArray:
    """1 where `inside` is positive, 0 where it is negative, between them an edge one pixel wide; in place."""
    inside /= pixel
    inside += np.float32(0.5)
    return ramp(inside)
