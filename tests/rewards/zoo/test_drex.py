"""D-REX: cloning, trajectories played with noise, rankings by noise alone, and who plays them."""

import numpy as np
import pytest
import torch

from guerdon.core.errors import ConfigError, DataError
from guerdon.envs.experts import balance, reach
from guerdon.rewards import create_reward_model
from guerdon.rewards.zoo.demonstrations import returns_of
from guerdon.rewards.zoo.drex import DREX
from guerdon.training.rollouts import noise_ranked, play_episodes, play_for
from guerdon.training.serial import shapes_of
from tests.rewards.zoo.zoo_tasks import FIXED_CARTPOLE, POINT_REACH, NanReward, experts, steps, task

SETTINGS = {"type": "drex", "obs_shape": 1, "action_size": 2, "hidden": [16], "normalize_obs": False}


def groups(**settings):
    """More noise, lower observations; env rewards say the opposite and must not be looked at."""
    return {
        noise: [steps(5 + n, obs=torch.full((6 + n, 1), -noise), reward=noise) for n in range(2)]
        for noise in (0.0, 0.5, 1.0)
    }


def test_less_noise_is_better_whatever_the_env_rewards_say():
    model = create_reward_model({**SETTINGS, "pretrain_updates": 200})
    assert isinstance(model, DREX)
    model.load_ranked_data(groups())
    model.pretrain()
    rewards = [float(model.rewards(steps(1, obs=torch.full((2, 1), -n)))) for n in (0.0, 0.5, 1.0)]
    assert rewards == sorted(rewards, reverse=True) and rewards[0] > rewards[2] + 1.0


def test_the_clone_does_what_was_demonstrated():
    for env_id, script in ((FIXED_CARTPOLE, balance), (POINT_REACH, reach)):
        model = create_reward_model({**shapes_of(task(env_id)), "type": "drex", "hidden": [32]})
        demonstrations = experts(env_id, 4)
        model.load_expert_data(demonstrations)
        clone = model.clone()
        obs = torch.cat([each.obs for each in demonstrations]).numpy()
        if env_id == FIXED_CARTPOLE:
            assert float((clone(obs) == script(obs)).mean()) > 0.9
        else:
            assert float(np.abs(clone(obs) - script(obs)).mean()) < 0.15


def test_noise_is_the_share_of_random_actions():
    env = task(FIXED_CARTPOLE, 4)
    ranked = noise_ranked(env, lambda obs: np.ones(4, np.int64), (0.0, 0.5, 1.0), 6, seed=1)
    share = {noise: torch.cat([e.actions for e in found]).float().mean() for noise, found in ranked.items()}
    assert [len(found) for found in ranked.values()] == [6, 6, 6]
    assert share[0.0] == 1.0
    assert float(share[0.5]) == pytest.approx(0.75, abs=0.04)
    assert float(share[1.0]) == pytest.approx(0.5, abs=0.05)
    again = noise_ranked(env, lambda obs: np.ones(4, np.int64), (0.0, 0.5, 1.0), 6, seed=1)
    assert all(torch.equal(a.obs, b.obs) for n in ranked for a, b in zip(ranked[n], again[n], strict=True))


def test_episodes_are_whole_and_not_picked_by_their_length():
    import gymnasium as gym

    env = gym.make_vec(
        "CartPole-v1", 3, vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
    )  # fmt: skip
    rng = np.random.default_rng(0)
    found = play_episodes(env, lambda obs: rng.integers(2, size=3), 40, seed=0)
    assert len(found) == 40
    for each in found:
        assert bool(each.done[-1]) and int(each.done.sum()) == 1
        torch.testing.assert_close(each.next_obs[:-1], each.obs[1:])
        assert float(each.obs[0].abs().max()) <= 0.05 and float(each.next_obs[-1].abs().max()) > 0.2
    assert float(returns_of(found).mean()) == pytest.approx(22.0, abs=5.0)  # of a random policy
    with pytest.raises(ConfigError, match="at least one episode"):
        play_episodes(env, lambda obs: rng.integers(2, size=3), 0)


def test_the_pipeline_plays_for_it_without_looking_at_rewards():
    env = NanReward(task(POINT_REACH, 4))
    model = create_reward_model(
        {**shapes_of(env), "type": "drex", "noise_levels": [0.0, 1.0], "episodes_per_level": 3}
    )
    model.load_expert_data(experts(POINT_REACH, 2))
    with pytest.raises(ConfigError, match="no noisy trajectories"):
        model.pretrain()
    assert play_for(model, env, seed=0) == 2 * 3 * 50
    assert model.ranked and play_for(model, env, seed=0) == 0
    assert model.pretrain()["accuracy"] > 0.5


def test_bad_rankings_are_refused():
    model = create_reward_model(SETTINGS)
    with pytest.raises(DataError, match="two levels"):
        model.load_ranked_data({0.5: [steps(3, size=1)]})
    with pytest.raises(ConfigError, match="no demonstrations"):
        model.clone()
