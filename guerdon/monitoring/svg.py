"""Small plots as inline SVG: no scripts, no fonts, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

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
    _marks: list[str] = field(default_factory=list)

    def curve(self, x: ArrayLike, y: ArrayLike, *, style: str = "curve", fill: bool = False) -> Plot:
        """A line through [K] points; points that fall on one spot are drawn once."""
        spots = _thin(np.stack([self._across(x), self._up(y)], axis=1))
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
        if fill:
            floor = self.height - self.bottom
            area = f"{spots[0, 0]:.1f},{floor} {path} {spots[-1, 0]:.1f},{floor}"
            self._marks.append(f'<polygon class="area" points="{area}"/>')
        self._marks.append(f'<polyline class="{style}" points="{path}"/>')
        return self

    def area(self, x: ArrayLike, low: ArrayLike, high: ArrayLike, *, style: str = "area") -> Plot:
        """The area between two lines through [K] points."""
        across = self._across(x)
        there, back = zip(across, self._up(low), strict=True), zip(across, self._up(high), strict=True)
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*there, *reversed(list(back))])
        self._marks.append(f'<polygon class="{style}" points="{path}"/>')
        return self

    def dots(self, x: ArrayLike, y: ArrayLike, radius: ArrayLike = 3.0, *, style: str = "dot") -> Plot:
        """A dot at each of [K] points, of one radius or of [K] radii in pixels."""
        across, up = self._across(x), self._up(y)
        for a, b, r in zip(across, up, np.broadcast_to(radius, across.shape), strict=True):
            self._marks.append(f'<circle class="{style}" cx="{a:.1f}" cy="{b:.1f}" r="{r:.1f}"/>')
        return self

    def text(self, x: float, y: float, words: str, *, anchor: str = "start") -> Plot:
        """Words at a point."""
        a, b = self._across([x])[0], self._up([y])[0]
        self._marks.append(
            f'<text class="strong" x="{a:.1f}" y="{b:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
        )
        return self

    def bands(self, starts: Sequence[float], ends: Sequence[float], *, style: str = "truth") -> Plot:
        """Upright bands over the whole height, from each start to its end."""
        top, floor = self._up([self.y_range[1], self.y_range[0]])
        for a, b in zip(self._across(starts), self._across(ends), strict=True):
            self._marks.append(
                f'<rect class="{style}" x="{a:.1f}" y="{top:.1f}" '
                f'width="{max(b - a, 1.0):.1f}" height="{floor - top:.1f}"/>'
            )
        return self

    def svg(self) -> str:
        """The plot as one `<svg>` element."""
        right, floor = self.width - 10, self.height - self.bottom
        parts = []
        for value in _ticks(self.y_range):
            b = self._up([value])[0]
            parts.append(f'<line class="grid" x1="{self.left}" y1="{b:.1f}" x2="{right}" y2="{b:.1f}"/>')
            parts.append(f'<text x="{self.left - 6}" y="{b + 4:.1f}" text-anchor="end">{value:g}</text>')
        for value in _ticks(self.x_range):
            a = self._across([value])[0]
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
        label = escape(self.label, quote=True)
        return (
            f'<svg class="plot" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{label}">'
            f"<title>{escape(self.label)}</title>{''.join(parts + self._marks)}</svg>"
        )

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
