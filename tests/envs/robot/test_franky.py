"""The franky driver on franky-sim, which speaks the network protocol of a Franka arm.

`make test-realtime` installs both packages and runs it.
"""

import time

import numpy as np
import pytest

from guerdon.config.schema_robot import CameraConfig, RobotEnvConfig
from guerdon.core.errors import RobotError, RobotUnreachableError
from guerdon.envs.robot import RobotEnv, ScriptedOperator
from guerdon.envs.robot.cameras import Camera
from guerdon.envs.robot.clock import Clock
from guerdon.envs.robot.franky import REST_JOINTS, FrankyDriver
from guerdon.envs.robot.poses import pose6
from tests.envs.robot.test_cameras import Stream

pytestmark = pytest.mark.realtime


@pytest.fixture
def arm_ip():
    import franky_sim
    from franky_sim.mujoco_simulator import MujocoSimulator

    with MujocoSimulator() as simulator:
        simulator.add_robot()
        with franky_sim.SimulationServer(simulator) as server:
            server.run_async()
            yield server.robot_servers[0].hostname


@pytest.fixture
def driver(arm_ip):
    driver = FrankyDriver(arm_ip, realtime=False)
    yield driver
    driver.close()


def test_nobody_at_the_address():
    with pytest.raises(RobotUnreachableError, match=r"127\.9\.9\.9"):
        FrankyDriver("127.9.9.9", realtime=False)


def test_the_arm_follows_and_tells_its_state(driver):
    driver.reset()
    state = driver.state()
    np.testing.assert_allclose(state.q, REST_JOINTS, atol=0.03)
    goal = state.pose.copy()
    goal[:3] += [0.02, -0.02, -0.02]
    for share in np.linspace(0.1, 1.0, 10):
        driver.move(state.pose + share * (goal - state.pose))
        time.sleep(0.05)
    time.sleep(1.0)
    reached = driver.state()
    assert np.abs(reached.pose[:3] - goal[:3]).max() < 0.005
    np.testing.assert_allclose(reached.jacobian @ reached.dq, reached.vel, atol=1e-6)


def test_a_controller_that_ended_is_started_again(driver):
    driver.move(driver.state().pose)
    driver._robot.stop()
    time.sleep(0.2)
    with pytest.raises(RobotError, match="has stopped"):
        driver.move(driver.state().pose)
    driver.clear_errors()
    driver.move(driver.state().pose)


def test_the_hand_opens_and_closes(driver):
    driver.close_gripper()
    time.sleep(2.0)
    assert driver.state().gripper_pos < 0.1
    driver.move_gripper(0.5)
    time.sleep(2.0)
    assert driver.state().gripper_pos == pytest.approx(0.5, abs=0.05)


def test_an_episode_on_the_arm(driver):
    driver.reset()
    place = pose6(driver.state().pose)
    place[2] -= 0.06
    config = RobotEnvConfig(
        driver="franky",
        robot_ip="given below",
        target_ee_pose=tuple(place.tolist()),
        random_xy_range=0.02,
        reward_threshold=(0.01, 0.01, 0.01, 0.3, 0.3, 0.3),
        success_hold_steps=3,
        cameras=(CameraConfig(name="front"),),
        image_size=(4, 8),
    )
    camera = Camera(config.cameras[0], (4, 8), Stream(), Clock())
    env = RobotEnv(config, driver=driver, cameras=[camera], operator=ScriptedOperator(config, noise=0.05))
    env.reset(seed=0)
    terminated = truncated = False
    while not (terminated or truncated):
        _, _, terminated, truncated, info = env.step(np.zeros(6, np.float32))
    env.close()
    assert info["success"] and info["elapsed_steps"] < 40
