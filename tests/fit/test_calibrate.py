"""Calibration mends probabilities, and the threshold keeps its promise on fresh episodes."""

import json
import math
import time

import numpy as np
import pytest

from guerdon.core.errors import DataError
from guerdon.fit.calibrate import calibrate
from guerdon.fit.metrics import LabelledScores, auc, ece, log_loss
from guerdon.fit.threshold import Threshold, binomial_upper_bound, choose_threshold, measure_threshold
from guerdon.rewards.relabel import Calibration


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def make_logits(rng, num_failures, num_successes, spread=1.0):
    """Logits that depend on each other within an episode; success sets in half-way -> logits, labels, ..."""
    lengths = rng.integers(15, 40, num_failures + num_successes)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    step = np.concatenate([np.arange(n) for n in lengths])
    onset = np.where(np.arange(len(lengths)) >= num_failures, lengths // 2, 1000)
    labels = (step >= onset[episode]).astype(np.float32)
    nearly = (step < onset[episode]) & (step >= onset[episode] - 2)
    logits = -4 + spread * rng.normal(size=len(lengths))[episode] + rng.normal(size=len(step))
    return logits + 8 * labels + 2 * nearly, labels, episode, step


def make_scores(rng, num_failures, num_successes, spread=1.0):
    logits, labels, episode, step = make_logits(rng, num_failures, num_successes, spread)
    success = np.arange(num_failures + num_successes) >= num_failures
    prob = sigmoid(logits).astype(np.float32)
    return LabelledScores(prob_success=prob, labels=labels, episode=episode, step=step, success=success)


def flat_scores(prob, labels, per_episode=10):
    """LabelledScores from given frames, cut into episodes of equal length."""
    episode = np.arange(len(prob)) // per_episode
    labels = np.asarray(labels, np.float32)
    return LabelledScores(
        prob_success=np.asarray(prob, np.float32),
        labels=labels,
        episode=episode,
        step=np.arange(len(prob)) % per_episode,
        success=np.bincount(episode, labels) > 0,
    )


def episodes_by_truth(rng, true_logits, per_episode=50):
    labels = (rng.random(len(true_logits)) < sigmoid(true_logits)).astype(np.float32)
    return labels, np.arange(len(labels)) // per_episode


def test_temperature_is_recovered():
    rng = np.random.default_rng(0)
    true = rng.normal(0, 2, 20_000)
    labels, episode = episodes_by_truth(rng, true)
    fitted = calibrate(3 * true, labels, episode, seed=0)
    assert fitted.kind == "temperature"
    assert fitted.temperature == pytest.approx(3, rel=0.05)
    assert ece(fitted.apply(3 * true), labels) < 0.01 < ece(sigmoid(3 * true), labels)


def test_isotonic_wins_where_no_temperature_fits():
    rng = np.random.default_rng(1)
    shown = rng.normal(0, 2, 20_000)
    labels, episode = episodes_by_truth(rng, np.where(shown > 1, 2.0, -2.0) + 0.1 * shown)
    fitted = calibrate(shown, labels, episode, seed=0)
    assert fitted.kind == "isotonic"
    assert fitted.held_out_log_loss["isotonic"] < fitted.held_out_log_loss["temperature"] - 0.02
    fresh = rng.normal(0, 2, 20_000)
    fresh_labels, _ = episodes_by_truth(rng, np.where(fresh > 1, 2.0, -2.0) + 0.1 * fresh)
    assert ece(fitted.apply(fresh), fresh_labels) < 0.02
    assert log_loss(fitted.apply(fresh), fresh_labels) == pytest.approx(
        fitted.held_out_log_loss["isotonic"], abs=0.02
    )


def test_few_episodes_never_choose_isotonic():
    rng = np.random.default_rng(1)
    shown = rng.normal(0, 2, 950)
    labels, episode = episodes_by_truth(rng, np.where(shown > 1, 4.0, -4.0))
    fitted = calibrate(shown, labels, episode, seed=0)
    assert fitted.kind == "temperature"
    assert set(fitted.held_out_log_loss) == {"identity", "temperature"}


def test_frames_of_one_episode_do_not_help_to_judge_themselves():
    """Each episode has its own logit and label: isotonic would shine if folds were cut through episodes."""
    rng = np.random.default_rng(2)
    labels = np.repeat((rng.random(40) < 0.5).astype(np.float32), 50)
    logits = np.repeat(rng.normal(size=40), 50)
    assert calibrate(logits, labels, np.arange(2000) // 50, seed=0).kind == "temperature"


def test_one_class_or_one_episode_is_calm():
    logits = np.linspace(-3, 3, 20)
    assert calibrate(logits, np.ones(20), np.arange(20), seed=0).kind == "identity"
    assert calibrate(logits, logits > 0, np.zeros(20, int), seed=0).kind == "temperature"


def test_separated_classes_keep_a_finite_temperature():
    logits = np.concatenate([np.linspace(-6, -4, 500), np.linspace(4, 6, 500)])
    prob = calibrate(logits, logits > 0, np.arange(1000) // 10, seed=0).apply(logits)
    assert 0 < prob.min() < 0.01
    assert 0.99 < prob.max() < 1


@pytest.mark.parametrize("kind", ["identity", "temperature", "isotonic"])
def test_apply_is_monotone_inside_zero_and_one_and_survives_json(kind):
    rng = np.random.default_rng(3)
    logits, labels, *_ = make_logits(rng, 30, 30)
    fitted = {
        "identity": Calibration(),
        "temperature": Calibration(kind="temperature", temperature=2.5),
        "isotonic": Calibration(kind="isotonic", knots=(-2.0, 0.0, 1.0), values=(-5.0, -5.0, 4.0)),
    }[kind]
    x = np.sort(np.concatenate([logits, [-12.0, 12.0]]))
    prob = fitted.apply(x)
    assert prob.dtype == np.float32
    assert (np.diff(prob) >= 0).all()
    assert 0 < prob[0] < prob[-1] < 1
    assert auc(fitted.apply(logits), labels) == pytest.approx(auc(sigmoid(logits), labels), abs=1e-4)
    again = Calibration.from_dict(json.loads(json.dumps(fitted.to_dict(), allow_nan=False)))
    assert again == fitted
    np.testing.assert_array_equal(again.apply(x), prob)


def test_isotonic_fit_is_the_best_monotone_map():
    """Against pooling one pair at a time, the textbook way."""
    from guerdon.fit.calibrate import _fit_isotonic

    rng = np.random.default_rng(4)
    x = np.round(rng.normal(0, 1, 400), 2)
    y = (rng.random(400) < sigmoid(2 * x)).astype(np.float64)
    pools = [[value, y[x == value].sum(), float((x == value).sum())] for value in np.unique(x)]
    i = 0
    while i < len(pools) - 1:
        if pools[i][1] / pools[i][2] >= pools[i + 1][1] / pools[i + 1][2]:
            pools[i : i + 2] = [[pools[i][0], pools[i][1] + pools[i + 1][1], pools[i][2] + pools[i + 1][2]]]
            i = max(i - 1, 0)
        else:
            i += 1
    starts = np.array([pool[0] for pool in pools])
    want = np.array([pool[1] / pool[2] for pool in pools])[np.searchsorted(starts, x, side="right") - 1]
    got = _fit_isotonic(x, y).apply(x)
    np.testing.assert_allclose(got, np.clip(want, 1 / 402, 401 / 402), atol=0.01)  # the tilt


def test_calibration_is_fast_on_many_frames():
    rng = np.random.default_rng(5)
    true = rng.normal(0, 3, 100_000)
    labels, episode = episodes_by_truth(rng, true)
    start = time.process_time()  # other load does not count
    calibrate(true, labels, episode, seed=0)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("plain", "complaint"),
    [
        ({"kind": "magic"}, "kind must be one of"),
        ({"kind": "temperature", "temperature": 0.0}, "temperature must be positive"),
        ({"kind": "isotonic"}, "needs knots"),
        ({"kind": "isotonic", "knots": [0.0, 1.0], "values": [1.0]}, "of one length"),
        ({"kind": "isotonic", "knots": [0.0, 1.0], "values": [1.0, 0.0]}, "must ascend"),
        ({"kind": "identity", "color": 1}, "unknown: .'color'"),
    ],
)
def test_damaged_calibrations_are_refused(plain, complaint):
    with pytest.raises(DataError, match=complaint):
        Calibration.from_dict(plain)


def test_calibrate_refuses_broken_input():
    with pytest.raises(DataError, match="NaN"):
        calibrate([0.0, np.nan], [0, 1], [0, 1], seed=0)
    with pytest.raises(DataError, match="one length"):
        calibrate([0.0, 1.0], [0, 1, 1], [0, 1, 2], seed=0)


def test_threshold_is_the_smallest_that_keeps_the_target():
    scores = make_scores(np.random.default_rng(6), 60, 60)
    chosen = choose_threshold(scores, seed=0)
    negatives = scores.prob_success[~scores.positive]
    assert np.mean(negatives > chosen.threshold) == chosen.false_positive_rate <= 0.01
    assert np.mean(negatives > np.nextafter(np.float32(chosen.threshold), np.float32(0))) > 0.01
    assert chosen.num_failure_episodes == chosen.num_success_episodes == 60
    low, high = chosen.false_positive_interval
    assert 0 <= low < chosen.false_positive_rate < high < 0.05
    assert chosen.true_positive_interval[0] <= chosen.true_positive_rate <= chosen.true_positive_interval[1]


@pytest.mark.parametrize(
    ("spread", "num"),
    [
        pytest.param(0.0, 20, marks=pytest.mark.slow),
        (0.7, 30),
        (1.0, 20),
        pytest.param(1.0, 60, marks=pytest.mark.slow),
    ],
)
def test_fresh_episodes_lie_within_the_intervals(spread, num):
    """Over many data sets, a fresh set of as many episodes lies inside about 95 times of 100."""
    rng = np.random.default_rng(7)
    inside = np.zeros(3)
    repeats = 200
    for i in range(repeats):
        chosen = choose_threshold(make_scores(rng, num, num, spread), num_resamples=300, seed=i)
        fresh = make_scores(rng, num, num, spread)
        fires = fresh.prob_success > chosen.threshold
        failure = ~fresh.success[fresh.episode]
        for k, (rate, (low, high)) in enumerate(
            [
                (fires[~fresh.positive].mean(), chosen.false_positive_interval),
                (fires[failure].mean(), chosen.failure_episode_interval),
                (fires[fresh.positive].mean(), chosen.true_positive_interval),
            ]
        ):
            inside[k] += low - 1e-9 <= rate <= high + 1e-9
    assert (inside / repeats >= 0.9).all(), inside / repeats


def test_resampling_is_by_episode():
    """The same frames in fewer, longer episodes whose frames agree support a wider interval only."""
    rng = np.random.default_rng(8)
    loose = make_scores(rng, 100, 100, spread=0.0)
    tight = make_scores(rng, 100, 100, spread=2.0)
    widths = [np.ptp(choose_threshold(scores, seed=0).false_positive_interval) for scores in (loose, tight)]
    assert widths[1] > 1.5 * widths[0]


def test_too_few_episodes_are_named_with_the_needed_number():
    few = choose_threshold(make_scores(np.random.default_rng(9), 8, 5), seed=0)
    assert not few.enough_data
    assert "Only 8 failure episodes: at least 20" in few.caveat
    assert "Only 5 success episodes: at least 20" in few.caveat
    assert "such episodes would be enough" in few.caveat
    many = choose_threshold(make_scores(np.random.default_rng(9), 300, 300), seed=0)
    assert many.enough_data
    assert many.caveat == ""


def test_no_fire_at_all_still_has_an_honest_upper_end():
    prob = np.concatenate([np.full(400, 0.1), np.full(400, 0.9)])
    chosen = choose_threshold(flat_scores(prob, prob > 0.5), seed=0)
    assert chosen.threshold == np.float32(0.1)
    assert chosen.false_positive_rate == 0
    assert chosen.false_positive_interval == (0.0, pytest.approx(1 - 0.025 ** (1 / 40)))
    assert "About 180 such episodes" in chosen.caveat
    assert chosen.true_positive_rate == 1


def test_ties_keep_the_target():
    prob = np.concatenate([np.full(970, 0.2), np.full(30, 0.6), np.full(500, 0.9)])
    chosen = choose_threshold(flat_scores(prob, prob > 0.8), seed=0)
    assert chosen.threshold == np.float32(0.6)
    assert chosen.false_positive_rate == 0


@pytest.mark.parametrize("top", [1.0, 0.8])
def test_something_can_always_fire(top):
    prob = np.concatenate([np.full(900, 0.2), np.full(100, top), np.full(500, top)])
    labels = np.repeat([0, 1], [1000, 500])
    chosen = choose_threshold(flat_scores(prob, labels), seed=0)
    assert chosen.threshold == np.float32(0.2)
    assert chosen.false_positive_rate == pytest.approx(0.1)
    assert not chosen.enough_data
    assert "nothing would fire" in chosen.caveat
    constant = choose_threshold(flat_scores(np.full(1500, top), labels), seed=0)
    assert constant.threshold < top
    assert constant.false_positive_rate == constant.true_positive_rate == 1


def test_raising_costs_no_success_and_spares_false_fires():
    rng = np.random.default_rng(10)
    prob = np.concatenate([rng.uniform(0, 0.2, 3000), rng.uniform(0.4, 1, 1000)])
    scores = flat_scores(prob, prob > 0.3)
    low, high = choose_threshold(scores, seed=0), choose_threshold(scores, seed=0, raise_to=0.5)
    assert low.threshold < 0.2 < high.threshold < scores.prob_success[scores.positive].min()
    assert (low.true_positive_rate, high.true_positive_rate) == (1, 1)
    assert low.false_positive_rate == pytest.approx(0.01)
    assert high.false_positive_rate == high.false_positive_interval[0] == 0
    capped = choose_threshold(scores, seed=0, raise_to=0.25)
    assert capped.threshold == np.float32(0.25)


def test_no_success_frames_and_no_failure_frames():
    rng = np.random.default_rng(11)
    failures = choose_threshold(make_scores(rng, 30, 0), seed=0)
    assert math.isnan(failures.true_positive_rate)
    assert all(math.isnan(end) for end in failures.true_positive_interval)
    assert not failures.enough_data
    with pytest.raises(DataError, match="needs failure frames"):
        choose_threshold(flat_scores(np.full(20, 0.5), np.ones(20)), seed=0)
    mixed = choose_threshold(make_scores(rng, 0, 30), seed=0)
    assert math.isnan(mixed.failure_episode_rate)
    assert mixed.false_positive_rate <= 0.01


def test_threshold_is_reproducible_and_survives_strict_json():
    scores = make_scores(np.random.default_rng(12), 30, 0)
    chosen = choose_threshold(scores, seed=4)
    assert repr(choose_threshold(scores, seed=4)) == repr(chosen)
    again = Threshold.from_dict(json.loads(json.dumps(chosen.to_dict(), allow_nan=False)))
    assert repr(again) == repr(chosen)  # repr, because NaN is not equal to itself
    with pytest.raises(DataError, match=r"missing: .*'threshold'"):
        Threshold.from_dict({"caveat": ""})


def test_threshold_refuses_senseless_targets():
    with pytest.raises(DataError, match="target_fpr"):
        choose_threshold(make_scores(np.random.default_rng(13), 3, 3), target_fpr=0.0, seed=0)


def test_binomial_bound_against_known_values():
    assert binomial_upper_bound(0, 100, 0.05) == pytest.approx(0.0295, abs=1e-4)
    assert binomial_upper_bound(3, 20, 0.025) == pytest.approx(0.3789, abs=1e-4)
    assert binomial_upper_bound(5, 5, 0.025) == 1.0


def test_a_given_threshold_is_measured_in_intervals_that_hold_its_rates():
    scores = make_scores(np.random.default_rng(21), 40, 40)
    for given in (0.3, 0.9):
        found = measure_threshold(scores, given, seed=0)
        prob, positive = scores.prob_success, scores.positive
        wrong, hits = (np.mean(prob[mask] > np.float32(given)) for mask in (~positive, positive))
        assert found.threshold == given and found.false_positive_rate == wrong
        assert found.true_positive_rate == hits
        for rate, (low, high) in (
            (wrong, found.false_positive_interval), (hits, found.true_positive_interval)
        ):  # fmt: skip
            assert low - 1e-12 <= rate <= high + 1e-12 and high - low < 0.4
        assert found.target_false_positive_rate == max(wrong, 0.01)
    with pytest.raises(DataError, match="needs failure frames"):
        measure_threshold(flat_scores(np.full(20, 0.5), np.ones(20)), 0.5, seed=0)
