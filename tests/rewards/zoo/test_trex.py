"""T-REX: the ranking loss, equal and unequal lengths, ties, length bias, scaling."""

import math

import pytest
import torch
from torch import nn

from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards import create_reward_model
from guerdon.rewards.zoo.trex import TREX, RankingNetwork, margins
from tests.rewards.zoo.zoo_tasks import steps

SETTINGS = {"type": "trex", "obs_shape": 1, "action_size": 2, "hidden": [16], "normalize_obs": False}


def made(episodes, **settings):
    model = create_reward_model({**SETTINGS, **settings})
    assert isinstance(model, TREX)
    model.load_expert_data(episodes)
    return model


def constant(length, value, reward):
    return steps(length, obs=torch.full((length + 1, 1), float(value)), reward=reward)


def identity():
    """Rewards that are the feature itself."""
    network = RankingNetwork(1, (), 1, reward_penalty=0.0)
    nn.init.ones_(network.weights[0])
    nn.init.zeros_(network.biases[0])
    return network


def test_the_loss_is_the_cross_entropy_of_all_pairs_that_differ():
    features = torch.tensor([[1.0, 2.0, 9.0], [0.5, 0.0, 1.0], [2.0, 9.0, 9.0]])[..., None]
    lengths, ranks = torch.tensor([2, 3, 1]), torch.tensor([5.0, 1.0, 5.0])
    sums = {"whole": (3.0, 1.5, 2.0), "equal": ((3.0, 0.5), (2.0, 0.5))}
    whole = [math.log1p(math.exp(sums["whole"][1] - sums["whole"][i])) for i in (0, 2)]
    found = identity().learn(features, lengths, ranks, False)
    assert float(found) == pytest.approx(sum(whole) / 2, rel=1e-5)
    equal = [math.log1p(math.exp(worse - better)) for better, worse in sums["equal"]]
    found = identity().learn(features, lengths, ranks, True)
    assert float(found) == pytest.approx(sum(equal) / 2, rel=1e-5)


def test_a_batch_of_ties_teaches_nothing():
    features = torch.randn(2, 3, 1)
    assert float(identity().learn(features, torch.tensor([3, 3]), torch.tensor([1.0, 1.0]), True)) == 0.0


def test_the_penalty_is_the_mean_square_of_rewards_that_are_there():
    network = identity()
    network.reward_penalty = 10.0
    features = torch.tensor([[2.0, 7.0], [1.0, 3.0]])[..., None]
    found = network.learn(features, torch.tensor([1, 2]), torch.tensor([1.0, 1.0]), True)
    assert float(found) == pytest.approx(10.0 * (4.0 + 1.0 + 9.0) / 3, rel=1e-5)


def test_parts_are_drawn_from_inside_the_trajectories():
    lengths = (4, 9, 30)
    episodes = [
        steps(length, obs=100.0 * number + torch.arange(length + 1.0)[:, None], reward=number)
        for number, length in enumerate(lengths)
    ]
    model, starts = made(episodes, snippet_length=6), set()
    for _ in range(60):
        features, used, ranks, equal = model.sample_batch()
        assert equal and sorted(used.tolist()) == [4, 6, 6]
        for part, count, rank in zip(features[..., 0], used.tolist(), ranks.tolist(), strict=True):
            first = float(part[0])
            assert torch.equal(part[:count], first + torch.arange(float(count)))
            trajectory = int(first // 100)
            assert rank == trajectory * lengths[trajectory]
            assert 1.0 <= first - 100 * trajectory <= lengths[trajectory] - count + 1
            starts.add((trajectory, first))
    assert {each for each in starts if each[0] == 0} == {(0, 1.0)}
    assert {each[1] for each in starts if each[0] == 1} == {101.0, 102.0, 103.0, 104.0}


@pytest.mark.parametrize("snippet_length", [0, 5])
def test_what_better_trajectories_have_more_of_is_rewarded(snippet_length):
    episodes = [constant(length, value, value) for value, length in ((-1, 5), (0, 9), (1, 7), (2, 6))]
    model = made(episodes, snippet_length=snippet_length, pretrain_updates=200)
    scalars = model.pretrain()
    assert scalars["accuracy"] == 1.0
    rewards = [float(model.rewards(constant(3, value, 0.0)).mean()) for value in (-1, 0, 1, 2)]
    if snippet_length:
        assert rewards == sorted(rewards) and rewards[3] > rewards[0] + 1.0
    features = torch.cat([each.next_obs for each in episodes])
    scaled = (model.network(features) - model.network.offset) / model.network.scale
    torch.testing.assert_close(scaled.std(1), torch.ones(5), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        torch.cat([model.rewards(each) for each in episodes]), scaled.mean(0) - scaled.std(0, correction=0)
    )


def test_a_constant_explains_unequal_lengths_but_nothing_in_equal_parts():
    lengths, ranks = torch.tensor([2, 5, 3]), torch.tensor([1.0, 2.0, 3.0])
    there = torch.arange(5) < lengths[:, None]
    rewards = torch.randn(1, 3, 5).masked_fill(~there, 0.0)
    more = (rewards + 0.5).masked_fill(~there, 0.0)
    torch.testing.assert_close(margins(more, lengths, ranks, True), margins(rewards, lengths, ranks, True))
    gained = margins(more, lengths, ranks, False) - margins(rewards, lengths, ranks, False)
    torch.testing.assert_close(gained, torch.tensor([[1.5, 0.5, -1.0]]))  # better minus worse: 5-2, 3-2, 3-5


@pytest.mark.parametrize(("zero_at", "share"), [("mean", None), ("worst", 0.9)])
def test_zero_is_where_it_was_chosen(zero_at, share):
    model = made([steps(50, seed=n, size=1, reward=n) for n in range(4)], zero_at=zero_at, num_members=1)
    model.pretrain()
    rewards = torch.cat([model.rewards(each) for each in model.experts])
    if share is None:
        assert float(rewards.mean()) == pytest.approx(0.0, abs=1e-4)
    else:
        assert float((rewards > 0.0).float().mean()) == pytest.approx(share, abs=0.01)


def test_members_learn_apart_and_what_they_disagree_by_is_taken_off():
    episodes = [steps(20, seed=n, size=1, reward=n) for n in range(4)]
    model, trusting = (made(episodes, pessimism=each, pretrain_updates=30) for each in (1.0, 0.0))
    model.pretrain(), trusting.pretrain()
    alone = create_reward_model({**SETTINGS, "num_members": 1})
    torch.testing.assert_close(create_reward_model(SETTINGS).network.weights[0][:1], alone.network.weights[0])
    near, far = steps(9, size=1, seed=1), steps(9, obs=torch.full((10, 1), 30.0))
    lost = [float((trusting.rewards(each) - model.rewards(each)).mean()) for each in (near, far)]
    assert 0.0 < lost[0] < lost[1]


def test_beyond_the_edge_of_the_demonstrations_nothing_changes():
    model = made([steps(20, seed=n, size=1, reward=n) for n in range(4)], normalize_obs=True, obs_limit=2.0)
    model.pretrain()
    out, far_out = (model.rewards(steps(1, obs=torch.full((2, 1), at))) for at in (10.0, 1e6))
    assert torch.equal(out, far_out)


def test_the_scale_is_saved(tmp_path):
    model = made([steps(20, seed=n, size=1, reward=n) for n in range(4)])
    model.pretrain()
    model.save(tmp_path / "trex.pt")
    other = create_reward_model(SETTINGS)
    other.load(tmp_path / "trex.pt")
    batch = steps(6, size=1, seed=9)
    assert torch.equal(other.rewards(batch), model.rewards(batch))


def test_rankings_that_cannot_be_learned_from_are_refused():
    with pytest.raises(DataError, match="all 3 tie at 8"):
        made([steps(4, size=1, reward=2.0, seed=n) for n in range(3)])
    with pytest.raises(DataError, match="there is one alone"):
        made([steps(4, size=1)])
    with pytest.raises(DataError, match="cannot be ranked"):
        made([steps(4, size=1), steps(4, size=1, reward=float("nan"))])
    with pytest.raises(ConfigError, match="no ranked trajectories"):
        create_reward_model(SETTINGS).pretrain()
