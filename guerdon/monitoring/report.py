"""The report of a run: one HTML file that says whether a policy learned the task or to please its reward.

It is made from what the run left in its folder and holds all it shows; only the reward card is linked. What
is missing is left out, and a line says so. All text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from guerdon.core.atomic import storage_errors, write_atomic
from guerdon.core.errors import DataError
from guerdon.core.types import display_path
from guerdon.monitoring.alarm_check import as_words
from guerdon.monitoring.alarms import ALARMS
from guerdon.monitoring.films import film_values
from guerdon.monitoring.page import (
    Level,
    Reason,
    document,
    figure,
    film,
    fold,
    grade,
    percent,
    plain,
    section,
    strip,
    table,
    tiles,
    verdict_box,
    worst_first,
)
from guerdon.monitoring.run_files import Run, is_number, read_run
from guerdon.monitoring.svg import Plot

GOOD_AGREEMENT, MIN_AGREEMENT = 0.95, 0.8
"""Share of frames on which the reward model and the environment must agree at the end."""
GOOD_GAP, MAX_GAP = 0.1, 0.3
"""Share of episodes at the end that the model calls a success and the environment does not."""
MAX_VIDEOS, MAX_VIDEO_BYTES = 4, 4_000_000
REWARD_CURVES = {
    "rollout/rewards": ("training", "training reward"),
    "rollout/env_rewards": ("env", "env reward"),
    "rollout/learned_rewards": ("learned", "learned reward"),
}
SUCCESS_CURVES = {
    "env/success_once": ("env", "env success, once in an episode"),
    "env/success_at_end": ("at-end", "env success, at the end"),
    "eval/success_once": ("evaluated", "evaluation, once in an episode"),
    "reward/fire_rate": ("learned", "share of frames that fire"),
}
REPORT_STYLE = """
svg.plot .training, svg.plot .env, svg.plot .learned, svg.plot .at-end, svg.plot .evaluated {
  fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.training { stroke: var(--accent); --key: var(--accent); } .env { stroke: var(--good); --key: var(--good); }
.learned { stroke: var(--care); --key: var(--care); } .evaluated { stroke: var(--ink); --key: var(--ink); }
.at-end { stroke: var(--good); --key: var(--good); stroke-dasharray: 5 4; }
svg.plot .alarm { fill: var(--bad); } span.alarm { --key: var(--bad); }
.key span { display: inline-block; margin-right: 14px; }
.key span::before { content: ""; display: inline-block; width: 14px; height: 3px; margin-right: 5px;
  vertical-align: middle; background: var(--key); }
.key span.at-end::before { width: 5px; box-shadow: 9px 0 var(--key); margin-right: 14px; }
.films { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px; }
.films img, .films video, .strip img { image-rendering: pixelated; }
.films video { width: 100%; display: block; border-radius: 4px; }
#monitor svg { max-width: 400px; }
pre { overflow-x: auto; font-size: 12px; } summary { cursor: pointer; } a { color: var(--accent); }
"""

HEADLINES = {
    "good": "Learned success agrees with that of the environment, and no alarm was raised",
    "care": "Look closer before you trust this run",
    "bad": "Do not trust this run: the policy may please the reward model instead of solving the task",
}


def write_report(folder: Path | str) -> Path:
    """Write `report.html` into a run's folder, replacing an older one; returns its path."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{display_path(folder)} is no folder of a run")
    write_atomic(folder / "report.html", _page(read_run(folder)))
    return folder / "report.html"


def judge_run(run: Run) -> tuple[Level, list[Reason]]:
    """Whether learned success is real success, and why: the worst reason decides."""
    reasons: list[Reason] = []
    agreement = run.end("reward/agreement")
    learned = any(name.startswith("reward/") for name in run.series)
    if not run.series:
        reasons.append(("care", "The run left no metrics, so nothing can be said."))
    elif not learned:
        reasons.append(("care", "No learned reward was measured; the curves show the environment's alone."))
    elif math.isnan(agreement):
        reasons.append(("care", "The environment does not tell success: fires may be right or wrong."))
    else:
        words = f"At the end model and environment agree on {agreement:.1%} of the frames."
        reasons.append((grade(agreement >= GOOD_AGREEMENT, agreement >= MIN_AGREEMENT), words))
    gap = run.end("monitor/success_gap")
    if not math.isnan(gap):
        words = f"The model alone calls {gap:.1%} of the last episodes a success."
        reasons.append((grade(gap <= GOOD_GAP, gap <= MAX_GAP), words))
    if run.alarms:
        on = run.last("monitor/alarms_on")
        names = ", ".join(sorted({as_words(alarm.name) for alarm in run.alarms}))
        over = on == 0
        text = f"{len(run.alarms)} alarm(s): {names}{'; all of them ended' if over else ''}."
        reasons.append(("care" if over else "bad", text))
    elif any(name.startswith("monitor/") for name in run.series):
        reasons.append(("good", "No alarm was raised."))
    elif learned:
        reasons.append(("care", "The run was not monitored for reward hacking."))
    if run.summary.get("stopped"):
        reasons.append(("care", f"The run was stopped early: {run.summary['stopped']}."))
    reasons = worst_first(reasons)
    return (reasons[0][0] if reasons else "care"), reasons


def _page(run: Run) -> str:
    level, reasons = judge_run(run)
    card = run.folder / "card.html"
    link = '<p><a href="card.html">The card of its reward model</a></p>' if card.is_file() else ""
    if not link:
        run.notes.append("There is no reward card (card.html) beside the report.")
    sections = [
        verdict_box(level, HEADLINES[level], reasons),
        _tiles(run),
        section("Rewards", _plot(run, "Rewards over the run", REWARD_CURVES, "mean per step")),
        section("Success", _plot(run, "Success over the run", SUCCESS_CURVES, "share", (0.0, 1.0))),
        section("Alarms", _alarms(run)),
        section("What the monitor saw", _monitor(run)),
        section("Sample episodes", _films(run)),
        section("Time", _times(run)),
        section("All metrics", fold("Last value of each", _last_values(run))),
        section(
            "Settings", fold("config.yaml", f"<pre>{escape(run.config)}</pre>") if run.config else _none()
        ),
    ]
    if run.notes:
        lines = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
        sections.append(section("Left out", f'<ul class="note">{lines}</ul>'))
    return document(f"Run {run.folder.resolve().name}", link, sections, REPORT_STYLE)


def _tiles(run: Run) -> str:
    evaluated = run.last("eval/success_once")
    values = [
        ("env success, evaluated", percent(evaluated), "by the environment, never by the model"),
        ("env success, training", percent(run.end("env/success_once")), "at the end of the run"),
        ("agreement", percent(run.end("reward/agreement")), "frames that model and env judge alike"),
        ("alarms", str(len(run.alarms)), "of the monitor"),
        ("env steps", f"{run.last_step:,.0f}", str(run.summary.get("algorithm", ""))),
    ]
    return tiles(values)


def _plot(
    run: Run,
    label: str,
    curves: Mapping[str, tuple[str, str]],
    y_label: str,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Curves over env steps with a key; alarms are upright lines."""
    there = [name for name in curves if name in run.series]
    missing = [f"{words} ({name})" for name, (_, words) in curves.items() if name not in run.series]
    absent = f'<p class="note">Not measured: {escape(", ".join(missing))}.</p>' if missing else ""
    if not there:
        return absent
    plot = Plot(
        label=label,
        x_label="env steps",
        y_label=y_label,
        x_range=run.x_range,
        y_range=y_range or _span([run.series[name][1] for name in there]),
        width=800,
        height=260,
        left=56,
    )
    at = [float(alarm.step) for alarm in run.alarms]
    plot.bands(at, at, style="alarm")
    for name in there:
        steps, values = run.series[name]
        if len(steps) == 1:
            plot.dots(steps, values, 4)
        plot.curve(steps, values, style=curves[name][0])
    keys = [curves[name] for name in there] + ([("alarm", "alarm")] if at else [])
    words = "".join(f'<span class="{style}">{escape(text)}</span>' for style, text in keys)
    return f'{plot.svg()}<p class="key note">{words}</p>{absent}'


def _alarms(run: Run) -> str:
    if not run.alarms:
        watched = any(name.startswith("monitor/") for name in run.series)
        return "<p>None.</p>" if watched else "<p>The run was not monitored.</p>"
    parts = []
    for alarm in run.alarms:
        name, value, limit = escape(as_words(alarm.name)), plain(alarm.value), plain(alarm.limit)
        pictures = [_picture(run, path) for path in alarm.frames]
        parts.append(
            f"<h3>{name} at step {alarm.step:,}: {value}, limit {limit}</h3>"
            f'<p class="note">{escape(alarm.remedy)}</p>'
            + (strip(pictures) if pictures else '<p class="note">No frames.</p>')
        )
    return "".join(parts)


def _picture(run: Run, path: Path) -> str:
    """A saved frame as a figure; only files inside the run's folder are looked at."""
    place = (run.folder / path).resolve()
    if not place.is_relative_to(run.folder.resolve()) or place.suffix != ".png" or not place.is_file():
        run.notes.append(f"The frame {path} is not in the run's folder.")
        return ""
    return figure(_content(place), "png", "offending frame", style="failure")


def _monitor(run: Run) -> str:
    """One small plot for each signal."""
    looks_at = {alarm.name: alarm.looks_at for alarm in ALARMS}
    names = [name for name in run.series if name.startswith("monitor/") and "alarms" not in name]
    plots = []
    for name in names:
        steps, values = run.series[name]
        signal = name.removeprefix("monitor/")
        plot = Plot(
            label=": ".join(filter(None, (as_words(signal), looks_at.get(signal)))),
            x_label="env steps",
            y_label=as_words(signal),
            x_range=run.x_range,
            y_range=_span([values]),
            width=380,
            height=180,
            left=50,
        )
        limits = {float(alarm.limit) for alarm in run.alarms if alarm.name == signal}
        for limit in limits:
            plot.curve(plot.x_range, [limit, limit], style="limit")
        plots.append(plot.curve(steps, values).dots(steps[-1:], values[-1:]).svg())
    return f'<div class="pair" id="monitor">{"".join(plots)}</div>' if plots else _none()


def _films(run: Run) -> str:
    parts = []
    for path in run.videos[:MAX_VIDEOS]:
        if path.stat().st_size > MAX_VIDEO_BYTES:
            run.notes.append(f"videos/{path.name} is too large to be shown here.")
            continue
        name = path.stem.replace("_", " ")
        parts.append(film(_content(path), path.suffix[1:], name, escape(name)))
    if len(run.videos) > MAX_VIDEOS:
        run.notes.append(f"{len(run.videos) - MAX_VIDEOS} more episodes are in videos/.")
    curve = "the learned probability; dashed, the threshold"
    if _shows_rewards(run):
        curve = "the learned reward, between its lowest and its highest value"
    words = f"Below each frame: {curve}; green, env success."
    return f'<p class="note">{words}</p><div class="films">{"".join(parts)}</div>' if parts else _none()


def _shows_rewards(run: Run) -> bool:
    """Whether the curves in the films are rewards, as those of a reward function are."""
    try:
        values = film_values(run.videos[0]) if run.videos else None
    except DataError as error:
        run.notes.append(str(error))
        return False
    return "learned_reward" in (values or {})


def _times(run: Run) -> str:
    rows = [
        (name.removeprefix("time/").replace("_", " "), plain(values.mean()), plain(values[-1]))
        for name, (_, values) in run.series.items()
        if name.startswith("time/")
    ]
    if is_number(run.summary.get("seconds")):
        rows.append(("whole run, seconds", "", plain(run.summary["seconds"])))
    return table(rows, ("", "mean", "last")) if rows else _none()


def _last_values(run: Run) -> str:
    rows = [(name, plain(values[-1]), f"{len(steps):,}") for name, (steps, values) in run.series.items()]
    return table(rows, ("metric", "last", "points")) if rows else _none()


def _none() -> str:
    return '<p class="note">Not there.</p>'


def _span(values: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """A range that holds all values and zero, with some air."""
    low, high = min(0.0, *(v.min() for v in values)), max(0.0, *(v.max() for v in values))
    air = 0.05 * max(high - low, 1e-9)
    return float(low - air * (low < 0)), float(high + air)


def _content(path: Path) -> bytes:
    with storage_errors(path):
        return path.read_bytes()
