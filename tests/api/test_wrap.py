"""`wrap`: Gymnasium, vector and Stable-Baselines3 environments with a learned reward."""

import gymnasium as gym
import numpy as np
import pytest

import guerdon as gd
from guerdon.core.errors import ConfigError
from tests.api.dot import Dot


@pytest.fixture(scope="module")
def reward(checkpoint):
    return gd.load_reward(checkpoint, reward_type="continuous")


def test_a_single_environment(reward):
    inner = Dot()
    env = gd.wrap(inner, reward)
    assert env.observation_space == inner.observation_space and env.action_space == inner.action_space
    env.reset(seed=0)
    _, learned, _, _, info = env.step(np.zeros(1, np.float32))
    assert learned == pytest.approx(float(reward.predict(inner.render())[0]))
    assert info["prob_success"] == pytest.approx(learned) and "env_reward" in info


def test_a_path_and_other_settings(checkpoint):
    env = gd.wrap(Dot(), checkpoint, combine_mode="add", success_reward=10.0, fail_reward=5.0)
    env.reset(seed=0)
    _, total, _, _, info = env.step(np.zeros(1, np.float32))
    assert info["learned_reward"] in (5.0, 10.0)
    assert total == info["env_reward"] + info["learned_reward"]


def test_a_vector_environment(reward):
    envs = gym.vector.SyncVectorEnv([Dot, Dot])
    env = gd.wrap(envs, reward)
    env.reset(seed=0)
    _, learned, *_ = env.step(np.zeros((2, 1), np.float32))
    np.testing.assert_allclose(learned, reward.predict(np.stack(envs.render())), atol=1e-6)


def test_stable_baselines3(reward):
    from stable_baselines3.common.vec_env import DummyVecEnv

    from guerdon.wrappers import KeepFinalFrame

    venv = gd.wrap(DummyVecEnv([lambda: KeepFinalFrame(Dot())]), reward)
    venv.reset()
    for _ in range(9):  # beyond the end of an episode
        _, learned, _, infos = venv.step(np.zeros((1, 1), np.float32))
        assert learned[0] == pytest.approx(infos[0]["prob_success"])


def test_a_function_of_frames():
    env = gd.wrap(Dot(), lambda frames: frames[:, :, :12].mean((1, 2, 3)), combine_mode="add")
    env.reset(seed=0)
    _, total, _, _, info = env.step(np.zeros(1, np.float32))
    assert info["learned_reward"] == pytest.approx(env.render()[:, :12].mean(), rel=1e-5)
    assert total == pytest.approx(info["learned_reward"] + info["env_reward"])


def test_a_model_of_the_zoo():
    model = gd.reward_model("rnd", Dot, hidden=(8,), seed=3)
    env = gd.wrap(Dot(), model, train_every=4)
    env.reset(seed=0)
    rewards = [env.step(env.action_space.sample())[1] for _ in range(6)]
    assert np.isfinite(rewards).all() and len(set(rewards)) > 1
    assert model.train_iter > 0


def test_wrong_arguments_are_named(reward):
    with pytest.raises(ConfigError, match=r"env must be a gymnasium.Env.*not list"):
        gd.wrap([], reward)
    with pytest.raises(ConfigError, match="wrap: unknown argument 'combine'; did you mean 'combine_mode'"):
        gd.wrap(Dot(), reward, combine="add")
