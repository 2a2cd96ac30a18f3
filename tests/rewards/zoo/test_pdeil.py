"""PDEIL: densities against hand-computed ones, discrete and real-valued actions, no NaN anywhere."""

import math

import pytest
import torch

from guerdon.core.errors import ConfigError
from guerdon.rewards import StepBatch, create_reward_model
from guerdon.rewards.zoo.pdeil import PDEIL
from tests.rewards.zoo.zoo_tasks import steps

SETTINGS = {"type": "pdeil", "obs_shape": 1, "action_size": 2, "bandwidth": 0.5}


def made(expert, **settings):
    model = create_reward_model({**SETTINGS, **settings})
    assert isinstance(model, PDEIL)
    model.load_expert_data([expert])
    return model


def along(*places, actions):
    seen = torch.tensor([*places, 0.0])[:, None]
    return steps(len(places), obs=seen, actions=actions)


def normal(x, width):
    return math.exp(-0.5 * (x / width) ** 2) / (width * math.sqrt(2.0 * math.pi))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_discrete_rewards_are_the_ratio_of_hand_made_densities(alpha):
    expert = along(-1.0, 1.0, 1.0, -1.0, actions=torch.tensor([0, 1, 0, 0]))  # mean 0, deviation 1
    model = made(expert, alpha=alpha)
    model.collect_data(along(0.0, 2.0, actions=torch.tensor([0, 0])))
    model.train()
    place = 0.25  # where the two state densities differ
    of_expert = [normal(place - at, 0.5) for at in (-1.0, 1.0, 1.0, -1.0)]
    states, policy = sum(of_expert) / 4, (normal(place, 0.5) + normal(place - 2.0, 0.5)) / 2
    for action, steps_of_it in ((0, (0, 2, 3)), (1, (1,))):
        wanted = sum(of_expert[i] for i in steps_of_it) / 4 / (alpha * states + (1 - alpha) * policy)
        found = model.rewards(along(place, actions=torch.tensor([action])))
        assert float(found) == pytest.approx(wanted, rel=1e-4)


def test_with_alpha_1_discrete_rewards_are_the_expert_s_probabilities():
    model = made(steps(50, size=1, seed=1), alpha=1.0)
    batch = steps(20, size=1, seed=2)
    both = [model.rewards(along(*batch.obs[:, 0].tolist(), actions=torch.full((20,), a))) for a in (0, 1)]
    torch.testing.assert_close(both[0] + both[1], torch.ones(20), rtol=1e-5, atol=1e-5)


def test_real_valued_actions_have_a_density():
    expert = along(-1.0, 1.0, actions=torch.tensor([[-1.0], [1.0]]))
    model = made(expert, action_size=1, discrete_actions=False, alpha=1.0)
    on, off = normal(0.0, 0.5), normal(2.0, 0.5)
    found = model.rewards(along(1.0, actions=torch.tensor([[1.0]])))
    assert float(found) == pytest.approx((on * on + off * off) / (on + off), rel=1e-4)
    other = model.rewards(along(1.0, actions=torch.tensor([[-1.0]])))
    assert float(other) == pytest.approx(2 * on * off / (on + off), rel=1e-4)


def test_where_nothing_was_seen_and_where_nothing_varies_rewards_are_numbers():
    flat = steps(10, obs=torch.zeros(11, 1), actions=torch.zeros(10, 1))
    for expert, settings in (
        (steps(10, size=1), {}),
        (flat, {"action_size": 1, "discrete_actions": False}),
        (steps(10, size=1, actions=torch.zeros(10, dtype=torch.long)), {}),  # an action that is never chosen
    ):
        model = made(expert, **settings)
        actions = torch.ones(3, 1) if settings else torch.ones(3, dtype=torch.long)
        far = along(1e6, -1e6, 0.0, actions=actions)
        for _ in range(2):
            rewards = model.rewards(far)
            assert bool(torch.isfinite(rewards).all()) and float(rewards.min()) >= 0.0
            model.collect_data(far)
            model.train()


def test_leaving_the_demonstrations_costs_before_and_after_the_policy_was_seen():
    model = made(steps(100, size=1, seed=1))
    near, far = (steps(50, obs=torch.randn(51, 1) * 0.3 + at) for at in (0.0, 4.0))
    for _ in range(2):
        assert float(model.rewards(near).mean()) > 5.0 * float(model.rewards(far).mean())
        model.collect_data(StepBatch.cat([near, far]))
        model.train()


def test_states_that_the_policy_has_too_often_pay_less():
    model, batch = made(steps(100, size=1, seed=1)), steps(30, obs=torch.full((31, 1), 1.0))
    model.collect_data(steps(100, size=1, seed=2))
    model.train()
    usual = model.rewards(batch)
    model.clear_data(0)
    model.collect_data(batch)
    model.train()
    assert bool((model.rewards(batch) < 0.6 * usual).all())


def test_densities_are_saved_and_few_kernels_stand_for_many(tmp_path):
    model = made(steps(100, size=1, seed=1), num_kernels=16)
    model.collect_data(steps(60, size=1, seed=2))
    model.train()
    assert {name: len(part) for name, part in model.kernels.items()} == dict.fromkeys(model.kernels, 16)
    model.save(tmp_path / "pdeil.pt")
    other = create_reward_model({**SETTINGS, "num_kernels": 16})
    with pytest.raises(ConfigError, match="no demonstrations"):
        other.estimate(steps(3, size=1))
    other.load(tmp_path / "pdeil.pt")
    batch = steps(9, size=1, seed=3)
    assert torch.equal(other.rewards(batch), model.rewards(batch))
