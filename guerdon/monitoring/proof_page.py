"""`prove.html`: success over env steps for a run and its controls, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from guerdon.monitoring.page import document, section, table, tiles, verdict_box, video
from guerdon.monitoring.proof import ARMS, Proof, shown, wilson
from guerdon.monitoring.svg import Plot

WORDS = {
    "start": "before reinforcement learning",
    "learned": "the learned reward",
    "off": "every learned reward zero",
    "shuffled": "verdicts permuted among the steps of each batch",
    "true": "the environment's own success as the reward",
}
STYLE = """
svg.plot .arm { fill: none; stroke: var(--key); stroke-width: 2.2; stroke-linejoin: round; }
svg.plot .band { fill: var(--key); opacity: .14; stroke: none; }
.arm-start { --key: var(--muted); } .arm-learned { --key: var(--accent); } .arm-off { --key: var(--bad); }
.arm-shuffled { --key: var(--care); } .arm-true { --key: var(--good); }
svg.plot .arm.arm-start { stroke-dasharray: 5 4; }
.films { display: flex; gap: 18px; } .films figure { margin: 0; }
.key span { display: inline-block; margin-right: 14px; }
.key span::before { content: ""; display: inline-block; width: 14px; height: 3px; margin-right: 5px;
  vertical-align: middle; background: var(--key); }
"""


def proof_page(proof: Proof, title: str, header: str = "", films: Mapping[str, str] | None = None) -> str:
    """The page as HTML.

    Args:
        proof: what it shows.
        title: of the page.
        header: HTML under the title.
        films: arm -> the film of an episode, the same one in all arms, as an address relative to the page.
    """
    unit = "by the environment, 95% interval"
    numbers = [
        (name, shown(arm["mean"], proof.measure), f"{_interval(arm, proof)} · {len(arm['seeds'])} seed(s)")
        for name, arm in proof.arms.items()
    ]
    rows = [
        (
            f"{name}, seed {result['seed']}",
            f"{shown(_value(result, proof.measure), proof.measure)} of {result['episodes']}",
            f"{result['env_steps']:,}",
            f"{result['seconds']:.0f}",
        )
        for name, arm in proof.arms.items()
        for result in arm["seeds"]
    ]
    return document(
        title,
        header,
        [
            verdict_box(proof.level, proof.verdict, proof.reasons),
            tiles(numbers),
            section(f"{proof.measure.capitalize()} over env steps", arms_plot(proof), f"Measured {unit}."),
            *_films(films or {}),
            section("Every run", table(rows, ("", proof.measure, "env steps", "seconds"))),
        ],
        STYLE,
    )


def _films(films: Mapping[str, str]) -> list[str]:
    if not films:
        return []
    captions = {name: f"<figcaption>{name}: {escape(WORDS[name])}</figcaption>" for name in films}
    shown = {
        name: video(place, name) if place.endswith(".mp4") else f'<img src="{escape(place)}" alt="{name}">'
        for name, place in films.items()
    }
    pictures = "".join(f"<figure>{film}{captions[name]}</figure>" for name, film in shown.items())
    note = "The curve is the learned probability of success, the bar below it the environment's own success."
    return [section("The same episode before and after", f'<div class="films">{pictures}</div>', note)]


def arms_plot(proof: Proof, width: int = 800, height: int = 280) -> str:
    """Curves of all arms with their bands, and a key."""
    curves = {name: _curve(arm, proof) for name, arm in proof.arms.items() if name != "start"}
    points = [point for curve in curves.values() for point in curve]
    last = max((point[0] for point in points), default=1.0)
    highest = max([point[3] for point in points] + [arm["high"] for arm in proof.arms.values()], default=1.0)
    lowest = min([point[2] for point in points] + [arm["low"] for arm in proof.arms.values()], default=0.0)
    span = (0.0, 1.0) if proof.measure == "success" else (min(lowest, 0.0), max(highest, 1e-9))
    plot = Plot(
        label=f"{proof.measure} over env steps for every arm",
        x_label="env steps",
        y_label=proof.measure,
        x_range=(0.0, 1.03 * max(last, 1.0)),
        y_range=span,
        width=width,
        height=height,
        left=56,
    )
    if "start" in proof.arms:
        mean = proof.arms["start"]["mean"]
        plot.curve([0.0, last], [mean, mean], style="arm arm-start")
    for name, curve in curves.items():
        steps, means, lows, highs = (list(column) for column in zip(*curve, strict=True))
        plot.area(steps, lows, highs, style=f"band arm-{name}")
        plot.curve(steps, means, style=f"arm arm-{name}")
    named = [name for name in ARMS if name in proof.arms]
    words = "".join(f'<span class="arm-{name}">{name}: {escape(WORDS[name])}</span>' for name in named)
    note = "Bands reach from the lowest seed to the highest; of one seed they are its 95% interval."
    return f'{plot.svg()}<p class="key note">{words}</p><p class="note">{note}</p>'


def _curve(arm: dict[str, Any], proof: Proof) -> list[tuple[float, float, float, float]]:
    """(env steps, mean, low, high) at the evaluations that all seeds had, from the start on."""
    seeds = arm["seeds"]
    found: dict[float, list[float]] = {}
    for result in seeds:
        for step, value in result["curve"]:
            found.setdefault(float(step), []).append(float(value))
    points = []
    if "start" in proof.arms:
        start = proof.arms["start"]
        values = [_value(result, proof.measure) for result in start["seeds"]]
        points.append((0.0, start["mean"], min(values), max(values)))
    for step in sorted(found):
        values = found[step]
        if len(values) < len(seeds):
            continue
        low, high = min(values), max(values)
        if len(seeds) == 1 and proof.measure == "success":
            low, high = wilson(values[0] * seeds[0]["episodes"], seeds[0]["episodes"])
        points.append((step, sum(values) / len(values), low, high))
    return points or [(0.0, arm["mean"], arm["low"], arm["high"])]


def _value(result: dict[str, Any], measure: str) -> float:
    return float(result["env_return"] if measure == "return" else result["success"])


def _interval(arm: dict[str, Any], proof: Proof) -> str:
    return f"{shown(arm['low'], proof.measure)} to {shown(arm['high'], proof.measure)}"
