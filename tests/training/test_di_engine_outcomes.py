"""The six cases of DI-engine's test of its reward-model entry, each beside a reward of zero.

The reward-model sections are DI-engine's. The policy gets more updates than its test gives it, for there is
something to compare only where something is learned. On CartPole the end of an episode tells a DQN that the
pole fell, whatever the reward: the control does not stay at the start, and is measured with the same seed.
"""

import functools
import json
from copy import deepcopy

import numpy as np
import pytest

from guerdon.rewards.zoo.baselines import ZeroReward
from guerdon.training.serial import (
    serial_pipeline_reward_model_offpolicy,
    serial_pipeline_reward_model_onpolicy,
)
from tests.training.test_experts import DQN, DQN_CREATE, IMITATION, PPO, SHAPES, expert_data

assert expert_data  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.outcome]
MARGIN = 20.0
"""Of the mean return."""


def settled(result):
    """The mean return of the later half of the evaluations: a random policy balances a pole now and then."""
    returns = [evaluation.env_return for _, _, evaluation in result.evaluations]
    return float(np.mean(returns[len(returns) // 2 :]))


def run_dqn(main, create, model=None):
    return serial_pipeline_reward_model_offpolicy(
        deepcopy((main, create)), seed=0, max_env_step=20_480, model=model
    )


@functools.cache
def without_imitation(main):
    """The settled return on a reward of zero: one learner for all four cases."""
    create = {**DQN_CREATE, "reward_model": {"type": IMITATION[1]["type"]}}
    return settled(run_dqn(json.loads(main), create, ZeroReward(SHAPES)))


@pytest.mark.parametrize("section", IMITATION, ids=lambda section: section["type"])
def test_imitation_is_better_than_no_reward(section, expert_data):
    main, create = {**deepcopy(DQN), "reward_model": section}, deepcopy(DQN_CREATE)
    create["reward_model"] = {"type": section["type"]}
    main["policy"]["learn"] |= {"update_per_collect": 32, "batch_size": 64, "target_update_freq": 50}
    main["policy"]["collect"]["n_sample"] = 256
    main["policy"]["eval"]["evaluator"]["eval_freq"] = 320
    learned = run_dqn(main, create)
    control = without_imitation(json.dumps({**main, "reward_model": IMITATION[1]}, sort_keys=True))
    print(section["type"], settled(learned), control)
    assert settled(learned) > control + MARGIN


@pytest.mark.parametrize(
    ("kind", "pipeline"),
    [("rnd", serial_pipeline_reward_model_onpolicy), ("icm", serial_pipeline_reward_model_offpolicy)],
)
def test_curiosity_beside_the_env_reward_is_better_than_no_reward(kind, pipeline, tmp_path, monkeypatch):
    """In these cases the env reward is added; the control has neither."""
    monkeypatch.chdir(tmp_path)
    create = {
        "env": {"type": "cartpole"},
        "policy": {"type": "ppo_offpolicy"},
        "reward_model": {"type": kind},
    }
    without = deepcopy(PPO)
    without["reward_model"]["intrinsic_reward_type"] = "assign"
    learned, control = (
        pipeline(deepcopy([main, create]), seed=0, max_env_step=10_240, model=model)
        for main, model in ((PPO, None), (without, ZeroReward(SHAPES)))
    )
    print(kind, settled(learned), settled(control))
    assert settled(learned) > settled(control) + MARGIN
