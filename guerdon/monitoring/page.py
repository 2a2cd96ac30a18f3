"""The HTML that the reward card and the report of a run have in common. All text is escaped here."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal, TypeAlias

from guerdon.monitoring.svg import PLOT_STYLE

Level: TypeAlias = Literal["good", "care", "bad"]
Reason: TypeAlias = tuple[Level, str]
MARKS = {"good": "✓", "care": "!", "bad": "✗"}
_ORDER: dict[Level, int] = {"bad": 0, "care": 1, "good": 2}

PAGE_STYLE = """
:root { color-scheme: light dark; --page: #f4f5f7; --card: #fff; --ink: #1c2128; --muted: #5c6670;
  --line: #e3e6ea; --accent: #2563c9; --good: #1a7f37; --care: #9a6700; --bad: #c0262d; }
@media (prefers-color-scheme: dark) { :root { --page: #0f1216; --card: #191e24; --ink: #e6e9ed;
  --muted: #98a2ad; --line: #2c333b; --accent: #6aa2ff; --good: #3fb950; --care: #d9a526; --bad: #ff6b6b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 860px; margin: 0 auto; padding: 16px; }
h1 { font-size: 24px; margin: 8px 0 0; } h2 { font-size: 17px; margin: 0 0 8px; }
h3 { font-size: 14px; margin: 18px 0 4px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px;
  margin: 14px 0; }
.note { color: var(--muted); font-size: 13px; margin: 0 0 8px; overflow-wrap: anywhere; }
#verdict { border: 2px solid var(--tone); background: color-mix(in srgb, var(--tone) 10%, var(--card)); }
#verdict h2 { font-size: 20px; line-height: 1.35; color: var(--tone); }
#verdict ul { list-style: none; margin: 0; padding: 0; }
#verdict li { padding: 3px 0 3px 26px; position: relative; }
#verdict li b { color: var(--tone); position: absolute; left: 4px; }
.good { --tone: var(--good); } .care { --tone: var(--care); } .bad { --tone: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 14px; }
.tile .note { margin: 0; font-size: 12px; } .big { font-size: 21px; font-weight: 650; line-height: 1.3; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(270px, 1fr)); gap: 16px;
  align-items: center; }
pre { margin: 4px 0 10px; padding: 6px 8px; background: var(--page); border-radius: 6px; font-size: 12px;
  white-space: pre-wrap; overflow-wrap: anywhere; } ol { margin: 0; padding-left: 20px; }
.strip { display: grid; grid-template-columns: repeat(8, 1fr); gap: 6px; margin-top: 6px; }
figure { margin: 0; font-size: 11px; line-height: 1.3; color: var(--muted); }
figure img { width: 100%; display: block; border-radius: 4px; border: 3px solid var(--tone); }
figure b { color: var(--ink); } figure.success { --tone: var(--good); } figure.failure { --tone: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { font-weight: 500; color: var(--muted); } .facts th { width: 34%; min-width: 120px; }
.facts td { overflow-wrap: anywhere; } .wide td { text-align: right; }
.wide tr:first-child th + th { text-align: right; }
@media (max-width: 560px) { .strip { grid-template-columns: repeat(4, 1fr); } main { padding: 8px; }
  .tiles { grid-template-columns: 1fr 1fr; } section { padding: 12px; } }
"""
"""Colours, light and dark, and the layout of a page."""


def document(title: str, header: str, sections: Iterable[str], style: str = "") -> str:
    """A whole page; `header` (HTML) stands under its title."""
    name = escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{PAGE_STYLE}{PLOT_STYLE}{style}</style></head><body><main>"
        f"<header><h1>{name}</h1>{header}</header>{''.join(sections)}</main></body></html>\n"
    )


def section(heading: str, body: str, intro: str = "") -> str:
    """A box with a heading; `body` is HTML."""
    words = f'<p class="note">{escape(intro)}</p>' if intro else ""
    return f"<section><h2>{escape(heading)}</h2>{words}{body}</section>"


def verdict_box(level: Level, headline: str, reasons: Iterable[Reason]) -> str:
    """The first box of a page: what to think of it all, and why."""
    items = "".join(
        f'<li class="{each}"><b aria-hidden="true">{MARKS[each]}</b> {escape(text)}</li>'
        for each, text in reasons
    )
    return f'<section id="verdict" class="{level}"><h2>{escape(headline)}</h2><ul>{items}</ul></section>'


def tiles(values: Iterable[tuple[str, str, str]]) -> str:
    """Key numbers: (name, value, a few words more) each."""
    cells = "".join(
        f'<div class="tile"><div class="note">{escape(name)}</div><div class="big">{escape(value)}</div>'
        f'<div class="note">{escape(more)}</div></div>'
        for name, value, more in values
    )
    return f'<section id="numbers" class="tiles">{cells}</section>'


def table(rows: Iterable[tuple[str, ...]], names: tuple[str, ...] = ()) -> str:
    """Rows of cells, the first of which names the row; plain facts need no `names` of columns."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    kind, first_row = ("wide", f"<tr>{head}</tr>") if names else ("facts", "")
    return f'<div class="scroll"><table class="{kind}">{first_row}{body}</table></div>'


def figure(picture: bytes, kind: str, alt: str, caption: str = "", style: str = "") -> str:
    """A picture in a format such as `png`, inside the page; `caption` is HTML."""
    source = f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
    words = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f'<figure class="{style}"><img alt="{escape(alt)}" src="{source}">{words}</figure>'


def film(content: bytes, kind: str, alt: str, caption: str = "") -> str:
    """A film inside the page: `gif`, or `mp4`, which begins by itself and repeats; `caption` is HTML."""
    if kind == "gif":
        return figure(content, kind, alt, caption)
    source = f"data:video/{kind};base64,{base64.b64encode(content).decode()}"
    return f"<figure>{video(source, alt)}<figcaption>{caption}</figcaption></figure>"


def video(source: str, alt: str) -> str:
    """A film of an address, as it plays in pages: without sound, again and again."""
    name, place = escape(alt), escape(source)
    return f'<video autoplay loop muted playsinline controls aria-label="{name}" src="{place}"></video>'


def strip(figures: Iterable[str]) -> str:
    """Small pictures side by side."""
    return f'<div class="strip">{"".join(figures)}</div>'


def fold(words: str, body: str) -> str:
    """HTML that is shown when its words are clicked."""
    return f"<details><summary>{escape(words)}</summary>{body}</details>"


def percent(value: float) -> str:
    """A share for people; `n/a` where it is not known."""
    return "n/a" if math.isnan(value) else f"{100 * value:.3g}%"


def plain(value: float, digits: int | None = None) -> str:
    """A number for people; `n/a` where it is not known."""
    if not math.isfinite(value):
        return "n/a"
    return f"{value:,.4g}" if digits is None else f"{value:.{digits}f}"


def grade(good: bool, usable: bool) -> Level:
    """From two limits to a level."""
    return "good" if good else "care" if usable else "bad"


def worst_first(reasons: Sequence[Reason]) -> list[Reason]:
    """In the order of what they mean: the first decides."""
    return sorted(reasons, key=lambda reason: _ORDER[reason[0]])
