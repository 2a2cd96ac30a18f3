import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from guerdon.envs.robot import ScriptedOperator
from guerdon.envs.robot.env import STATE_NAMES

NOTHING = np.zeros(6, np.float32)


def play(env, action=lambda: NOTHING, seed=None):
    """One episode; the infos of its steps, and how it ended."""
    env.reset(seed=seed)
    infos = []
    while True:
        obs, reward, terminated, truncated, info = env.step(action())
        infos.append(info)
        assert env.observation_space.contains(obs)
        assert reward == float(info["success"])
        if terminated or truncated:
            return infos, terminated


def test_scripted_operator_inserts_in_time(make_env, server):
    env = make_env(operator=lambda config: ScriptedOperator(config, seed=3), success_hold_steps=5)
    for seed in range(6):
        infos, terminated = play(env, seed=seed)
        assert terminated and infos[-1]["success"] and len(infos) < 40
        assert server.world.truth()["inserted"]
        assert all(info["intervened"] for info in infos)
        assert [info["hold_steps"] for info in infos[-5:]] == [1, 2, 3, 4, 5]
    assert server.world.record.outside == 0 < server.world.record.commands


def test_random_actions_do_not_insert(make_env, server):
    env = make_env(max_episode_steps=40)
    rng = np.random.default_rng(0)
    for seed in range(4):
        infos, terminated = play(env, lambda: rng.uniform(-1, 1, 6).astype(np.float32), seed)
        assert not terminated and not infos[-1]["success"] and len(infos) == 40
    assert not server.world.truth()["inserted_once"]
    assert server.world.record.outside == 0


def test_gymnasium_finds_nothing_to_complain_about(make_env):
    env = make_env(enable_random_reset=False)
    with pytest.warns(UserWarning):
        check_env(env, skip_render_check=True)
    obs, _ = env.reset(seed=1)
    assert set(obs) == {"states", "main_images", "wrist_camera"}
    assert obs["states"].shape == (len(STATE_NAMES),)
