"""The reward card: one HTML file that shows in a minute whether a reward model can be trusted.

It is self-contained: inline SVG, base64 PNG, no script, no request. All text is escaped.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.types import IntArray, UInt8Array
from guerdon.fit.metrics import (
    RATES,
    confusion,
    detection_delay,
    log_loss_per_frame,
    phases,
    trade_off,
)
from guerdon.monitoring.advice import next_steps
from guerdon.monitoring.curves import (
    episode_plot,
    episode_rows,
    has_both_classes,
    pr_plot,
    reliability_plot,
    roc_plot,
    trade_off_plot,
)
from guerdon.monitoring.page import (
    MARKS,
    document,
    figure,
    percent,
    plain,
    section,
    strip,
    table,
    tiles,
    verdict_box,
)
from guerdon.monitoring.verdict import CardInputs, Verdict, judge
from guerdon.rewards.relabel import fires

FRAMES_PER_EPISODE, WORST_FRAMES = 8, 8
STRIP_PIXELS, WORST_PIXELS = 96, 128
ONE_CLASS = "<p>There is one class only: no curve can be drawn.</p>"
WORDS = {"good": "Trust it", "care": "With care", "bad": "Not yet"}
TRADE_OFF_WORDS = (
    "Every threshold is a point of this curve; the red dot is the present one. The interval of a rate holds "
    "what these episodes show. The promise was made at calibration, for fresh episodes of the same kind: a "
    "rate outside it means that these episodes are of another kind."
)


def write_card(path: Path | str, inputs: CardInputs) -> Verdict:
    """Write the card to `path`, replacing an older one; return its verdict."""
    path = Path(path)
    verdict = judge(inputs)
    make_directory(path.parent)
    write_atomic(path, _page(inputs, verdict))
    return verdict


def _page(inputs: CardInputs, verdict: Verdict) -> str:
    sections = [
        verdict_box(verdict.level, verdict.headline, verdict.reasons),
        section("What it can be used for", _uses(verdict)),
        section("What to do next", _steps(inputs, verdict)),
        _key_numbers(inputs),
        section("Which threshold", _trade_off(inputs), TRADE_OFF_WORDS),
        section("How well it separates", _curves(inputs), "The red dot is where the threshold puts it."),
        section("Whether its probabilities are honest", _reliability(inputs)),
        section(
            "Probability over time",
            "".join(_episode(inputs, name, number) for name, number in sample_episodes(inputs)),
            "Shaded: the true label is success. Dashed: the threshold. A frame fires above it.",
        ),
        section("Worst false positives", _worst(inputs, positive=False), "Failure frames that fire."),
        section("Worst false negatives", _worst(inputs, positive=True), "Success frames that do not."),
        section("Errors by phase of the episode", _phase_table(inputs)),
        section("Speed", _speed(inputs)),
        section("Data", _data(inputs)),
        section("Contract", table(_flatten(inputs.contract)), "What the checkpoint expects of its input."),
    ]
    about = f'<p class="note">Reward card of <code>{escape(inputs.checkpoint)}</code></p>'
    return document(inputs.title, about, sections)


def _key_numbers(inputs: CardInputs) -> str:
    metrics, chosen, scores = inputs.metrics, inputs.threshold, inputs.scores
    here, name = inputs.measured or chosen, f"{chosen.confidence:.0%} interval"
    num_success, num_failure = int(scores.success.sum()), int((~scores.success).sum())
    delay_p90, missed = metrics["detection_delay_p90"], metrics["missed_episode_rate"]
    numbers = [
        ("AUC", plain(metrics["auc"], 4), f"average precision {plain(metrics['average_precision'], 4)}"),
        (
            "false positives",
            percent(metrics["false_positive_rate"]),
            f"{name} {_interval(here.false_positive_interval)}; promised "
            f"{_interval(chosen.false_positive_interval)}",
        ),
        (
            "true positives",
            percent(metrics["true_positive_rate"]),
            f"{name} {_interval(here.true_positive_interval)}; promised "
            f"{_interval(chosen.true_positive_interval)}",
        ),
        ("threshold", f"{chosen.threshold:.3g}", "a frame fires above it"),
        (
            "detection delay",
            f"{plain(metrics['detection_delay_median'])} steps",
            f"90% within {plain(delay_p90)}; {percent(missed)} of successes missed",
        ),
        (
            "false fires per episode",
            plain(metrics["false_fires_per_episode"], 2),
            f"in {percent(metrics['failure_episode_fire_rate'])} of failure episodes",
        ),
        ("calibration error", plain(metrics["ece"], 4), inputs.calibration.kind),
        (
            "held-out data",
            f"{num_success + num_failure} episodes",
            f"{num_success} successes, {num_failure} failures, {len(scores.labels)} frames",
        ),
    ]
    return tiles(numbers)


def _interval(ends: tuple[float, float]) -> str:
    return f"{percent(ends[0])} to {percent(ends[1])}"


def _uses(verdict: Verdict) -> str:
    return table(
        [(each.use, f"{MARKS[each.level]} {WORDS[each.level]}. {each.reason}") for each in verdict.uses]
    )


def _steps(inputs: CardInputs, verdict: Verdict) -> str:
    items = "".join(
        f"<li>{escape(step.why)}" + (f"<pre>{escape(step.command)}</pre>" if step.command else "") + "</li>"
        for step in next_steps(inputs, verdict)
    )
    return f"<ol>{items}</ol>"


def _trade_off(inputs: CardInputs) -> str:
    """Recall against false fires in the range that matters, and the thresholds that a target would give."""
    if not has_both_classes(inputs):
        return ONE_CLASS
    scores, now = inputs.scores, inputs.threshold.threshold
    here = confusion(scores.prob_success, scores.labels, now)
    rows = [("now", percent(here.false_positive_rate), percent(here.true_positive_rate), f"{now:.4g}")]
    rows += [
        (
            f"at most {percent(rate)}",
            percent(point.false_positive_rate),
            percent(point.true_positive_rate),
            f"{point.threshold:.4g}",
        )
        for rate in RATES
        for point in trade_off(scores, (rate,))
    ]
    names = ("target", "false fires", "recall", "threshold")
    return f'<div class="pair">{trade_off_plot(inputs).svg()}{table(rows, names)}</div>'


def _curves(inputs: CardInputs) -> str:
    if not has_both_classes(inputs):
        return ONE_CLASS
    return f'<div class="pair">{roc_plot(inputs).svg()}{pr_plot(inputs).svg()}</div>'


def _reliability(inputs: CardInputs) -> str:
    tried = [
        (f"log loss, {kind.replace('identity', 'as it comes')}", f"{loss:.4f}")
        for kind, loss in inputs.calibration.held_out_log_loss.items()
    ]
    kind = inputs.calibration.kind
    detail = f"{kind} {inputs.calibration.temperature:.3g}" if kind == "temperature" else kind
    rows = [("calibration", detail), *tried, ("expected calibration error", plain(inputs.metrics["ece"], 4))]
    words = "On the dashed line what it says is what happens. A larger dot stands for more frames."
    picture = reliability_plot(inputs).svg()
    return f'<div class="pair">{picture}<div><p class="note">{words}</p>{table(rows)}</div></div>'


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
    rows = episode_rows(inputs, number)
    shown = rows[np.unique(np.linspace(0, len(rows) - 1, FRAMES_PER_EPISODE).round().astype(np.int64))]
    plot = episode_plot(inputs, name, number, shown)
    kind = "success" if inputs.scores.success[number] else "failure"
    pictures = _pictures(inputs, shown, STRIP_PIXELS)
    return f"<h3>{escape(name)}: episode {number} ({kind})</h3>{plot.svg()}{pictures}"


def _worst(inputs: CardInputs, *, positive: bool) -> str:
    """The most mistaken frame of each episode, worst first."""
    scores = inputs.scores
    fired = fires(scores.prob_success, inputs.threshold.threshold)
    wrong = np.flatnonzero((scores.positive == positive) & (fired != positive))
    by_error = wrong[np.argsort(scores.prob_success[wrong] * (1 if positive else -1), kind="stable")]
    _, first = np.unique(scores.episode[by_error], return_index=True)  # one picture per episode
    rows = by_error[np.sort(first)][:WORST_FRAMES]
    if not len(rows):
        return "<p>None.</p>"
    count = f"{_count(len(wrong), 'frame')} in {_count(len(first), 'episode')}; the worst of each episode:"
    return f"<p class='note'>{count}</p>{_pictures(inputs, rows, WORST_PIXELS, episode=True)}"


def _pictures(inputs: CardInputs, rows: IntArray, pixels: int, *, episode: bool = False) -> str:
    """A captioned picture of each of the frames; its border tells the label."""
    scores, parts = inputs.scores, []
    for row in rows.tolist():
        number, step, prob = int(scores.episode[row]), int(scores.step[row]), float(scores.prob_success[row])
        truth = "success" if scores.positive[row] else "failure"
        place = f"episode {number}, step {step}"
        shown = "&lt;0.001" if 0 < prob < 0.001 else f"{prob:.3f}"
        caption = f"<b>{shown}</b> {place if episode else f'step {step}'}"
        picture = _png(inputs.frame(number, step), pixels)
        parts.append(figure(picture, "png", f"{place}, {truth}", caption, truth))
    return strip(parts)


def _png(frame: UInt8Array, pixels: int) -> bytes:
    """A frame, no larger than `pixels`."""
    picture = Image.fromarray(np.repeat(frame, 3, axis=-1) if frame.shape[-1] == 1 else np.asarray(frame))
    picture.thumbnail((pixels, pixels))
    file = io.BytesIO()
    picture.save(file, format="PNG", optimize=True)
    return file.getvalue()


def _phase_table(inputs: CardInputs) -> str:
    scores, limit = inputs.scores, inputs.threshold.threshold
    names = ("phase", "frames", "hits", "misses", "false fires", "rightly silent", "true pos.", "false pos.")
    rows = []
    for name, mask in phases(scores).items():
        counts = confusion(scores.prob_success[mask], scores.labels[mask], limit)
        numbers = (counts.true_positive, counts.false_negative, counts.false_positive, counts.true_negative)
        rates = percent(counts.true_positive_rate), percent(counts.false_positive_rate)
        rows.append((name, str(int(mask.sum())), *map(str, numbers), *rates))
    return table(rows, names)


def _speed(inputs: CardInputs) -> str:
    rows = [(name.replace("_", " "), plain(value)) for name, value in inputs.speed.items()]
    return table(rows) if rows else "<p>Not measured.</p>"


def _data(inputs: CardInputs) -> str:
    rows = [("data hash", inputs.data_hash or "unknown")]
    if inputs.audit is None:
        return table([*rows, ("audit", "not run")])
    rows += [("audited", f"{inputs.audit.path}: {inputs.audit.num_episodes} episodes")]
    rows += [
        (f"{finding.level}: {finding.check}", " · ".join((finding.message, *finding.examples[:3])))
        for finding in inputs.audit.findings[:20]
    ]
    return table(rows)


def _flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as rows with dotted names; of long lists only the length is given."""
    rows = []
    for name, item in value.items():
        if isinstance(item, Mapping):
            rows += _flatten(item, f"{prefix}{name}.")
        elif isinstance(item, (list, tuple)) and len(item) > 8:
            rows.append((f"{prefix}{name}", f"{len(item)} values"))
        else:
            rows.append((f"{prefix}{name}", str(item)))
    return rows


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
