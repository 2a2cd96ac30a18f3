"""Whatever the arm says of itself, one command moves it a little at most, and by a fresh state."""

import dataclasses
import sys
import threading
import time
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from guerdon.config.schema_robot import TARGET_POSE, RobotEnvConfig, outside_box
from guerdon.core.errors import ConfigError, RobotError
from guerdon.envs.robot import RobotEnv
from guerdon.envs.robot import franky as franky_driver
from guerdon.envs.robot.poses import multiply, pose6, pose7, quat_from_euler, rotation_between
from guerdon.envs.robot.safety import SafetyBox, StepLimit
from guerdon.envs.robot.serl_http import SerlHttpDriver
from tests.envs.robot.conftest import settings

WIDE = {
    "ee_pose_limit_min": (0.44, -0.06, 0.09, -6.14, -1.5, -3.0),
    "ee_pose_limit_max": (0.56, 0.06, 0.2, -0.14, 1.5, 3.0),
    "enable_random_reset": False,
}
"""A box that lets the arm turn almost as it likes."""
SMALL = np.full(6, 0.2, np.float32)


class LyingDriver(SerlHttpDriver):
    """Moves the arm as told, but says that it is somewhere else."""

    def __init__(self, url):
        super().__init__(url)
        self.lies = 0
        """How many of the next measurements are wrong; -1: all of them."""
        self.turn, self.shift, self.late = np.zeros(3), np.zeros(3), 0.0
        self.sent = []

    def state(self):
        state = super().state()
        if not self.lies:
            return state
        self.lies -= 1
        time.sleep(self.late)
        pose = np.concatenate(
            [state.pose[:3] + self.shift, multiply(quat_from_euler(self.turn), state.pose[3:])]
        )
        return dataclasses.replace(state, pose=pose)

    def move(self, pose):
        self.sent.append(np.array(pose))
        super().move(pose)

    def steps(self):
        """Metres and radians from each command to the next."""
        pairs = list(zip(self.sent, self.sent[1:], strict=False))
        metres = [np.linalg.norm(one[:3] - other[:3]) for one, other in pairs]
        return max(metres), max(np.linalg.norm(rotation_between(one[3:], other[3:])) for one, other in pairs)


@pytest.fixture
def begin(server):
    """An environment whose driver can lie, in its first episode."""
    made = []

    def make(*, reset=True, **changes):
        config = settings(server, **{**WIDE, "recovery_seconds": 0.1, **changes})
        env = RobotEnv(config, driver=LyingDriver(server.url))
        made.append(env)
        if reset:
            env.reset(seed=0)
        return env, env.driver

    yield make
    for env in made:
        env.close()


@pytest.mark.parametrize(
    ("turn", "shift"),
    [([0, 0, 3.0], [0, 0, 0]), ([0.4, 0, 0], [0, 0, 0]), ([0, 0, 0], [0.05, 0, 0])],
    ids=["3 rad", "0.4 rad", "5 cm"],
)
def test_one_wrong_measurement_moves_nothing(begin, server, turn, shift):
    env, driver = begin()
    for _ in range(3):
        *_, info = env.step(SMALL)
        assert not info["refused"]
    before, count = pose6(server.world.state()["pose"]), len(driver.sent)
    driver.lies, driver.turn, driver.shift = 1, np.array(turn), np.array(shift)
    env.arm.measure()  # as at the end of a step
    env.arm._asked = np.inf  # which the next one trusts
    *_, info = env.step(SMALL)
    assert info["refused"] and not info["force_limited"]
    assert len(driver.sent) == count
    moved = pose6(server.world.state()["pose"]) - before
    assert np.abs(moved).max() < 0.02
    *_, info = env.step(SMALL)
    assert not info["refused"] and len(driver.sent) == count + 1
    metres, radians = driver.steps()
    assert metres <= env.config.step_limit[0] and radians <= env.config.step_limit[1] < 0.18


def test_an_arm_that_keeps_lying_is_stopped_without_a_jump(begin, server):
    env, driver = begin(max_recoveries=2)
    env.step(SMALL)
    driver.lies, driver.turn = -1, np.array([0, 0, 3.0])
    with pytest.raises(RobotError, match=r"3 rad .*3 times in a row: is the arm where it says it is\?"):
        for _ in range(10):
            env.step(SMALL)
    assert not server.world.truth()["controller_running"]
    assert driver.steps()[1] <= env.config.step_limit[1]  # the command to stay before the stop, too


def test_closing_does_not_trust_one_measurement(begin):
    env, driver = begin()
    env.step(SMALL)
    driver.lies, driver.turn = -1, np.array([0, 0, 3.0])
    env.close()
    assert driver.steps()[1] <= env.config.step_limit[1]


def test_a_wrong_measurement_at_the_start_is_noticed(begin):
    env, driver = begin(reset=False)
    driver.lies, driver.turn = 1, np.array([0, 0, 3.0])
    with pytest.raises(RobotError, match="two measurements of the arm disagree"):
        env.reset(seed=0)
    assert driver.sent == []
    env.reset(seed=0)
    env.step(SMALL)


def test_an_arm_that_is_turned_out_of_the_box_is_not_moved(begin, server):
    env, driver = begin(reset=False, ee_pose_limit_min=None, ee_pose_limit_max=None)
    driver.lies, driver.turn = -1, np.array([0, 0, 0.6])
    with pytest.raises(RobotError, match=r"0\.35 rad outside the safety box"):
        env.reset(seed=0)
    assert driver.sent == [] and server.world.record.commands == 0


def test_resets_turn_the_arm_in_small_steps(begin, server):
    turned = [*TARGET_POSE[:2], TARGET_POSE[2] + 0.07, *TARGET_POSE[3:5], 1.2]
    server.world.command(pose7(turned).tolist())
    until = time.monotonic() + 60
    while abs(pose6(server.world.state()["pose"])[5] - 1.2) > 0.01:
        assert time.monotonic() < until
        time.sleep(0.01)
    env, driver = begin()
    assert len(driver.sent) > 10 and driver.steps()[1] <= env.config.step_limit[1] / 2 + 1e-6
    assert abs(pose6(server.world.state()["pose"])[5]) < 0.06


def test_a_late_state_is_asked_for_again_and_not_used(begin):
    env, driver = begin(max_state_age=0.2, max_recoveries=2)
    driver.lies, driver.late = 1, 0.3
    before = len(driver.sent)
    env.step(SMALL)
    assert driver.lies == 0 and len(driver.sent) == before + 1
    driver.lies = -1
    env.arm._asked = -np.inf  # the step cannot trust the last measurement, however little time has passed
    with pytest.raises(RobotError, match=r"state is 0\.\d+ s old when it arrives; max_state_age is 0\.2 s"):
        env.step(SMALL)
    assert len(driver.sent) <= before + 2  # at most the one to stay


poses = st.lists(st.floats(-4.0, 4.0), min_size=6, max_size=6).map(pose7)


@budget(max_examples=200, deadline=None)
@given(poses, poses)
def test_a_limited_step_is_short_and_in_the_box(last, target):
    config = RobotEnvConfig(url="http://127.0.0.1:1", **WIDE)
    box = SafetyBox(config)
    limit = StepLimit(config, box)
    last, target = box.clip(last), box.clip(target)
    reached = limit.limited(last, target)
    assert outside_box(pose6(reached).tolist(), *config.box) is None
    way, turn = (
        np.linalg.norm(reached[:3] - last[:3]),
        np.linalg.norm(rotation_between(last[3:], reached[3:])),
    )
    assert way <= config.step_limit[0] + 1e-6 and turn <= config.step_limit[1] + 1e-6
    if limit.wrong(last, target) is None:
        np.testing.assert_array_equal(reached, target)


def test_a_limit_that_no_action_keeps_is_refused():
    with pytest.raises(ConfigError, match=r"max_command_step \[0\.01, 1\.0\] is shorter than an action"):
        RobotEnvConfig(url="http://127.0.0.1:1", max_command_step=(0.01, 1.0))
    config = RobotEnvConfig(url="http://127.0.0.1:1", action_scale=(0.03, 0.2))
    assert config.step_limit == pytest.approx((0.104, 0.693), abs=1e-3)


@pytest.fixture
def stuck_arm(monkeypatch):
    """A stand-in for franky whose controller does not end before `release`."""
    release = threading.Event()

    class Tracker:
        def __init__(self, robot, **gains):
            pass

        def stop(self):
            release.wait()

    module = types.SimpleNamespace(
        Robot=lambda ip, realtime_config: types.SimpleNamespace(),
        RealtimeConfig=types.SimpleNamespace(Enforce=1, Ignore=2),
        NetworkException=type("NetworkException", (Exception,), {}),
        Exception=type("FrankyException", (Exception,), {}),
        CartesianImpedanceTracker=Tracker,
    )
    monkeypatch.setitem(sys.modules, "franky", module)
    monkeypatch.setattr(franky_driver, "STOP_SECONDS", 0.2)
    yield franky_driver.FrankyDriver("127.0.0.1"), release
    release.set()


def test_a_controller_that_does_not_end_is_not_waited_for(stuck_arm, caplog):
    driver, release = stuck_arm
    driver.start()
    with pytest.raises(RobotError, match=r"did not stop in 0\.2 s: use the red button"):
        driver.stop()
    driver.start()
    driver.close()
    assert "use the red button" in caplog.text
    release.set()
    driver.start()
    driver.stop()
