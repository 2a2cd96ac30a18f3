"""What a reward card shows, and the rules by which it says whether the model can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from guerdon.core.errors import DataError
from guerdon.core.types import UInt8Array
from guerdon.data.datasets.audit import AuditReport
from guerdon.fit.metrics import LabelledScores
from guerdon.fit.threshold import Threshold, measure_threshold
from guerdon.monitoring.page import Level, Reason, grade, percent, worst_first
from guerdon.rewards.relabel import Calibration

Use: TypeAlias = Literal["continuous", "binary", "terminal", "ending episodes"]
"""`reward_type: continuous` or `binary` for every step, `reward_mode: terminal`, and `standalone`."""

GOOD_AUC, MIN_AUC = 0.99, 0.90
GOOD_TRUE_POSITIVE_RATE, MIN_TRUE_POSITIVE_RATE = 0.95, 0.1
"""Rare rewards slow learning down, but they are right: only a model that hardly ever fires is of no use."""
MAX_ECE = 0.05
MAX_EPISODE_FIRE_RATE = 0.05
"""A model may end episodes only if it fires wrongly in at most this share of them."""
MAX_FINAL_FIRE_RATE, MIN_FINAL_RATE = 0.2, 0.5
"""Of the last frames of episodes: failures that fire and successes that do, for terminal rewards."""
HEADLINES: dict[Level, str] = {"good": "Trust it for", "care": "Usable with care for", "bad": "Do not use it"}
REWARDS: tuple[Use, ...] = ("continuous", "binary", "terminal")


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
    data: str = ""
    """Path of the data set, as text; for the commands that the card proposes."""

    @cached_property
    def measured(self) -> Threshold | None:
        """What the threshold does on these frames; `threshold` says what was promised at calibration.

        None without failure frames.
        """
        confidence, target = self.threshold.confidence, self.threshold.target_false_positive_rate
        try:
            return measure_threshold(
                self.scores, self.threshold.threshold, target_fpr=target, confidence=confidence, seed=0
            )
        except DataError:
            return None


@dataclass(frozen=True, kw_only=True)
class UseVerdict:
    """Whether the model serves one kind of use, and why."""

    use: Use
    level: Level
    reason: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The card's first line, and why."""

    level: Level
    """`good` if it is so for all kinds of rewards, `bad` if it is for all of them."""
    headline: str
    reasons: tuple[Reason, ...]
    uses: tuple[UseVerdict, ...]

    def use(self, name: Use) -> UseVerdict:
        """The verdict on one use."""
        return next(each for each in self.uses if each.use == name)


def judge(inputs: CardInputs) -> Verdict:
    """Apply the rules: for each use the worst reason decides."""
    general = worst_first([*_data_reasons(inputs), *_audit_reasons(inputs.audit)])
    rules = {"continuous": _continuous, "binary": _binary, "terminal": _terminal}
    own: dict[Use, list[Reason]] = {name: rules[name](inputs) for name in REWARDS}
    own["ending episodes"] = [_ending(inputs.metrics)]
    uses = [_judged(name, reasons, general) for name, reasons in own.items()]
    levels = {each.level for each in uses if each.use in REWARDS}
    level: Level = next(iter(levels)) if len(levels) == 1 else "care"
    every = dict.fromkeys([*(reason for name in REWARDS for reason in own[name]), *general])  # each once
    reasons = tuple(worst_first(list(every)))
    return Verdict(level=level, headline=_headline(uses), reasons=reasons, uses=tuple(uses))


def _judged(name: Use, own: list[Reason], general: list[Reason]) -> UseVerdict:
    """The worst reason decides; a use that has nothing against it is explained by its own reasons."""
    reasons = worst_first([*own, *(reason for reason in general if reason[0] != "good")])
    level = reasons[0][0]
    because = " ".join(text for each, text in own) if level == own[0][0] == "good" else reasons[0][1]
    return UseVerdict(use=name, level=level, reason=because)


def _continuous(inputs: CardInputs) -> list[Reason]:
    """Continuous rewards need the right order of frames and probabilities that mean what they say."""
    auc, ece = inputs.metrics["auc"], inputs.metrics["ece"]
    if math.isnan(auc):
        return [("bad", "The held-out frames have one class only, so nothing is proven.")]
    level = grade(auc >= GOOD_AUC, auc >= MIN_AUC)
    reasons = [(level, f"It ranks a success frame above a failure frame in {auc:.2%} of pairs (AUC).")]
    if ece > MAX_ECE:
        reasons.append(("care", f"Its probabilities are off by {percent(ece)} on average."))
    return worst_first(reasons)


def _binary(inputs: CardInputs) -> list[Reason]:
    """Binary rewards need few false fires, and enough of the success frames."""
    metrics, threshold = inputs.metrics, inputs.threshold
    target, (low, high) = threshold.target_false_positive_rate, threshold.false_positive_interval
    tpr, fpr = metrics["true_positive_rate"], metrics["false_positive_rate"]
    reasons: list[Reason] = []
    if not math.isnan(fpr):
        level = grade(fpr <= high and high <= 2 * target, low <= target and fpr <= max(5 * target, high))
        text = f"{percent(fpr)} of failure frames fire wrongly; the target is {percent(target)}, and fresh "
        reasons.append((level, f"{text}episodes should show {percent(low)} to {percent(high)}."))
    if not math.isnan(tpr):
        level = grade(tpr >= GOOD_TRUE_POSITIVE_RATE, tpr >= MIN_TRUE_POSITIVE_RATE)
        effect = "" if level == "good" else ": rewards are rarer than successes"
        reasons.append((level, f"{percent(tpr)} of success frames fire{effect}."))
    if math.isnan(tpr) or math.isnan(fpr):
        return [("bad", "Nothing shows both how often it fires rightly and how often wrongly.")]
    return worst_first(reasons)


def _terminal(inputs: CardInputs) -> list[Reason]:
    """Terminal rewards are made of the last frame of each episode."""
    hits = inputs.metrics.get("final_true_positive_rate", math.nan)
    wrong = inputs.metrics.get("final_false_positive_rate", math.nan)
    if math.isnan(hits) or math.isnan(wrong):
        return [("bad", "No episode ends in success, or all do: nothing shows what it says of last frames.")]
    level = grade(
        hits >= GOOD_TRUE_POSITIVE_RATE and wrong <= MAX_EPISODE_FIRE_RATE,
        hits >= MIN_FINAL_RATE and wrong <= MAX_FINAL_FIRE_RATE,
    )
    text = f"Of the last frames, {percent(hits)} of the successes fire and {percent(wrong)} of the failures."
    return [(level, text)]


def _ending(metrics: Mapping[str, float]) -> Reason:
    """Whether the model may end episodes, from how many it would end wrongly."""
    rates = metrics["failure_episode_fire_rate"], metrics["early_fire_episode_rate"]
    if any(map(math.isnan, rates)):
        return "bad", "Nothing shows how many it would end wrongly."
    level: Level = "good" if max(rates) <= MAX_EPISODE_FIRE_RATE else "bad"
    return level, f"It fires too soon or wrongly in up to {percent(max(rates))} of the episodes."


def _data_reasons(inputs: CardInputs) -> list[Reason]:
    """What holds for every use: a card is worth as much as the episodes behind it."""
    if math.isnan(inputs.metrics["auc"]):
        return [("bad", "The held-out frames have one class only, so nothing is proven.")]
    threshold = inputs.threshold
    if threshold.caveat or not threshold.enough_data:
        return [("care", threshold.caveat or "There are too few episodes for the promised interval.")]
    return []


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


def _headline(uses: list[UseVerdict]) -> str:
    """What the model may be used for, in one line."""
    by_level: dict[Level, list[str]] = {"good": [], "care": [], "bad": []}
    ending = next(each for each in uses if each.use == "ending episodes")
    for each in uses:
        if each.use in REWARDS:
            by_level[each.level].append(each.use)
    if len(by_level["bad"]) == len(REWARDS):
        return f"{HEADLINES['bad']} as a reward."
    parts: list[str] = []
    for level, names in by_level.items():
        if not names:
            continue
        named = " and ".join(names) + " rewards"
        if len(names) == len(REWARDS):
            named = "rewards per step or at the end"
        start = "not for" if level == "bad" else HEADLINES[level]
        parts.append(f"{start if not parts else start[0].lower() + start[1:]} {named}")
    text = "; ".join(parts)
    if ending.level != "bad":
        return f"{text}, and for ending episodes."
    return f"{text}, not for ending episodes: {ending.reason[0].lower()}{ending.reason[1:]}"
