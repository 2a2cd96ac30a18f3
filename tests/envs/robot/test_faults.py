"""A run goes on through lost requests, late answers, controller errors and frozen cameras."""

import numpy as np
import pytest

from guerdon.core.errors import RobotError
from guerdon.envs.robot import ScriptedOperator
from tests.envs.robot.test_env import NOTHING, play

FAULTS = {
    "drop_rate": 0.05,
    "latency_rate": 0.02,
    "latency_seconds": 0.2,
    "controller_error_rate": 0.02,
    "freeze_rate": 0.01,
    "freeze_seconds": 3.0,
}


def test_episodes_come_out_right_despite_all_faults(make_env, server):
    env = make_env(operator=lambda config: ScriptedOperator(config, seed=1), success_hold_steps=5)
    server.world.set_faults(FAULTS)
    record = server.world.record
    for seed in range(40):
        if seed >= 8 and min(record.faults.values()) >= 1:  # a busy machine asks for fewer pictures
            break
        infos, terminated = play(env, seed=seed)
        assert terminated and infos[-1]["success"], f"episode {seed}"
        assert server.world.truth()["inserted"], f"episode {seed} was labelled a success and is none"
    assert record.outside == 0
    assert min(record.faults.values()) >= 1, f"not every fault struck: {record.faults}"


def test_a_controller_error_is_noticed_and_cleared(make_env, server):
    env = make_env()
    env.reset(seed=0)
    server.world.fail_controller()
    before = server.world.truth()["tip"]
    *_, info = env.step(np.array([0, 0, 1, 0, 0, 0], np.float32))
    assert info["recoveries"] == 1
    assert not server.world.truth()["controller_failed"]
    assert np.allclose(server.world.truth()["tip"], before, atol=1e-4)
    *_, info = env.step(np.array([0, 0, 1, 0, 0, 0], np.float32))
    assert info["recoveries"] == 0
    assert server.world.truth()["tip"][2] > before[2] + 0.004


def test_a_controller_that_never_recovers_ends_in_an_error(make_env, server):
    env = make_env(max_recoveries=2, recovery_seconds=0.1)
    env.reset(seed=0)
    server.world.set_faults({"controller_error_rate": 1.0})
    up = np.array([0, 0, 1, 0, 0, 0], np.float32)
    with pytest.raises(RobotError, match="does not move, though errors were cleared 2 times"):
        for _ in range(5):
            env.step(up)
    assert not server.world.truth()["controller_running"]
    assert server.world.record.faults["controller_error"] < 10


def test_standing_still_by_command_is_no_error(make_env):
    env = make_env()
    env.reset(seed=0)
    assert all(env.step(NOTHING)[-1]["recoveries"] == 0 for _ in range(5))


def test_a_robot_that_goes_away_is_named(make_env, server):
    env = make_env(max_recoveries=1, recovery_seconds=0.1, retries=1)
    env.reset(seed=0)
    server.stop()
    with pytest.raises(RobotError, match=server.url):
        for _ in range(3):
            env.step(NOTHING)


def test_a_frozen_camera_is_opened_anew_and_no_picture_comes_twice(make_env, server):
    env = make_env()
    obs, _ = env.reset(seed=0)
    server.world.freeze_camera("wrist_camera", 1e6)
    seen = [obs["wrist_camera"]]
    again = 0
    for _ in range(3):
        obs, *_, info = env.step(np.array([0.3, 0, 0, 0, 0, 0], np.float32))
        assert not np.array_equal(obs["wrist_camera"], seen[-1])
        seen.append(obs["wrist_camera"])
        again += info["recoveries"]
    assert again == 1
    assert server.world.record.outside == 0


def test_late_answers_are_counted(make_env, server):
    env = make_env()
    env.reset(seed=0)
    before = env.timing()
    server.world.set_faults({"latency_rate": 1.0, "latency_seconds": 0.4})
    for _ in range(3):
        env.step(NOTHING)
    after = env.timing()
    assert after.steps == before.steps + 3
    assert after.overruns - before.overruns >= 2
    assert after.jitter_max > 0.1
