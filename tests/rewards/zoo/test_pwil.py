"""PWIL: the greedy coupling against a slow one, masses, episodes that begin and end, purity."""

import math

import numpy as np
import pytest
import torch

from guerdon.core.errors import ConfigError
from guerdon.rewards import StepBatch, create_reward_model
from guerdon.rewards.zoo.pwil import PWIL
from tests.rewards.zoo.zoo_tasks import steps

SETTINGS = {"type": "pwil", "obs_shape": 2, "action_size": 2, "alpha": 5.0, "beta": 5.0}


def made(episodes, **settings):
    model = create_reward_model({**SETTINGS, **settings})
    assert isinstance(model, PWIL)
    model.load_expert_data(episodes)
    return model


def one_hot(actions):
    return np.eye(2)[actions.numpy()]


def slow_rewards(experts, episode, horizon, alpha, beta):
    """Step by step and atom by atom, in floating point, as the paper's algorithm 1."""
    atoms = np.concatenate([np.concatenate([e.obs.numpy(), one_hot(e.actions)], 1) for e in experts]).astype(
        float
    )
    mean, std = atoms.mean(0), atoms.std(0)
    std[std == 0.0] = 1.0
    atoms = (atoms - mean) / std
    mass = [1.0 / len(atoms)] * len(atoms)
    points = (np.concatenate([episode.obs.numpy(), one_hot(episode.actions)], 1) - mean) / std
    rewards = []
    for point in points:
        weight, cost = 1.0 / horizon, 0.0
        far = [math.dist(point, atom) for atom in atoms]
        while weight > 1e-12 and max(mass) > 1e-12:
            nearest = min((d, i) for i, d in enumerate(far) if mass[i] > 1e-12)[1]
            moved = min(weight, mass[nearest])
            cost += moved * far[nearest]
            mass[nearest] -= moved
            weight -= moved
        rewards.append(alpha * math.exp(-beta * horizon / math.sqrt(4) * cost))
    return torch.tensor(rewards)


@pytest.mark.parametrize(("lengths", "horizon"), [((7, 5), 7), ((3,), 8), ((30, 25, 20), 6)])
def test_rewards_are_those_of_a_slow_coupling(lengths, horizon):
    """More demonstrated steps than an episode has, fewer, and many for each step."""
    experts = [steps(length, seed=number) for number, length in enumerate(lengths)]
    model = made(experts, horizon=horizon, beta=1.0)
    episode = steps(horizon, seed=99)
    slow = slow_rewards(experts, episode, horizon, 5.0, 1.0)
    torch.testing.assert_close(model.rewards(episode), slow.float(), rtol=1e-4, atol=1e-5)


def test_an_episode_of_full_length_uses_all_mass_to_the_unit_and_later_steps_get_nothing():
    experts = [steps(11, seed=1), steps(6, seed=2)]
    model = made(experts)
    episode = steps(13, seed=3).streams()
    _, left = model.stream_rewards(episode[:10], model.initial_state(1))
    assert int(left.sum()) == 17  # of 11 steps one is to come, of D = 17 units
    rewards, left = model.stream_rewards(episode[10:12], left)
    assert int(left.abs().sum()) == 0 and rewards[0, 0] > 0.0 and rewards[1, 0] == 0.0


def test_the_demonstration_itself_gets_the_highest_reward_once():
    episode = steps(9, seed=4)
    model = made([episode])
    torch.testing.assert_close(model.rewards(episode), torch.full((9,), 5.0))
    again = StepBatch.cat([episode[:1]] * 3)
    rewards = model.rewards(again.map(lambda part: part.clone()))
    assert rewards[0] == pytest.approx(5.0) and rewards[1] < 4.9  # the nearest is used up


def test_streams_are_scored_in_pieces_side_by_side_and_begin_afresh_after_an_end():
    model = made([steps(8, seed=1), steps(8, seed=2)])
    first, second = [steps(5, seed=5), steps(3, seed=6)], [steps(8, seed=7)]
    streams = StepBatch(
        **{
            name: torch.stack([getattr(StepBatch.cat(each), name) for each in (first, second)], dim=1)
            for name in first[0].parts()
        }
    )
    whole, _ = model.stream_rewards(streams, model.initial_state(2))
    memory, pieces = model.initial_state(2), []
    for start in (0, 2, 6):
        piece, memory = model.stream_rewards(
            streams[start : min(start + 4, 6) if start == 2 else start + 2], memory
        )
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces), whole)
    alone = torch.cat([model.rewards(each) for each in first])
    torch.testing.assert_close(whole[:, 0], alone)
    torch.testing.assert_close(whole[:, 1], model.rewards(second[0]))


def test_scoring_changes_neither_memory_nor_model():
    model = made([steps(8, seed=1)])
    memory = model.initial_state(1)
    kept, episode = memory.clone(), steps(4, seed=2).streams()
    first, _ = model.stream_rewards(episode, memory)
    second, _ = model.stream_rewards(episode, memory)
    assert torch.equal(first, second) and torch.equal(memory, kept)


def test_a_saved_model_scores_without_its_demonstrations(tmp_path):
    model = made([steps(8, seed=1)], subsample=2)
    model.save(tmp_path / "pwil.pt")
    other = create_reward_model({**SETTINGS, "subsample": 2})
    with pytest.raises(ConfigError, match="no demonstrations"):
        other.estimate(steps(3))
    other.load(tmp_path / "pwil.pt")
    episode = steps(6, seed=3)
    assert torch.equal(other.rewards(episode), model.rewards(episode))
    assert model.initial_state(3).shape == (3, 4)
