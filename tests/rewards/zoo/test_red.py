"""RED: the formula, sigma from steps that were not learned from, and whose statistics count."""

import math

import pytest
import torch

from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards import create_reward_model
from guerdon.rewards.zoo.red import RED
from tests.rewards.zoo.zoo_tasks import steps

SETTINGS = {"type": "red", "obs_shape": 2, "action_size": 2, "hidden": [16], "pretrain_updates": 60}


def made(**settings):
    model = create_reward_model({**SETTINGS, **settings})
    assert isinstance(model, RED)
    model.load_expert_data([steps(40, seed=number) for number in range(5)])
    return model


def test_rewards_follow_the_formula_and_the_target_never_learns():
    model, batch = made(), steps(7, seed=9)
    target = [part.clone() for part in model.network.target.parameters()]
    model.pretrain()
    assert all(torch.equal(a, b) for a, b in zip(target, model.network.target.parameters(), strict=True))
    features = model.features(batch, ("obs", "action"))
    error = (model.network.predictor(features) - model.network.target(features)).square().mean(1)
    torch.testing.assert_close(model.rewards(batch), torch.exp(-model.network.sigma * error))


def test_sigma_gives_the_quantile_of_the_held_out_steps_its_reward():
    model = made(expert_quantile=0.9, reward_at_quantile=0.25)
    model.pretrain()
    assert len(model._held) == 40 and len(model._learned) == 160
    rewards = torch.exp(-model.network.sigma * model.network(model._held))
    assert float(torch.quantile(rewards, 0.1)) == pytest.approx(0.25, abs=0.02)
    assert float(model.network.sigma) == pytest.approx(
        math.log(4.0) / float(torch.quantile(model.network(model._held), 0.9)), rel=1e-4
    )


def test_what_is_unlike_the_demonstrations_gets_less():
    model = made(pretrain_updates=300)
    model.pretrain()
    near, far = steps(200, seed=50), steps(200, obs=5.0 + torch.randn(201, 2))
    assert float(model.rewards(near).mean()) > 0.5 > 0.05 > float(model.rewards(far).mean())


def test_the_policy_s_states_change_nothing():
    model, batch = made(), steps(6, seed=3)
    model.pretrain()
    before = model.rewards(batch)
    model.collect_data(steps(50, obs=100.0 + torch.randn(51, 2)))
    assert torch.equal(model.rewards(batch), before) and not len(model.experience)


def test_sigma_is_saved(tmp_path):
    model, batch = made(), steps(6, seed=3)
    model.pretrain()
    model.save(tmp_path / "red.pt")
    other = create_reward_model(SETTINGS)
    other.load(tmp_path / "red.pt")
    assert torch.equal(other.rewards(batch), model.rewards(batch))


def test_bad_settings_and_data_are_refused():
    with pytest.raises(ConfigError, match="reward_at_quantile"):
        create_reward_model({**SETTINGS, "reward_at_quantile": 1.0})
    with pytest.raises(DataError, match="leave nothing to learn"):
        create_reward_model(SETTINGS).load_expert_data([steps(1)])
    with pytest.raises(ConfigError, match="no demonstrations"):
        create_reward_model(SETTINGS).pretrain()
