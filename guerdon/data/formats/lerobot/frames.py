"""Frames of videos by their times, and pictures in parquet files.

A video holds the frames of many episodes. Reading goes to the key frame before the wanted time and decodes
from there; what is decoded is bounded by what is asked for. For random access, open files and decoded frames
are kept, up to a bound.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import UInt8Array, display_path
from guerdon.data.files.bounds import one_line
from guerdon.data.files.videos import check_pixels, open_video
from guerdon.data.formats.folder import decode_picture

TOLERANCE = 1e-4
"""Seconds between the time of a row and that of its frame; LeRobot's own."""
CACHE_BYTES = 256 << 20
MAX_OPEN = 8
MAX_SKIPPED = 600
"""Frames that are decoded in a row without being asked for: key frames may be far apart."""
_FLOAT32 = 2.0**-23
_KEY = 1e4  # times are told apart to 0.1 ms


class _OpenVideo:
    """One file and the place to which it is decoded."""

    def __init__(self, path: Path) -> None:
        self._stack = ExitStack()
        self.container, self.stream = self._stack.enter_context(open_video(path, "lerobot"))
        self.stream.thread_type = "SLICE"  # threads that decode frames ahead make every seek dear
        self._frames: Iterator[Any] = iter(())
        self.at = float("inf")
        """The time of the frame that was decoded last; infinite before the first."""

    def close(self) -> None:
        self._stack.close()

    def seek(self, seconds: float) -> None:
        """Go on at the key frame before `seconds`."""
        base = self.stream.time_base
        self.container.seek(max(0, int(seconds / base) - 1), stream=self.stream, backward=True)
        self._frames = self.container.decode(self.stream)
        self.at = -1.0

    def __next__(self) -> Any:
        frame = next(self._frames)
        while frame.pts is None:
            frame = next(self._frames)
        self.at = float(frame.pts * self.stream.time_base)
        return frame


class VideoReader:
    """Frames of videos by their times; safe to ask in any order."""

    def __init__(self, cache_bytes: int = CACHE_BYTES) -> None:
        self._open: OrderedDict[Path, _OpenVideo] = OrderedDict()
        self._frames: OrderedDict[tuple[Path, int, int], UInt8Array] = OrderedDict()
        self._cache_bytes = self._room = cache_bytes
        self.num_decoded = 0
        """Frames that were decoded so far."""

    def close(self) -> None:
        """Close all files and drop the frames that are kept."""
        for video in self._open.values():
            video.close()
        self._open.clear()
        self._frames.clear()
        self._room = self._cache_bytes

    def frames(self, path: Path, times: ArrayLike, shape: tuple[int, int, int]) -> UInt8Array:
        """The frames at `times` (seconds, [n], in any order), uint8 [n, H, W, C]; some are kept for later."""
        wanted = np.asarray(times, np.float64)
        found = np.empty((len(wanted), *shape), np.uint8)
        missing = []
        for place, time in enumerate(wanted.tolist()):
            kept = self._frames.get(key := (path, round(time * _KEY), shape[2]))
            if kept is None:
                missing.append(place)
            else:
                self._frames.move_to_end(key)
                found[place] = kept
        if missing:
            order = sorted(missing, key=lambda place: wanted[place])
            for place, frame in zip(order, self.decoded(path, wanted[order], shape), strict=True):
                found[place] = frame
                self._keep((path, round(float(wanted[place]) * _KEY), shape[2]), frame)
        return found

    def _keep(self, key: tuple[Path, int, int], frame: UInt8Array) -> None:
        if key in self._frames or frame.nbytes > self._cache_bytes:
            return
        self._frames[key] = frame
        self._room -= frame.nbytes
        while self._room < 0:
            _, oldest = self._frames.popitem(last=False)
            self._room += oldest.nbytes

    def decoded(
        self, path: Path, times: NDArray[np.float64], shape: tuple[int, int, int]
    ) -> Iterator[UInt8Array]:
        """The frames at `times`, which grow, one after another: uint8 [H, W, C] each."""
        if not all(one <= other for one, other in pairwise(times.tolist())):
            raise DataError("has times that go backwards")
        try:
            yield from self._decoded(path, times, shape)
        except DataError as error:
            text = str(error).removeprefix(f"{display_path(path)}: ")
            self._drop(path)
            raise DataError(f"{display_path(path)}: {text}") from error
        except (OSError, ValueError, EOFError) as error:  # PyAV's errors are of these classes too
            self._drop(path)
            raise DataError(f"{display_path(path)} is not a readable video: {one_line(error)}") from error

    def _decoded(
        self, path: Path, times: NDArray[np.float64], shape: tuple[int, int, int]
    ) -> Iterator[UInt8Array]:
        video = self._video(path)
        last: tuple[float, UInt8Array] | None = None
        for time in times.tolist():
            tolerance = max(TOLERANCE, 2 * _FLOAT32 * time)
            if last is not None and abs(last[0] - time) <= tolerance:
                yield last[1]
                continue
            if not video.at < time - tolerance or time - video.at > 1.0:
                video.seek(time)
            skipped = 0
            while True:
                frame = next(video, None)
                if frame is None or video.at > time + tolerance:
                    raise DataError(f"has no frame at {time:.4f} s; a recording without it was cut off")
                self.num_decoded += 1
                if video.at >= time - tolerance:
                    break
                skipped += 1
                if skipped > MAX_SKIPPED:
                    raise DataError(f"has more than {MAX_SKIPPED} frames from a key frame to {time:.4f} s")
            last = video.at, _pixels(frame, shape)
            yield last[1]

    def _video(self, path: Path) -> _OpenVideo:
        if path not in self._open:
            if not path.exists():
                raise DataError("does not exist")
            self._open[path] = _OpenVideo(path)
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(path)
        return self._open[path]

    def _drop(self, path: Path) -> None:
        if (video := self._open.pop(path, None)) is not None:
            video.close()


def _pixels(frame: Any, shape: tuple[int, int, int]) -> UInt8Array:
    check_pixels(frame.width, frame.height)
    if (frame.height, frame.width) != shape[:2]:
        raise DataError(
            f"has frames of {frame.width}x{frame.height} pixels; info.json tells of {shape[1]}x{shape[0]}"
        )
    pixels: UInt8Array = frame.to_ndarray(format="rgb24" if shape[2] == 3 else "gray")
    return pixels.reshape(shape)


def check_video(path: Path) -> None:
    """Raise unless the file can be opened as a video; nothing is decoded."""
    if not path.exists():
        raise DataError(f"{display_path(path)} does not exist")
    with open_video(path, "lerobot"):
        pass


def pictures(cells: Iterable[Any], shape: tuple[int, int, int]) -> Iterator[UInt8Array]:
    """The images in cells as Hugging Face's `datasets` stores them: `{"bytes": ..., "path": ...}`."""
    for place, cell in enumerate(cells):
        content = cell.get("bytes") if isinstance(cell, dict) else None
        if not isinstance(content, bytes):
            raise DataError(f"has no embedded picture in row {place}; other files are not opened")
        image = decode_picture(content)
        if image.shape[:2] != shape[:2]:
            sizes = f"{image.shape[1]}x{image.shape[0]}; info.json tells of {shape[1]}x{shape[0]}"
            raise DataError(f"has a picture of {sizes}")
        if image.ndim == 2:
            image = image[..., None]
        if image.shape[2] != shape[2]:
            image = np.repeat(image, 3, axis=2) if shape[2] == 3 else image[..., :1]
        yield image
