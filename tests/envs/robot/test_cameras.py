"""The newest picture, its age, and cameras that hang."""

import sys
import time
import types
from contextlib import suppress
from threading import Event

import numpy as np
import pytest

from guerdon.config.schema_robot import CameraConfig
from guerdon.core.errors import RobotError, StaleFrameError
from guerdon.envs.robot.cameras import Camera, OpenCvSource, RealSenseSource
from guerdon.envs.robot.clock import Clock
from tests.envs.robot.conftest import wait_for


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


def fresh_frame(camera):
    """A frame, as soon as the thread that reads the camera has caught up."""
    found = []

    def read():
        with suppress(StaleFrameError):
            found.append(camera.frame())
        return found

    wait_for(read)
    return found[0]


def test_the_newest_picture_is_handed_out(camera):
    camera, source = camera
    frames = []
    for _ in range(2):
        shown = source.count
        wait_for(lambda shown=shown: source.count >= shown + 5)
        taken = source.count
        frames.append(fresh_frame(camera))
        # Pictures are numbered modulo 256; the last one may not have been handed over yet.
        assert (int(frames[-1].image[0, 0, 0]) - (taken - 1)) % 256 < 128, "an old picture of a queue"
    before, after = frames
    assert after.time > before.time and Clock().now() >= after.time


@pytest.mark.parametrize("how", ["hang", "repeat"])
def test_a_camera_with_nothing_new_is_stale(camera, how):
    camera, source = camera
    fresh_frame(camera)
    if how == "hang":
        source.go.clear()
    else:
        source.repeat = True
    time.sleep(0.3)
    with pytest.raises(StaleFrameError, match=r"camera 'c' has shown nothing new for \d"):
        camera.frame()
    source.go.set()
    source.repeat = False
    camera.open()
    assert fresh_frame(camera).time > 0 and source.opened == 2 and source.closed == 1


def test_a_camera_that_breaks_is_stale_until_opened_anew(camera):
    camera, source = camera
    source.broken = True
    wait_for(lambda: camera._problem is not None)
    with pytest.raises(StaleFrameError, match="has stopped: unplugged"):
        camera.frame()
    source.broken = False
    camera.open()
    assert fresh_frame(camera).time > 0


def test_a_camera_that_never_shows_anything_cannot_be_opened(monkeypatch):
    monkeypatch.setattr("guerdon.envs.robot.cameras.FIRST_FRAME_SECONDS", 60.0)
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


@pytest.mark.system
def test_opencv_devices_are_read_as_rgb(tmp_path):
    import cv2

    film = str(tmp_path / "film.avi")  # OpenCV opens a film as it opens a device
    writer = cv2.VideoWriter(film, cv2.VideoWriter_fourcc(*"MJPG"), 30, (64, 48))
    for number in range(4):
        image = np.zeros((48, 64, 3), np.uint8)
        image[..., 2] = 255 - 20 * number  # OpenCV's third channel is red
        writer.write(image)
    writer.release()
    source = OpenCvSource(CameraConfig(name="usb", source="opencv", device=film))
    source.open()
    first = source.grab()
    assert first.shape == (48, 64, 3)
    assert first[..., 0].mean() > 220 and first[..., 2].mean() < 30
    for _ in range(3):
        source.grab()
    with pytest.raises(RobotError, match="camera 'usb' gave no picture"):
        source.grab()
    source.close()


class RealSense(types.ModuleType):
    """As much of pyrealsense2 as is used, with one camera that shows its number of pictures."""

    def __init__(self, serials):
        super().__init__("pyrealsense2")
        self.started = self.stopped = None
        self.camera_info = types.SimpleNamespace(serial_number=1)
        self.stream = types.SimpleNamespace(color="color")
        self.format = types.SimpleNamespace(rgb8="rgb8")
        devices = [types.SimpleNamespace(get_info=lambda _, serial=serial: serial) for serial in serials]
        self.context = lambda: types.SimpleNamespace(query_devices=lambda: devices)
        self.config = lambda: types.SimpleNamespace(
            enable_device=lambda serial: setattr(self, "serial", serial),
            enable_stream=lambda *settings: setattr(self, "settings", settings),
        )
        frame = types.SimpleNamespace(get_data=lambda: np.full((480, 640, 3), 7, np.uint8))
        self.pipeline = lambda: types.SimpleNamespace(
            start=lambda config: setattr(self, "started", True),
            wait_for_frames=lambda wait: types.SimpleNamespace(get_color_frame=lambda: frame),
            stop=lambda: setattr(self, "stopped", True),
        )


def test_a_realsense_is_found_by_its_serial_number(monkeypatch):
    module = RealSense(["111", "222"])
    monkeypatch.setitem(sys.modules, "pyrealsense2", module)
    source = RealSenseSource(CameraConfig(name="wrist", source="realsense", device="222", fps=15))
    source.open()
    assert module.serial == "222" and module.settings == ("color", 640, 480, "rgb8", 15)
    assert source.grab().shape == (480, 640, 3)
    source.close()
    assert module.stopped
    with pytest.raises(RobotError, match=r"no RealSense 333 \(connected: 111, 222\)"):
        RealSenseSource(CameraConfig(name="wrist", source="realsense", device="333")).open()
