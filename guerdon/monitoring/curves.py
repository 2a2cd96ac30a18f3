"""The curves of the reward card, as plots; a page draws them as SVG, a model card as PNG."""

from __future__ import annotations

import math

import numpy as np

from guerdon.core.types import IntArray
from guerdon.fit.metrics import confusion, pr_curve, reliability, roc_curve, trade_off
from guerdon.monitoring.page import plain
from guerdon.monitoring.svg import Plot
from guerdon.monitoring.verdict import CardInputs


def has_both_classes(inputs: CardInputs) -> bool:
    """Whether there are success and failure frames: with one of them alone no curve can be drawn."""
    here = confusion(inputs.scores.prob_success, inputs.scores.labels, inputs.threshold.threshold)
    return not (math.isnan(here.true_positive_rate) or math.isnan(here.false_positive_rate))


def trade_off_plot(inputs: CardInputs) -> Plot:
    """Recall against false fires in the range that matters; needs both classes."""
    scores = inputs.scores
    here = confusion(scores.prob_success, scores.labels, inputs.threshold.threshold)
    points = trade_off(scores)
    curve = roc_curve(scores.prob_success, scores.labels)
    end = min(1.0, max(0.1, 1.5 * here.false_positive_rate))
    shown = curve.x <= end
    plot = Plot(
        label="Trade-off of the threshold",
        x_label="false-fire rate",
        y_label="recall of success frames",
        x_range=(0.0, end),
    )
    plot.curve(curve.x[shown], curve.y[shown]).dots(
        [point.false_positive_rate for point in points], [point.true_positive_rate for point in points]
    )
    return plot.dots([here.false_positive_rate], [here.true_positive_rate], 5, style="point")


def roc_plot(inputs: CardInputs) -> Plot:
    """True against false positives; needs both classes."""
    prob, labels = inputs.scores.prob_success, inputs.scores.labels
    point, roc = confusion(prob, labels, inputs.threshold.threshold), roc_curve(prob, labels)
    plot = Plot(label="ROC curve", x_label="false-positive rate", y_label="true-positive rate")
    plot.curve([0, 1], [0, 1], style="guide").curve(roc.x, roc.y, fill=True).dots(
        [point.false_positive_rate], [point.true_positive_rate], 5, style="point"
    )
    return plot.text(0.97, 0.06, f"AUC {plain(inputs.metrics['auc'], 4)}", anchor="end")


def pr_plot(inputs: CardInputs) -> Plot:
    """Precision against recall; needs both classes."""
    prob, labels = inputs.scores.prob_success, inputs.scores.labels
    point, pr = confusion(prob, labels, inputs.threshold.threshold), pr_curve(prob, labels)
    plot = Plot(label="Precision-recall curve", x_label="recall", y_label="precision")
    plot.curve(pr.x, pr.y, fill=True)
    if not math.isnan(point.precision):
        plot.dots([point.true_positive_rate], [point.precision], 5, style="point")
    return plot.text(0.03, 0.06, f"AP {plain(inputs.metrics['average_precision'], 4)}")


def reliability_plot(inputs: CardInputs) -> Plot:
    """The share of successes against the probability that was given."""
    said = reliability(inputs.scores.prob_success, inputs.scores.labels, bins=10)
    plot = Plot(label="Reliability diagram", x_label="probability it says", y_label="share of successes seen")
    radius = 3 + 5 * np.sqrt(said.num_frames / said.num_frames.max())
    plot.curve([0, 1], [0, 1], style="guide").curve(said.prob, said.share)
    return plot.dots(said.prob, said.share, radius)


def episode_rows(inputs: CardInputs, number: int) -> IntArray:
    """The frames of an episode in the order of their steps, as rows of the scores."""
    rows: IntArray = inputs.scores.order[inputs.scores.episode[inputs.scores.order] == number]
    return rows


def episode_plot(inputs: CardInputs, name: str, number: int, marked: IntArray | None = None) -> Plot:
    """Probability over the steps of an episode; `marked` are rows that get a dot."""
    scores, rows = inputs.scores, episode_rows(inputs, number)
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
    plot.bands((step[edges[::2]] - 0.5).tolist(), (step[edges[1::2] - 1] + 0.5).tolist())
    plot.curve(plot.x_range, [limit, limit], style="limit").curve(step, prob)
    if marked is not None:
        plot.dots(scores.step[marked], scores.prob_success[marked], 3.5)
    return plot
