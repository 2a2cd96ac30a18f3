"""The metrics agree with their definitions, also with ties, one class and frames in any order."""

import math

import numpy as np
import pytest

from guerdon.core.errors import DataError
from guerdon.fit import metrics
from guerdon.fit.metrics import LabelledScores


def scores_of(episodes, success=None, shuffle=None):
    """LabelledScores from a list of (probabilities, labels) per episode."""
    prob = np.concatenate([np.asarray(p, np.float32) for p, _ in episodes])
    labels = np.concatenate([np.asarray(y, np.float32) for _, y in episodes])
    lengths = [len(p) for p, _ in episodes]
    episode = np.repeat(np.arange(len(episodes)), lengths)
    step = np.concatenate([np.arange(n) for n in lengths])
    if success is None:
        success = [max(y) >= 0.5 for _, y in episodes]
    rows = np.arange(len(prob)) if shuffle is None else np.random.default_rng(shuffle).permutation(len(prob))
    return LabelledScores(
        prob_success=prob[rows],
        labels=labels[rows],
        episode=episode[rows].astype(np.int64),
        step=step[rows].astype(np.int64),
        success=np.array(success, np.bool_),
    )


@pytest.fixture
def tied():
    """Frames with many equal probabilities."""
    rng = np.random.default_rng(0)
    labels = (rng.random(300) < 0.3).astype(np.float32)
    prob = np.round(np.clip(0.4 * labels + rng.normal(0.3, 0.2, 300), 0, 1), 1).astype(np.float32)
    return prob, labels


def test_auc_counts_pairs_and_halves_ties(tied):
    prob, labels = tied
    high, low = prob[labels == 1][:, None], prob[labels == 0][None]
    assert metrics.auc(prob, labels) == pytest.approx(np.mean((high > low) + 0.5 * (high == low)))
    assert metrics.auc([0.1, 0.9], [0, 1]) == 1.0
    assert metrics.auc([0.5, 0.5, 0.5], [0, 1, 1]) == 0.5


def test_curves_are_what_confusion_gives_at_their_thresholds(tied):
    prob, labels = tied
    roc, pr = metrics.roc_curve(prob, labels), metrics.pr_curve(prob, labels)
    assert len(roc.x) == len(np.unique(prob)) + 1
    for i, threshold in enumerate(roc.thresholds):
        counts = metrics.confusion(prob, labels, threshold)
        assert roc.x[i] == pytest.approx(counts.false_positive_rate)
        assert roc.y[i] == pytest.approx(counts.true_positive_rate)
        assert pr.x[i] == pytest.approx(counts.true_positive_rate)
        assert pr.y[i] == pytest.approx(1.0 if i == 0 else counts.precision)
    assert (roc.x[0], roc.y[0], roc.x[-1], roc.y[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(roc.y, roc.x) == pytest.approx(metrics.auc(prob, labels))


def test_average_precision_is_the_mean_precision_at_the_successes():
    prob, labels = [0.9, 0.8, 0.7, 0.6, 0.5], [1, 0, 1, 0, 1]
    assert metrics.average_precision(prob, labels) == pytest.approx((1 + 2 / 3 + 3 / 5) / 3)


def test_log_loss_and_accuracy_by_hand():
    assert metrics.log_loss([0.5, 0.25], [1, 0]) == pytest.approx(-(math.log(0.5) + math.log(0.75)) / 2)
    assert metrics.log_loss([0.0], [1]) == pytest.approx(-math.log(metrics.PROB_FLOOR))
    assert metrics.accuracy([0.5, 0.51, 0.1], [1, 1, 0]) == pytest.approx(2 / 3)  # 0.5 does not exceed 0.5


def test_ece_is_zero_for_honest_and_large_for_boastful_probabilities():
    rng = np.random.default_rng(1)
    prob = rng.random(200_000)
    honest = (rng.random(200_000) < prob).astype(np.float32)
    assert metrics.ece(prob, honest) < 0.01
    assert metrics.ece(np.where(prob > 0.5, 1.0, 0.0), honest) == pytest.approx(0.25, abs=0.01)
    said = metrics.reliability(prob, honest, bins=10)
    assert said.num_frames.sum() == 200_000
    np.testing.assert_allclose(said.prob, np.arange(0.05, 1, 0.1), atol=0.01)
    np.testing.assert_allclose(said.share, said.prob, atol=0.02)
    assert len(metrics.reliability([0.05, 1.0], [0, 1], bins=10).prob) == 2  # empty bins are left out


@pytest.mark.parametrize("shuffle", [None, 3])
def test_episode_numbers_by_hand(shuffle):
    scores = scores_of(
        [
            ([0.9, 0.1, 0.9, 0.2, 0.8], [0, 0, 0, 1, 1]),  # two early runs, then one step late
            ([0.1, 0.1, 0.7], [0, 1, 0]),  # fires after the success is lost: late by one, and false
            ([0.1, 0.2], [0, 1]),  # missed
            ([0.9, 0.9, 0.1, 0.9], [0, 0, 0, 0]),  # a failure with two runs
            ([0.9, 0.1], [0, 0]),  # counted as a success, but without a positive frame
        ],
        success=[True, True, True, False, True],
        shuffle=shuffle,
    )
    np.testing.assert_array_equal(metrics.detection_delay(scores, 0.5), [1, 1, np.nan, np.nan])
    np.testing.assert_array_equal(metrics.early_fires(scores, 0.5), [2, 0, 0, 1])
    fires = metrics.false_fires_per_episode(scores, 0.5)
    np.testing.assert_array_equal(fires.runs, [2, 1, 0, 2, 1])
    np.testing.assert_array_equal(fires.frames, [2, 1, 0, 3, 1])
    summary = metrics.summarize(scores, 0.5)
    assert summary["detection_delay_median"] == 1
    assert summary["missed_episode_rate"] == 0.5
    assert summary["early_fire_episode_rate"] == 0.5
    assert summary["false_fires_per_episode"] == pytest.approx(6 / 5)
    assert summary["false_fire_frames_per_episode"] == pytest.approx(7 / 5)
    assert summary["failure_episode_fire_rate"] == 1.0
    assert summary["true_positive_rate"] == pytest.approx(1 / 4)
    assert summary["false_positive_rate"] == pytest.approx(7 / 12)
    assert summary["precision"] == pytest.approx(1 / 8)


def test_fires_of_neighbouring_episodes_are_two_runs():
    scores = scores_of([([0.1, 0.9], [0, 0]), ([0.9, 0.1], [0, 0])])
    np.testing.assert_array_equal(metrics.false_fires_per_episode(scores, 0.5).runs, [1, 1])


def test_phases_cover_every_frame_once():
    scores = scores_of([([0.5] * 7, [0, 0, 0, 1, 1, 0, 1]), ([0.5] * 3, [0, 0, 0]), ([0.5], [1])], shuffle=1)
    parts = list(metrics.phases(scores).values())
    assert (np.sum(parts[:3], axis=0) == 1).all()
    assert (np.sum(parts[3:], axis=0) == 1).all()
    assert [int(part.sum()) for part in parts] == [5, 3, 3, 3, 5, 3]


def test_a_fire_exceeds_the_threshold_strictly():
    scores = scores_of([([0.5, 0.5], [0, 1])])
    assert metrics.summarize(scores, 0.5)["true_positive_rate"] == 0.0
    assert metrics.summarize(scores, 0.49)["true_positive_rate"] == 1.0


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_class_gives_nan_where_both_are_needed_and_nothing_raises(label, recwarn):
    scores = scores_of([([0.2, 0.7], [label, label])])
    summary = metrics.summarize(scores, 0.5)
    assert math.isnan(summary["auc"])
    assert math.isnan(summary["true_positive_rate"]) == (label == 0)
    assert math.isnan(summary["average_precision"]) == (label == 0)
    assert math.isnan(summary["false_positive_rate"]) == (label == 1)
    assert math.isfinite(summary["log_loss"])
    assert math.isfinite(summary["ece"])
    assert np.isnan(metrics.roc_curve(scores.prob_success, scores.labels).x).all() == (label == 1)
    assert not recwarn.list


def test_summary_keys_are_stable_and_values_are_plain_floats():
    summary = metrics.summarize(scores_of([([0.2, 0.7], [0, 1]), ([0.1], [0])]), 0.5)
    assert list(summary) == [
        "threshold",
        "auc",
        "average_precision",
        "log_loss",
        "accuracy",
        "ece",
        "true_positive_rate",
        "false_positive_rate",
        "precision",
        "detection_delay_median",
        "detection_delay_p90",
        "missed_episode_rate",
        "early_fire_episode_rate",
        "false_fires_per_episode",
        "false_fire_frames_per_episode",
        "failure_episode_fire_rate",
        "num_frames",
        "num_positive_frames",
        "num_episodes",
        "num_success_episodes",
        "final_true_positive_rate",
        "final_false_positive_rate",
    ]
    assert all(type(value) is float for value in summary.values())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"prob_success": np.array([0.1, 1.5], np.float32)}, r"prob_success must lie in \[0, 1\]"),
        ({"prob_success": np.array([0.1, np.nan], np.float32)}, r"prob_success must lie in \[0, 1\]"),
        ({"prob_success": np.array([0.1, 0.5])}, "prob_success must be a numpy array float32"),
        ({"labels": np.zeros(3, np.float32)}, "2 frames, labels has 3"),
        ({"episode": np.array([0, 2])}, r"episode must lie in 0\.\.1"),
        ({"episode": np.array([0, 0]), "step": np.array([4, 4])}, "step 4 of episode 0 twice"),
        ({"success": np.array([1, 0])}, "success must be a numpy array bool"),
    ],
)
def test_wrong_scores_are_refused(change, complaint):
    good = {
        "prob_success": np.array([0.1, 0.5], np.float32),
        "labels": np.array([0.0, 1.0], np.float32),
        "episode": np.array([0, 1]),
        "step": np.array([0, 0]),
        "success": np.array([False, True]),
    }
    LabelledScores(**good)
    with pytest.raises(DataError, match=complaint):
        LabelledScores(**{**good, **change})


def test_no_frame_is_refused():
    none = np.zeros(0, np.float32)
    numbers = np.zeros(0, np.int64)
    with pytest.raises(DataError, match="no frame"):
        LabelledScores(
            prob_success=none, labels=none, episode=numbers, step=numbers, success=np.zeros(0, np.bool_)
        )


def test_final_rates_are_those_of_the_last_frames():
    episodes = [([0.9, 0.2], [0, 1]), ([0.1, 0.9], [0, 1]), ([0.9, 0.1], [0, 0]), ([0.1, 0.8], [1, 0])]
    summary = metrics.summarize(scores_of(episodes), 0.5)
    assert summary["final_true_positive_rate"] == 0.5 and summary["final_false_positive_rate"] == 0.5


def test_the_trade_off_gives_the_best_recall_for_each_rate():
    rng = np.random.default_rng(0)
    labels = (np.arange(400) % 2).tolist()
    prob = np.clip(0.3 + 0.4 * np.array(labels) + rng.normal(0, 0.15, 400), 0, 1).tolist()
    scores = scores_of([(prob, labels)])
    points = metrics.trade_off(scores, (0.02, 0.1))
    assert len(points) == 2 and points[0].true_positive_rate < points[1].true_positive_rate
    for rate, point in zip((0.02, 0.1), points, strict=True):
        here = metrics.confusion(scores.prob_success, scores.labels, point.threshold)
        assert here.false_positive_rate == point.false_positive_rate <= rate
        assert here.true_positive_rate == point.true_positive_rate
        lower = metrics.confusion(scores.prob_success, scores.labels, point.threshold - 0.05)
        assert lower.false_positive_rate > rate  # no other threshold gives more
    assert metrics.trade_off(scores_of([([0.2, 0.3], [1, 1])])) == []
    better = metrics.better_recall(scores, 0.95, wanted=0.8)
    assert better is not None and better.true_positive_rate >= 0.8
    assert metrics.better_recall(scores, 0.05, wanted=0.8) is None
    assert [metrics.round_up(rate) for rate in (0.0, 0.0191, 0.02, 0.0201)] == [0.001, 0.02, 0.02, 0.021]
