"""Cameras: a thread reads each of them, so that the newest picture is always at hand with its time.

A camera that hangs hands out nothing or the same picture again and again. Sensors are noisy, so a picture
that equals the one before to the byte is not counted as a new one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from threading import Condition, Thread

import numpy as np
from PIL import Image

from guerdon.config.schema_robot import CameraConfig, RobotEnvConfig
from guerdon.core.errors import RobotError, StaleFrameError
from guerdon.core.types import UInt8Array
from guerdon.envs.robot.clock import Clock
from guerdon.envs.robot.sources import ImageSource, make_source

log = logging.getLogger("guerdon")

FIRST_FRAME_SECONDS = 5.0
"""How long a camera may take to show its first picture, by the wall clock."""
_SCALED_WAIT = 1.0
"""Where time is scaled, at least so many seconds of the wall clock are left to a camera."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A picture and the robot's time when it was read."""

    image: UInt8Array
    """[H, W, 3] RGB, cropped and resized."""
    time: float


class Camera:
    """Reads one source in a thread.

    Args:
        config: its settings.
        image_size: (height, width) of what it hands out.
        source: who takes the pictures.
        clock: the robot's time.
    """

    def __init__(
        self, config: CameraConfig, image_size: tuple[int, int], source: ImageSource, clock: Clock
    ) -> None:
        self.config, self.name = config, config.name
        self._size, self._source, self._clock = image_size, source, clock
        self._change = Condition()
        self._thread: Thread | None = None
        self._closing = False
        self._wanted = False
        self._asked = 0.0
        self._raw: UInt8Array | None = None
        self._raw_time = 0.0
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
                log.warning("camera %s hangs and is left behind", self.name)
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
    return [Camera(each, config.image_size, make_source(each, config), clock) for each in config.cameras]
