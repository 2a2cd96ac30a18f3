"""Who acts in ManiSkill tasks while data is collected: the script, and the motion planner."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from guerdon.config import CollectConfig, EnvConfig
from guerdon.config.maniskill import ManiSkillConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.data.collect.run import collect
from guerdon.data.collect.wrapper import VectorDataCollectorWrapper
from guerdon.data.store import EpisodeStore
from guerdon.envs.maniskill.env import ManiSkillVectorEnv
from guerdon.envs.maniskill.expert import CUBE, GOAL, GRASPED, LOUDEST, PickCubeExpert
from guerdon.envs.maniskill.planner import MotionPlanner
from guerdon.envs.observations import per_env

pytestmark = pytest.mark.sim

PICKCUBE = {"id": "PickCube-v1", "control_mode": "pd_ee_delta_pos"}


@pytest.fixture(scope="module")
def pickcube():
    env = ManiSkillVectorEnv(8, autoreset_mode=AutoresetMode.SAME_STEP, **PICKCUBE)
    yield env
    env.close()


def play(env, expert, episodes, seed):
    """Success at any time and at the end, [E] each, and the last distances of the cube from the goal."""
    once, records = np.zeros(env.num_envs, bool), []
    state = env.reset(seed=seed)[0]
    while len(records) < episodes:
        state, _, _, truncated, infos = env.step(expert.act(state))
        success = per_env(infos, "success", env.num_envs, truncated) > 0.5
        once |= success
        if truncated.any():
            ends = env.final_state()
            far = np.linalg.norm(ends[:, CUBE] - ends[:, GOAL], axis=1)
            records += list(zip(once[truncated], success[truncated], far[truncated], strict=True))
            once[truncated] = False
            expert.reset(truncated)
    return np.array(records).T


def test_the_script_solves_the_task(pickcube):
    once, at_end, _ = play(pickcube, PickCubeExpert(0.0, seed=0), 32, seed=50)
    assert once.mean() >= 0.9 and at_end.mean() >= 0.9


def test_noise_shakes_first_and_then_spoils(pickcube):
    once, _, _ = play(pickcube, PickCubeExpert(0.2, seed=0), 24, seed=60)
    assert once.mean() >= 0.8
    once, at_end, far = play(pickcube, PickCubeExpert(1.0, seed=0), 32, seed=70)
    assert 0.1 <= once.mean() <= 0.8
    near_misses = (at_end == 0) & (far > 0.025) & (far < 0.08)
    assert near_misses.mean() >= 0.1  # held beside the goal: what a reward model has to tell apart


def test_a_noisy_script_tells_what_it_means():
    """What a script without noise would do, in whatever state noise and bad habits have brought it to."""
    rng = np.random.default_rng(0)
    wild, clean, differ = PickCubeExpert(1.0, seed=3), PickCubeExpert(0.0), []
    for _ in range(40):
        states = rng.uniform(-0.1, 0.1, (16, 42)).astype(np.float32)
        states[:, GRASPED] = np.arange(16) % 2
        done, meant = wild.act(states), clean.act(states)
        np.testing.assert_allclose(wild.intended, meant, atol=1e-5)
        differ.append(np.abs(done - meant).max(axis=1) > 0.01)
    assert np.mean(differ) > 0.5


def test_what_the_expert_does_follows_from_its_seed():
    states = np.random.default_rng(0).uniform(-0.1, 0.1, (3, 42)).astype(np.float32)
    runs = [
        [expert.act(states) for _ in range(5)] for expert in (PickCubeExpert(0.5, 4), PickCubeExpert(0.5, 4))
    ]
    np.testing.assert_array_equal(*runs)
    assert np.abs(runs[0][0] - PickCubeExpert(0.5, 5).act(states)).max() > 0.01
    expert = PickCubeExpert(0.5, 4)
    expert.act(states)
    expert.reset(np.array([True, False, False]))
    assert (expert.act(states)[0] != runs[0][1][0]).any()
    assert LOUDEST < 0.3
    with pytest.raises(DataError, match=r"\[N, 42\]"):
        expert.act(states[:, :41])
    with pytest.raises(ConfigError, match="noise"):
        PickCubeExpert(-0.1)


def test_demonstrations_are_collected_like_everything_else(tmp_path):
    env = EnvConfig(
        env_type="maniskill", id="PickCube-v1", num_envs=2, reward_render_mode="on_demand",
        init_params={"control_mode": "pd_ee_delta_pos", "render_mode": "rgb_array", "image_size": [32, 32]},
    )  # fmt: skip
    cfg = CollectConfig(
        policy="scripted", policy_noise=0.1, save_dir=str(tmp_path), target_success=2, target_failure=0
    )
    result = collect(env, cfg, seed=1)
    assert result.complete and result.num_success >= 2
    episode = EpisodeStore(tmp_path).read_episode(0)
    assert episode.source == "PickCube-v1 (control_mode pd_ee_delta_pos)"
    assert episode.success and episode.labels[-1] == 1.0
    assert episode.frames["base_camera"].shape == (1, 32, 32, 3)  # on demand: the end of the episode alone
    assert episode.states is not None and episode.states.shape == (1, 42)
    assert episode.intended is not None and episode.actions is not None
    assert episode.intended.shape == episode.actions.shape == (1, 4)


def test_policies_that_do_not_fit_the_task(tmp_path):
    env = EnvConfig(
        env_type="maniskill", id="PushCube-v1", init_params={"control_mode": "pd_joint_delta_pos"}
    )
    cfg = CollectConfig(policy="scripted", save_dir=str(tmp_path))
    with pytest.raises(
        ConfigError, match="PickCube-v1 with control_mode pd_ee_delta_pos, not for PushCube-v1"
    ):
        collect(env, cfg)
    with pytest.raises(ConfigError, match="needs a ManiSkill task"):
        collect(EnvConfig(), CollectConfig(policy="motion_planner", save_dir=str(tmp_path)))


def planned(seeds, **more):
    facts = SimpleNamespace(control_mode="pd_joint_pos", action_low=np.zeros(2))
    config = ManiSkillConfig(id="PickCube-v1")
    return SimpleNamespace(
        num_envs=2, facts=facts, config=config, max_episode_steps=3, episode_seeds=lambda: np.array(seeds)
    )


def test_plans_are_followed_episode_by_episode(caplog):
    seeds = [5, 6]
    env = planned(seeds)

    def plan(seed):
        return np.arange(seed - 3, dtype=np.float32)[:, None] + [10.0 * seed, 0.0]

    policy = MotionPlanner(env, plan)
    taken = np.stack([policy.act(np.zeros((2, 4), np.float32)) for _ in range(4)])
    np.testing.assert_array_equal(taken[:, 0, 0], [50, 51, 51, 51])  # holds still at the end
    np.testing.assert_array_equal(taken[:, 1, 0], [60, 61, 62, 62])
    seeds[0] = 7
    policy.reset(np.array([True, False]))
    np.testing.assert_array_equal(policy.act(np.zeros((2, 4), np.float32))[:, 0], [70, 62])
    assert "a plan of 4 steps is truncated at max_episode_steps=3" in caplog.text
    env.facts.control_mode = "pd_ee_delta_pos"
    with pytest.raises(ConfigError, match="needs control_mode pd_joint_pos"):
        MotionPlanner(env, plan)


def test_the_motion_planner_plans_or_says_why_not():
    """mplib ends its process where it does not fit the installed NumPy; that is an error, not our end."""
    env = ManiSkillVectorEnv(
        1, id="PickCube-v1", control_mode="pd_joint_pos", max_episode_steps=200,
        autoreset_mode=AutoresetMode.SAME_STEP,
    )  # fmt: skip
    try:
        state, _ = env.reset(seed=0)
        policy = MotionPlanner(env)
        try:
            first = policy.act(state)
        except ConfigError as error:
            assert "mplib 0.1.1 needs numpy below 2" in str(error) and "exit code" in str(error)
            return
        success = False
        for _ in range(200):
            state, _, _, _, infos = env.step(first)
            success = success or bool(per_env(infos, "success", 1, np.zeros(1, bool))[0])
            first = policy.act(state)
        assert success
    finally:
        env.close()


def test_an_episode_that_is_lost_with_its_simulator_is_no_failure(tmp_path):
    env = ManiSkillVectorEnv(
        2, autoreset_mode=AutoresetMode.SAME_STEP, render_mode="rgb_array", max_episode_steps=4, **PICKCUBE
    )
    recorded = VectorDataCollectorWrapper(env, tmp_path, format="native")
    try:
        recorded.reset(seed=0)
        for step in range(4):
            if step == 2:
                os.kill(env.simulators.process_ids[1], signal.SIGKILL)
            recorded.step(np.zeros((2, 4), np.float32))
    finally:
        recorded.close()
    store = EpisodeStore(tmp_path)
    kept = sorted((e.complete, len(e.labels)) for e in map(store.read_episode, range(len(store))))
    # One that was cut off in the end, the two steps before the other one was lost, and a whole one.
    assert kept == [(False, 1), (False, 2), (True, 4)]
    assert (recorded.archive.num_failure, recorded.archive.num_unfinished) == (1, 2)
