"""Pictures and video files without labels, as batches of frames: never more than one batch in memory.

A picture, a folder of pictures (in natural order: 2 before 10), a video file, or a folder of videos. For a
model with several cameras: a folder that has, for each camera, a folder of pictures or a video of its name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

from guerdon.core.errors import DataError
from guerdon.core.types import UInt8Array, display_path
from guerdon.data.files.bounds import one_line
from guerdon.data.files.videos import VIDEO_CONTAINERS, check_pixels, open_video
from guerdon.data.formats.folder import PICTURE_SUFFIXES, read_picture

log = logging.getLogger("guerdon")

MAX_BATCH_BYTES = 256 << 20
"""Of the frames of one batch and camera."""
MAX_STRETCH = 0.02
"""Frames are resized if the ratio of width to height stays the same within this share."""

Size: TypeAlias = tuple[int, int, int]
"""(H, W, C)."""
View: TypeAlias = Path | tuple[Path, ...]
"""What one camera shows: a video, or pictures in their order."""


@dataclass(frozen=True, kw_only=True)
class Clip:
    """Frames that follow each other in time."""

    source: str
    views: Mapping[str, View]
    """By camera."""

    def batches(self, sizes: Mapping[str, Size], count: int) -> Iterator[dict[str, UInt8Array]]:
        """At most `count` frames of every camera at a time, uint8 [n, H, W, C].

        Args:
            sizes: camera -> what its frames are resized to; cameras without an entry stay as they are.
            count: fewer are given where frames are large.
        """
        readers = {camera: _frames(view, sizes.get(camera)) for camera, view in self.views.items()}
        while True:
            first = {camera: next(reader, None) for camera, reader in readers.items()}
            there = {camera: frame for camera, frame in first.items() if frame is not None}
            if not there:
                return
            most = min(count, *(max(1, MAX_BATCH_BYTES // frame.nbytes) for frame in there.values()))
            batch = {
                camera: _stacked([frame, *islice(readers[camera], most - 1)], self.source)
                for camera, frame in there.items()
            }
            if len(there) < len(first) or len({len(frames) for frames in batch.values()}) > 1:
                raise DataError(f"{self.source}: the cameras {list(first)} have different numbers of frames")
            yield batch


def find_clips(path: Path, cameras: Sequence[str]) -> list[Clip]:
    """The clips at `path` for a model that looks at `cameras`; none if there is no picture and no video."""
    view = _view(path)
    if len(cameras) == 1 and view is not None:
        return [Clip(source=display_path(path), views={cameras[0]: view})]
    by_camera = {camera: _view_of_camera(path, camera) for camera in cameras} if path.is_dir() else {}
    if by_camera and all(found is not None for found in by_camera.values()):
        views = {camera: found for camera, found in by_camera.items() if found is not None}
        return [Clip(source=display_path(path), views=views)]
    videos = [file for file in _listed(path) if file.suffix.lower() in VIDEO_CONTAINERS]
    if len(cameras) == 1:
        return [Clip(source=display_path(file), views={cameras[0]: file}) for file in videos]
    if view is not None or videos or any(by_camera.values()):
        missing = [camera for camera in cameras if by_camera.get(camera) is None]
        raise DataError(
            f"{display_path(path)} shows nothing of {missing}: the model looks at {list(cameras)} and needs "
            "a folder with a folder of pictures or a video for each, named like the camera"
        )
    return []


def _view(path: Path) -> View | None:
    """A video file, a picture, or the pictures directly inside a folder."""
    suffix = path.suffix.lower()
    if path.is_file():
        return path if suffix in VIDEO_CONTAINERS else (path,) if suffix in PICTURE_SUFFIXES else None
    return tuple(file for file in _listed(path) if file.suffix.lower() in PICTURE_SUFFIXES) or None


def _view_of_camera(path: Path, camera: str) -> View | None:
    if "/" in camera or camera in ("", ".", ".."):
        return None
    if (path / camera).is_dir():
        return _view(path / camera)
    return next((file for file in _listed(path) if file.stem == camera and _view(file) == file), None)


def _listed(path: Path) -> list[Path]:
    """The files directly inside a folder, in natural order."""
    if not path.is_dir():
        return []
    files = (item for item in path.iterdir() if item.is_file() and not item.name.startswith("."))
    return sorted(files, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    parts = re.split(r"([0-9]+)", path.name)
    return [(int(part), "") if part.isdecimal() and part.isascii() else (-1, part) for part in parts]


def _frames(view: View, size: Size | None) -> Iterator[UInt8Array]:
    """The frames of one camera, resized to `size`."""
    if isinstance(view, Path):
        images = video_frames(view)
    else:
        images = ((display_path(file), _picture(file)) for file in view)
    warned = False
    for source, image in images:
        if size is not None and image.shape[:2] != size[:2] and not warned:
            warned = True
            log.info(
                "%s: frames of %dx%d pixels are resized to %dx%d, the size that the model was fitted to",
                *(source, image.shape[1], image.shape[0], size[1], size[0]),
            )
        yield fitted(image, size, source)


def _picture(file: Path) -> UInt8Array:
    try:
        return read_picture(file)
    except (DataError, OSError) as error:
        raise DataError(f"{display_path(file)}: {one_line(error)}") from error


def fitted(image: UInt8Array, size: Size | None, source: str) -> UInt8Array:
    """A picture, uint8 [H, W] or [H, W, 3], as a frame of `size`; refused if that would distort it."""
    if size is None:
        return image[..., None] if image.ndim == 2 else image
    height, width, channels = size
    picture = Image.fromarray(np.ascontiguousarray(image)).convert("RGB" if channels == 3 else "L")
    if picture.size != (width, height):
        stretch = (picture.width / picture.height) / (width / height)
        if abs(stretch - 1.0) > MAX_STRETCH:
            raise DataError(
                f"{source}: {picture.width}x{picture.height} pixels; the model was fitted to frames of "
                f"{width}x{height}. Resizing would distort them: crop them to the same shape first"
            )
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(picture).reshape(height, width, channels)


def _stacked(frames: list[UInt8Array], source: str) -> UInt8Array:
    if len({frame.shape for frame in frames}) > 1:
        sizes = sorted({f"{frame.shape[1]}x{frame.shape[0]}x{frame.shape[2]}" for frame in frames})
        raise DataError(f"{source}: the pictures have different sizes: {', '.join(sizes[:4])}")
    return np.stack(frames)


def video_frames(path: Path) -> Iterator[tuple[str, UInt8Array]]:
    """The frames of a video, one at a time, each with the name for messages; uint8 [H, W, 3]."""
    shown = display_path(path)
    with open_video(path) as (container, stream):
        found = False
        for frame in container.decode(stream):
            check_pixels(frame.width, frame.height)
            found = True
            pixels = frame.to_ndarray(format="rgb24")
            yield shown, np.rot90(pixels, getattr(frame, "rotation", 0) // 90)  # as players show it
        if not found:
            raise DataError("has no frames")
