"""Keys and mice: who steers, and how an episode is said to have gone."""

import fcntl
import os
import pty
import sys
import termios
import types

import numpy as np
import pytest

from guerdon.config.schema_robot import RobotEnvConfig
from guerdon.core.errors import EmergencyStopError, RobotError
from guerdon.envs.robot import KeyboardOperator, ScriptedOperator, SpaceMouseOperator
from tests.envs.robot.conftest import wait_for
from tests.envs.robot.test_env import NOTHING, play

CONFIG = RobotEnvConfig(url="http://127.0.0.1:1", use_gripper=True)


@pytest.fixture
def terminal():
    """Our end and the program's end of a terminal."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)
    os.close(theirs)


@pytest.fixture
def keyboard(terminal):
    ours, theirs = terminal
    operator = KeyboardOperator(CONFIG, theirs, hold_seconds=0.3)
    yield operator, lambda text: type_keys(ours, theirs, text)
    operator.close()


@pytest.fixture
def clock(monkeypatch):
    """The operators' time, which stands still until it is moved."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        "guerdon.envs.robot.operators.time", types.SimpleNamespace(monotonic=lambda: clock.now)
    )
    return clock


def type_keys(ours, theirs, text):
    """Press keys, and wait until the program's end of the terminal has them all."""
    os.write(ours, text.encode())
    wait_for(
        lambda: int.from_bytes(fcntl.ioctl(theirs, termios.FIONREAD, bytes(4)), sys.byteorder) == len(text)
    )


def test_keys_steer_as_long_as_they_are_held(clock, keyboard):
    operator, press = keyboard
    assert operator.read(None) is None
    press("iuO]")
    np.testing.assert_array_equal(operator.read(None).action, [1, 0, 1, 0, 0, -1, 1])
    press("k")
    assert operator.read(None).action[0] == 0, "opposite keys cancel each other"
    clock.now += 0.35
    assert operator.read(None) is None


def test_other_keys_are_told_once(keyboard):
    operator, press = keyboard
    press("ica")
    assert operator.keys() == ["c", "a"]
    assert operator.keys() == []
    press("c ")
    operator.reset()
    assert operator.keys() == [" "], "a stop is never forgotten"


def test_the_terminal_is_given_back(terminal):
    _, theirs = terminal
    before = termios.tcgetattr(theirs)
    operator = KeyboardOperator(CONFIG, theirs)
    assert termios.tcgetattr(theirs)[3] & termios.ICANON == 0
    operator.close()
    assert termios.tcgetattr(theirs) == before


def test_without_a_terminal_there_is_no_keyboard():
    reading, writing = os.pipe()
    with pytest.raises(RobotError, match="needs a terminal"):
        KeyboardOperator(CONFIG, reading)
    os.close(reading)
    os.close(writing)


@pytest.fixture
def steered(terminal, make_env):
    ours, theirs = terminal
    env = make_env(operator=lambda config: KeyboardOperator(config, theirs, hold_seconds=600.0))
    env.reset(seed=0)
    return env, lambda text: type_keys(ours, theirs, text)


def test_an_intervention_overrides_the_policy_and_is_told(steered):
    env, press = steered
    policy = np.array([1, 0, 0, 0, 0, 0], np.float32)
    *_, info = env.step(policy)
    assert not info["intervened"]
    np.testing.assert_array_equal(info["action_taken"], policy)
    press("j")
    before = info["ee_pose"]
    *_, info = env.step(policy)
    assert info["intervened"]
    np.testing.assert_array_equal(info["action_taken"], [0, 1, 0, 0, 0, 0])
    assert info["ee_pose"][1] - before[1] > 0.004
    assert abs(info["ee_pose"][0] - before[0]) < 0.004


@pytest.mark.parametrize(("key", "success"), [("c", True), ("a", False)])
def test_keys_end_the_episode_as_said(steered, key, success):
    env, press = steered
    press(key)
    _, reward, terminated, truncated, info = env.step(NOTHING)
    assert (terminated, truncated) == (True, False)
    assert info["success"] is success and info["operator_key"] == key and reward == float(success)
    env.reset(seed=1)
    assert env.step(NOTHING)[2] is False, "the key counted twice"


def test_the_space_bar_stops_the_arm(steered, server):
    env, press = steered
    press(" ")
    with pytest.raises(EmergencyStopError, match="operator stopped"):
        env.step(np.ones(6, np.float32))
    assert not server.world.truth()["controller_running"]


def test_a_scripted_operator_fails_when_it_shall(make_env, server):
    env = make_env(
        operator=lambda config: ScriptedOperator(config, failure_rate=1.0, press_keys=True, seed=0),
        max_episode_steps=60,
    )
    for seed in range(3):
        infos, terminated = play(env, seed=seed)
        assert terminated and infos[-1]["operator_key"] == "a" and not infos[-1]["success"]
        assert not server.world.truth()["inserted"]


def test_a_scripted_operator_leaves_steps_to_the_policy(make_env):
    env = make_env(operator=lambda config: ScriptedOperator(config, intervene_rate=0.5, seed=0))
    env.reset(seed=0)
    taken = [env.step(NOTHING)[-1]["intervened"] for _ in range(20)]
    assert 3 < sum(taken) < 17


class Mouse:
    """A SpaceMouse as pyspacemouse 2 shows it."""

    def __init__(self):
        self.state = types.SimpleNamespace(t=0.0, x=0, y=0, z=0, roll=0, pitch=0, yaw=0, buttons=[0, 0])
        self.closed, self.num_reads = False, 0

    def read(self):
        self.num_reads += 1
        return self.state

    def say(self, **values):
        self.state = types.SimpleNamespace(**{**vars(self.state), **values, "t": self.state.t + 1})
        read = self.num_reads
        wait_for(lambda: self.num_reads >= read + 2)  # the first of them has been taken in

    def close(self):
        self.closed = True


@pytest.fixture
def mouse(monkeypatch):
    device = Mouse()
    module = types.ModuleType("pyspacemouse")
    module.open = lambda axis_convention: device
    module.AxisConvention = types.SimpleNamespace(ROS="ros")
    monkeypatch.setitem(sys.modules, "pyspacemouse", module)
    operator = SpaceMouseOperator(CONFIG)
    yield operator, device
    operator.close()
    assert device.closed


def test_a_mouse_steers_beyond_its_dead_zone(clock, mouse):
    operator, device = mouse
    device.say(x=0.04, yaw=-0.02)
    assert operator.read(None) is None
    device.say(x=0.5, z=-1.2, yaw=0.3, buttons=[0, 1])
    np.testing.assert_allclose(operator.read(None).action, [0.5, 0, -1, 0, 0, 0.3, 1])
    device.say(x=0, z=0, yaw=0, buttons=[1, 0])
    np.testing.assert_allclose(operator.read(None).action, [0, 0, 0, 0, 0, 0, -1])


def test_a_mouse_that_is_pulled_out_steers_no_more(clock, mouse):
    operator, device = mouse
    device.say(x=1.0)
    assert operator.read(None) is not None
    clock.now += 0.6
    assert operator.read(None) is None
