"""What is wrong is said clearly, and before anything moves."""

import dataclasses
import socket
import sys

import pytest

from guerdon.config.build import build
from guerdon.config.schema_robot import CameraConfig, RobotEnvConfig, RobotSimConfig
from guerdon.core.errors import ConfigError, RobotError, RobotUnreachableError
from guerdon.envs.robot import RobotEnv, SpaceMouseOperator
from guerdon.envs.robot.sim.server import SimServer
from tests.envs.robot.conftest import SCALE, settings

FRONT = CameraConfig(name="front_camera")


@pytest.fixture(autouse=True)
def nothing_moves(server):
    yield
    assert server.world.record.commands == 0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_nobody_at_the_address():
    with pytest.raises(RobotUnreachableError, match=r"no answer from the robot at http://127.0.0.1:\d+/"):
        RobotEnv(RobotEnvConfig(robot_ip=f"127.0.0.1:{free_port()}"))


def test_an_address_that_does_not_exist():
    with pytest.raises(RobotUnreachableError, match=r"no-such-robot\.invalid:5000"):
        RobotEnv(RobotEnvConfig(robot_ip="no-such-robot.invalid"))


def test_somebody_who_never_answers():
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        config = RobotEnvConfig(robot_ip=f"127.0.0.1:{deaf.getsockname()[1]}", timeout=0.05, retries=1)
        with pytest.raises(RobotUnreachableError, match="after 2 tries: timed out"):
            RobotEnv(config)


def test_a_server_that_is_no_robot(server):
    with pytest.raises(RobotUnreachableError, match="is it a robot server"):
        RobotEnv(RobotEnvConfig(url=server.url + "/sim"))


@pytest.mark.parametrize("url", ["172.16.0.1:5000", "ftp://robot", "http://robot:port"])
def test_an_address_that_is_none(url):
    with pytest.raises(ConfigError, match="address"):
        RobotEnv(RobotEnvConfig(url=url))


def test_a_camera_that_is_missing(server):
    with pytest.raises(RobotError, match="no camera 'side_camera'; there are front_camera, wrist_camera"):
        RobotEnv(settings(server, cameras=(FRONT, CameraConfig(name="side_camera"))))


def test_a_device_that_is_missing(server):
    side = CameraConfig(name="side", source="opencv", device="/dev/video_none")
    with pytest.raises(RobotError, match="camera 'side': there is no device '/dev/video_none'"):
        RobotEnv(settings(server, cameras=(FRONT, side)))


@pytest.mark.parametrize(
    ("module", "changes", "extra"),
    [
        ("pyrealsense2", {"cameras": (CameraConfig(name="d405", source="realsense"),)}, "realsense"),
        ("cv2", {"cameras": (CameraConfig(name="usb", source="opencv"),)}, "opencv"),
        ("franky", {"driver": "franky", "robot_ip": "127.0.0.1", "time_scale": 1.0}, "franky"),
    ],
)
def test_a_package_that_is_missing(server, monkeypatch, module, changes, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RobotError, match=rf"pip install guerdon\[{extra}\]"):
        RobotEnv(settings(server, **changes))


def test_a_mouse_without_its_package(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspacemouse", None)
    with pytest.raises(RobotError, match=r"pip install guerdon\[spacemouse\]"):
        SpaceMouseOperator(settings(server))


def test_time_that_is_not_the_robots(server):
    with pytest.raises(
        ConfigError, match=f"time_scale must be {SCALE:g}, that of this simulated robot, not 3"
    ):
        RobotEnv(settings(server, time_scale=3.0))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"ee_pose_limit_max": [0.45, 0.1, 0.3, -3.0, 0.3, 0.3]}, r"target_ee_pose lies outside .* x = 0.5"),
        ({"reset_ee_pose": [0.5, 0.0, 0.5, -3.14, 0.0, 0.0]}, "reset_ee_pose lies outside .* z = 0.5 m"),
        ({"reset_ee_pose": [0.5, 0.0, 0.15, 0.0, 0.0, 0.0]}, "reset_ee_pose lies outside .* rx = 0 rad"),
        ({"random_xy_range": 0.1}, "random_xy_range"),
        ({"random_rz_range": 0.3}, "random_rz_range .* rz"),
        ({"ee_pose_limit_min": [0.9, -1, -1, -4, -1, -1]}, "must be below"),
        ({"robot_ip": "ROBOT_IP"}, "replace it with your robot's address"),
        ({"robot_ip": None}, "robot_ip is missing"),
        ({"cameras": []}, "at least one camera"),
        ({"cameras": [{"name": "a"}, {"name": "a"}]}, "no name twice"),
        ({"cameras": [{"name": "states"}]}, "cannot be called"),
        ({"axes": ["x", "x"]}, "none twice"),
        ({"axes": ["w"]}, "axes"),
        ({"driver": "franky", "time_scale": 2}, "time_scale must be 1"),
        ({"target_ee_pose": [0.5, 0.0]}, "6 entries"),
        ({"force_limit": 0}, "force_limit"),
        ({"succes_hold_steps": 20}, "success_hold_steps"),
    ],
)
def test_settings_that_contradict_themselves(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        build(RobotEnvConfig, {"robot_ip": "172.16.0.1", **changes})


def test_the_documents_pose_is_taken_on_either_side_of_half_a_turn():
    for angle in (-3.14, 3.14, 3.1415):
        pose = [0.5, 0.0, 0.1, angle, 0.0, 0.0]
        low = [0.4, -0.1, 0.05, -3.34, -0.2, -0.2]
        high = [0.6, 0.1, 0.3, -2.94, 0.2, 0.2]
        config = build(
            RobotEnvConfig,
            {
                "robot_ip": "172.16.0.1",
                "target_ee_pose": pose,
                "ee_pose_limit_min": low,
                "ee_pose_limit_max": high,
            },
        )
        assert config.server_url == "http://172.16.0.1:5000"
        assert dataclasses.replace(config, robot_ip="h:1").server_url == "http://h:1"


def test_a_port_that_is_taken(server):
    with pytest.raises(ConfigError, match="cannot listen on"):
        SimServer(RobotSimConfig(port=server.server_address[1]))
