"""NGU's memory: neighbours within the episode, by hand and against a loop; streams in pieces."""

import pytest
import torch
from test_curiosity import made, steps

from guerdon.rewards.zoo.ngu import EpisodicMemory, nearest_in_episode


def by_hand(phi, done, k, size):
    """Step by step, stream by stream."""
    found = torch.full((*phi.shape[:2], k), torch.inf)
    for env in range(phi.shape[1]):
        past: list[torch.Tensor] = []
        for t in range(len(phi)):
            apart = sorted(float((phi[t, env] - each).square().sum()) for each in past[-size:])[:k]
            found[t, env, : len(apart)] = torch.tensor(apart)
            past = [] if done[t, env] else [*past, phi[t, env]]
    return found


def nothing(num_streams, size):
    return EpisodicMemory(
        keys=torch.zeros(num_streams, 0, size), valid=torch.zeros(num_streams, 0, dtype=torch.bool)
    )


@pytest.mark.parametrize("pieces", [(150,), (1, 70, 79), (64, 64, 22)])
def test_neighbours_are_those_of_the_episode_whatever_the_pieces(pieces):
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(150, 3, 4, generator=generator)
    done = torch.rand(150, 3, generator=generator) < 0.03
    done[149, 0] = done[63, 1] = True
    memory, found = nothing(3, 4), []
    for some, ended in zip(phi.split(pieces), done.split(pieces), strict=True):
        nearest, memory = nearest_in_episode(some, ended, memory, 5, 1000)
        found.append(nearest)
    torch.testing.assert_close(torch.cat(found), by_hand(phi, done, 5, 1000))
    assert not memory.valid[0].any()  # its episode is over


def test_the_memory_keeps_the_latest_steps():
    phi = torch.randn(20, 1, 2)
    memory, found = nothing(1, 2), []
    for t in range(20):
        nearest, memory = nearest_in_episode(
            phi[t : t + 1], torch.zeros(1, 1, dtype=torch.bool), memory, 3, 6
        )
        found.append(nearest)
        assert memory.keys.shape[1] == min(t + 1, 6)
    torch.testing.assert_close(torch.cat(found), by_hand(phi, torch.zeros(20, 1), 3, 6))


def test_kernel_and_modulation_by_hand():
    model = made("ngu", num_neighbours=2, scale_by="nothing")
    model.mean_distance = torch.tensor(2.0)
    nearest = torch.tensor([[0.0, 4.0], [1.0, torch.inf], [torch.inf, torch.inf]])
    kernels = torch.tensor(
        [
            [1.0, 1e-3 / (2.0 - 8e-3 + 1e-3)],
            [1e-3 / (0.5 - 8e-3 + 1e-3), 1e-3 / (1.0 - 8e-3 + 1e-3)],
            [1e-3 / (1.0 - 8e-3 + 1e-3)] * 2,
        ]
    )
    expected = 1.0 / (kernels.sum(1).sqrt() + 1e-3)
    torch.testing.assert_close(model._episodic(nearest), expected)
    assert (model._episodic(torch.zeros(1, 100)) == 0.0).all()  # 100 times the same: nothing

    features = torch.randn(6, 3)
    errors = model.network.lifelong(features)
    model.error_statistics.update(errors[:3])
    mean, deviation = errors[:3].mean(), errors[:3].std(unbiased=False)
    modulation = (1.0 + (errors - mean) / deviation).clamp(1.0, 5.0)
    ones = torch.full((6, 1, 2), torch.inf)
    torch.testing.assert_close(model._novelty(features, ones), expected[2] * modulation)


def test_coming_back_pays_less_than_going_on_and_a_new_episode_starts_afresh():
    model = made("ngu", obs_shape=2, num_neighbours=1)
    places = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    batch = steps(5, 1, size=2)
    batch.next_obs[:] = places[:, None]
    batch.terminated[3] = True
    model.collect_data(batch)
    rewards = model.novelty(batch)[:, 0].detach()
    assert rewards[2] < 0.2 * rewards[1] and rewards[2] < 0.2 * rewards[0]
    assert rewards[4] == pytest.approx(float(rewards[0]))


def test_streams_in_pieces_get_the_rewards_of_the_whole():
    model = made("ngu")
    model.collect_data(steps(40, 3))
    batch = steps(30, 3, seed=1)
    batch.truncated[11, 1] = True
    whole, _ = model.stream_rewards(batch, model.initial_state(3))
    memory, found = model.initial_state(3), []
    for rows in (slice(0, 7), slice(7, 12), slice(12, 30)):
        rewards, memory = model.stream_rewards(batch[rows], memory)
        found.append(rewards)
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.rewards(batch), whole, rtol=1e-4, atol=1e-5)
