"""The scripted expert: how often it succeeds, how it fails, and that it is repeatable."""

import numpy as np
import pytest

from guerdon.core.errors import ConfigError, DataError
from guerdon.envs import ScriptedExpert, TabletopVectorEnv
from guerdon.envs.tabletop.scene import CUBE_TO_GOAL


def play(noise, num_envs=400, seed=0, env_seed=1000, **settings):
    """One episode in each environment -> distance to the goal, success, still, grasped; [T, N] each."""
    env = TabletopVectorEnv(num_envs, autoreset_mode="Disabled", **settings)
    obs, _ = env.reset(seed=env_seed)
    expert = ScriptedExpert(noise, seed)
    log = []
    for _ in range(50):
        obs, _, _, _, info = env.step(expert.act(obs))
        distance = np.linalg.norm(obs[:, CUBE_TO_GOAL], axis=1)
        log.append((distance, info["success"], info["is_robot_static"], info["is_grasped"]))
    return [np.array(column) for column in zip(*log, strict=True)]


def test_without_noise_it_succeeds_and_stays_there():
    _, success, still, _ = play(0.0, 1000)
    assert success.any(axis=0).mean() >= 0.98
    assert success[-1].mean() >= 0.98
    first = success.argmax(axis=0)
    assert first.max() < 40
    assert still[-10:].all()


def test_a_decoy_does_not_mislead_it():
    _, success, _, _ = play(0.0, 200, decoy=True)
    assert success[-1].mean() >= 0.98


def test_moderate_noise_mixes_successes_near_misses_and_failures():
    distance, success, still, grasped = play(0.5)
    assert 0.35 < success[-1].mean() < 0.75
    assert 0.1 < 1.0 - success.any(axis=0).mean() < 0.6
    near = (distance > 0.025) & (distance < 0.06)
    assert (near & still & grasped).mean() > 0.05  # held still beside the goal: the most telling negatives
    assert (near & still & grasped).any(axis=0).mean() > 0.4
    assert ((distance <= 0.025) & ~still).mean() > 0.05  # at the goal, but moving
    assert (~grasped[-1]).mean() > 0.02  # dropped or never grasped


def test_more_noise_means_less_success():
    rates = [play(noise, 200)[1][-1].mean() for noise in (0.0, 0.2, 0.5, 1.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.35


def test_what_it_does_depends_on_seed_environment_and_episode_alone():
    reference = play(0.6, 12)
    again = play(0.6, 12)
    fewer = play(0.6, 5)
    other = play(0.6, 12, seed=1)
    np.testing.assert_array_equal(reference[0], again[0])
    np.testing.assert_array_equal(reference[0][:, :5], fewer[0])
    assert not np.array_equal(reference[0], other[0])


def acts(expert, state):
    """Eight actions in the same state, [8, N, 4]."""
    return np.array([expert.act(state) for _ in range(8)])


def test_episodes_differ_and_a_reset_of_some_leaves_the_others():
    env = TabletopVectorEnv(6)
    state, _ = env.reset(seed=0)
    one, two = ScriptedExpert(0.8, seed=3), ScriptedExpert(0.8, seed=3)
    for expert in (one, two):
        for _ in range(3):
            expert.act(state)
    mask = np.array([True, False, False, True, False, False])
    one.reset(mask)
    second, going_on = acts(one, state), acts(two, state)
    np.testing.assert_array_equal(second[:, ~mask], going_on[:, ~mask])
    assert (second != going_on).any(axis=(0, 2))[mask].all()
    first = acts(ScriptedExpert(0.8, seed=3), state)
    assert (second != first).any(axis=(0, 2))[mask].all()  # the second episode is not the first again
    one.reset()
    np.testing.assert_array_equal(acts(one, state), first)


def test_actions_fit_the_action_space():
    env = TabletopVectorEnv(32)
    state, _ = env.reset(seed=0)
    expert = ScriptedExpert(1.0)
    for _ in range(20):
        action = expert.act(state)
        assert env.action_space.contains(action)
        state, *_ = env.step(action)


def test_wrong_input():
    with pytest.raises(ConfigError, match="noise"):
        ScriptedExpert(-0.1)
    with pytest.raises(ConfigError, match="noise"):
        ScriptedExpert(float("nan"))
    with pytest.raises(ConfigError, match="seed"):
        ScriptedExpert(0.1, seed=-1)
    expert = ScriptedExpert()
    with pytest.raises(DataError, match=r"\[N, 20\]"):
        expert.act(np.zeros((3, 7), np.float32))
    expert.act(np.zeros((3, 20), np.float32))
    with pytest.raises(DataError, match="plays 3 environments"):
        expert.act(np.zeros((4, 20), np.float32))
    with pytest.raises(DataError, match="mask"):
        expert.reset(np.ones(4, bool))
    expert.reset()
    assert expert.act(np.zeros((4, 20), np.float32)).shape == (4, 4)
