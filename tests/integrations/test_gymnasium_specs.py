"""Gymnasium's conventions: `env.spec` makes a wrapped environment again, and `make_vec` makes ours."""

import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import guerdon as gd
from guerdon.collect import DataCollectorWrapper
from guerdon.config.schema_zoo import MixConfig
from guerdon.data.formats import get_format
from guerdon.envs import TABLETOP_ID, TabletopVectorEnv
from guerdon.wrappers import KeepFinalFrame, LearnedRewardWrapper

SETTINGS = {"image_size": (16, 16), "max_episode_steps": 4, "obs_mode": "rgb"}


def brightness(frames):
    """A reward function of frames, uint8 [N, H, W, C]."""
    return frames.mean(axis=(1, 2, 3)) / 255.0


def tabletop():
    return gym.make(TABLETOP_ID, render_mode="rgb_array", **SETTINGS)


def played(env, steps=6):
    """Rewards, ends and observations of fixed actions."""
    obs, _ = env.reset(seed=5)
    found = [obs]
    rng = np.random.default_rng(0)
    for _ in range(steps):
        obs, reward, terminated, truncated, _ = env.step(rng.uniform(-1, 1, 4).astype(np.float32))
        found += [obs, reward, terminated, truncated]
        if terminated or truncated:
            obs, _ = env.reset()
    return found


def wrappers_of(env):
    names = []
    while isinstance(env, gym.Wrapper):
        names.append(type(env))
        env = env.env
    return names


@pytest.mark.parametrize(
    "wrap",
    [
        KeepFinalFrame,
        functools.partial(LearnedRewardWrapper, manager=brightness),
        functools.partial(
            LearnedRewardWrapper, manager=brightness, cfg=MixConfig(combine_mode="add"), train_every=0
        ),
        lambda env: KeepFinalFrame(gd.wrap(env, brightness, combine_mode="weighted", reward_weight=0.25)),
    ],
    ids=["final frame", "learned reward", "added reward", "gd.wrap in another"],
)
def test_a_spec_makes_an_equal_environment(wrap):
    env = wrap(tabletop())
    again = gym.make(env.spec)
    assert wrappers_of(again) == wrappers_of(env)
    assert str(again) == str(env)
    assert again.spec == env.spec
    for mine, other in zip(played(env), played(again), strict=True):
        np.testing.assert_equal(mine, other)
    rewards = [value for value in played(env) if isinstance(value, float)]
    assert len(rewards) == 6
    env.close()
    again.close()


def test_a_recorder_made_again_appends_to_the_same_place(tmp_path):
    arguments = {"target_success": None, "format": "npy-trajectory", "keep_states": False}
    env = DataCollectorWrapper(tabletop(), tmp_path / "data", **arguments)
    spec = env.spec
    played(env)
    env.close()
    before = sum(get_format("npy-trajectory").count(tmp_path / "data"))
    again = gym.make(spec)
    assert spec.additional_wrappers[-1].kwargs["format"] == "npy-trajectory"
    played(again)
    again.close()
    assert before == 1
    assert sum(get_format("npy-trajectory").count(tmp_path / "data")) == 2 * before


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_make_vec_takes_vector_arguments_and_wrappers(mode):
    """Gymnasium hands `vector_kwargs` and `wrappers` to its own vector environments."""
    envs = gym.make_vec(
        TABLETOP_ID,
        num_envs=2,
        vectorization_mode=mode,
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        wrappers=[KeepFinalFrame, functools.partial(LearnedRewardWrapper, manager=brightness)],
        render_mode="rgb_array",
        **SETTINGS,
    )
    try:
        assert envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
        envs.reset(seed=0)
        for _ in range(4):
            _, rewards, _, truncated, info = envs.step(np.zeros((2, 4), np.float32))
            shown = info["final_info"] if truncated.all() else info
            np.testing.assert_allclose(rewards, shown["learned_reward"])
        assert truncated.all() and "final_frame" in info["final_info"]
        if mode == "sync":
            assert isinstance(gym.make_vec(envs.spec), SyncVectorEnv)
    finally:
        envs.close()


def test_make_vec_makes_our_own_batches():
    """They take their arguments by name; a spec makes them again."""
    envs = gym.make_vec(TABLETOP_ID, num_envs=3, autoreset_mode=AutoresetMode.SAME_STEP, **SETTINGS)
    again = gym.make_vec(envs.spec)
    assert isinstance(envs, TabletopVectorEnv) and isinstance(again, TabletopVectorEnv)
    assert again.spec == envs.spec and again.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    for mine, other in zip(envs.reset(seed=1)[0].values(), again.reset(seed=1)[0].values(), strict=True):
        np.testing.assert_array_equal(mine, other)
    point = gym.make_vec("guerdon/PointReach-v0", num_envs=2)
    assert gym.make_vec(point.spec).num_envs == 2
