"""What to do next with a reward model, from what its card shows: each step with reason and command."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass

import numpy as np

from guerdon.core.types import IntArray
from guerdon.fit.metrics import better_recall, phases, round_up
from guerdon.monitoring.page import percent
from guerdon.monitoring.verdict import (
    GOOD_TRUE_POSITIVE_RATE,
    MAX_ECE,
    MIN_AUC,
    REWARDS,
    CardInputs,
    Verdict,
)
from guerdon.rewards.relabel import fires

WANTED_RECALL = 0.8
"""Of the threshold that is proposed where few success frames fire."""
SHOWN_EPISODES = 5
PHASES = ("before the first success", "from the first success on", "episodes without success")
"""Parts of the data in which false fires are counted."""


@dataclass(frozen=True, kw_only=True)
class NextStep:
    """One thing to do."""

    why: str
    """What was seen, and what helps."""
    command: str = ""
    """For a shell; empty where no command does it."""


def next_steps(inputs: CardInputs, verdict: Verdict) -> list[NextStep]:
    """What would help most, the cheapest first; how to use the model, if nothing is left to mend."""
    metrics = inputs.metrics
    steps: list[NextStep] = []
    audit = inputs.audit
    if audit is not None and any(finding.level != "info" for finding in audit.findings):
        steps.append(
            NextStep(why="Look at what the data audit found.", command=f"guerdon data audit {_data(inputs)}")
        )
    if math.isnan(metrics["auc"]):
        why = "Collect episodes of both kinds: without success frames and failure frames nothing is shown."
        return [*steps, NextStep(why=why, command=_collect(20, 20))]
    if metrics["auc"] < MIN_AUC:
        why = (
            "It often ranks failures above successes, which no threshold mends. Check that the camera shows "
            "the goal and that labels are right; fit to more episodes, or let it see motion (num_frames)."
        )
        command = "guerdon train-reward fit.data.path=DATA reward.model.num_frames=2"
        steps.append(NextStep(why=why, command=command))
    steps += _threshold_steps(inputs)
    wrong = _false_fires(inputs)
    if wrong is not None:
        steps.append(wrong)
    threshold = inputs.threshold
    if not threshold.enough_data:
        why = "The promise rests on few episodes. Collect more, and calibrate on them."
        steps.append(NextStep(why=why, command=_collect(50, 50)))
    return steps or [_use_it(inputs, verdict)]


def _threshold_steps(inputs: CardInputs) -> list[NextStep]:
    """Another threshold, or another calibration."""
    metrics, threshold = inputs.metrics, inputs.threshold
    tpr, fpr, target = (
        metrics["true_positive_rate"],
        metrics["false_positive_rate"],
        threshold.target_false_positive_rate,
    )
    command = (
        f"guerdon reward recalibrate --checkpoint {shlex.quote(inputs.checkpoint)} --data {_data(inputs)}"
    )
    if fpr > 2 * target:
        why = (
            f"{percent(fpr)} of the failure frames fire here, more than twice the target of "
            f"{percent(target)}. Raise the threshold until the target holds on these episodes."
        )
        return [NextStep(why=why, command=f"{command} --fpr {target:g}")]
    better = better_recall(inputs.scores, threshold.threshold, WANTED_RECALL)
    if tpr < GOOD_TRUE_POSITIVE_RATE and better is not None:
        why = (
            f"{percent(tpr)} of the success frames fire at {percent(fpr)} of false fires. At "
            f"{percent(better.false_positive_rate)} of false fires {percent(better.true_positive_rate)} do: "
            f"lower the threshold, for good or for one run (reward.reward_threshold={better.threshold:.7g})."
        )
        return [NextStep(why=why, command=f"{command} --fpr {round_up(better.false_positive_rate):g}")]
    if metrics["ece"] > MAX_ECE:
        why = f"Its probabilities are off by {percent(metrics['ece'])} here. Calibrate on these episodes."
        return [NextStep(why=why, command=command)]
    return []


def worst_episodes(inputs: CardInputs) -> IntArray:
    """The episodes with the most false fires, worst first -> int64 [at most 5]."""
    scores = inputs.scores
    wrong = fires(scores.prob_success, inputs.threshold.threshold) & ~scores.positive
    counts = scores.per_episode(wrong)
    order = np.argsort(-counts, kind="stable")[:SHOWN_EPISODES]
    return order[counts[order] > 0].astype(np.int64)


def _false_fires(inputs: CardInputs) -> NextStep | None:
    """More failures of the kind that fires, if too many do."""
    scores, threshold = inputs.scores, inputs.threshold
    limit = max(threshold.target_false_positive_rate, 0.005)
    few_hits = inputs.metrics["true_positive_rate"] < GOOD_TRUE_POSITIVE_RATE
    if inputs.metrics["false_positive_rate"] <= limit and not few_hits:
        return None
    wrong = fires(scores.prob_success, threshold.threshold) & ~scores.positive
    if not wrong.any():
        return None
    parts = {name: int((wrong & mask).sum()) for name, mask in phases(scores).items() if name in PHASES}
    place = max(parts, key=lambda name: parts[name])
    share = parts[place] / int(wrong.sum())
    where = place if place.startswith("episodes") else f"success episodes {place}"
    named = ", ".join(map(str, worst_episodes(inputs).tolist()))
    why = (
        f"{share:.0%} of the false fires are in {where}; most are in episode {named} (pictures below). "
        "Collect failures that look like these, label them, and fit again: that moves the whole curve up."
    )
    wanted = max(20, int((~scores.success).sum()))
    return NextStep(why=why, command=_collect(0, wanted))


def _use_it(inputs: CardInputs, verdict: Verdict) -> NextStep:
    best = next((name for name in REWARDS if verdict.use(name).level == "good"), REWARDS[0])
    setting = "reward_mode=terminal" if best == "terminal" else f"reward_type={best}"
    command = (
        "guerdon train reward.use_reward_model=true "
        f"reward.model.checkpoint_path={shlex.quote(inputs.checkpoint)} reward.{setting}"
    )
    return NextStep(why=f"Train with it; {best} rewards have the best evidence.", command=command)


def _collect(successes: int, failures: int) -> str:
    targets = f"collect.target_success={successes} collect.target_failure={failures}"
    return f"guerdon collect collect.save_dir=more {targets} seed=1"


def _data(inputs: CardInputs) -> str:
    return shlex.quote(inputs.data) if inputs.data else "DATA"
