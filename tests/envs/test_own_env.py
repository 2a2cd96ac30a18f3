"""Environments that a user brings: labels, actions and final frames without images in the observation."""

import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from guerdon.collect import DataCollectorWrapper, RewardDataCollector
from guerdon.config import CollectConfig, EnvConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.data.collect.policies import RandomPolicy
from guerdon.data.collect.run import collect
from guerdon.data.store import EpisodeStore
from guerdon.envs.make import make_vector_env
from guerdon.envs.success import SuccessLabels, success_of
from guerdon.wrappers import KeepFinalFrame
from tests.envs.own_env import GOAL, STEPS, Slider, place_in, succeeded

ROOT = Path(__file__).parents[2]
MODULE = "tests.envs.own_env"


def section(name="Slider", num_envs=3, **settings):
    return EnvConfig(id=f"{MODULE}:{name}-v0", num_envs=num_envs, **settings)


def collected(folder, env, **settings):
    cfg = CollectConfig(save_dir=str(folder), target_success=2, target_failure=2, **settings)
    result = collect(env, cfg, seed=3)
    return result, list(EpisodeStore(folder))


def check_episodes(episodes):
    """Pictures, states and labels belong to each other, up to the last step."""
    for episode in episodes:
        assert episode.num_frames == STEPS and episode.complete
        shown = [place_in(picture) for picture in episode.frames["base_camera"]]
        np.testing.assert_allclose(shown, episode.states[:, 0], atol=0.04)
        np.testing.assert_array_equal(episode.labels, episode.states[:, 0] > GOAL)


@pytest.mark.parametrize("name", ["Slider", "DiscreteSlider"])
def test_collect_needs_no_setting_for_an_environment_that_renders(tmp_path, name):
    result, episodes = collected(tmp_path / "data", section(name))
    assert result.complete and result.format == "native" and len(episodes) >= 4
    check_episodes(episodes)


@pytest.mark.parametrize("given", [{"success_key": "solved"}, {"label_fn": f"{MODULE}:succeeded"}])
def test_labels_from_another_entry_or_a_function(tmp_path, given):
    _, episodes = collected(tmp_path / "data", section("SolvedSlider", **given))
    check_episodes(episodes)


def test_missing_labels_name_the_ways_to_give_them(tmp_path):
    with pytest.raises(DataError, match=r"it has: place, solved\).*success_key=.*label_fn=\(obs, info\)"):
        collected(tmp_path / "data", section("SolvedSlider"))
    with pytest.raises(DataError, match=r"success_key is 'won'.*which has: .*place, solved"):
        collected(tmp_path / "more", section("SolvedSlider", success_key="won"))
    with pytest.raises(ConfigError, match="give one of them"):
        SuccessLabels("won", succeeded)
    with pytest.raises(ConfigError, match=r"label_fn='no\.such:place' names no function"):
        SuccessLabels(label_fn="no.such:place")
    with pytest.raises(ConfigError, match="is a int, not a function"):
        SuccessLabels(label_fn=f"{MODULE}:STEPS")


@pytest.mark.parametrize("given", [{"success_key": "solved"}, {"label_fn": succeeded}, {}])
@pytest.mark.parametrize("vector", [False, True])
def test_the_wrapper_labels_and_says_when_it_is_full(tmp_path, given, vector):
    key = "solved" if given else "is_success"
    env = Slider(render_mode="rgb_array", key=key)
    if vector:
        makers = [lambda: KeepFinalFrame(Slider(render_mode="rgb_array", key=key))]
        env = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    env = DataCollectorWrapper(env, tmp_path / "data", 1, 1, **given)
    env.reset(seed=0)
    action = np.ones(env.action_space.shape, np.float32)
    for episode in range(2):
        assert not env.is_full
        for _ in range(STEPS):
            env.step(action if episode else -action)
        if not vector:
            env.reset()
    assert env.is_full
    env.close()
    episodes = list(EpisodeStore(tmp_path / "data"))
    assert sorted(episode.success for episode in episodes) == [False, True]
    check_episodes(episodes)


def test_a_key_that_only_the_last_step_has(tmp_path):
    class Late(Slider):
        def step(self, action):
            obs, reward, terminated, truncated, info = super().step(action)
            return obs, reward, terminated, truncated, info if truncated else {}

    env = DataCollectorWrapper(Late(render_mode="rgb_array"), tmp_path, success_key="is_success")
    env.reset(seed=0)
    for _ in range(STEPS):
        env.step(np.ones(1, np.float32))
    env.close()
    (episode,) = EpisodeStore(tmp_path)
    assert episode.success and episode.labels.tolist() == [0.0] * (STEPS - 1) + [1.0]


def test_the_reward_data_collector_takes_the_same_ways(tmp_path):
    def feed(info, **given):
        collector = RewardDataCollector(
            positive_dir=tmp_path / "p",
            negative_dir=tmp_path / "n",
            max_positive_trajectories=1,
            max_negative_trajectories=0,
            **given,
        )
        full = collector.is_full
        images = np.zeros((2, 8, 8, 3), np.uint8)
        collector.add_env_output({"obs": {"base_camera": images}, "dones": np.ones(2, bool)}, info, True)
        counts = collector.positive_count, full, collector.is_full
        collector.close()
        for file in (tmp_path / "p").glob("*.npy"):
            file.unlink()
        return counts

    def labelled(obs, info):
        assert (info["task"], info["level"]) == ("push", 3) and obs["base_camera"].shape == (8, 8, 3)
        return info["won"] > 0 and info["parts"]["won"] > 0

    won = np.array([0.0, 1.0])
    assert feed({"is_success": won}) == (1, False, True)
    assert feed({"won": won}, success_key="won") == (1, False, True)
    info = {"won": won, "task": "push", "level": 3, "parts": {"won": won}}
    assert feed(info, label_fn=labelled) == (1, False, True)
    with pytest.raises(DataError, match=r"no 'success_frame' and env_info no 'success'.*it has: won"):
        feed({"won": won})


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_foreign_environments_keep_to_the_reset_mode(mode):
    env = make_vector_env(section(), autoreset_mode=mode)
    assert env.metadata["autoreset_mode"] == mode and env.render_mode == "rgb_array"
    env.close()
    plain = make_vector_env(section(), autoreset_mode=mode, keep_final_frame=False)
    assert plain.render_mode is None  # nobody looks: nothing is rendered
    plain.close()


def test_final_frames_of_environments_in_other_processes(tmp_path):
    makers = [lambda: KeepFinalFrame(Slider(render_mode="rgb_array"))] * 2
    vector = AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP, context="fork")
    env = DataCollectorWrapper(vector, tmp_path, 0, 2)
    env.reset(seed=0)
    for _ in range(STEPS):
        env.step(np.full((2, 1), -0.1, np.float32))
    env.close()
    check_episodes(EpisodeStore(tmp_path))


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(3, start=2),
        gym.spaces.MultiDiscrete([2, 5]),
        gym.spaces.MultiBinary(4),
        gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
        gym.spaces.Box(0, 9, (2,), np.int64),
        gym.spaces.Box(-1, 3, (2,), np.float32),
    ],
    ids=str,
)
def test_random_actions_of_every_space(space):
    policy, same = RandomPolicy(space, seed=1), RandomPolicy(space, seed=1)
    for obs in (np.zeros((4, 2)), {"state": np.zeros((4, 2))}):
        actions = policy.act(obs)
        assert all(space.contains(action) for action in actions) and len(actions) == 4
        np.testing.assert_array_equal(actions, same.act(obs))
    drawn = np.concatenate([policy.act(np.zeros((4, 1))).reshape(4, -1) for _ in range(30)])
    assert len(np.unique(drawn)) > 1


def test_success_is_found_under_both_names():
    done = np.array([False, True])
    info = {"is_success": np.array([1.0, 0.0]), "final_info": {"is_success": np.array([0.0, 1.0])}}
    assert success_of(info, 2, done).tolist() == [1.0, 1.0]
    assert success_of({"success": np.array([0, 1]), **info}, 2, np.zeros(2, bool)).tolist() == [0, 1]
    assert success_of({"solved": done}, 2, done) is None


@pytest.mark.parametrize("safe", [False, True])
def test_the_command_finds_modules_of_the_working_directory(tmp_path, safe):
    """The program that pip installs: a script elsewhere, whose folder is first on the path."""
    (tmp_path / "bin").mkdir()
    script, work = tmp_path / "bin" / "guerdon", tmp_path / "work"
    script.write_text("from guerdon.cli import command\ncommand()\n")
    work.mkdir()
    (work / "mine.py").write_text("import gymnasium as gym\nfrom tests.envs.own_env import Slider\n")
    with (work / "mine.py").open("a") as file:
        file.write("gym.register('Mine-v0', Slider)\n")
    (work / "yaml.py").write_text("raise SystemExit('not the installed module')\n")
    settings = ["env.train.id=mine:Mine-v0", "env.train.num_envs=2", "collect.policy=random"]
    settings += ["collect.target_success=1", "collect.target_failure=1", "collect.save_dir=data"]
    flags = ["-P"] if safe else []
    result = subprocess.run(
        [sys.executable, *flags, script, "collect", *settings],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if safe:
        assert result.returncode == 2 and "'mine:Mine-v0' cannot be imported" in result.stderr
    else:
        assert result.returncode == 0, result.stderr
        assert "success 1/1 fail 1/1" in result.stdout
