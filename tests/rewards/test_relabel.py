"""Where rewards meet: every mode, type and combination, by hand-made numbers."""

import numpy as np
import pytest

from guerdon.config import RewardConfig
from guerdon.config.schema_zoo import MixConfig
from guerdon.core.errors import DataError
from guerdon.rewards import Scores
from guerdon.rewards.model import SuccessScores
from guerdon.rewards.relabel import (
    RewardScale,
    combine,
    learned_rewards,
    scored_frames,
    training_rewards,
    verdicts,
)

PROB = np.array([[0.1, 0.95], [0.8, 0.6], [0.9, 0.2]], np.float32)
ENV = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32)
DONE = np.array([[False, False], [False, True], [True, False]])


def test_per_step_binary_replaces():
    cfg = RewardConfig(success_reward=2.0, fail_reward=-1.0)
    expected = [[-1, 2], [2, -1], [2, -1]]
    np.testing.assert_array_equal(training_rewards(PROB, ENV, DONE, cfg, 0.7), expected)


def test_the_threshold_itself_is_no_success():
    assert training_rewards(np.array([0.5]), np.zeros(1), np.zeros(1, bool), RewardConfig(), 0.5) == [0.0]


def test_terminal_mode_is_zero_on_all_but_the_last_frame():
    cfg = RewardConfig(reward_mode="terminal", success_reward=2.0, fail_reward=-1.0)
    prob = np.where(DONE, PROB, np.nan)  # nothing else was scored
    expected = [[0, 0], [0, -1], [2, 0]]
    np.testing.assert_array_equal(learned_rewards(prob, DONE, cfg, 0.7), expected)
    np.testing.assert_array_equal(scored_frames(DONE, cfg), DONE)
    assert scored_frames(DONE, RewardConfig()).all()


def test_continuous_is_the_probability():
    np.testing.assert_array_equal(
        training_rewards(PROB, ENV, DONE, RewardConfig(reward_type="continuous"), 0.7), PROB
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"combine_mode": "replace"}, [[0, 1], [1, 0], [1, 0]]),
        ({"combine_mode": "add"}, [[1, 3], [4, 4], [6, 6]]),
        (
            {"combine_mode": "weighted", "reward_weight": 10.0, "env_reward_weight": 0.5},
            [[0.5, 11], [11.5, 2], [12.5, 3]],
        ),
    ],
)
def test_combinations(settings, expected):
    before = ENV.copy()
    result = training_rewards(PROB, ENV, DONE, RewardConfig(**settings), 0.7)
    np.testing.assert_array_equal(result, np.array(expected, np.float32))
    assert result.dtype == np.float32
    result += 1
    np.testing.assert_array_equal(ENV, before)


def test_env_rewards_are_never_the_learned_ones_array():
    learned = np.zeros((3, 2), np.float32)
    assert combine(ENV, learned, RewardConfig()) is not learned


def test_bad_input():
    with pytest.raises(DataError, match="1 scored frames have no finite probability"):
        learned_rewards(np.array([np.nan, 0.5]), np.array([True, True]), RewardConfig(), 0.5)
    with pytest.raises(DataError, match=r"shape \[2\], learned ones \[3\]"):
        combine(np.zeros(2), np.zeros(3, np.float32), RewardConfig())


def test_the_scale_is_the_running_deviation_and_changes_in_update_alone():
    rng = np.random.default_rng(0)
    parts = [rng.normal(3.0, 2.0, (5, 7)).astype(np.float32) for _ in range(4)]
    scale = RewardScale()
    np.testing.assert_array_equal(scale.apply(parts[0]), parts[0])
    for part in parts:
        scale.update(part)
    deviation = np.concatenate(parts).std(dtype=np.float64)
    for _ in range(2):
        np.testing.assert_allclose(scale.apply(parts[0]), parts[0] / deviation, rtol=1e-5)
    cfg = RewardConfig(reward_type="continuous")
    scaled = training_rewards(parts[0], np.zeros((5, 7)), np.zeros((5, 7), bool), cfg, 0.5, scale)
    np.testing.assert_allclose(scaled, parts[0] / deviation, rtol=1e-5)


def test_scores_of_either_kind():
    cfg = RewardConfig(success_reward=2.0, fail_reward=-1.0)
    seen = SuccessScores(prob_success=PROB)
    expected = [[-1, 2], [2, -1], [2, -1]]
    np.testing.assert_array_equal(training_rewards(seen, ENV, DONE, cfg, 0.7), expected)
    given = Scores(rewards=PROB, disagreement=np.ones_like(PROB))
    np.testing.assert_array_equal(training_rewards(given, ENV, DONE, cfg, 0.7), PROB)
    terminal = RewardConfig(reward_mode="terminal", combine_mode="add")
    np.testing.assert_array_equal(training_rewards(given, ENV, DONE, terminal, 0.7), ENV + PROB * DONE)
    np.testing.assert_array_equal(given[1].values, PROB[1])
    for wrong in ({}, {"rewards": PROB, "prob_success": PROB}):
        with pytest.raises(DataError, match="either rewards or prob_success"):
            Scores(**wrong)
    with pytest.raises(DataError, match=r"a disagreement of \[2\]"):
        Scores(rewards=PROB, disagreement=np.ones(2, np.float32))


def test_the_weight_of_a_mix_changes_with_the_steps():
    mix = MixConfig(
        combine_mode="weighted",
        env_reward_weight=1.0,
        reward_weight=2.0,
        reward_weight_end=0.0,
        reward_weight_steps=10,
    )
    for env_steps, weight in ((0, 2.0), (5, 1.0), (20, 0.0)):
        np.testing.assert_allclose(combine(ENV, PROB, mix, env_steps=env_steps), ENV + weight * PROB)
    scale = RewardScale(count=1.0, mean=0.0, spread=4.0)
    np.testing.assert_allclose(combine(ENV, PROB, mix, scale), ENV + PROB)  # of deviation 2


# Controls


def test_off_is_zero_whatever_the_model_says():
    cfg = RewardConfig(control="off", combine_mode="add", fail_reward=-1.0)
    assert not cfg.looks_at_frames
    np.testing.assert_array_equal(training_rewards(PROB, ENV, DONE, cfg, 0.7), ENV.astype(np.float32))
    unseen = np.full_like(PROB, np.nan)  # nothing was asked of the model
    np.testing.assert_array_equal(training_rewards(unseen, ENV, DONE, cfg, 0.7), ENV.astype(np.float32))
    assert not combine(ENV, PROB, RewardConfig(control="off")).any()


def test_shuffled_rewards_keep_their_values_and_lose_their_places():
    cfg = RewardConfig(control="shuffled")
    learned = np.arange(600, dtype=np.float32).reshape(20, 30)
    env_rewards = np.zeros((20, 30))
    shuffled = combine(env_rewards, learned, cfg, env_steps=7)
    np.testing.assert_array_equal(np.sort(shuffled.reshape(-1)), learned.reshape(-1))
    assert not (shuffled == learned).any()
    assert abs(np.corrcoef(shuffled.reshape(-1), learned.reshape(-1))[0, 1]) < 0.15
    np.testing.assert_array_equal(combine(env_rewards, learned, cfg, env_steps=7), shuffled)
    assert (combine(env_rewards, learned, cfg, env_steps=8) != shuffled).any()


def test_shuffled_terminal_rewards_stay_at_the_ends_of_episodes():
    cfg = RewardConfig(control="shuffled", reward_mode="terminal", reward_type="continuous")
    rng = np.random.default_rng(0)
    prob = rng.random((40, 5)).astype(np.float32)
    done = rng.random((40, 5)) < 0.2
    rewards = training_rewards(prob, np.zeros((40, 5)), done, cfg, 0.5)
    assert not rewards[~done].any()
    np.testing.assert_array_equal(np.sort(rewards[done]), np.sort(prob[done]))
    assert not (rewards[done] == prob[done]).any()


def test_a_shuffled_reward_that_is_alone_in_its_batch_does_not_stay():
    """Few of a sample's steps end an episode; with a single one the learned reward would get through."""
    cfg = RewardConfig(control="shuffled", reward_mode="terminal", reward_type="continuous")
    rng = np.random.default_rng(0)
    own, given = [], []
    for env_steps in range(2_000):
        prob, done = rng.random(32).astype(np.float32), rng.random(32) < 0.05
        rewards = training_rewards(prob, np.zeros(32), done, cfg, 0.5, env_steps=env_steps)
        own, given = [*own, *prob[done]], [*given, *rewards[done]]
    assert abs(np.corrcoef(own, given)[0, 1]) < 0.08  # 0.34 if it stayed


def test_the_environments_success_in_place_of_the_models():
    prob, success = np.array([0.9, np.nan, 0.1], np.float32), np.array([False, True, True])
    done = np.array([False, False, True])
    assert verdicts(prob, success, done, RewardConfig()) is prob
    np.testing.assert_array_equal(verdicts(prob, success, done, RewardConfig(control="env")), [0.0, 1.0, 1.0])
    terminal = RewardConfig(control="env", reward_mode="terminal")
    np.testing.assert_array_equal(verdicts(prob, success, done, terminal), [np.nan, np.nan, 1.0])
