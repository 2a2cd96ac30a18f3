"""The newest picture, its age, and cameras that hang."""

import time
from threading import Event

import numpy as np
import pytest

from guerdon.config.schema_robot import CameraConfig
from guerdon.envs.robot.cameras import Camera
from guerdon.envs.robot.clock import Clock
from guerdon.errors import RobotError, StaleFrameError


class Stream:
    """A device that shows the number of its picture; it can be told to hang, to repeat and to break."""

    on_demand = False

    def __init__(self):
        self.count = self.opened = self.closed = 0
        self.go = Event()
        self.go.set()
        self.repeat = self.broken = False

    def open(self):
        self.opened += 1

    def grab(self):
        time.sleep(0.002)
        self.go.wait()
        if self.broken:
            raise RobotError("unplugged")
        self.count += not self.repeat
        return np.full((4, 8, 3), self.count % 256, np.uint8)

    def close(self):
        self.closed += 1


@pytest.fixture
def camera():
    source = Stream()
    camera = Camera(CameraConfig(name="c", max_age=0.15), (4, 8), source, Clock())
    camera.open()
    yield camera, source
    source.go.set()
    camera.close()


def test_the_newest_picture_is_handed_out(camera):
    camera, _ = camera
    time.sleep(0.05)
    before = camera.frame()
    time.sleep(0.05)
    after = camera.frame()
    assert after.image[0, 0, 0] > before.image[0, 0, 0] + 3, "an old picture of a queue"
    assert after.time > before.time
    assert Clock().now() - after.time < 0.1


@pytest.mark.parametrize("how", ["hang", "repeat"])
def test_a_camera_with_nothing_new_is_stale(camera, how):
    camera, source = camera
    camera.frame()
    if how == "hang":
        source.go.clear()
    else:
        source.repeat = True
    time.sleep(0.3)
    with pytest.raises(StaleFrameError, match="camera 'c' has shown nothing new for 0"):
        camera.frame()
    source.go.set()
    source.repeat = False
    camera.open()
    assert camera.frame().time > 0 and source.opened == 2 and source.closed == 1


def test_a_camera_that_breaks_is_stale_until_opened_anew(camera):
    camera, source = camera
    source.broken = True
    time.sleep(0.05)
    with pytest.raises(StaleFrameError, match="has stopped: unplugged"):
        camera.frame()
    source.broken = False
    camera.open()
    camera.frame()


def test_a_camera_that_never_shows_anything_cannot_be_opened(monkeypatch):
    monkeypatch.setattr("guerdon.envs.robot.cameras.FIRST_FRAME_SECONDS", 0.05)
    source = Stream()
    source.broken = True
    camera = Camera(CameraConfig(name="c"), (4, 8), source, Clock())
    with pytest.raises(RobotError, match="camera 'c' shows no picture: unplugged"):
        camera.open()
    assert source.closed == 1
    with pytest.raises(RobotError, match="not open"):
        camera.frame()


def test_pictures_are_cropped_and_resized():
    class Halves(Stream):
        def grab(self):
            image = np.zeros((40, 80, 3), np.uint8)
            image[:, 40:] = 200
            self.count += 1
            image[0, 0, 0] = self.count % 256
            return image

    config = CameraConfig(name="c", crop=(0.0, 0.5, 1.0, 0.5))
    camera = Camera(config, (16, 16), Halves(), Clock())
    camera.open()
    image = camera.frame().image
    camera.close()
    assert image.shape == (16, 16, 3) and image.dtype == np.uint8
    assert (image == 200).all()


def test_a_simulated_camera_takes_its_picture_when_asked(make_env, server):
    env = make_env()
    env.reset(seed=0)
    taken = server.world.now()
    for _ in range(3):
        *_, info = env.step(np.array([0, 1, 0, 0, 0, 0], np.float32))
        assert info["frame_age"] >= 0
    assert server.world.shot("front_camera").taken_at > taken
