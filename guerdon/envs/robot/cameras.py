"""Cameras: a thread reads each device, so that the newest picture is always at hand with its time.

A camera that hangs hands out nothing or the same picture again and again. Sensors are noisy, so a picture
that equals the one before to the byte is not counted as a new one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from http.client import HTTPMessage
from threading import Condition, Thread
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from guerdon.config.schema_robot import CameraConfig, RobotEnvConfig
from guerdon.core.errors import ConfigError, RobotError, StaleFrameError
from guerdon.core.types import UInt8Array
from guerdon.envs.robot.clock import Clock
from guerdon.envs.robot.driver import import_extra
from guerdon.envs.robot.serl_http import HttpConnection

log = logging.getLogger("guerdon")

FIRST_FRAME_SECONDS = 5.0
"""How long a camera may take to show its first picture, by the wall clock."""
_SCALED_WAIT = 1.0
"""Where time is scaled, at least so many seconds of the wall clock are left to a camera."""


class ImageSource(Protocol):
    """A device that takes pictures; used by one thread."""

    on_demand: bool
    """Whether it takes a picture when asked, rather than many a second by itself."""

    def open(self) -> None:
        """Begin; RobotError if there is no such device."""

    def grab(self) -> UInt8Array:
        """The next picture, RGB [H, W, 3]; RobotError if there is none."""

    def close(self) -> None:
        """Let go of the device."""


class HttpSource:
    """A camera of the simulated robot."""

    on_demand = True

    def __init__(self, url: str, timeout: float, retries: int) -> None:
        parts = urlsplit(url)
        self._route = parts.path
        self._connection = HttpConnection(f"{parts.scheme}://{parts.netloc}", timeout, retries)
        self.url = url

    def open(self) -> None:
        """Tell the simulation, which ends a freeze."""
        self._request("POST", f"{self._route}/open")

    def grab(self) -> UInt8Array:
        """The newest picture."""
        body, headers = self._request("GET", self._route)
        try:
            height, width, channels = (int(value) for value in headers.get("X-Shape", "").split(","))
            return np.frombuffer(body, np.uint8).reshape(height, width, channels)
        except ValueError as error:
            raise RobotError(f"what came from {self.url} is no picture: {error}") from error

    def _request(self, method: str, route: str) -> tuple[bytes, HTTPMessage]:
        status, body, headers = self._connection.request(method, route)
        if status != 200:
            raise RobotError(f"there is no camera at {self.url}: {body[:200].decode(errors='replace')}")
        return body, headers

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class OpenCvSource:
    """A device that OpenCV can open: a number, or a path such as /dev/video0."""

    on_demand = False

    def __init__(self, config: CameraConfig) -> None:
        self._config = config
        self._capture: Any = None

    def open(self) -> None:
        """Open the device and ask for size and rate."""
        cv2 = import_extra("cv2", "opencv")
        device = 0 if self._config.device is None else self._config.device
        capture = cv2.VideoCapture(device)
        if not capture.isOpened():
            capture.release()
            raise RobotError(f"camera {self._config.name!r}: there is no device {device!r}")
        height, width = self._config.capture_size
        for setting, value in (
            (cv2.CAP_PROP_FRAME_WIDTH, width),
            (cv2.CAP_PROP_FRAME_HEIGHT, height),
            (cv2.CAP_PROP_FPS, self._config.fps),
            (cv2.CAP_PROP_BUFFERSIZE, 1),  # old pictures in a queue are of no use
        ):
            capture.set(setting, value)
        self._capture = capture

    def grab(self) -> UInt8Array:
        """The next picture."""
        good, image = self._capture.read()
        if not good:
            raise RobotError(f"camera {self._config.name!r} gave no picture")
        rgb: UInt8Array = np.ascontiguousarray(image[..., ::-1])
        return rgb

    def close(self) -> None:
        """Release the device."""
        if self._capture is not None:
            self._capture.release()
            self._capture = None


class RealSenseSource:
    """An Intel RealSense by its serial number."""

    on_demand = False

    def __init__(self, config: CameraConfig) -> None:
        self._config = config
        self._pipeline: Any = None

    def open(self) -> None:
        """Start the colour stream of the device."""
        pyrealsense2 = import_extra("pyrealsense2", "realsense")
        devices = pyrealsense2.context().query_devices()
        serials = [device.get_info(pyrealsense2.camera_info.serial_number) for device in devices]
        wanted = None if self._config.device is None else str(self._config.device)
        if not serials or (wanted is not None and wanted not in serials):
            there = f"(connected: {', '.join(serials) or 'none'})"
            raise RobotError(f"camera {self._config.name!r}: no RealSense {wanted or ''} {there}")
        settings = pyrealsense2.config()
        settings.enable_device(wanted or serials[0])
        height, width = self._config.capture_size
        colour, rgb = pyrealsense2.stream.color, pyrealsense2.format.rgb8
        settings.enable_stream(colour, width, height, rgb, self._config.fps)
        pipeline = pyrealsense2.pipeline()
        try:
            pipeline.start(settings)
        except RuntimeError as error:
            raise RobotError(f"camera {self._config.name!r} does not start: {error}") from error
        self._pipeline = pipeline

    def grab(self) -> UInt8Array:
        """The next picture."""
        try:
            frame = self._pipeline.wait_for_frames(1000).get_color_frame()
        except RuntimeError as error:
            raise RobotError(f"camera {self._config.name!r} gave no picture: {error}") from error
        if not frame:
            raise RobotError(f"camera {self._config.name!r} gave a set of pictures without colour")
        image: UInt8Array = np.asanyarray(frame.get_data()).copy()  # the device uses its memory again
        return image

    def close(self) -> None:
        """Stop the stream."""
        if self._pipeline is not None:
            self._pipeline.stop()
            self._pipeline = None


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A picture and the robot's time when it was read."""

    image: UInt8Array
    """[H, W, 3] RGB, cropped and resized."""
    time: float


class Camera:
    """Reads one source in a thread; hands out pictures of `image_size` (height, width)."""

    def __init__(
        self, config: CameraConfig, image_size: tuple[int, int], source: ImageSource, clock: Clock
    ) -> None:
        self.config, self.name = config, config.name
        self._size, self._source, self._clock = image_size, source, clock
        self._change = Condition()
        self._thread: Thread | None = None
        self._closing = self._wanted = False
        self._asked = self._raw_time = 0.0
        self._raw: UInt8Array | None = None
        self._problem: Exception | None = None

    def open(self) -> None:
        """Start reading; RobotError unless a first picture comes."""
        self.close()
        try:
            self._source.open()
        except BaseException:
            self._source.close()
            raise
        self._closing, self._raw, self._problem = False, None, None
        self._thread = Thread(target=self._read, daemon=True, name=f"camera {self.name}")
        self._thread.start()
        with self._change:
            self._wanted = True
            self._change.notify_all()
            self._change.wait_for(
                lambda: self._raw is not None or self._problem is not None, FIRST_FRAME_SECONDS
            )
            missing, problem = self._raw is None, self._problem
        if missing:
            self.close()
            reason = problem or f"nothing came within {FIRST_FRAME_SECONDS:g} s"
            raise RobotError(f"camera {self.name!r} shows no picture: {reason}") from problem

    def ask(self) -> None:
        """Have a source that takes pictures on demand take one now; `frame` then waits for it."""
        with self._change:
            self._asked = self._clock.now()
            self._wanted = True
            self._change.notify_all()

    def frame(self) -> Frame:
        """The newest picture; StaleFrameError if it is too old, or none came after `ask`."""
        if self._thread is None:
            raise RobotError(f"camera {self.name!r} is not open")
        wait = self.config.max_age / self._clock.scale
        if self._clock.scale != 1.0:
            wait = max(wait, _SCALED_WAIT)
        with self._change:
            if self._source.on_demand:
                asked = self._asked
                self._change.wait_for(lambda: self._raw_time >= asked or self._problem is not None, wait)
                fresh = self._raw_time >= asked
            else:
                fresh = (self._clock.now() - self._raw_time) / self._clock.scale <= wait
            raw, taken, problem = self._raw, self._raw_time, self._problem
        if problem is not None:
            raise StaleFrameError(f"camera {self.name!r} has stopped: {problem}") from problem
        if raw is None or not fresh:
            age = self._clock.now() - taken
            raise StaleFrameError(f"camera {self.name!r} has shown nothing new for {age:.2f} s")
        return Frame(image=self._fit(raw), time=taken)

    def close(self) -> None:
        """Stop reading and let go of the device."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            if self._thread.is_alive():
                log.warning("camera %s does not answer; its thread is not waited for", self.name)
            self._thread = None
            self._source.close()

    def _fit(self, image: UInt8Array) -> UInt8Array:
        """Cropped and resized."""
        height, width = image.shape[:2]
        if self.config.crop is not None:
            top, left, tall, wide = self.config.crop
            first, start = int(top * height), int(left * width)
            image = image[first : max(first + int(tall * height), first + 1)]
            image = image[:, start : max(start + int(wide * width), start + 1)]
        if image.shape[:2] == self._size:
            return image
        picture = Image.fromarray(np.ascontiguousarray(image))
        resized = picture.resize((self._size[1], self._size[0]), Image.Resampling.BILINEAR, reducing_gap=2.0)
        return np.asarray(resized)

    def _read(self) -> None:
        """What the thread does."""
        while True:
            with self._change:
                if self._source.on_demand:
                    self._change.wait_for(lambda: self._wanted or self._closing)
                if self._closing:
                    return
            began = self._clock.now()
            try:
                image = self._source.grab()
            except Exception as error:  # handed to whoever asks for a picture
                with self._change:
                    self._problem = error
                    self._change.notify_all()
                return
            with self._change:
                if self._raw is None or not np.array_equal(image, self._raw):
                    self._raw = image
                    self._raw_time = began if self._source.on_demand else self._clock.now()
                    self._wanted = self._asked > began  # asked again while this one was taken
                    self._change.notify_all()
                elif self._source.on_demand:
                    self._change.wait_for(lambda: self._closing, 0.02)  # frozen: look again a little later


def make_cameras(config: RobotEnvConfig, clock: Clock) -> list[Camera]:
    """The cameras of the settings, not yet open."""
    return [Camera(each, config.image_size, _make_source(each, config), clock) for each in config.cameras]


def _make_source(camera: CameraConfig, config: RobotEnvConfig) -> ImageSource:
    """Who takes the pictures of a camera."""
    if camera.source == "opencv":
        return OpenCvSource(camera)
    if camera.source == "realsense":
        return RealSenseSource(camera)
    device = camera.name if camera.device is None else str(camera.device)
    if "://" not in device:
        if config.driver != "serl_http":
            raise ConfigError(f"camera {camera.name!r}: source http is for simulated robots; give its URL")
        device = f"{config.server_url}/sim/camera/{device}"
    return HttpSource(device, config.timeout, config.retries)
