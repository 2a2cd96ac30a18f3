"""The reward card's verdict, numbers and curves for the model card of a shared model."""

from __future__ import annotations

import tempfile
from pathlib import Path

from guerdon.core.types import display_path
from guerdon.fit.score import score_path
from guerdon.monitoring.assess import card_inputs
from guerdon.monitoring.card import sample_episodes
from guerdon.monitoring.curves import (
    episode_plot,
    has_both_classes,
    pr_plot,
    reliability_plot,
    roc_plot,
    trade_off_plot,
)
from guerdon.monitoring.page import percent, plain
from guerdon.monitoring.png import plot_png
from guerdon.monitoring.svg import Plot
from guerdon.monitoring.verdict import CardInputs, judge
from guerdon.rewards.image.model_card import Evidence
from guerdon.rewards.image.scorer import RewardManager


def evidence_on(manager: RewardManager, data: Path | str) -> Evidence:
    """What the reward card shows of a model on labelled episodes, at its calibrated threshold."""
    with tempfile.TemporaryDirectory() as copy:
        scored = score_path(manager, Path(data), Path(copy))
        return evidence_of(card_inputs(manager, scored, Path(data)))


def evidence_of(inputs: CardInputs) -> Evidence:
    """The same of scored episodes."""
    verdict, scores = judge(inputs), inputs.scores
    failures = int((~scores.success).sum())
    return Evidence(
        level=verdict.level,
        headline=verdict.headline,
        reasons=verdict.reasons,
        uses=tuple((each.use, each.level, each.reason) for each in verdict.uses),
        numbers=tuple(_numbers(inputs)),
        data=(
            f"{display_path(inputs.data)}: {len(scores.success) - failures} successes and {failures} "
            f"failures, {len(scores.labels)} frames (hash {inputs.data_hash})"
        ),
        pictures={f"card_{name}.png": (words, plot_png(plot)) for name, words, plot in _plots(inputs)},
    )


def _numbers(inputs: CardInputs) -> list[tuple[str, str]]:
    metrics, here = inputs.metrics, inputs.measured or inputs.threshold
    rates = {
        "failure frames that fire": ("false_positive_rate", here.false_positive_interval),
        "success frames that fire": ("true_positive_rate", here.true_positive_interval),
    }
    return [
        ("AUC", plain(metrics["auc"], 4)),
        ("average precision", plain(metrics["average_precision"], 4)),
        *(
            (words, f"{percent(metrics[key])} ({here.confidence:.0%}: {percent(low)} to {percent(high)})")
            for words, (key, (low, high)) in rates.items()
        ),
        ("threshold of these rates", f"{inputs.threshold.threshold:.4g}"),
        ("calibration error", plain(metrics["ece"], 4)),
        ("detection delay, median", f"{plain(metrics['detection_delay_median'])} steps"),
        ("false fires per episode", plain(metrics["false_fires_per_episode"], 2)),
        ("failure episodes with a false fire", percent(metrics["failure_episode_fire_rate"])),
    ]


def _plots(inputs: CardInputs) -> list[tuple[str, str, Plot]]:
    """File name, words and plot."""
    plots = [("reliability", "Probability it says against successes seen", reliability_plot(inputs))]
    if has_both_classes(inputs):
        plots = [
            ("threshold", "Trade-off of the threshold (red: the present one)", trade_off_plot(inputs)),
            ("roc", "True against false positives", roc_plot(inputs)),
            ("precision_recall", "Precision and recall", pr_plot(inputs)),
            *plots,
        ]
    for number, (name, episode) in enumerate(sample_episodes(inputs)[:2], 1):
        words = f"{name}: probability over time (shaded: success; dashed: the threshold)"
        plots.append((f"episode_{number}", words, episode_plot(inputs, name, episode)))
    return plots
