"""AIRL: its formulas; a policy learns from its reward alone in test_imitation_outcomes.py."""

import math
from dataclasses import replace

import pytest
import torch

from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards import create_reward_model
from tests.rewards.zoo import zoo_tasks
from tests.rewards.zoo.test_gail import SHAPES, rows


def known_rows(count=30, seed=0):
    return replace(rows(count, seed), log_probs=torch.full((count,), math.log(0.5)))


def model(**settings):
    made = create_reward_model({"type": "airl", **SHAPES, "normalize_obs": False, **settings})
    made.policy_log_probs = lambda obs, actions: torch.full((len(obs),), math.log(0.5))
    made.load_expert_data([rows(30, 1)])
    made.collect_data(known_rows(30, 2))
    return made


def with_known_networks(**settings):
    """g(s) = s_0 + 2 s_1 and h(s) = 3 s_0 - s_1."""
    airl = model(hidden=[], gamma=0.9, **settings)
    with torch.no_grad():
        airl.network.reward[0].weight.copy_(torch.tensor([[1.0, 2.0]]))
        airl.network.potential[0].weight.copy_(torch.tensor([[3.0, -1.0]]))
    return airl


def test_reward_forms_by_hand():
    batch = replace(
        known_rows(2),
        obs=torch.tensor([[1.0, 2.0], [0.0, 1.0]]),
        next_obs=torch.tensor([[2.0, 1.0], [4.0, 0.0]]),
        terminated=torch.tensor([False, True]),
        truncated=torch.tensor([False, False]),
    )
    f = torch.tensor([5.0 + 0.9 * 5.0 - 1.0, 2.0 + 0.0 - (-1.0)])  # nothing follows a step that terminated
    torch.testing.assert_close(with_known_networks().estimate(batch).env_rewards, f)
    found = with_known_networks(reward_form="log_ratio").estimate(batch).env_rewards
    torch.testing.assert_close(found, f - math.log(0.5))
    found = (
        with_known_networks(reward_form="positive").estimate(batch).env_rewards
    )  # 1 - D = pi / (exp f + pi)
    torch.testing.assert_close(found, torch.log1p(f.exp() / 0.5))
    found = with_known_networks(reward_form="plain").estimate(batch).env_rewards
    torch.testing.assert_close(found, torch.tensor([5.0, 2.0]))


def test_the_discriminator_is_the_papers():
    """D = exp(f) / (exp(f) + pi), the expert's rows first."""
    airl = with_known_networks()
    expert, policy = rows(2, 5), rows(2, 6)
    seen = [torch.cat(both) for both in zip(airl.inputs_of(expert), airl.inputs_of(policy), strict=True)]
    pi = torch.tensor([0.2, 0.9, 0.4, 0.5])
    exp_f = torch.exp(airl.network(*seen))
    share = exp_f / (exp_f + pi)
    wanted = -(share[:2].log().sum() + (1.0 - share[2:]).log().sum()) / 4
    torch.testing.assert_close(airl.network.learn(pi.log(), *seen), wanted)


def test_a_transition_that_the_policy_likes_anyway_proves_less():
    """Same data of both sides: only pi differs, and f has to make up for it."""
    airl = create_reward_model({"type": "airl", **SHAPES, "lr": 1e-2, "update_per_collect": 400})
    same = replace(rows(60, 1), obs=torch.ones(60, 2), next_obs=torch.ones(60, 2))
    airl.policy_log_probs = lambda obs, actions: torch.full((len(obs),), math.log(0.25))
    airl.load_expert_data([same])
    airl.collect_data(replace(same, log_probs=torch.full((60,), math.log(0.25))))
    airl.train()
    found = airl.estimate(same).env_rewards
    torch.testing.assert_close(found, torch.full((60,), math.log(0.25)), atol=0.1, rtol=0.0)


def test_log_probs_are_needed():
    airl = create_reward_model({"type": "airl", **SHAPES})
    airl.load_expert_data([rows(30, 1)])
    airl.collect_data(known_rows())
    with pytest.raises(ConfigError, match="on-policy pipeline"):
        airl.train()
    with pytest.raises(DataError, match="log_probs"):
        model(reward_form="log_ratio").estimate(rows())
    off_policy = zoo_tasks.zoo_config("fixed_cartpole_airl")
    off_policy["learner"] = {"algorithm": "dqn", "total_steps": 2_000}
    with pytest.raises((ConfigError, DataError), match="ppo"):
        zoo_tasks.run(off_policy, demonstrations=zoo_tasks.experts(zoo_tasks.FIXED_CARTPOLE, 1))
