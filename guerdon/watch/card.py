"""The reward card: one HTML file that shows in a minute whether a reward model can be trusted.

It is self-contained: inline SVG, base64 PNG, no script, no request. All text is escaped.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from guerdon.datasets import AuditReport
from guerdon.fit.calibrate import Calibration
from guerdon.fit.metrics import (
    Scores,
    confusion,
    detection_delay,
    log_loss_per_frame,
    phases,
    pr_curve,
    reliability,
    roc_curve,
)
from guerdon.fit.threshold import Threshold
from guerdon.store.atomic import make_directory, write_atomic
from guerdon.types import IntArray, UInt8Array
from guerdon.watch.svg import PAGE_STYLE, PLOT_STYLE, Plot

GOOD_AUC, MIN_AUC = 0.99, 0.90
GOOD_TRUE_POSITIVE_RATE, MIN_TRUE_POSITIVE_RATE = 0.95, 0.5
MAX_ECE = 0.05
MAX_EPISODE_FIRE_RATE = 0.05
"""A model may end episodes only if it fires wrongly in at most this share of them."""
FRAMES_PER_EPISODE, WORST_FRAMES = 8, 8
STRIP_PIXELS, WORST_PIXELS = 96, 128

Level = Literal["good", "care", "bad"]
HEADLINES = {"good": "Trust it for", "care": "Usable with care for", "bad": "Do not use it"}
MARKS = {"good": "✓", "care": "!", "bad": "✗"}


@dataclass(frozen=True, kw_only=True)
class CardInputs:
    """Everything that a card shows."""

    title: str
    checkpoint: str
    """Path of the checkpoint, as text."""
    scores: Scores
    """Held-out frames with calibrated probabilities; best of episodes that calibration has not seen either,
    else the calibration error looks smaller than it is."""
    threshold: Threshold
    calibration: Calibration
    metrics: Mapping[str, float]
    """From `guerdon.fit.metrics.summarize` of the same scores and threshold."""
    frame: Callable[[int, int], UInt8Array]
    """(episode, step) as in `scores` -> uint8 [H, W, 3]."""
    contract: Mapping[str, Any] = field(default_factory=dict)
    audit: AuditReport | None = None
    data_hash: str = ""
    speed: Mapping[str, float] = field(default_factory=dict)
    """Latency and throughput: a name that carries its unit -> value."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The card's first line, and why."""

    level: Level
    headline: str
    reasons: tuple[tuple[Level, str], ...]


def judge(inputs: CardInputs) -> Verdict:
    """Apply the rules: the worst reason decides."""
    metrics, threshold = inputs.metrics, inputs.threshold
    target, (low, high) = threshold.target_false_positive_rate, threshold.false_positive_interval
    auc, ece = metrics["auc"], metrics["ece"]
    tpr, fpr = metrics["true_positive_rate"], metrics["false_positive_rate"]
    reasons: list[tuple[Level, str]] = []
    if math.isnan(auc):
        reasons.append(("bad", "The held-out frames have one class only, so nothing is proven."))
    else:
        level = _grade(auc >= GOOD_AUC, auc >= MIN_AUC)
        reasons.append(
            (level, f"It ranks a success frame above a failure frame in {auc:.2%} of pairs (AUC).")
        )
    if not math.isnan(fpr):
        level = _grade(fpr <= high and high <= 2 * target, low <= target and fpr <= max(5 * target, high))
        text = f"{_percent(fpr)} of failure frames fire wrongly; the target is {_percent(target)}, and fresh "
        reasons.append((level, f"{text}episodes should show {_percent(low)} to {_percent(high)}."))
    if not math.isnan(tpr):
        level = _grade(tpr >= GOOD_TRUE_POSITIVE_RATE, tpr >= MIN_TRUE_POSITIVE_RATE)
        reasons.append((level, f"{_percent(tpr)} of success frames fire."))
    if ece > MAX_ECE:
        reasons.append(("care", f"Its probabilities are off by {_percent(ece)} on average."))
    if threshold.caveat or not threshold.enough_data:
        reasons.append(("care", threshold.caveat or "There are too few episodes for the promised interval."))
    reasons += _audit_reasons(inputs.audit)
    order: dict[Level, int] = {"bad": 0, "care": 1, "good": 2}
    reasons.sort(key=lambda reason: order[reason[0]])
    level = reasons[0][0]
    return Verdict(level=level, headline=f"{HEADLINES[level]} {_use(metrics, level)}", reasons=tuple(reasons))


def write_card(path: Path | str, inputs: CardInputs) -> Verdict:
    """Write the card to `path`, replacing an older one; return its verdict."""
    path = Path(path)
    verdict = judge(inputs)
    page = _page(inputs, verdict).encode()
    make_directory(path.parent)
    write_atomic(path, lambda file: file.write(page))
    return verdict


def _grade(good: bool, usable: bool) -> Level:
    return "good" if good else "care" if usable else "bad"


def _audit_reasons(audit: AuditReport | None) -> list[tuple[Level, str]]:
    if audit is None:
        return [("care", "The data were not audited.")]
    errors = [finding.message for finding in audit.findings if finding.level == "error"]
    warnings = [finding.message for finding in audit.findings if finding.level == "warning"]
    if errors:
        return [("bad", f"The data audit found {len(errors)} error(s), the first: {errors[0]}")]
    if warnings:
        return [("care", f"The data audit has {len(warnings)} warning(s), the first: {warnings[0]}")]
    return [("good", "The data audit found nothing wrong.")]


def _use(metrics: Mapping[str, float], level: Level) -> str:
    """What the model may be used for, from how many episodes it would end wrongly."""
    if level == "bad":
        return "as a reward."
    rates = metrics["failure_episode_fire_rate"], metrics["early_fire_episode_rate"]
    if max(rates) <= MAX_EPISODE_FIRE_RATE and not any(map(math.isnan, rates)):
        return "rewards per step or at the end, and for ending episodes."
    why = f"it fires too soon or wrongly in up to {_percent(max(rates))} of them"
    if any(map(math.isnan, rates)):
        why = "nothing shows how many it would end wrongly"
    return f"rewards per step or at the end, not for ending episodes: {why}."


def _page(inputs: CardInputs, verdict: Verdict) -> str:
    sections = [
        _verdict_box(verdict),
        _key_numbers(inputs),
        _section("How well it separates", _curves(inputs), "The red dot is where the threshold puts it."),
        _section("Whether its probabilities are honest", _reliability(inputs)),
        _section(
            "Probability over time",
            "".join(_episode(inputs, name, number) for name, number in sample_episodes(inputs)),
            "Shaded: the true label is success. Dashed: the threshold. A frame fires above it.",
        ),
        _section("Worst false positives", _worst(inputs, positive=False), "Failure frames that fire."),
        _section("Worst false negatives", _worst(inputs, positive=True), "Success frames that do not."),
        _section("Errors by phase of the episode", _phase_table(inputs)),
        _section("Speed", _speed(inputs)),
        _section("Data", _data(inputs)),
        _section("Contract", _table(_flatten(inputs.contract)), "What the checkpoint expects of its input."),
    ]
    title = escape(inputs.title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{PAGE_STYLE}{PLOT_STYLE}</style></head><body><main><header><h1>{title}</h1>"
        f'<p class="note">Reward card of <code>{escape(inputs.checkpoint)}</code></p></header>'
        f"{''.join(sections)}</main></body></html>\n"
    )


def _section(heading: str, body: str, intro: str = "") -> str:
    words = f'<p class="note">{escape(intro)}</p>' if intro else ""
    return f"<section><h2>{escape(heading)}</h2>{words}{body}</section>"


def _verdict_box(verdict: Verdict) -> str:
    reasons = "".join(
        f'<li class="{level}"><b aria-hidden="true">{MARKS[level]}</b> {escape(text)}</li>'
        for level, text in verdict.reasons
    )
    return (
        f'<section id="verdict" class="{verdict.level}"><h2>{escape(verdict.headline)}</h2>'
        f"<ul>{reasons}</ul></section>"
    )


def _key_numbers(inputs: CardInputs) -> str:
    metrics, chosen = inputs.metrics, inputs.threshold
    false_low, false_high = map(_percent, chosen.false_positive_interval)
    true_low, true_high = map(_percent, chosen.true_positive_interval)
    scores = inputs.scores
    num_success, num_failure = int(scores.success.sum()), int((~scores.success).sum())
    delay_p90, missed = metrics["detection_delay_p90"], metrics["missed_episode_rate"]
    tiles = [
        ("AUC", _plain(metrics["auc"], 4), f"average precision {_plain(metrics['average_precision'], 4)}"),
        (
            "false positives",
            _percent(metrics["false_positive_rate"]),
            f"{chosen.confidence:.0%} interval {false_low} to {false_high}",
        ),
        (
            "true positives",
            _percent(metrics["true_positive_rate"]),
            f"{chosen.confidence:.0%} interval {true_low} to {true_high}",
        ),
        ("threshold", f"{chosen.threshold:.3g}", "a frame fires above it"),
        (
            "detection delay",
            f"{_plain(metrics['detection_delay_median'])} steps",
            f"90% within {_plain(delay_p90)}; {_percent(missed)} of successes missed",
        ),
        (
            "false fires per episode",
            _plain(metrics["false_fires_per_episode"], 2),
            f"in {_percent(metrics['failure_episode_fire_rate'])} of failure episodes",
        ),
        ("calibration error", _plain(metrics["ece"], 4), inputs.calibration.kind),
        (
            "held-out data",
            f"{num_success + num_failure} episodes",
            f"{num_success} successes, {num_failure} failures, {len(scores.labels)} frames",
        ),
    ]
    cells = "".join(
        f'<div class="tile"><div class="note">{escape(name)}</div><div class="big">{escape(value)}</div>'
        f'<div class="note">{escape(more)}</div></div>'
        for name, value, more in tiles
    )
    return f'<section id="numbers" class="tiles">{cells}</section>'


def _curves(inputs: CardInputs) -> str:
    prob, labels = inputs.scores.prob_success, inputs.scores.labels
    point = confusion(prob, labels, inputs.threshold.threshold)
    tpr, fpr, precision = point.true_positive_rate, point.false_positive_rate, point.precision
    if math.isnan(tpr) or math.isnan(fpr):
        return "<p>There is one class only: no curve can be drawn.</p>"
    roc, pr = roc_curve(prob, labels), pr_curve(prob, labels)
    left = Plot(label="ROC curve", x_label="false-positive rate", y_label="true-positive rate")
    left.curve([0, 1], [0, 1], style="guide").curve(roc.x, roc.y, fill=True).dots(
        [fpr], [tpr], 5, style="point"
    )
    left.text(0.97, 0.06, f"AUC {_plain(inputs.metrics['auc'], 4)}", anchor="end")
    right = Plot(label="Precision-recall curve", x_label="recall", y_label="precision")
    right.curve(pr.x, pr.y, fill=True)
    if not math.isnan(precision):
        right.dots([tpr], [precision], 5, style="point")
    right.text(0.03, 0.06, f"AP {_plain(inputs.metrics['average_precision'], 4)}")
    return f'<div class="pair">{left.svg()}{right.svg()}</div>'


def _reliability(inputs: CardInputs) -> str:
    said = reliability(inputs.scores.prob_success, inputs.scores.labels, bins=10)
    plot = Plot(label="Reliability diagram", x_label="probability it says", y_label="share of successes seen")
    radius = 3 + 5 * np.sqrt(said.num_frames / said.num_frames.max())
    plot.curve([0, 1], [0, 1], style="guide").curve(said.prob, said.share).dots(said.prob, said.share, radius)
    tried = [
        (f"log loss, {kind.replace('identity', 'as it comes')}", f"{loss:.4f}")
        for kind, loss in inputs.calibration.held_out_log_loss.items()
    ]
    kind = inputs.calibration.kind
    detail = f"{kind} {inputs.calibration.temperature:.3g}" if kind == "temperature" else kind
    rows = [("calibration", detail), *tried, ("expected calibration error", _plain(inputs.metrics["ece"], 4))]
    words = "On the dashed line what it says is what happens. A larger dot stands for more frames."
    return f'<div class="pair">{plot.svg()}<div><p class="note">{words}</p>{_table(rows)}</div></div>'


def sample_episodes(inputs: CardInputs) -> list[tuple[str, int]]:
    """A typical success, a typical failure, and the episodes that go worst: name and number, each once."""
    scores = inputs.scores
    loss = log_loss_per_frame(scores.prob_success, scores.labels)
    frames = scores.per_episode(np.ones(len(loss), np.bool_))
    mean_loss = np.bincount(scores.episode, loss, scores.num_episodes) / np.maximum(frames, 1)
    there = frames > 0
    successes, failures = np.flatnonzero(scores.success & there), np.flatnonzero(~scores.success & there)
    chosen: dict[int, str] = {}
    if len(successes):
        delay = detection_delay(scores, inputs.threshold.threshold)[there[scores.success]]
        off = np.abs(np.nan_to_num(delay - inputs.metrics["detection_delay_median"], nan=np.inf))
        chosen.setdefault(int(successes[np.argmin(off)]), "A typical success")
    if len(failures):
        middle = np.argsort(mean_loss[failures])[len(failures) // 2]
        chosen.setdefault(int(failures[middle]), "A typical failure")
    for name, numbers in (("The worst success", successes), ("The worst failure", failures)):
        if len(numbers):
            chosen.setdefault(int(numbers[np.argmax(mean_loss[numbers])]), name)
    return [(name, number) for number, name in chosen.items()]


def _episode(inputs: CardInputs, name: str, number: int) -> str:
    scores = inputs.scores
    rows = scores.order[scores.episode[scores.order] == number]
    step, prob = scores.step[rows], scores.prob_success[rows]
    positive, limit = scores.positive[rows], inputs.threshold.threshold
    plot = Plot(
        label=f"{name}: episode {number}",
        x_label="step",
        y_label="probability",
        x_range=(float(step[0]) - 0.5, float(step[-1]) + 0.5),
        width=640,
        height=180,
    )
    edges = np.flatnonzero(np.diff(np.concatenate([[False], positive, [False]])))
    plot.bands(step[edges[::2]] - 0.5, step[edges[1::2] - 1] + 0.5)
    plot.curve(plot.x_range, [limit, limit], style="limit").curve(step, prob)
    shown = np.unique(np.linspace(0, len(rows) - 1, FRAMES_PER_EPISODE).round().astype(np.int64))
    plot.dots(step[shown], prob[shown], 3.5)
    strip = _pictures(inputs, rows[shown], STRIP_PIXELS)
    kind = "success" if scores.success[number] else "failure"
    return f"<h3>{escape(name)}: episode {number} ({kind})</h3>{plot.svg()}<div class='strip'>{strip}</div>"


def _worst(inputs: CardInputs, *, positive: bool) -> str:
    """The most mistaken frame of each episode, worst first."""
    scores = inputs.scores
    fires = scores.prob_success > inputs.threshold.threshold
    wrong = np.flatnonzero((scores.positive == positive) & (fires != positive))
    by_error = wrong[np.argsort(scores.prob_success[wrong] * (1 if positive else -1), kind="stable")]
    _, first = np.unique(scores.episode[by_error], return_index=True)  # one picture per episode
    rows = by_error[np.sort(first)][:WORST_FRAMES]
    if not len(rows):
        return "<p>None.</p>"
    count = f"{_count(len(wrong), 'frame')} in {_count(len(first), 'episode')}; the worst of each episode:"
    pictures = _pictures(inputs, rows, WORST_PIXELS, episode=True)
    return f"<p class='note'>{count}</p><div class='strip'>{pictures}</div>"


def _pictures(inputs: CardInputs, rows: IntArray, pixels: int, *, episode: bool = False) -> str:
    """A captioned picture of each of the frames; its border tells the label."""
    scores, parts = inputs.scores, []
    for row in rows.tolist():
        number, step = int(scores.episode[row]), int(scores.step[row])
        truth = "success" if scores.positive[row] else "failure"
        name = f"episode {number}, step {step}" if episode else f"step {step}"
        parts.append(
            f'<figure class="{truth}"><img alt="episode {number}, step {step}, {truth}" '
            f'src="{_png(inputs.frame(number, step), pixels)}">'
            f"<figcaption><b>{escape(_short(float(scores.prob_success[row])))}</b> {name}</figcaption>"
            "</figure>"
        )
    return "".join(parts)


def _png(frame: UInt8Array, pixels: int) -> str:
    """A frame, no larger than `pixels`, as a data URL."""
    picture = Image.fromarray(np.repeat(frame, 3, axis=-1) if frame.shape[-1] == 1 else np.asarray(frame))
    picture.thumbnail((pixels, pixels))
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _phase_table(inputs: CardInputs) -> str:
    scores, limit = inputs.scores, inputs.threshold.threshold
    names = ("phase", "frames", "hits", "misses", "false fires", "rightly silent", "true pos.", "false pos.")
    rows = []
    for name, mask in phases(scores).items():
        counts = confusion(scores.prob_success[mask], scores.labels[mask], limit)
        numbers = (counts.true_positive, counts.false_negative, counts.false_positive, counts.true_negative)
        rates = _percent(counts.true_positive_rate), _percent(counts.false_positive_rate)
        rows.append((name, str(int(mask.sum())), *map(str, numbers), *rates))
    return _table(rows, names)


def _speed(inputs: CardInputs) -> str:
    rows = [(name.replace("_", " "), _plain(value)) for name, value in inputs.speed.items()]
    return _table(rows) if rows else "<p>Not measured.</p>"


def _data(inputs: CardInputs) -> str:
    rows = [("data hash", inputs.data_hash or "unknown")]
    if inputs.audit is None:
        return _table([*rows, ("audit", "not run")])
    rows += [("audited", f"{inputs.audit.path}: {inputs.audit.num_episodes} episodes")]
    rows += [
        (f"{finding.level}: {finding.check}", " · ".join((finding.message, *finding.examples[:3])))
        for finding in inputs.audit.findings[:20]
    ]
    return _table(rows)


def _flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as rows with dotted names; long lists are told by their length."""
    rows = []
    for name, item in value.items():
        if isinstance(item, Mapping):
            rows += _flatten(item, f"{prefix}{name}.")
        elif isinstance(item, (list, tuple)) and len(item) > 8:
            rows.append((f"{prefix}{name}", f"{len(item)} values"))
        else:
            rows.append((f"{prefix}{name}", str(item)))
    return rows


def _table(rows: Iterable[tuple[str, ...]], names: tuple[str, ...] = ()) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><th>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    )
    kind = "wide" if names else "facts"
    return (
        f'<div class="scroll"><table class="{kind}">{f"<tr>{head}</tr>" if head else ""}{body}</table></div>'
    )


def _percent(value: float) -> str:
    return "n/a" if math.isnan(value) else f"{100 * value:.3g}%"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _short(prob: float) -> str:
    """A probability in the space of a caption."""
    return "<0.001" if 0 < prob < 0.001 else f"{prob:.3f}"


def _plain(value: float, digits: int | None = None) -> str:
    if math.isnan(value):
        return "n/a"
    return f"{value:,.4g}" if digits is None else f"{value:.{digits}f}"
