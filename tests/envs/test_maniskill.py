"""ManiSkill tasks: the conventions of Tabletop, frames on demand, and processes that may be lost."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from guerdon.config import EnvConfig, RewardConfig
from guerdon.config.maniskill import ManiSkillConfig
from guerdon.core.errors import ConfigError, DataError, WorkerError
from guerdon.envs import TabletopVectorEnv
from guerdon.envs.make import make_vector_env
from guerdon.envs.maniskill import task
from guerdon.envs.maniskill.batch import ManiSkillBatch
from guerdon.envs.maniskill.env import ManiSkillVectorEnv
from guerdon.training.frames import FrameSelector

pytestmark = pytest.mark.sim

PICKCUBE = {"id": "PickCube-v1", "control_mode": "pd_ee_delta_pos"}
SAME_STEP = AutoresetMode.SAME_STEP


def make(num_envs=2, autoreset_mode=SAME_STEP, **settings):
    return ManiSkillVectorEnv(num_envs, autoreset_mode=autoreset_mode, **{**PICKCUBE, **settings})


def actions(num_envs, steps, size=4):
    return np.random.default_rng(0).uniform(-1, 1, (steps, num_envs, size)).astype(np.float32)


def alive(pid):
    """Whether a process runs; one that has ended and is not waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def shown():
    """Two environments in two processes that end episodes after six steps and can be looked at."""
    env = make(render_mode="rgb_array", max_episode_steps=6)
    yield env
    env.close()


def test_it_speaks_like_tabletop(shown):
    tabletop = TabletopVectorEnv(2, autoreset_mode=SAME_STEP, max_episode_steps=6)
    reported, infos = set(tabletop.reset(seed=0)[1]), shown.reset(seed=0)[1]
    assert reported <= set(infos)
    for t, action in enumerate(actions(2, 6)):
        obs, env_rewards, terminated, truncated, infos = shown.step(action)
        assert obs.shape == (2, 42) and obs.dtype == np.float32 and env_rewards.dtype == np.float32
        assert not terminated.any() and truncated.tolist() == [t == 5] * 2
        assert infos["elapsed_steps"].tolist() == ([0, 0] if t == 5 else [t + 1] * 2)
    final = tabletop.reset(seed=0)[1]
    for action in actions(2, 6):
        final = tabletop.step(action)[4]
    assert set(final) <= set(infos) and set(final["final_info"]) <= set(infos["final_info"])
    assert infos["final_info"]["elapsed_steps"].tolist() == [6, 6]
    assert infos["final_info"]["success"].dtype == np.bool_
    assert infos["episode_index"].tolist() == [1, 1] and infos["env_seed"].tolist() == [0, 1]
    np.testing.assert_array_equal(shown.final_state(), infos["final_obs"])
    assert np.abs(shown.state() - infos["final_obs"]).max() > 0.01  # the new episode is another one
    with pytest.raises(DataError, match=r"shape \[2, 4\]"):
        shown.step(np.zeros((2, 3)))
    with pytest.raises(DataError, match="finite"):
        shown.step(np.full((2, 4), np.nan))


def test_frames_are_of_the_scene_that_the_action_led_to(shown):
    still = make(autoreset_mode=AutoresetMode.DISABLED, render_mode="rgb_array", max_episode_steps=6)
    try:
        shown.reset(seed=5)
        still.reset(seed=5)
        start = shown.render_frames()
        assert start.shape == (2, 64, 64, 3) and start.dtype == np.uint8
        for action in actions(2, 6):
            shown.step(action)
            still.step(action)
        end = still.render_frames()
        np.testing.assert_allclose(shown.render_frames(final=True).astype(int), end, atol=3)
        begun = shown.render_frames()
        assert (np.abs(begun.astype(int) - end).max(axis=(1, 2, 3)) > 50).all()
        np.testing.assert_array_equal(shown.render_frames(env_ids=[1]), begun[1:])
        assert [frame.shape for frame in shown.render()] == [(256, 256, 3)] * 2
        # Looking at the end of the old episode leaves no trace in the new one: the states are the same as
        # those of an environment that only went through it.
        shown.reset(seed=5)
        followed = []
        for look in (False, True):
            shown.reset(seed=5)
            for action in actions(2, 11):
                obs, _, _, truncated, _ = shown.step(action)
                if look and truncated.any():
                    shown.render_frames(final=True)
            followed.append(obs)
        np.testing.assert_allclose(followed[0], followed[1], atol=1e-3)
    finally:
        still.close()


def test_the_last_steps_of_an_episode_can_be_seen_after_it(caplog):
    env = make(render_mode="rgb_array", max_episode_steps=4)
    try:
        env.keep_past(2)
        env.reset(seed=5)
        pictures = [env.render_frames()]
        for action in actions(2, 4):
            env.step(action)
            pictures.append(env.render_frames(final=True))
        for back in (1, 2):  # the next episode has begun by now
            seen = env.render_past("base_camera", [1, 0], [back, back]).astype(int)
            np.testing.assert_allclose(seen, pictures[-1 - back][::-1], atol=3)
            assert np.abs(seen - pictures[-1][::-1].astype(int)).max() > 50
        with pytest.raises(DataError, match=r"steps_back must lie in 1\.\.2"):
            env.render_past("base_camera", [0], [3])
        os.kill(env.simulators.process_ids[0], signal.SIGKILL)
        assert env.step(actions(2, 1)[0])[3].tolist() == [True, False]  # a new process remembers from now on
        env.step(actions(2, 1)[0])
        before = env.render_frames()
        env.step(-actions(2, 1)[0])
        seen = env.render_past("base_camera", [0, 1], [1, 1]).astype(int)
        np.testing.assert_allclose(seen, before, atol=3)
    finally:
        env.close()


def test_terminal_verdicts_on_stacks_render_no_other_frames():
    env = make(render_mode="rgb_array", max_episode_steps=4)
    try:
        env.reset(seed=5)
        feed = FrameSelector(env, ["base_camera"], RewardConfig(reward_mode="terminal"), 2)
        feed.reset()
        for action in actions(2, 8):
            _, _, _, done, _ = env.step(action)
            env_ids, frames = feed.step(env.state(), done)
            if done.any():
                assert env_ids.tolist() == [0, 1] and frames["base_camera"].shape == (2, 2, 64, 64, 3)
                last = env.render_past("base_camera", [0, 1], [1, 1])
                np.testing.assert_array_equal(frames["base_camera"][:, 0], last)
        assert feed.num_rendered == 2 * 2 * 2  # two episodes in each of two environments, two frames each
    finally:
        env.close()


def test_goal_and_cube_are_seen(shown):
    shown.reset(seed=3)
    large = shown.render_frames(size=(128, 128)).astype(int)
    green = (large[..., 1] > 120) & (large[..., 0] < 60) & (large[..., 2] < 60)
    red = (large[..., 0] > 100) & (large[..., 1] < 40) & (large[..., 2] < 40)
    assert green.sum(axis=(1, 2)).min() >= 20 and red.sum(axis=(1, 2)).min() >= 20
    with pytest.raises(ConfigError, match="did you mean 'base_camera'"):
        shown.render_frames("bas_camera")


def test_episodes_follow_from_seeds_and_not_from_processes():
    runs = []
    for count in (1, 3):
        env = make(3, num_processes=count, max_episode_steps=4)
        try:
            assert len(env.simulators.process_ids) == count
            states = [env.reset(seed=11)[0]]
            states += [env.step(action)[0] for action in actions(3, 6)]
            with pytest.raises(ConfigError, match="render_mode"):
                env.render_frames()
        finally:
            env.close()
        runs.append(np.stack(states))
    np.testing.assert_allclose(runs[0], runs[1], atol=1e-4)
    assert np.abs(runs[0][0, 0] - runs[0][0, 1]).max() > 0.01 and np.abs(runs[0][4] - runs[0][0]).max() > 0.01


@pytest.mark.parametrize("task", ["PushCube-v1", "StackCube-v1", "PegInsertionSide-v1"])
def test_other_tasks(task):
    cfg = EnvConfig(
        env_type="maniskill",
        num_envs=1,
        max_episode_steps=3,
        init_params={"id": task, "obs_mode": "state", "render_mode": "rgb_array", "image_size": [48, 64]},
    )
    env = make_vector_env(cfg, autoreset_mode=SAME_STEP)
    try:
        obs, infos = env.reset(seed=0)
        assert obs.shape == env.observation_space.shape and np.isfinite(obs).all()
        before = env.render_frames()
        for action in actions(1, 3, env.single_action_space.shape[0]):
            obs, env_rewards, _, truncated, infos = env.step(action)
        assert truncated.all() and np.isfinite(env_rewards).all()
        assert infos["final_info"]["success"].tolist() == [False]
        if task == "StackCube-v1":
            np.testing.assert_array_equal(infos["is_grasped"], infos["is_cubeA_grasped"])
        final = env.render_frames(final=True)
        assert final.shape == (1, 48, 64, 3) and final.std() > 5
        assert (final != env.render_frames()).any() and (final != before).any()
    finally:
        env.close()
    still = make_vector_env(cfg, autoreset_mode=AutoresetMode.DISABLED)
    try:  # the end of the episode is shown as it was, also by tasks that have built another scene since
        still.reset(seed=0)
        for action in actions(1, 3, env.single_action_space.shape[0]):
            still.step(action)
        np.testing.assert_allclose(final.astype(int), still.render_frames(), atol=3)
    finally:
        still.close()


def test_images_in_observations():
    env = make(1, obs_mode="rgb", image_size=(32, 32), max_episode_steps=2)
    try:
        obs, _ = env.reset(seed=0)
        assert obs["state"].shape == (1, 29)  # joints, gripper and goal, but not where the cube is
        np.testing.assert_array_equal(obs["state"], env.state()[:, :29])
        np.testing.assert_array_equal(obs["base_camera"], env.render_frames())
        assert env.single_observation_space["base_camera"].shape == (32, 32, 3)
        env.step(np.zeros((1, 4)))
        obs, _, _, truncated, infos = env.step(np.ones((1, 4)))
        assert truncated.all()
        ended = infos["final_obs"]["base_camera"]
        np.testing.assert_allclose(ended.astype(int), env.render_frames(final=True), atol=3)
        assert (ended != obs["base_camera"]).any()
    finally:
        env.close()


def test_the_batch_of_a_gpu_does_the_same_with_tensors():
    """ManiSkill's own batch, here with the one environment that a CPU allows."""
    cfg = ManiSkillConfig(**PICKCUBE, max_episode_steps=3, render_mode="rgb_array", output="torch")
    env = ManiSkillVectorEnv(
        1, config=cfg, autoreset_mode=SAME_STEP, simulators=ManiSkillBatch(cfg, 1, "cpu")
    )
    other = make(1, max_episode_steps=3)
    env.keep_past(1)
    try:
        state, _ = env.reset(seed=2)
        expected, _ = other.reset(seed=2)
        for action in actions(1, 4):
            np.testing.assert_allclose(state.numpy(), expected, atol=1e-4)
            state, env_rewards, _, truncated, infos = env.step(torch.from_numpy(action))
            expected, other_rewards, _, other_truncated, other_infos = other.step(action)
            np.testing.assert_allclose(env_rewards.numpy(), other_rewards, atol=1e-4)
            assert isinstance(truncated, torch.Tensor) and truncated.tolist() == other_truncated.tolist()
            if truncated.any():
                finals = infos["final_obs"], infos["final_info"]["success"], infos["success"]
                assert all(isinstance(each, torch.Tensor) for each in finals)
                np.testing.assert_allclose(finals[0].numpy(), other_infos["final_obs"], atol=1e-4)
                frames = env.render_tensor(final=True)
                assert frames.shape == (1, 64, 64, 3) and frames.dtype == torch.uint8
                assert (frames != env.render_tensor()).any()
                past = env.render_past("base_camera", [0], [1])
                assert past.shape == (1, 64, 64, 3) and (past != frames.numpy()).any()
    finally:
        env.close()
        other.close()


def test_a_killed_simulator_costs_its_episode_and_nothing_else(shown, caplog):
    shown.reset(seed=7)
    moves = actions(2, 4)
    undisturbed = [shown.step(move)[0][0] for move in moves]
    shown.reset(seed=7)
    shown.step(moves[0])
    last = shown.state()[1]
    gone = shown.simulators.process_ids[1]
    os.kill(gone, signal.SIGKILL)
    obs, env_rewards, terminated, truncated, infos = shown.step(moves[1])
    assert truncated.tolist() == [False, True] and not terminated.any() and env_rewards[1] == 0.0
    assert infos["final_info"]["episode_lost"].tolist() == [False, True] and not infos["episode_lost"].any()
    assert not infos["final_info"]["success"][1]
    np.testing.assert_array_equal(infos["final_obs"][1], last)  # the last that is known
    assert infos["episode_index"].tolist() == [0, 1] and infos["elapsed_steps"].tolist() == [2, 0]
    assert "environments 1 to 1 was lost during step" in caplog.text
    assert shown.render_frames(final=True).shape == (2, 64, 64, 3)
    np.testing.assert_allclose(obs[0], undisturbed[1], atol=1e-4)
    obs, _, _, truncated, _ = shown.step(moves[2])
    assert not truncated.any()
    np.testing.assert_allclose(obs[0], undisturbed[2], atol=1e-4)
    # Lost while a frame is rendered: there is a frame all the same, and the episode ends with the next step.
    os.kill(shown.simulators.process_ids[0], signal.SIGKILL)
    assert shown.render_frames().shape == (2, 64, 64, 3)
    assert shown.step(moves[3])[3].tolist() == [True, False]
    # Lost between episodes: the new one begins in a new process.
    os.kill(shown.simulators.process_ids[1], signal.SIGKILL)
    obs, infos = shown.reset(seed=7)
    assert not infos["episode_lost"].any()
    np.testing.assert_allclose(shown.step(moves[0])[0][0], undisturbed[0], atol=1e-4)
    assert shown.simulators.restarts == 3 and not alive(gone)


def test_processes_that_go_on_dying_are_an_error_and_none_stays():
    env = make(1, max_restarts=1)
    env.reset(seed=0)
    pids = env.simulators.process_ids
    os.kill(pids[0], signal.SIGKILL)
    env.step(np.zeros((1, 4)))
    pids += env.simulators.process_ids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"lost 2 times.*max_restarts is 1"):
        env.step(np.zeros((1, 4)))
    env.close()
    assert len(set(pids)) == 2 and not any(alive(pid) for pid in pids)


def test_a_simulator_that_hangs_is_replaced(caplog):
    env = make(1, timeout_seconds=4.0)
    try:
        env.reset(seed=0)
        hanging = env.simulators.process_ids[0]
        os.kill(hanging, signal.SIGSTOP)
        truncated, infos = env.step(np.zeros((1, 4)))[3:]
        assert truncated.all() and infos["final_info"]["episode_lost"].all() and not alive(hanging)
        assert "no answer for 4 s" in caplog.text
        assert env.step(np.zeros((1, 4)))[4]["elapsed_steps"].tolist() == [1]
    finally:
        env.close()


SCRIPT = """
import os, signal, sys
from guerdon.envs.maniskill.env import ManiSkillVectorEnv
if __name__ == "__main__":
    env = ManiSkillVectorEnv(2, id="PickCube-v1", num_processes=2)
    env.reset(seed=0)
    print(*env.simulators.process_ids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_process_is_left_when_the_parent_is_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(pids) == 2, done.stderr
    until = time.monotonic() + 60.0
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"id": "PickCub-v1"}, "unknown ManiSkill task 'PickCub-v1'; did you mean 'PickCube-v1'"),
        (
            {"control_mode": "pd_ee_delta"},
            "PickCube-v1: unknown control_mode 'pd_ee_delta'; did you mean 'pd_ee_delta_pos'",
        ),
        ({"task_params": {"colour": 1}}, "PickCube-v1 cannot be made with these settings.*colour"),
    ],
)
def test_what_the_simulator_refuses_is_said(settings, message):
    with pytest.raises(ConfigError, match=message):
        make(1, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"obs_mod": "state"}, "did you mean 'obs_mode'"),
        ({"obs_mode": "pointcloud"}, "obs_mode must be one of .*, not 'pointcloud'"),
        ({"reward_mode": "dens"}, "did you mean 'dense'"),
        ({"sim_backend": "tpu"}, "sim_backend must be one of .*, not 'tpu'"),
        ({"camera_eye": [1, 2, 3]}, "camera_eye and camera_target belong together"),
        (
            {"camera_eye": [1, 2], "camera_target": [0, 0, 0]},
            "camera_eye must be a list of 3 entries, each a number",
        ),
        ({"num_processes": 0}, "num_processes must be a whole number"),
    ],
)
def test_settings_are_checked_before_anything_starts(settings, message):
    with pytest.raises(ConfigError, match=message):
        ManiSkillConfig.from_settings(settings)


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sim_backend: gpu needs a CUDA device"):
        make(1, sim_backend="gpu")


def is_green(frame, place):
    """Whether the goal's marker is at a place (row and column as shares) of a picture."""
    size = len(frame)
    row, column = (np.asarray(place) * size).astype(int)
    patch = frame[max(row - 2, 0) : row + 3, max(column - 2, 0) : column + 3].astype(int)
    return bool(((patch[..., 1] > patch[..., 0] + 40) & (patch[..., 1] > patch[..., 2] + 40)).any())


def test_the_goal_is_found_in_the_picture(shown):
    shown.reset(seed=4)  # the arm hides none of its goals
    seen = 0
    places = []
    for t in range(18):
        _, _, _, truncated, _ = shown.step(np.zeros((2, 4), np.float32))
        assert bool(truncated.all()) is (t % 6 == 5)
        places.append(shown.goal_in_picture("base_camera", [0, 1]))
        frames = shown.render_frames(final=True)
        seen += sum(is_green(frame, place) for frame, place in zip(frames, places[-1], strict=True))
    assert seen == 36  # at the end of an episode it is that episode's goal, like the frame
    assert np.array_equal(places[0], places[5]) and not np.allclose(places[5], places[6])
    with pytest.raises(ConfigError, match=r"unknown camera 'wrist'"):
        shown.goal_in_picture("wrist", [0])
    env = ManiSkillVectorEnv(1, id="StackCube-v1", render_mode="rgb_array")
    try:
        env.reset(seed=0)
        with pytest.raises(ConfigError, match=r"StackCube-v1 does not tell where its goal is"):
            env.goal_in_picture("base_camera", [0])
    finally:
        env.close()


def test_the_shaders_without_a_table_draw_the_same(monkeypatch):
    """The table that is left out takes eight seconds of a core; if SAPIEN changes, this tells."""
    cfg = ManiSkillConfig(**PICKCUBE, render_mode="rgb_array")
    assert task._shaders_without_table() is not None
    frames = []
    for stock in (False, True):
        if stock:
            monkeypatch.setattr(task, "_shaders_without_table", lambda: None)
        batch = ManiSkillBatch(cfg, 1, "cpu")
        batch.reset([0], [3], keep_final=False)
        frames.append(batch.render()[0].numpy().copy())
        batch.close()
    np.testing.assert_array_equal(frames[0], frames[1])
    assert task._without_table("color = texture(samplerBRDFLUT, uv);") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_envs": 1.5}, "num_envs must be a whole number"),
        ({"num_envs": True}, "num_envs must be a whole number"),
        ({"autoreset_mode": "SomeStep"}, "unknown autoreset_mode 'SomeStep'"),
    ],
)
def test_arguments_are_checked_before_anything_starts(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make(**arguments)
