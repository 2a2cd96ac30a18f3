"""No command outside the box is ever sent; forces stop the arm; errors stop it for good."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guerdon.config.schema_robot import TARGET_POSE, RobotEnvConfig, outside_box
from guerdon.core.errors import EmergencyStopError, RobotError
from guerdon.envs.robot.poses import pose6, pose7
from guerdon.envs.robot.safety import SafetyBox
from tests.envs.robot.conftest import SCALE

CONFIG = RobotEnvConfig(url="http://127.0.0.1:1")
NOTHING = np.zeros(6, np.float32)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(-4.0, 4.0), min_size=6, max_size=6))
def test_whatever_is_asked_for_ends_up_in_the_box(numbers):
    clipped = SafetyBox(CONFIG).clip(pose7(numbers))
    assert outside_box(pose6(clipped).tolist(), *CONFIG.box) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-0.99, 0.99), min_size=6, max_size=6))
def test_what_is_in_the_box_is_left_alone(shares):
    low, high = np.array(CONFIG.box)
    inside = pose7((low + high) / 2 + np.array(shares) * (high - low) / 2)
    clipped = SafetyBox(CONFIG).clip(inside)
    assert np.abs(clipped[:3] - inside[:3]).max() < 1e-9
    assert abs(abs(clipped[3:] @ inside[3:]) - 1) < 1e-9


def test_a_pose_that_is_not_finite_is_not_sent():
    with pytest.raises(EmergencyStopError, match="not finite"):
        SafetyBox(CONFIG).clip(np.full(7, np.nan))


@pytest.mark.parametrize("direction", [(1, 1, 1, 1, 1, 1), (-1, -1, -1, -1, -1, -1), (1, -1, 1, -1, 1, -1)])
def test_pushing_against_the_box_sends_nothing_beyond_it(make_env, server, direction):
    env = make_env()
    low, high = np.array(env.config.box)
    env.reset(seed=0)
    touched = np.zeros(6, bool)
    for _ in range(20):
        *_, info = env.step(np.array(direction, np.float32))
        here = pose6(info["ee_pose"])
        middle, half = (low + high) / 2, (high - low) / 2
        away = here - middle
        away[3:] = (away[3:] + np.pi) % (2 * np.pi) - np.pi
        touched |= np.abs(away) > half - 0.005
    assert touched.sum() >= 4, "the edges were never reached: the test shows nothing"
    assert server.world.record.outside == 0 < server.world.record.commands


def test_the_server_would_have_noticed(make_env, server, monkeypatch):
    env = make_env()
    env.reset(seed=0)
    monkeypatch.setattr(env.arm.box, "clip", lambda pose: pose)
    with pytest.raises(RobotError, match="outside the safety box"):  # the arm's own place is checked too
        for _ in range(15):
            env.step(np.ones(6, np.float32))
    assert server.world.record.outside > 0


def test_a_force_over_the_limit_stops_the_motion(make_env, server):
    env = make_env(force_limit=12.0, max_overloads=100)
    env.reset(seed=0, options=None)
    down = np.array([0.3, 0.3, -1, 0, 0, 0], np.float32)
    infos = [env.step(down)[-1] for _ in range(20)]
    limited = [info["force_limited"] for info in infos]
    assert any(limited) and not all(limited)
    first = limited.index(True)
    force = server.world.state()["force"]
    assert np.linalg.norm(force) < 25, "the arm went on pushing"
    assert not limited[first + 1], "staying where it is did not relieve the arm"


def test_a_force_that_does_not_go_ends_in_a_stop(make_env, server):
    env = make_env(force_limit=0.001, max_overloads=4)
    with pytest.raises(EmergencyStopError, match="4 steps in a row"):
        env.reset(seed=0)
    assert not server.world.truth()["controller_running"]


def test_an_arm_outside_the_box_is_not_moved(make_env, server):
    x, y, z, *angles = TARGET_POSE
    with pytest.raises(RobotError, match="outside the safety box"):
        make_env(
            target_ee_pose=(x + 0.3, y, z, *angles),
            enable_random_reset=False,
        )
    assert server.world.record.commands == 0


def test_ctrl_c_stops_the_arm(make_env, server, monkeypatch):
    env = make_env()
    env.reset(seed=0)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(env.clock, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        env.step(np.array([1, 0, 0, 0, 0, 0], np.float32))
    monkeypatch.undo()
    stopped = server.world.truth()
    assert not stopped["controller_running"]
    tip = server.world.truth()["tip"]
    assert np.allclose(server.world.truth()["tip"], tip, atol=1e-6)
    env.reset(seed=1)
    assert server.world.truth()["controller_running"]
    env.step(NOTHING)


def test_a_process_that_is_told_to_end_stops_the_arm(server):
    code = f"""
import numpy as np
from guerdon.config.schema_robot import RobotEnvConfig
from guerdon.envs.robot import RobotEnv

env = RobotEnv(RobotEnvConfig(url={server.url!r}, time_scale={SCALE}, image_size=(32, 32)))
env.reset(seed=0)
print("ready", flush=True)
while True:
    env.step(np.zeros(6, np.float32))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "ready\n"
        time.sleep(0.2)
        assert server.world.truth()["controller_running"]
        program.terminate()
        assert program.wait(240) not in (0, -signal.SIGTERM)
    assert not server.world.truth()["controller_running"]


def test_any_error_in_between_stops_the_arm(make_env, server):
    def broken(obs):
        raise ZeroDivisionError("a bug in the detector")

    env = make_env(standalone=True, success_detector=broken)
    env.reset(seed=0)
    with pytest.raises(ZeroDivisionError):
        env.step(NOTHING)
    assert not server.world.truth()["controller_running"]


def test_closing_leaves_the_arm_where_it_is(make_env, server):
    env = make_env()
    env.reset(seed=0)
    env.step(np.ones(6, np.float32))
    env.close()
    before = server.world.truth()["tip"]
    time.sleep(0.05)
    assert np.allclose(server.world.truth()["tip"], before, atol=2e-3)
    assert server.world.record.outside == 0
