"""What a reward card shows, and the rules by which it says whether the model can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from guerdon.core.types import UInt8Array
from guerdon.data.datasets.audit import AuditReport
from guerdon.fit.calibrate import Threshold
from guerdon.fit.metrics import LabelledScores
from guerdon.monitoring.page import Level, grade, percent, worst_first
from guerdon.rewards.relabel import Calibration

GOOD_AUC, MIN_AUC = 0.99, 0.90
GOOD_TRUE_POSITIVE_RATE, MIN_TRUE_POSITIVE_RATE = 0.95, 0.5
MAX_ECE = 0.05
MAX_EPISODE_FIRE_RATE = 0.05
"""A model may end episodes only if it fires wrongly in at most this share of them."""
HEADLINES = {"good": "Trust it for", "care": "Usable with care for", "bad": "Do not use it"}


@dataclass(frozen=True, kw_only=True)
class CardInputs:
    """Everything that a card shows."""

    title: str
    checkpoint: str
    """Path of the checkpoint, as text."""
    scores: LabelledScores
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
        level = grade(auc >= GOOD_AUC, auc >= MIN_AUC)
        reasons.append(
            (level, f"It ranks a success frame above a failure frame in {auc:.2%} of pairs (AUC).")
        )
    if not math.isnan(fpr):
        level = grade(fpr <= high and high <= 2 * target, low <= target and fpr <= max(5 * target, high))
        text = f"{percent(fpr)} of failure frames fire wrongly; the target is {percent(target)}, and fresh "
        reasons.append((level, f"{text}episodes should show {percent(low)} to {percent(high)}."))
    if not math.isnan(tpr):
        level = grade(tpr >= GOOD_TRUE_POSITIVE_RATE, tpr >= MIN_TRUE_POSITIVE_RATE)
        reasons.append((level, f"{percent(tpr)} of success frames fire."))
    if ece > MAX_ECE:
        reasons.append(("care", f"Its probabilities are off by {percent(ece)} on average."))
    if threshold.caveat or not threshold.enough_data:
        reasons.append(("care", threshold.caveat or "There are too few episodes for the promised interval."))
    reasons += _audit_reasons(inputs.audit)
    reasons = worst_first(reasons)
    level = reasons[0][0]
    return Verdict(level=level, headline=f"{HEADLINES[level]} {_use(metrics, level)}", reasons=tuple(reasons))


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
    why = f"it fires too soon or wrongly in up to {percent(max(rates))} of them"
    if any(map(math.isnan, rates)):
        why = "nothing shows how many it would end wrongly"
    return f"rewards per step or at the end, not for ending episodes: {why}."
