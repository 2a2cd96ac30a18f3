"""The same small part of many images at once, as planar floats, for drawing into it.

Windows have one size for all images but a place of its own in each. They are cut out and put back as whole
rows of bytes; in between they are float32 `[m, P]` for the P pixels of a window in m images. Distances from
edges come from one matrix product; its coefficients are rounded so that it is exact in float32, and an image
therefore does not depend on which others are drawn beside it.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from guerdon.core.types import FloatArray, IntArray, UInt8Array

Params: TypeAlias = NDArray[np.float64]
"""One number per image, [m], or k of them, [k, m]."""

LARGEST = 4096.0
"""Values of linear functions are clipped to this, in pixels."""
ZERO, HALF, ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
_QUANTUM = 2.0**-12


class Scratch:
    """Memory that is used again for each shape; new memory takes longer to get than drawing does."""

    def __init__(self) -> None:
        self._floats: dict[str, FloatArray] = {}

    def floats(self, name: str, *shape: int) -> FloatArray:
        """An uninitialised float32 array; the previous one under this name is overwritten."""
        size = math.prod(shape)
        if name not in self._floats or self._floats[name].size < size:
            self._floats[name] = np.empty(size, np.float32)
        return self._floats[name][:size].reshape(shape)


class Window:
    """The same small part of m images, opened for drawing; `close` puts it back.

    Only one can be open at a time, as all share the same scratch memory.

    Args:
        frames: uint8 [n, H, W, 3].
        scratch: memory to work in.
        ids: int [m], which of the images.
        bounds: left, right, top and bottom of what the window must hold, in pixels, [m] each.
    """

    def __init__(
        self,
        frames: UInt8Array,
        scratch: Scratch,
        ids: IntArray,
        bounds: tuple[Params, Params, Params, Params],
    ) -> None:
        height, width = frames.shape[1:3]
        left, cols = _span(bounds[0], bounds[1], width)
        top, rows = _span(bounds[2], bounds[3], height)
        self.left, self.top = left + 0.5, top + 0.5
        grid = np.ones((3, rows, cols), np.float32)
        grid[0] = np.arange(cols)
        grid[1] = np.arange(rows)[:, None]
        self._grid = grid.reshape(3, -1)
        strides = frames.strides
        self._views = as_strided(
            frames,
            (len(frames), height - rows + 1, width - cols + 1, rows, cols * 3),
            (strides[0], strides[1], strides[2], strides[1], 1),
        )
        self._place = (ids, top, left)
        self._bytes = self._views[self._place]
        self._pixels = self._bytes.reshape(len(ids), -1, 3)
        self.scratch = scratch
        self.rgb = self.scratch.floats("rgb", 3, len(ids), rows * cols)
        for channel in range(3):  # one by one, which makes for long inner loops
            self.rgb[channel] = self._pixels[..., channel]

    def close(self) -> None:
        """Put the window back into the images; its values, in [0, 255], lose their fractions."""
        for channel in range(3):
            self._pixels[..., channel] = self.rgb[channel]
        self._views[self._place] = self._bytes

    def planes(
        self,
        along: tuple[Params, Params],
        through: tuple[Params, Params],
        value: Params | float,
        name: str = "planes",
    ) -> FloatArray:
        """Linear functions of x and y at every pixel.

        Args:
            along: their slopes along x and y, [k, m] each.
            through: x and y of a point, [k, m] or [m] each, ...
            value: ... and what they are there, [k, m] or a number.
            name: of the scratch memory to use.

        Returns:
            float32 [k, m, P].
        """
        terms = np.empty((3, *along[0].shape))
        terms[0], terms[1] = along
        _quantise(terms[:2])
        np.subtract(value, terms[0] * through[0] + terms[1] * through[1], out=terms[2])
        _quantise(terms[2])
        terms[2] += terms[0] * self.left + terms[1] * self.top
        out = self.scratch.floats(name, *along[0].shape, self._grid.shape[1])
        flat = terms.reshape(3, -1).astype(np.float32)
        np.matmul(flat.T, self._grid, out=out.reshape(flat.shape[1], -1))
        return out

    def room(self, left: Params, right: Params, top: Params, bottom: Params) -> FloatArray:
        """How far inside these bounds, each [m], every pixel is, plus 1; float32 [m, P]."""
        slopes = np.zeros((4, 2, len(left)))
        slopes[0, 0], slopes[1, 1], slopes[2, 0], slopes[3, 1] = 1.0, 1.0, -1.0, -1.0
        points = np.array([left, left, right, right]), np.array([top, top, bottom, bottom])
        sides = self.planes((slopes[:, 0], slopes[:, 1]), points, 1.0, "room")
        pairs = np.minimum(sides[:2], sides[2:], out=sides[:2])
        result: FloatArray = np.minimum(pairs[0], pairs[1], out=pairs[0])
        return result

    def distance(self, u: Params, v: Params, name: str) -> FloatArray:
        """Distance of every pixel from the point (u, v), in pixels, float32 [m, P]."""
        along = np.zeros((2, 2, len(u)))
        along[0, 0] = along[1, 1] = 1.0
        away = self.planes((along[0], along[1]), (u, v), 0.0, name)
        away *= away
        result: FloatArray = np.sqrt(np.add(away[0], away[1], out=away[0]), out=away[0])
        return result

    def blend(self, alpha: FloatArray, rgb: Params | float) -> None:
        """Lay the colour `rgb` ([3, m] or one grey) over the window, as dense as `alpha` [m, P] in [0, 1]."""
        part = self.scratch.floats("part", *self.rgb.shape)
        colour: Any = np.float32(rgb) if isinstance(rgb, float) else rgb.astype(np.float32)[:, :, None]
        np.subtract(colour, self.rgb, out=part)
        part *= alpha
        self.rgb += part

    def cover(self, alpha: FloatArray, lit: FloatArray, rgb: Params) -> None:
        """Put a surface over the window that hides the share `alpha` [m, P] of each pixel.

        Its colour is `rgb` [3, m]; `lit` [m, P] is how bright it is there, in [0, 1], times `alpha`.
        """
        part = self.scratch.floats("part", *self.rgb.shape)
        np.minimum(lit, alpha, out=lit)
        self.rgb *= np.subtract(ONE, alpha, out=part[0])
        self.rgb += np.multiply(lit, rgb.astype(np.float32)[:, :, None], out=part)


def _quantise(values: Params) -> None:
    """Round in place so that products with pixel coordinates, and their sums, are exact in float32."""
    np.maximum(values, -LARGEST, out=values)
    np.minimum(values, LARGEST, out=values)
    values *= 1.0 / _QUANTUM
    np.rint(values, out=values)
    values *= _QUANTUM


def _span(low: Params, high: Params, limit: int) -> tuple[IntArray, int]:
    """First pixel [m] and number of pixels of spans that hold [low, high] as far as it is in the image."""
    first = np.floor(np.minimum(np.maximum(low - 0.5, -2.0), limit + 1.0))
    last = np.ceil(np.minimum(np.maximum(high + 0.5, -1.0), limit + 2.0))
    size = min(limit, int((last - first).max()))
    return np.minimum(np.maximum(first, 0.0), limit - size).astype(np.int64), size


def column(values: Params) -> FloatArray:
    """[m] -> float32 [m, 1]."""
    return values.astype(np.float32)[:, None]


def ramp(values: FloatArray) -> FloatArray:
    """Clip to [0, 1] in place."""
    np.maximum(values, ZERO, out=values)
    return np.minimum(values, ONE, out=values)
