"""The check that the reward reaches the loss, on paths with one fault each."""

import numpy as np
import pytest

from guerdon.config import RewardConfig
from guerdon.monitoring.reward_path import (
    RewardPathError,
    check_learned_rewards,
    check_reward_path,
    probe_probabilities,
)
from guerdon.rewards.relabel import combine, scored_frames, training_rewards

THRESHOLD = 0.8
DONE = np.zeros((10, 4), np.bool_)
DONE[4::5] = True
ENV_REWARDS = np.random.default_rng(0).normal(size=DONE.shape).astype(np.float32)
SETTINGS = [
    {},
    {"reward_type": "continuous"},
    {"reward_mode": "terminal"},
    {"success_reward": -1.0, "fail_reward": 2.0},
    {"combine_mode": "add"},
    {"combine_mode": "weighted", "reward_weight": -3.0},
]


class Path:
    """From probabilities to what is optimised, as a runner has it; a fault spoils one part of it."""

    def __init__(self, cfg, fault=None, objective=None):
        self.cfg, self.fault, self.rewards = cfg, fault, None
        self.objective = objective or (lambda: np.cumsum(self.rewards[::-1], 0)[::-1])

    def relabel(self, prob):
        rewards = training_rewards(prob, ENV_REWARDS, DONE, self.cfg, THRESHOLD)
        self.rewards = rewards if self.fault is None else self.fault(prob, rewards)
        return self.rewards

    def check(self):
        check_reward_path(self.relabel, self.objective, DONE, self.cfg, THRESHOLD)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_sound_path_passes(settings):
    Path(RewardConfig(**settings)).check()


@pytest.mark.parametrize("settings", SETTINGS)
def test_every_fault_of_a_path_is_found(settings):
    cfg = RewardConfig(**settings)
    scored = scored_frames(DONE, cfg)
    faults = {
        "the scores are dropped": lambda prob, rewards: ENV_REWARDS,
        "where the settings say": lambda prob, rewards: 2 * ENV_REWARDS - rewards,  # the sign
        "change the training reward by": lambda prob, rewards: rewards * np.arange(1, 5, dtype=np.float32),
        "probability stayed the same": lambda prob, rewards: rewards + prob.mean(),  # all frames move
    }
    assert scored.any()
    for message, fault in faults.items():
        with pytest.raises(RewardPathError, match=message):
            Path(cfg, fault).check()


@pytest.mark.parametrize("other", [0.5, 0.79, 0.81, 0.9])
def test_another_threshold_is_found_however_near(other):
    cfg = RewardConfig()

    def read_elsewhere(prob, rewards):
        return training_rewards(prob, ENV_REWARDS, DONE, cfg, other)

    with pytest.raises(RewardPathError, match="another threshold is used"):
        Path(cfg, read_elsewhere).check()


def test_an_objective_that_does_not_follow_is_found():
    with pytest.raises(RewardPathError, match="computed before relabelling"):
        Path(RewardConfig(), objective=lambda: np.ones((10, 4))).check()
    noise = np.random.default_rng(1)
    with pytest.raises(RewardPathError, match="computed before relabelling"):  # rounding is no answer
        Path(RewardConfig(), objective=lambda: 1e-9 * noise.normal(size=(10, 4))).check()


@pytest.mark.parametrize(
    "settings", [{"success_reward": 0.0}, {"combine_mode": "weighted", "reward_weight": 0.0}]
)
def test_settings_without_influence_are_refused(settings):
    with pytest.raises(RewardPathError, match="no influence"):
        Path(RewardConfig(**settings)).check()


def test_a_rollout_without_an_end_cannot_be_checked_in_terminal_mode():
    cfg = RewardConfig(reward_mode="terminal")
    with pytest.raises(RewardPathError, match="needs a finished episode"):
        check_reward_path(lambda prob: prob, lambda: np.ones(1), np.zeros((3, 2), np.bool_), cfg, 0.5)


@pytest.mark.parametrize("mode", ["per_step", "terminal"])
def test_probabilities_lie_on_both_sides_of_the_threshold_by_a_hair(mode):
    cfg = RewardConfig(reward_mode=mode)
    for threshold in (0.01, 0.5, 0.99):
        below, above, raised = probe_probabilities(DONE, cfg, threshold)
        assert (below < threshold).all() and (above[raised] > threshold).all()
        assert below.min() >= 0 and above.max() <= 1 and (above - below).max() < 0.011
        assert (above[~raised] == below[~raised]).all()
        scored = scored_frames(DONE, cfg)
        assert not raised[~scored].any() and 0 < raised.sum() < scored.sum()


@pytest.mark.parametrize("control", ["off", "shuffled", "env"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_control_passes(settings, control):
    Path(RewardConfig(**settings, control=control)).check()


@pytest.mark.parametrize("control", ["off", "shuffled"])
def test_a_control_passes_with_a_single_end_of_an_episode(control):
    done = np.zeros_like(DONE)
    done[3, 1] = True
    cfg, held = RewardConfig(reward_mode="terminal", control=control), []

    def relabel(prob):
        held[:] = [training_rewards(prob, np.zeros(done.shape), done, cfg, 0.5)]
        return held[0]

    check_reward_path(relabel, lambda: held[0], done, cfg, 0.5)
    assert not held[0].any()


def test_a_control_whose_reward_gets_through_is_found():
    with pytest.raises(RewardPathError, match="control is off, but the learned reward changes"):
        Path(RewardConfig(control="off"), lambda prob, rewards: prob).check()
    with pytest.raises(RewardPathError, match="control is shuffled, but some rewards are lost"):
        Path(RewardConfig(control="shuffled"), lambda prob, rewards: 0 * rewards).check()


def test_controls_of_a_model_that_gives_rewards():
    shape, held = (6, 3), []

    def relabel(learned):
        held[:] = [combine(np.zeros(shape), learned, RewardConfig(control=control))]
        return held[0]

    for control in ("none", "off", "shuffled"):
        check_learned_rewards(relabel, lambda: held[0], shape, 1.0, control)
    control = "none"
    with pytest.raises(RewardPathError, match="control is off"):
        check_learned_rewards(relabel, lambda: held[0], shape, 1.0, "off")
