"""Small plots: as inline SVG for pages (no scripts, no fonts, no files), and as PNG by `png.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

PLOT_STYLE = """
svg.plot { width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif; }
svg.plot text { fill: var(--muted); }
svg.plot .grid { stroke: var(--line); stroke-width: 1; }
svg.plot .curve { stroke: var(--accent); stroke-width: 2.2; fill: none; stroke-linejoin: round; }
svg.plot .area { fill: var(--accent); opacity: .13; }
svg.plot .guide { stroke: var(--muted); stroke-width: 1.2; stroke-dasharray: 4 4; fill: none; }
svg.plot .limit { stroke: var(--bad); stroke-width: 1.4; stroke-dasharray: 6 4; fill: none; }
svg.plot .truth { fill: var(--good); opacity: .2; }
svg.plot .dot { fill: var(--accent); stroke: var(--card); stroke-width: 1.5; }
svg.plot .point { fill: var(--bad); stroke: var(--card); stroke-width: 2; }
svg.plot .strong { fill: var(--ink); font-weight: 600; }
"""
"""Plots in the colours of the page."""

Range = tuple[float, float]


@dataclass(frozen=True)
class Mark:
    """One shape of a plot."""

    kind: Literal["polyline", "polygon", "circle", "rect", "text"]
    style: str
    points: NDArray[Any]
    """[K, 2] in pixels: of a line or polygon, the centre of a circle, two corners of a rectangle."""
    radius: float = 0.0
    words: str = ""
    anchor: str = "start"

    def svg(self) -> str:
        """The shape as an element of an `<svg>`."""
        (a, b), start = self.points[0], f'<{self.kind} class="{self.style}"'
        if self.kind == "circle":
            return f'{start} cx="{a:.1f}" cy="{b:.1f}" r="{self.radius:.1f}"/>'
        if self.kind == "text":
            return f'{start} x="{a:.1f}" y="{b:.1f}" text-anchor="{self.anchor}">{escape(self.words)}</text>'
        if self.kind == "rect":
            wide, tall = self.points[1] - self.points[0]
            return f'{start} x="{a:.1f}" y="{b:.1f}" width="{wide:.1f}" height="{tall:.1f}"/>'
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points)
        return f'{start} points="{path}"/>'


@dataclass(kw_only=True)
class Plot:
    """One pair of axes; marks are drawn in the order in which they are added.

    Lines and bands take data coordinates; `svg` gives the finished element.
    """

    label: str
    """What the plot shows; read aloud by screen readers."""
    x_label: str = ""
    y_label: str = ""
    x_range: Range = (0.0, 1.0)
    y_range: Range = (0.0, 1.0)
    width: int = 320
    height: int = 260
    left: int = 44
    bottom: int = 36
    marks: list[Mark] = field(default_factory=list)
    """In pixels, as they were added."""

    def curve(self, x: ArrayLike, y: ArrayLike, *, style: str = "curve", fill: bool = False) -> Plot:
        """A line through [K] points; points that fall on one spot are drawn once."""
        spots = _thin(np.stack([self._across(x), self._up(y)], axis=1))
        if fill:
            floor = float(self.height - self.bottom)
            ends = [[spots[0, 0], floor]], [[spots[-1, 0], floor]]
            self.marks.append(Mark("polygon", "area", np.concatenate([ends[0], spots, ends[1]])))
        self.marks.append(Mark("polyline", style, spots))
        return self

    def area(self, x: ArrayLike, low: ArrayLike, high: ArrayLike, *, style: str = "area") -> Plot:
        """The area between two lines through [K] points."""
        across = self._across(x)
        there, back = np.stack([across, self._up(low)], 1), np.stack([across, self._up(high)], 1)
        self.marks.append(Mark("polygon", style, np.concatenate([there, back[::-1]])))
        return self

    def dots(self, x: ArrayLike, y: ArrayLike, radius: ArrayLike = 3.0, *, style: str = "dot") -> Plot:
        """A dot at each of [K] points, of one radius or of [K] radii in pixels."""
        across, up = self._across(x), self._up(y)
        for a, b, r in zip(across, up, np.broadcast_to(radius, across.shape), strict=True):
            self.marks.append(Mark("circle", style, np.array([[a, b]]), radius=float(r)))
        return self

    def text(self, x: float, y: float, words: str, *, anchor: str = "start") -> Plot:
        """Words at a point."""
        a, b = self._across([x])[0], self._up([y])[0]
        self.marks.append(Mark("text", "strong", np.array([[a, b]]), words=words, anchor=anchor))
        return self

    def bands(self, starts: Sequence[float], ends: Sequence[float], *, style: str = "truth") -> Plot:
        """Upright bands over the whole height, from each start to its end."""
        top, floor = self._up([self.y_range[1], self.y_range[0]])
        for a, b in zip(self._across(starts), self._across(ends), strict=True):
            self.marks.append(Mark("rect", style, np.array([[a, top], [a + max(b - a, 1.0), floor]])))
        return self

    def svg(self) -> str:
        """The plot as one `<svg>` element."""
        right, floor = self.width - 10, self.height - self.bottom
        parts = []
        for value, b in self.y_ticks():
            parts.append(f'<line class="grid" x1="{self.left}" y1="{b:.1f}" x2="{right}" y2="{b:.1f}"/>')
            parts.append(f'<text x="{self.left - 6}" y="{b + 4:.1f}" text-anchor="end">{value:g}</text>')
        for value, a in self.x_ticks():
            parts.append(f'<line class="grid" x1="{a:.1f}" y1="10" x2="{a:.1f}" y2="{floor}"/>')
            parts.append(f'<text x="{a:.1f}" y="{floor + 14}" text-anchor="middle">{value:g}</text>')
        middle = (self.left + right) / 2
        parts.append(
            f'<text x="{middle:.0f}" y="{self.height - 5}" text-anchor="middle">{escape(self.x_label)}</text>'
        )
        center = (10 + floor) / 2
        parts.append(
            f'<text transform="translate(11 {center:.0f}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_label)}</text>"
        )
        label, marks = escape(self.label, quote=True), "".join(mark.svg() for mark in self.marks)
        return (
            f'<svg class="plot" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{label}">'
            f"<title>{escape(self.label)}</title>{''.join(parts)}{marks}</svg>"
        )

    def x_ticks(self) -> list[tuple[float, float]]:
        """Round values and their pixels from the left."""
        return [(value, float(self._across([value])[0])) for value in _ticks(self.x_range)]

    def y_ticks(self) -> list[tuple[float, float]]:
        """Round values and their pixels from the top."""
        return [(value, float(self._up([value])[0])) for value in _ticks(self.y_range)]

    def _across(self, x: ArrayLike) -> NDArray[Any]:
        """Pixels from the left."""
        low, high = self.x_range
        share = (np.asarray(x, np.float64) - low) / max(high - low, 1e-12)
        return self.left + share * (self.width - 10 - self.left)

    def _up(self, y: ArrayLike) -> NDArray[Any]:
        """Pixels from the top."""
        low, high = self.y_range
        share = (np.asarray(y, np.float64) - low) / max(high - low, 1e-12)
        return (self.height - self.bottom) - share * (self.height - self.bottom - 10)


def _thin(spots: NDArray[Any]) -> NDArray[Any]:
    """Leave out points that lie within half a pixel of the one before, and NaN; keep both ends."""
    spots = spots[np.isfinite(spots).all(axis=1)]
    if len(spots) < 3:
        return spots if len(spots) else np.zeros((1, 2))
    cells = np.round(spots * 2)
    keep = np.append(True, (np.diff(cells, axis=0) != 0).any(axis=1))
    keep[-1] = True
    thinned: NDArray[Any] = spots[keep]
    return thinned


def _ticks(limits: Range) -> list[float]:
    """About five round values within the limits."""
    low, high = limits
    span = max(high - low, 1e-12)
    unit = 10.0 ** np.floor(np.log10(span / 4))
    step = unit * min((1, 2, 2.5, 5, 10), key=lambda factor: abs(span / (factor * unit) - 4.5))
    first, last = int(np.ceil(low / step - 1e-9)), int(np.floor(high / step + 1e-9))
    return [float(np.round(k * step, 10)) for k in range(first, last + 1)]
