"""One's own environment in the wrappers: states for the policy, rendered pictures for the reward."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3 import SAC
from stable_baselines3.common.vec_env import DummyVecEnv

from guerdon.config import RewardConfig
from guerdon.config.schema_zoo import MixConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.wrappers import (
    KeepFinalFrame,
    LearnedRewardVecEnv,
    LearnedRewardVectorWrapper,
    LearnedRewardWrapper,
)
from tests.envs.own_env import GOAL, STEPS, Slider, place_in

PUSH = np.full(1, 0.4, np.float32)


def places(frames):
    """A reward function that reads the picture."""
    assert frames.dtype == np.uint8 and frames.ndim == 4
    return [place_in(picture) for picture in frames]


def slider():
    return KeepFinalFrame(Slider(render_mode="rgb_array"))


def single(reward, cfg=None):
    return LearnedRewardWrapper(Slider(render_mode="rgb_array"), reward, cfg)


def vector(reward, cfg=None):
    envs = SyncVectorEnv([slider, slider], autoreset_mode=AutoresetMode.SAME_STEP)
    return LearnedRewardVectorWrapper(envs, reward, cfg)


def stepped(env, steps=STEPS):
    """Rewards and true places of the steps of one episode, [T, N]."""
    env.reset(seed=0)
    rewards, true = [], []
    for _ in range(steps):
        _, reward, _, _, info = env.step(np.broadcast_to(PUSH, env.action_space.shape))
        final = info.get("final_info", info)
        rewards.append(np.atleast_1d(reward))
        true.append(np.atleast_1d(final["place"]))
    env.close()
    return np.array(rewards), np.array(true)


@pytest.mark.parametrize("make", [single, vector])
def test_what_a_function_returns_is_the_reward(make):
    env = make(places)
    assert env.observation_space == env.env.observation_space
    assert env.action_space == env.env.action_space
    rewards, true = stepped(env)
    np.testing.assert_allclose(rewards, true, atol=0.04)  # the final frame too, not the next episode's first
    assert true[-1].min() > GOAL


@pytest.mark.parametrize("make", [single, vector])
def test_with_a_reward_section_it_returns_probabilities(make):
    section = RewardConfig(
        reward_threshold=GOAL, success_reward=2.0, fail_reward=-1.0, reward_mode="terminal"
    )
    rewards, _ = stepped(make(places, section))
    assert (rewards[:-1] == 0).all() and (rewards[-1] == 2.0).all()
    with pytest.raises(DataError, match=r"returned 5 to 5, but probabilities are 0 to 1"):
        stepped(make(lambda frames: np.full(len(frames), 5.0), section))
    with pytest.raises(ConfigError, match="no calibrated threshold: give reward_threshold a number"):
        make(places, RewardConfig())
    smooth, true = stepped(make(places, RewardConfig(reward_type="continuous")))
    np.testing.assert_allclose(smooth, true, atol=0.04)


def test_a_function_is_mixed_with_the_env_reward():
    rewards, true = stepped(single(places, MixConfig(combine_mode="weighted", reward_weight=3.0)))
    np.testing.assert_allclose(rewards, 3 * true, atol=0.12)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda frames: 1.0 if len(frames) > 1 else [1.0, 2.0], r"each of 1 frames, not \[2\]"),
        (lambda frames: [np.nan], "of which 1 are not finite"),
    ],
)
def test_a_function_that_answers_wrongly_is_named(function, message):
    with pytest.raises(DataError, match=message):
        stepped(single(function), 1)


def test_sac_of_stable_baselines3_learns_on_states_from_pictures_alone():
    """The env reward is zero; the policy sees one number, the reward function sees pictures."""
    section = RewardConfig(reward_threshold=GOAL)
    venv = LearnedRewardVecEnv(DummyVecEnv([slider]), places, section)
    assert isinstance(venv.observation_space, gym.spaces.Box) and venv.observation_space.shape == (1,)
    agent = SAC(
        "MlpPolicy",
        venv,
        seed=0,
        learning_starts=100,
        batch_size=32,
        learning_rate=3e-3,
        gamma=0.8,
        ent_coef=0.01,
        policy_kwargs={"net_arch": [16]},
    ).learn(500)
    env, at_end = Slider(), []
    for seed in range(10):
        obs, _ = env.reset(seed=seed)
        for _ in range(STEPS):
            obs, *_, info = env.step(agent.predict(obs, deterministic=True)[0])
        at_end.append(info["is_success"])
    assert np.mean(at_end) >= 0.9
