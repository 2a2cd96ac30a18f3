"""Plots as PNG pictures, for Markdown: hubs and repositories show no inline SVG."""

from __future__ import annotations

import io
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from guerdon.monitoring.svg import Mark, Plot

Colour: TypeAlias = tuple[int, int, int, int]

_SCALE, _FINER = 2, 2
"""Pixels of the picture for one of the plot; it is drawn finer by the second and averaged."""
_DRAWN = _SCALE * _FINER
_INK, _MUTED, _LINE = (28, 32, 38, 255), (95, 103, 115, 255), (222, 226, 231, 255)
_ACCENT, _GOOD, _BAD = (37, 99, 190, 255), (32, 138, 78, 255), (190, 50, 50, 255)
_PAPER = (255, 255, 255, 255)
_LINES: dict[str, tuple[Colour, float, tuple[float, float] | None]] = {
    "curve": (_ACCENT, 2.2, None),
    "guide": (_MUTED, 1.2, (4, 4)),
    "limit": (_BAD, 1.4, (6, 4)),
}
"""Style -> colour, width and dashes, as in `PLOT_STYLE`."""
_AREAS: dict[str, Colour] = {"area": (*_ACCENT[:3], 33), "truth": (*_GOOD[:3], 51)}
_DOTS: dict[str, Colour] = {"dot": _ACCENT, "point": _BAD}
_FONT_PIXELS = 11


def plot_png(plot: Plot) -> bytes:
    """A plot as a PNG file on white paper, twice as large as in a page."""
    size = plot.width * _DRAWN, plot.height * _DRAWN
    picture = Image.new("RGBA", size, _PAPER)
    _draw_axes(ImageDraw.Draw(picture), picture, plot)
    for mark in plot.marks:
        layer = Image.new("RGBA", size, (0, 0, 0, 0))  # shapes may be see-through
        _draw_mark(ImageDraw.Draw(layer), mark)
        picture.alpha_composite(layer)
    final = picture.convert("RGB").resize((plot.width * _SCALE, plot.height * _SCALE), Image.Resampling.BOX)
    file = io.BytesIO()
    final.save(file, format="PNG", optimize=True)
    return file.getvalue()


@cache
def _font() -> Any:
    return ImageFont.load_default(_FONT_PIXELS * _DRAWN)


def _draw_axes(draw: Any, picture: Image.Image, plot: Plot) -> None:
    right, floor = plot.width - 10, plot.height - plot.bottom
    for value, up in plot.y_ticks():
        _stroke(draw, np.array([[plot.left, up], [right, up]]), _LINE, 1.0)
        _text(draw, plot.left - 6, up, f"{value:g}", "rm", _MUTED)
    for value, across in plot.x_ticks():
        _stroke(draw, np.array([[across, 10], [across, floor]]), _LINE, 1.0)
        _text(draw, across, floor + 4, f"{value:g}", "ma", _MUTED)
    _text(draw, (plot.left + right) / 2, plot.height - 3, plot.x_label, "md", _MUTED)
    if plot.y_label:
        wide = int(_font().getlength(plot.y_label)) + 2 * _DRAWN
        label = Image.new("RGBA", (wide, 2 * _FONT_PIXELS * _DRAWN), (0, 0, 0, 0))
        ImageDraw.Draw(label).text((_DRAWN, 0), plot.y_label, _MUTED, font=_font(), anchor="la")
        label = label.rotate(90, expand=True)
        middle = (10 + floor) / 2 * _DRAWN
        picture.alpha_composite(label, (2 * _DRAWN, max(int(middle - label.height / 2), 0)))


def _draw_mark(draw: Any, mark: Mark) -> None:
    points = mark.points
    if mark.kind == "polyline":
        colour, width, dashes = _LINES[mark.style]
        for piece in [points] if dashes is None else _dashed(points, *dashes):
            _stroke(draw, piece, colour, width)
    elif mark.kind == "polygon":
        draw.polygon([tuple(point) for point in points * _DRAWN], fill=_AREAS[mark.style])
    elif mark.kind == "rect":
        draw.rectangle([tuple(point) for point in points * _DRAWN], fill=_AREAS[mark.style])
    elif mark.kind == "circle":
        centre, rim = points[0], mark.radius + 0.75
        for radius, colour in ((rim, _PAPER), (mark.radius - 0.75, _DOTS[mark.style])):
            corners = np.array([centre - radius, centre + radius]) * _DRAWN
            draw.ellipse([tuple(corner) for corner in corners], fill=colour)
    else:
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[mark.anchor]
        _text(draw, *points[0], mark.words, anchor, _INK)


def _stroke(draw: Any, points: NDArray[Any], colour: Colour, width: float) -> None:
    draw.line(
        [tuple(point) for point in points * _DRAWN], colour, max(round(width * _DRAWN), 1), joint="curve"
    )


def _text(draw: Any, x: float, y: float, words: str, anchor: str, colour: Colour) -> None:
    draw.text((x * _DRAWN, y * _DRAWN), words, colour, font=_font(), anchor=anchor)


def _dashed(points: NDArray[Any], on: float, off: float) -> list[NDArray[Any]]:
    """The strokes of a dashed line through [K, 2] points."""
    steps = np.linalg.norm(np.diff(points, axis=0), axis=1)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    pieces = []
    for start in np.arange(0.0, along[-1], on + off):
        ends = np.array([start, min(start + on, along[-1])])
        inner = along[(along > ends[0]) & (along < ends[1])]
        places = np.concatenate([ends[:1], inner, ends[1:]])
        pieces.append(np.stack([np.interp(places, along, points[:, axis]) for axis in (0, 1)], axis=1))
    return pieces
