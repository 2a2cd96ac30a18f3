"""Shapes drawn into many images at once; edges are a pixel wide and show motion by less than a pixel."""

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
_FACES = np.array([[0, 1, 2, 3], [0, 1, 5, 4], [0, 3, 6, 4]]).T
"""The three faces of a box that can be seen, as numbers of its corners [4, 3]; corner 0 is the nearest."""
_NEXT = np.array([1, 2, 3, 0])
_EDGE_VALUES = np.array([0.5, 0.5, -0.5, -0.5])[:, None, None]
_DISC = 0.25
_FREE, _BEHIND, _POKING = 0.32, 0.08, 0.8
"""Densities of a translucent ball: with no box there, behind the surface of one, and in front of it."""


class Scratch:
    """Memory that is used again for each shape; new memory takes longer to get than drawing does."""

    def __init__(self) -> None:
        self._floats: dict[str, FloatArray] = {}

    def floats(self, name: str, *shape: int) -> FloatArray:
        """An uninitialised float32 array; it overwrites the previous one under this name."""
        size = math.prod(shape)
        if name not in self._floats or self._floats[name].size < size:
            self._floats[name] = np.empty(size, np.float32)
        return self._floats[name][:size].reshape(shape)


class Window:
    """The same small part of the images `ids`, int [m], opened for drawing as planar floats.

    Windows have one size for all images but a place of its own in each, so that they hold `bounds`: left,
    right, top and bottom in pixels, [m] each. They are cut out and put back (`close`) as whole rows of bytes;
    in between they are float32 [m, P] for the P pixels of a window in m images. Only one can be open at a
    time, as all share the same scratch memory.
    """

    def __init__(self, canvas: Canvas, ids: IntArray, *bounds: Params) -> None:
        frames, scratch = canvas.frames, canvas.scratch
        height, width = frames.shape[1:3]
        left, cols = _span(bounds[0], bounds[1], width)
        top, rows = _span(bounds[2], bounds[3], height)
        self.left, self.top = left + 0.5, top + 0.5
        grid = np.ones((3, rows, cols), np.float32)
        grid[0], grid[1] = np.arange(cols), np.arange(rows)[:, None]
        self._grid = grid.reshape(3, -1)
        image, row, pixel = frames.strides[:3]
        shape = (len(frames), height - rows + 1, width - cols + 1, rows, cols * 3)
        self._views = as_strided(frames, shape, (image, row, pixel, row, 1))
        self._place = (ids, top, left)
        self._bytes = self._views[self._place]
        self._pixels = self._bytes.reshape(len(ids), -1, 3)
        self.scratch = scratch
        self.rgb = scratch.floats("rgb", 3, len(ids), rows * cols)
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
        """Linear functions of x and y at every pixel, float32 [k, m, P], in the scratch memory `name`.

        `along` are their slopes along x and y, [k, m] each; `value` ([k, m] or a number) is what they are at
        the point `through`, x and y [k, m] or [m]. They come from one matrix product, whose coefficients are
        rounded so that it is exact in float32: an image does not depend on which others are drawn beside it.
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
    np.maximum(values, -LARGEST, out=values)  # faster than `clip` for so few
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


def _groups_of_like_size(sizes: Params) -> list[IntArray]:
    """Numbers of shapes, in groups, so that a few large ones, [m], do not make all windows large."""
    if len(sizes) < 64 or sizes.max() < 1.5 * np.median(sizes):
        return [np.arange(len(sizes))]
    return np.array_split(np.argsort(sizes, kind="stable"), 4)


def _overlap(edges: FloatArray) -> FloatArray:
    """How much of each pixel, [m, P], is inside a quadrilateral; also right if that is thin.

    `edges` [4, m, P] is how much of it each edge in turn leaves, less 1 for the third and the fourth.
    """
    np.minimum(edges[:2], ONE, out=edges[:2])
    pairs = np.add(edges[:2], np.minimum(edges[2:], ZERO, out=edges[2:]), out=edges[:2])
    inside: FloatArray = np.minimum(pairs[0], pairs[1], out=pairs[0])
    return np.maximum(inside, ZERO, out=inside)


class Canvas:
    """Images, uint8 [n, H, W, 3], to draw into. `ids`, int [m], always says into which of them.

    Coordinates are in pixels from the upper left corner; colours `rgb` are [3, m] in [0, 255].
    """

    def __init__(self, frames: UInt8Array, scratch: Scratch) -> None:
        self.frames, self.scratch = frames, scratch
        self.everyone: IntArray = np.arange(len(frames))

    def _open_around(self, ids: IntArray, ends: Params, reach: Params | float) -> Window:
        """A window around straight lines between `ends` [4, m] (x, y, x, y), wider by `reach`."""
        low, high = np.minimum(ends[:2], ends[2:]) - reach, np.maximum(ends[:2], ends[2:]) + reach
        return Window(self, ids, low[0], high[0], low[1], high[1])

    def box(self, ids: IntArray, u: Params, v: Params, light: Params, rgb: Params) -> None:
        """A box.

        `u` and `v` are x and y of its corners, [7, m]: the four upper ones, beginning with the nearest and
        going on to its neighbour on the front, and under numbers 0, 1 and 3 the lower ones. `light` [3, m] is
        the brightness of the upper face, the front and the side, 0 where a face is hidden.
        """
        faces = np.flatnonzero(light.max(axis=1) > 0.0)
        if not len(faces):
            return
        bounds = u.min(axis=0), u.max(axis=0), v.min(axis=0), v.max(axis=0)
        window = Window(self, ids, *bounds)
        u4, v4 = u[_FACES], v[_FACES]  # [4, 3, m]
        du, dv = u4[_NEXT] - u4, v4[_NEXT] - v4
        turn = (u4[2] - u4[0]) * (v4[3] - v4[1]) - (v4[2] - v4[0]) * (u4[3] - u4[1])
        scale = np.copysign(1.0, turn) / np.maximum(np.sqrt(du * du + dv * dv), 1e-3)
        du, dv = du * scale, dv * -scale
        value = np.where(light > 0.0, _EDGE_VALUES, -LARGEST)  # [4, 3, m]
        covered = lit = self.scratch.floats("lit", *window.rgb.shape[1:])
        for number, face in enumerate(faces):
            slopes, points = (dv[:, face], du[:, face]), (u4[:, face], v4[:, face])
            inside = _overlap(window.planes(slopes, points, value[:, face], "planes" if number else "first"))
            if number == 0:
                covered = inside
                np.multiply(inside, column(light[face]), out=lit)
            else:
                covered += inside  # along a shared edge the parts of both faces add up to 1
                inside *= column(light[face])
                lit += inside
        # Soft edges that meet at an acute angle reach beyond the corner; nothing is drawn out there.
        np.minimum(covered, window.room(*bounds), out=covered)
        window.cover(ramp(covered), lit, rgb)
        window.close()

    def shadow(self, ids: IntArray, ellipse: Params, softness: Params, strength: Params) -> None:
        """Darken a soft-edged rectangle that lies on the table, in the middle by the share `strength` [m].

        `ellipse` [6, m] is its centre (x, y) and the two half axes (x, y) as they appear in the image,
        `softness` [m] the width of the soft edge, as a share of the half axes.
        """
        window, places = self._open_flat(ids, ellipse, 1.0 + softness)
        np.abs(places, out=places)
        alpha = np.maximum(places[0], places[1], out=places[0])
        slope = 0.5 / softness
        alpha *= column(-slope)
        alpha += column((1.0 + softness) * slope)
        ramp(alpha)
        alpha *= column(-strength)
        alpha += ONE
        window.rgb *= alpha
        window.close()

    def ring(self, ids: IntArray, ellipse: Params, half_width: float, rgb: Params) -> None:
        """A faintly filled ring that lies on the table; `ellipse` as for `shadow`."""
        radius = np.sqrt(np.abs(ellipse[2] * ellipse[5] - ellipse[3] * ellipse[4])) + 1e-3
        window, places = self._open_flat(ids, ellipse, 1.0 + (half_width + 0.5) / radius)
        places *= places
        away = np.sqrt(np.add(places[0], places[1], out=places[0]), out=places[0])
        away -= ONE
        away *= column(radius)
        fill = np.subtract(HALF, away, out=places[1])
        ramp(fill)
        fill *= np.float32(_DISC)
        np.abs(away, out=away)
        np.subtract(np.float32(half_width + 0.5), away, out=away)
        window.blend(np.maximum(ramp(away), fill, out=away), rgb)
        window.close()

    def _open_flat(self, ids: IntArray, ellipse: Params, reach: Params) -> tuple[Window, FloatArray]:
        """A window around `ellipse` and, [2, m, P], coordinates in which its half axes are the units."""
        u, v, ux, vx, uy, vy = ellipse
        wide, tall = reach * (np.abs(ux) + np.abs(uy)), reach * (np.abs(vx) + np.abs(vy))
        window = Window(self, ids, u - wide, u + wide, v - tall, v + tall)
        area = ux * vy - uy * vx
        along = np.array([vy, -uy, -vx, ux]) / np.where(np.abs(area) < 1e-6, 1e-6, area)
        return window, window.planes((along[0::2], along[1::2]), (u, v), 0.0)

    def line(self, ids: IntArray, ends: Params, half_width: float, rgb: Params) -> None:
        """Translucent straight lines between `ends` [4, m] (x, y, x, y)."""
        u0, v0, u1, v1 = ends
        window = self._open_around(ids, ends, half_width + 0.5)
        length = np.sqrt((u1 - u0) ** 2 + (v1 - v0) ** 2)
        du, dv = (u1 - u0) / np.maximum(length, 1e-3), (v1 - v0) / np.maximum(length, 1e-3)
        slopes = np.array([-dv, du]), np.array([du, dv])
        beside, along = window.planes(slopes, (u0, v0), np.array([[0.0], [0.5]]))
        np.subtract(np.float32(half_width + 0.5), np.abs(beside, out=beside), out=beside)
        alpha = ramp(beside)
        alpha *= ramp(np.minimum(along, column(length + 1.0) - along, out=along))
        alpha *= column(0.7 * np.minimum(length, 1.0))
        window.blend(alpha, rgb)
        window.close()

    def pole(self, ids: IntArray, ends: Params, half_widths: Params, rgb: Params) -> None:
        """A round pole between `ends` [4, m] (x, y, x, y) with `half_widths` [2, m], cut off square."""
        for group in _groups_of_like_size(np.abs(ends[3] - ends[1])):
            self._pole(ids[group], ends[:, group], half_widths[:, group], rgb[:, group])

    def _pole(self, ids: IntArray, ends: Params, half_widths: Params, rgb: Params) -> None:
        u0, v0, u1, v1 = ends
        window = self._open_around(ids, ends, half_widths.max(axis=0) + 0.5)
        length = np.maximum(np.sqrt((u1 - u0) ** 2 + (v1 - v0) ** 2), 1e-3)
        du, dv = (u1 - u0) / length, (v1 - v0) / length
        taper = (half_widths[1] - half_widths[0]) / length
        slopes = (
            np.array([taper * du - dv, taper * du + dv, du]),
            np.array([taper * dv + du, taper * dv - du, dv]),
        )
        values = np.array([half_widths[0] + 0.5, half_widths[0] + 0.5, np.full_like(u0, 0.5)])
        left, right, along = window.planes(slopes, (u0, v0), values)
        # Darker towards the edges, and a little more so on the right.
        shade = np.subtract(left, right, out=self.scratch.floats("lit", *left.shape))
        shade *= column(0.5 / half_widths.max(axis=0))
        curve = np.multiply(shade, shade, out=self.scratch.floats("curve", *left.shape))
        curve *= np.float32(-0.3)
        shade *= np.float32(0.12)
        shade += curve
        shade += ONE
        alpha = np.add(np.minimum(left, ONE, out=left), np.minimum(right, ONE, out=right), out=left)
        alpha -= ONE
        ramp(np.minimum(alpha, np.minimum(along, column(length + 1.0) - along, out=along), out=alpha))
        shade *= alpha
        window.cover(alpha, shade, rgb)
        window.close()

    def ball(self, ids: IntArray, circle: Params, rgb: Params, solid: Params) -> None:
        """A translucent ball with a clear rim and a highlight; `circle` [3, m] is (x, y, radius).

        It shows through a box that hides it, faintly, and stands out where it pokes through that box. `solid`
        [3, 9, m] is the box as linear functions of the pixel that say where lines of sight meet its planes:
        slopes along x and y, and values at the ball's centre: pixels towards the camera from its depth. Lines
        of sight enter the box at the least of the first three and leave it at the greatest of the others.
        """
        for group in _groups_of_like_size(circle[2]):
            self._ball(ids[group], circle[:, group], rgb[:, group], solid[:, :, group])

    def _ball(self, ids: IntArray, circle: Params, rgb: Params, solid: Params) -> None:
        u, v, r = circle
        reach = r + 0.25
        window = Window(self, ids, u - reach, u + reach, v - reach, v + reach)
        depth = window.distance(u, v, "depth")
        planes = window.planes((solid[0], solid[1]), (u, v), solid[2])
        alpha = self._translucency(planes, depth, r)
        np.subtract(column(r), depth, out=depth)
        fill = np.add(depth, HALF, out=self.scratch.floats("fill", *depth.shape))
        alpha *= ramp(fill)
        rim = np.maximum(0.7, 0.09 * r)
        depth -= column(rim - 0.25)
        np.abs(depth, out=depth)
        depth *= column(-1.0 / rim)
        depth += column(1.0 + 0.5 / rim)
        ramp(depth)
        depth *= HALF
        alpha += depth
        window.blend(np.minimum(alpha, ONE, out=alpha), rgb)
        shine = window.distance(u - 0.36 * r, v - 0.36 * r, "depth")
        width = np.maximum(0.2 * r, 1.0)
        shine *= column(-1.0 / width)
        shine += column((0.5 + 0.24 * r) / width)
        ramp(shine)
        shine *= np.float32(0.45)
        window.blend(shine, 240.0)
        window.close()

    def _translucency(self, planes: FloatArray, away: FloatArray, radius: Params) -> FloatArray:
        """How dense a ball appears, [m, P], beside a box of `planes` [9, m, P], `away` from its centre."""
        enter = np.minimum(np.minimum(planes[0], planes[1], out=planes[0]), planes[2], out=planes[0])
        leave = planes[3]
        for plane in planes[4:]:
            np.maximum(leave, plane, out=leave)
        covered = np.subtract(enter, leave, out=leave)
        covered += HALF
        ramp(covered)
        # How much nearer than its centre the surface of the ball is, against the surface of the box.
        bulge = np.multiply(away, away, out=self.scratch.floats("alpha", *away.shape))
        np.maximum(np.subtract(column(radius * radius), bulge, out=bulge), ZERO, out=bulge)
        np.sqrt(bulge, out=bulge)
        bulge -= enter
        bulge += HALF
        ramp(bulge)
        bulge *= np.float32(_POKING - _BEHIND)
        bulge += np.float32(_BEHIND - _FREE)
        bulge *= covered
        bulge += np.float32(_FREE)
        return bulge

    def lamp(self, ids: IntArray, circle: Params, rgb: Params) -> None:
        """A round lamp in a dark housing, wholly opaque; `circle` [3, m] is (x, y, radius)."""
        u, v, r = circle
        case = 1.3 * r + 0.4
        window = Window(self, ids, u - case, u + case, v - case, v + case)
        away = window.distance(u, v, "depth")
        alpha = self.scratch.floats("alpha", *away.shape)
        window.blend(ramp(np.subtract(column(case + 0.5), away, out=alpha)), 28.0)
        window.blend(ramp(np.subtract(column(r + 0.5), away, out=alpha)), rgb)
        away *= column(-1.0 / (0.6 * r))
        away += ONE
        ramp(away)
        away *= np.float32(0.6)
        window.blend(away, 255.0)
        window.close()
