"""Drawing a few shapes into many images at once, with soft edges, so that sub-pixel motion can be seen.

Each shape touches only a small window, of one size for all images but at a place of its own in each. Windows
are cut out and put back as whole rows of bytes; in between they are planar float32, `[m, P]` for the P pixels
of a window in m images. Distances from edges come from one matrix product; their coefficients are rounded so
that it is exact in float32, and an image therefore does not depend on which others are drawn beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from guerdon.types import FloatArray, IntArray, UInt8Array

Params: TypeAlias = NDArray[np.float64]
"""One number per image, [m], or k of them, [k, m]."""

_QUANTUM = 2.0**-12
_LARGEST = 4096.0
_FACES = np.array([[0, 1, 2, 3], [0, 1, 5, 4], [0, 3, 6, 4]]).T
"""The three faces of a box that can be seen, as numbers of its corners [4, 3]; corner 0 is the nearest."""
_NEXT = np.array([1, 2, 3, 0])
_DISC = 0.25
_FREE, _BEHIND, _POKING = 0.32, 0.08, 0.8
"""Densities of a translucent ball: with no box there, behind the surface of one, and in front of it."""
_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)


class Scratch:
    """Memory that is used again for each shape; asking the system for it anew takes longer than drawing."""

    def __init__(self) -> None:
        self._floats: dict[str, FloatArray] = {}

    def floats(self, name: str, *shape: int) -> FloatArray:
        """An uninitialised float32 array; the previous one under this name is overwritten."""
        size = math.prod(shape)
        if name not in self._floats or self._floats[name].size < size:
            self._floats[name] = np.empty(size, np.float32)
        return self._floats[name][:size].reshape(shape)


@dataclass(frozen=True, kw_only=True)
class Solid:
    """A box as nine linear functions of the pixel, [9, m] each, that say where lines of sight meet it.

    Their values are in pixels, relative to the depth of some point, and grow towards the camera. Lines of
    sight enter the box at the least of the first three and leave it at the greatest of the others.
    """

    slopes: tuple[Params, Params]
    through: tuple[float, float]
    values: Params


class Window:
    """The same small part of m images, opened for drawing; `close` puts it back."""

    def __init__(self, canvas: Canvas, ids: IntArray, bounds: tuple[Params, Params, Params, Params]) -> None:
        """Open the window of `canvas` that holds `bounds`: left, right, top, bottom, in pixels, [m]."""
        frames = canvas.frames
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
        self.scratch = canvas.scratch
        self.rgb = self.scratch.floats("rgb", 3, len(ids), rows * cols)
        for channel in range(3):  # one by one, which makes for long inner loops
            self.rgb[channel] = self._pixels[..., channel]

    def close(self) -> None:
        """Put the window back into the images; its values must lie in [0, 255]."""
        self.rgb += _HALF
        for channel in range(3):
            self._pixels[..., channel] = self.rgb[channel]
        self._views[self._place] = self._bytes

    def planes(
        self,
        along: tuple[Params, Params],
        through: tuple[Params | float, Params | float],
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


def _quantise(values: Params) -> None:
    """Round in place so that products with pixel coordinates, and their sums, are exact in float32."""
    np.maximum(values, -_LARGEST, out=values)
    np.minimum(values, _LARGEST, out=values)
    values *= 1.0 / _QUANTUM
    np.rint(values, out=values)
    values *= _QUANTUM


def _span(low: Params, high: Params, limit: int) -> tuple[IntArray, int]:
    """First pixel [m] and number of pixels of spans that hold [low, high] as far as it is in the image."""
    first = np.floor(np.minimum(np.maximum(low - 0.5, -2.0), limit + 1.0))
    last = np.ceil(np.minimum(np.maximum(high + 0.5, -1.0), limit + 2.0))
    size = min(limit, int((last - first).max()))
    return np.minimum(np.maximum(first, 0.0), limit - size).astype(np.int64), size


def _column(values: Params) -> FloatArray:
    """[m] -> float32 [m, 1]."""
    return values.astype(np.float32)[:, None]


def _ramp(values: FloatArray) -> FloatArray:
    """Clip to [0, 1] in place."""
    np.maximum(values, _ZERO, out=values)
    return np.minimum(values, _ONE, out=values)


class Canvas:
    """Images, uint8 [n, H, W, 3], to draw into. `ids`, int [m], always says into which of them.

    Coordinates are in pixels from the upper left corner; colours `rgb` are [3, m] in [0, 255].
    """

    def __init__(self, frames: UInt8Array, scratch: Scratch) -> None:
        self.frames = frames
        self.scratch = scratch
        self.everyone: IntArray = np.arange(len(frames))

    def box(self, ids: IntArray, u: Params, v: Params, light: Params, rgb: Params) -> None:
        """A box.

        Args:
            ids: int [m].
            u: x of its corners, [7, m]: the four upper ones, beginning with the nearest and going on to its
                neighbour on the front, and under numbers 0, 1 and 3 the lower ones.
            v: y of its corners.
            light: [3, m]; brightness of the upper face, the front and the side, 0 where a face is hidden.
            rgb: [3, m].
        """
        faces = np.flatnonzero(light.max(axis=1) > 0.0)
        if not len(faces):
            return
        window = Window(self, ids, (u.min(axis=0), u.max(axis=0), v.min(axis=0), v.max(axis=0)))
        u4, v4 = u[_FACES], v[_FACES]  # [4, 3, m]
        du, dv = u4[_NEXT] - u4, v4[_NEXT] - v4
        turn = (u4[2] - u4[0]) * (v4[3] - v4[1]) - (v4[2] - v4[0]) * (u4[3] - u4[1])
        scale = np.copysign(1.0, turn) / np.maximum(np.sqrt(du * du + dv * dv), 1e-3)
        du *= scale
        dv *= -scale
        value = np.where(light > 0.0, 0.5, -_LARGEST)
        shape = window.rgb.shape[1:]
        left_over, lit = self.scratch.floats("left over", *shape), self.scratch.floats("lit", *shape)
        first = True
        for face in faces:
            edges = window.planes((dv[:, face], du[:, face]), (u4[:, face], v4[:, face]), value[face])
            np.minimum(edges[:2], edges[2:], out=edges[:2])
            inside = _ramp(np.minimum(edges[0], edges[1], out=edges[0]))
            # Along a shared edge the parts of both faces add up to 1.
            np.subtract(_ONE if first else left_over, inside, out=left_over)
            shaded = np.multiply(inside, _column(light[face]), out=lit if first else inside)
            if not first:
                lit += shaded
            first = False
        np.maximum(left_over, _ZERO, out=left_over)
        window.rgb *= left_over
        part = self.scratch.floats("part", *window.rgb.shape)
        window.rgb += np.multiply(lit, rgb.astype(np.float32)[:, :, None], out=part)
        np.minimum(window.rgb, np.float32(255.0), out=window.rgb)
        window.close()

    def shadow(self, ids: IntArray, ellipse: Params, softness: Params, strength: Params) -> None:
        """Darken a soft-edged rectangle that lies on the table.

        Args:
            ids: int [m].
            ellipse: [6, m]; centre (x, y) and the two half axes (x, y) as they appear in the image.
            softness: [m]; width of the soft edge, as a share of the half axes.
            strength: [m]; share of the light that is taken away in the middle.
        """
        window, places = self._open_flat(ids, ellipse, 1.0 + softness)
        np.abs(places, out=places)
        alpha = np.maximum(places[0], places[1], out=places[0])
        slope = 0.5 / softness
        alpha *= _column(-slope)
        alpha += _column((1.0 + softness) * slope)
        _ramp(alpha)
        alpha *= _column(-strength)
        alpha += _ONE
        window.rgb *= alpha
        window.close()

    def ring(self, ids: IntArray, ellipse: Params, half_width: float, rgb: Params) -> None:
        """A faintly filled ring that lies on the table; `ellipse` as for `shadow`."""
        radius = np.sqrt(np.abs(ellipse[2] * ellipse[5] - ellipse[3] * ellipse[4])) + 1e-3
        window, places = self._open_flat(ids, ellipse, 1.0 + (half_width + 0.5) / radius)
        places *= places
        away = np.sqrt(np.add(places[0], places[1], out=places[0]), out=places[0])
        away -= _ONE
        away *= _column(radius)
        fill = np.subtract(_HALF, away, out=places[1])
        _ramp(fill)
        fill *= np.float32(_DISC)
        np.abs(away, out=away)
        np.subtract(np.float32(half_width + 0.5), away, out=away)
        window.blend(np.maximum(_ramp(away), fill, out=away), rgb)
        window.close()

    def _open_flat(self, ids: IntArray, ellipse: Params, reach: Params) -> tuple[Window, FloatArray]:
        """A window around `ellipse` and, [2, m, P], coordinates in which its half axes are the units."""
        u, v, ux, vx, uy, vy = ellipse
        wide, tall = reach * (np.abs(ux) + np.abs(uy)), reach * (np.abs(vx) + np.abs(vy))
        window = Window(self, ids, (u - wide, u + wide, v - tall, v + tall))
        area = ux * vy - uy * vx
        along = np.array([vy, -uy, -vx, ux]) / np.where(np.abs(area) < 1e-6, 1e-6, area)
        return window, window.planes((along[0::2], along[1::2]), (u, v), 0.0)

    def line(self, ids: IntArray, ends: Params, half_width: float, rgb: Params) -> None:
        """Translucent straight lines between `ends` [4, m] (x, y, x, y)."""
        u0, v0, u1, v1 = ends
        pad = half_width
        bounds = (np.minimum(u0, u1) - pad, np.maximum(u0, u1) + pad, np.minimum(v0, v1), np.maximum(v0, v1))
        window = Window(self, ids, bounds)
        length = np.sqrt((u1 - u0) ** 2 + (v1 - v0) ** 2)
        du, dv = (u1 - u0) / np.maximum(length, 1e-3), (v1 - v0) / np.maximum(length, 1e-3)
        slopes = np.array([-dv, du]), np.array([du, dv])
        across, along = window.planes(slopes, (u0, v0), np.array([[0.0], [0.5]]))
        np.subtract(np.float32(half_width + 0.5), np.abs(across, out=across), out=across)
        alpha = _ramp(across)
        alpha *= _ramp(np.minimum(along, _column(length + 1.0) - along, out=along))
        alpha *= _column(0.7 * np.minimum(length, 1.0))
        window.blend(alpha, rgb)
        window.close()

    def ball(self, ids: IntArray, circle: Params, rgb: Params, solid: Solid) -> None:
        """A translucent ball with a clear rim and a highlight.

        It shows through a box that hides it, faintly, and stands out where it pokes through that box.

        Args:
            ids: int [m].
            circle: [3, m]; centre (x, y) and radius.
            rgb: [3, m].
            solid: the box, for these m images.
        """
        u, v, r = circle
        window = Window(self, ids, (u - r, u + r, v - r, v + r))
        depth = window.distance(u, v, "depth")
        alpha = self._translucency(window, depth, r, solid)
        np.subtract(_column(r), depth, out=depth)
        fill = np.add(depth, _HALF, out=self.scratch.floats("fill", *depth.shape))
        alpha *= _ramp(fill)
        rim = np.maximum(0.7, 0.09 * r)
        depth -= _column(rim - 0.25)
        np.abs(depth, out=depth)
        depth *= _column(-1.0 / rim)
        depth += _column(1.0 + 0.5 / rim)
        _ramp(depth)
        depth *= _HALF
        alpha += depth
        window.blend(np.minimum(alpha, _ONE, out=alpha), rgb)
        shine = window.distance(u - 0.36 * r, v - 0.36 * r, "depth")
        width = np.maximum(0.2 * r, 1.0)
        shine *= _column(-1.0 / width)
        shine += _column((0.5 + 0.24 * r) / width)
        _ramp(shine)
        shine *= np.float32(0.45)
        window.blend(shine, 240.0)
        window.close()

    def _translucency(self, window: Window, away: FloatArray, radius: Params, solid: Solid) -> FloatArray:
        """How dense a ball appears, [m, P]; `away` is the distance of each pixel from its centre."""
        planes = window.planes(solid.slopes, solid.through, solid.values)
        enter = np.minimum(np.minimum(planes[0], planes[1], out=planes[0]), planes[2], out=planes[0])
        leave = np.maximum(np.maximum(planes[3], planes[4], out=planes[3]), planes[5], out=planes[3])
        np.maximum(planes[6], planes[7], out=planes[6])
        np.maximum(leave, np.maximum(planes[6], planes[8], out=planes[6]), out=leave)
        covered = np.subtract(enter, leave, out=leave)
        covered += _HALF
        _ramp(covered)
        # How much nearer than its centre the surface of the ball is, against the surface of the box.
        bulge = np.multiply(away, away, out=self.scratch.floats("alpha", *away.shape))
        np.subtract(_column(radius * radius), bulge, out=bulge)
        np.sqrt(np.maximum(bulge, _ZERO, out=bulge), out=bulge)
        bulge -= enter
        bulge += _HALF
        _ramp(bulge)
        bulge *= np.float32(_POKING - _BEHIND)
        bulge += np.float32(_BEHIND - _FREE)
        bulge *= covered
        bulge += np.float32(_FREE)
        return bulge

    def lamp(self, ids: IntArray, circle: Params, rgb: Params) -> None:
        """A round lamp in a dark housing, wholly opaque; `circle` [3, m] is (x, y, radius)."""
        u, v, r = circle
        case = 1.3 * r + 0.4
        window = Window(self, ids, (u - case, u + case, v - case, v + case))
        away = window.distance(u, v, "depth")
        alpha = self.scratch.floats("alpha", *away.shape)
        window.blend(_ramp(np.subtract(_column(case + 0.5), away, out=alpha)), 28.0)
        window.blend(_ramp(np.subtract(_column(r + 0.5), away, out=alpha)), rgb)
        away *= _column(-1.0 / (0.6 * r))
        away += _ONE
        _ramp(away)
        away *= np.float32(0.6)
        window.blend(away, 255.0)
        window.close()
