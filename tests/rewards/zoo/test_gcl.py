"""Guided cost learning: its formula; a policy learns from it in test_imitation_outcomes.py."""

import math
from dataclasses import replace

import pytest
import torch

from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards import create_reward_model
from guerdon.rewards.zoo.gcl import Cost, negative_log_likelihood
from tests.rewards.zoo.test_airl import known_rows
from tests.rewards.zoo.test_gail import SHAPES, rows


def test_likelihood_by_hand():
    costs = torch.tensor([1.0, 3.0, 0.5, 2.0])  # two of the expert, two of the policy
    q = torch.tensor([0.5, 0.1, 0.25, 1.0])
    z = sum(math.exp(-c) / p for c, p in zip(costs.tolist(), q.tolist(), strict=True)) / 4
    assert float(negative_log_likelihood(costs, q.log())) == pytest.approx(2.0 + math.log(z), rel=1e-5)


def test_a_constant_cost_changes_nothing_but_the_penalty():
    costs, log_probs = torch.randn(6), torch.randn(6)
    before = negative_log_likelihood(costs, log_probs)
    torch.testing.assert_close(negative_log_likelihood(costs + 7.0, log_probs), before)
    network = Cost(1, (), "any", cost_penalty=0.5)
    with torch.no_grad():
        network.layers[0].weight.fill_(1.0)
    loss = network.learn(torch.full((2, 1), 2.0), torch.full((2, 1), 2.0), torch.zeros(4))
    assert loss.item() == pytest.approx(0.5 * 4.0)


def test_what_was_demonstrated_becomes_cheap_and_its_reward_high():
    gcl = create_reward_model({"type": "gcl", **SHAPES, "inputs": "state", "lr": 1e-2})
    gcl.policy_log_probs = lambda obs, actions: torch.full((len(obs),), math.log(0.5))
    expert, policy = rows(60, 1), known_rows(60, 2)
    expert = replace(expert, next_obs=expert.next_obs.abs())
    policy = replace(policy, next_obs=-policy.next_obs.abs())
    gcl.load_expert_data([expert])
    gcl.collect_data(policy)
    for _ in range(5):
        reported = gcl.train()
    assert reported["cost_gap"] > 0.3 and 0.0 < reported["effective_samples"] <= 1.0
    assert gcl.estimate(expert).env_rewards.mean() > gcl.estimate(policy).env_rewards.mean() + 0.3


def test_costs_have_the_sign_that_was_asked_for():
    features = torch.linspace(-5.0, 5.0, 11)[:, None]
    network = {sign: Cost(1, (), sign, 0.0) for sign in ("any", "positive", "negative")}
    for each in network.values():
        torch.nn.init.ones_(each.layers[0].weight)
    free, positive, negative = (each(features) for each in network.values())
    torch.testing.assert_close(free, features[:, 0])
    torch.testing.assert_close(positive, torch.log1p(free.exp()))
    torch.testing.assert_close(negative, -torch.log1p((-free).exp()))  # increasing too: cheap stays cheap


def test_log_probs_are_needed():
    gcl = create_reward_model({"type": "gcl", **SHAPES})
    gcl.load_expert_data([rows(30, 1)])
    gcl.collect_data(rows(30, 2))
    with pytest.raises(ConfigError, match="on-policy pipeline"):
        gcl.train()
    gcl.policy_log_probs = lambda obs, actions: torch.zeros(len(obs))
    with pytest.raises(DataError, match="log_probs"):
        gcl.train()
