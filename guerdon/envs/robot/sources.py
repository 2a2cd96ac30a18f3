"""Where pictures come from: the simulated robot, OpenCV devices and RealSense cameras."""

from __future__ import annotations

from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from guerdon.config.schema_robot import CameraConfig, RobotEnvConfig
from guerdon.core.errors import ConfigError, RobotError
from guerdon.core.types import UInt8Array
from guerdon.envs.robot.serl_http import HttpConnection


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
        status, body, _ = self._connection.request("POST", f"{self._route}/open")
        if status != 200:
            raise RobotError(f"there is no camera at {self.url}: {body[:200].decode(errors='replace')}")

    def grab(self) -> UInt8Array:
        """The newest picture."""
        status, body, headers = self._connection.request("GET", self._route)
        if status != 200:
            raise RobotError(f"there is no camera at {self.url}: {body[:200].decode(errors='replace')}")
        try:
            height, width, channels = (int(value) for value in headers.get("X-Shape", "").split(","))
            return np.frombuffer(body, np.uint8).reshape(height, width, channels)
        except ValueError as error:
            raise RobotError(f"what came from {self.url} is no picture: {error}") from error

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
        try:
            import cv2
        except ImportError as error:
            raise RobotError(
                f"camera {self._config.name!r} needs OpenCV: pip install guerdon[opencv]"
            ) from error
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
        try:
            import pyrealsense2
        except ImportError as error:
            raise RobotError(
                f"camera {self._config.name!r} needs pyrealsense2: pip install guerdon[realsense]"
            ) from error
        serials = [
            device.get_info(pyrealsense2.camera_info.serial_number)
            for device in pyrealsense2.context().query_devices()
        ]
        wanted = None if self._config.device is None else str(self._config.device)
        if not serials or (wanted is not None and wanted not in serials):
            there = ", ".join(serials) or "none"
            raise RobotError(
                f"camera {self._config.name!r}: no RealSense {wanted or ''} (connected: {there})"
            )
        settings = pyrealsense2.config()
        settings.enable_device(wanted or serials[0])
        height, width = self._config.capture_size
        settings.enable_stream(
            pyrealsense2.stream.color, width, height, pyrealsense2.format.rgb8, self._config.fps
        )
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


def make_source(camera: CameraConfig, config: RobotEnvConfig) -> ImageSource:
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
