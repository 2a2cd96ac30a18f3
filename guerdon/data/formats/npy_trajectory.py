"""`npy-trajectory`: one `.npy` file for each trajectory, in `positive/` and `negative/`.

A file is `np.save` of `{"images": {camera: float32 [T, C, H, W] in [0, 1]}, "labels": float32 [T]}`.
Lost in writing: everything else (actions, states, rewards, flags, seed, source, split).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from guerdon.core.atomic import NumberedFiles, make_directory
from guerdon.core.errors import DataError
from guerdon.core.images import CHANNELS, to_unit_chw
from guerdon.core.types import Episode, Fault, UInt8Array, display_path, is_positive
from guerdon.data.files.bounds import Allowance, as_array
from guerdon.data.files.safe_pickle import load_npy
from guerdon.data.formats.base import EpisodeWriter, Format
from guerdon.data.formats.common import (
    UNFINISHED,
    camera_name,
    existing,
    files_in,
    read_files,
    require,
    stack_images,
    to_labels,
)

POSITIVE, NEGATIVE = "positive", "negative"
_OBJECT_HEADER = b"'descr': '|O'"


def read_trajectory(path: Path, *, success_once: bool = False, complete: bool = True) -> Episode:
    """One file. It counts as a success if `success_once` or by its labels."""
    content = load_npy(path)
    if content.dtype != object or content.ndim != 0:
        raise DataError(f"holds an array of shape {list(content.shape)}, not a dict of images and labels")
    record = content.item()
    images = require(record, "images")
    if not isinstance(images, Mapping) or not images:
        raise DataError("missing camera key: 'images' is not a dict with an array for each camera")
    room = Allowance.of(path)
    room.take_steps(len(images))
    named = [(camera_name(camera), value) for camera, value in images.items()]
    frames = {camera: _frames(value, camera, room) for camera, value in named}
    counts = {camera: len(value) for camera, value in frames.items()}
    first = next(iter(counts))
    if len(set(counts.values())) > 1:
        raise DataError(f"has different numbers of frames: {counts}")
    labels = to_labels(require(record, "labels"), counts[first])
    return Episode(
        frames=frames,
        labels=labels,
        success=is_positive(labels, success_once),
        source=display_path(path),
        complete=complete,
    )


def _frames(value: Any, camera: str, room: Allowance) -> UInt8Array:
    """The document says channels first; a file with channels last is read too."""
    if isinstance(value, list | tuple):
        room.take_steps(len(value))
    else:
        value = as_array(value)
        if value.ndim == 4 and value.shape[1] in CHANNELS:
            value = np.moveaxis(value, 1, -1)
    return stack_images(value, camera, room)


def read_directories(positive_dir: Path, negative_dir: Path) -> Iterator[Episode | Fault]:
    """All trajectories of two directories, whatever their names."""
    for directory, positive in ((positive_dir, True), (negative_dir, False)):
        complete = directory.parent.name != UNFINISHED
        read = partial(read_trajectory, success_once=positive, complete=complete)
        yield from read_files(files_in(directory, ".npy"), read)


class NpyTrajectoryWriter(EpisodeWriter):
    """Writes trajectories to two directories; those that were cut off go to `unfinished/` beside them."""

    def __init__(self, positive_dir: Path, negative_dir: Path) -> None:
        positive_dir, negative_dir = Path(positive_dir), Path(negative_dir)
        self._directories = {True: make_directory(positive_dir), False: make_directory(negative_dir)}
        self._files = {
            positive: NumberedFiles([directory], suffix=".npy")
            for positive, directory in self._directories.items()
        }
        self._apart: NpyTrajectoryWriter | None = None

    def add(self, episode: Episode) -> str:
        """Write one episode; return its path."""
        if not episode.complete and self._directories[True].parent.name != UNFINISHED:
            return self._unfinished().add(episode)
        images = {camera: to_unit_chw(frames) for camera, frames in episode.frames.items()}
        content = np.array({"images": images, "labels": episode.labels}, dtype=object)

        def write(file: BinaryIO) -> None:
            np.save(file, content, allow_pickle=True)

        positive = is_positive(episode.labels, episode.success)
        return str(self._files[positive].write(self._directories[positive], write))

    def _unfinished(self) -> NpyTrajectoryWriter:
        if self._apart is None:
            places = (item.parent / UNFINISHED / item.name for item in self._directories.values())
            self._apart = NpyTrajectoryWriter(*places)
        return self._apart


class NpyTrajectory(Format):
    """A directory with `positive/` and `negative/`, a directory of `.npy` trajectories, or one of them."""

    name: ClassVar[str] = "npy-trajectory"
    looks_for: ClassVar[str] = "positive/*.npy and negative/*.npy"

    def detect(self, path: Path) -> bool:
        """Whether there is a `.npy` file with an object in it where trajectories are kept."""
        return any(_is_trajectory(file) for file in _files(path))

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """Positive ones first, then negative ones, then those that were cut off."""
        yield from read_files(_files(existing(path)), _read_placed)

    def count(self, path: Path) -> tuple[int, int]:
        """By the directories alone; a collector asks before every run, and reading all files takes long."""
        return len(files_in(path / POSITIVE, ".npy")), len(files_in(path / NEGATIVE, ".npy"))

    def writer(self, path: Path) -> NpyTrajectoryWriter:
        """Append to `positive/` and `negative/` below `path`."""
        return NpyTrajectoryWriter(Path(path) / POSITIVE, Path(path) / NEGATIVE)


def _files(path: Path) -> list[Path]:
    """The files that may be trajectories, in reading order."""
    if path.is_file():
        return [path]
    below = [root / kind for root in (path, path / UNFINISHED) for kind in (POSITIVE, NEGATIVE)]
    return [file for place in (path, *below) for file in files_in(place, ".npy")]


def _read_placed(path: Path) -> Episode:
    """A file whose directories say whether it is positive and whether it was cut off."""
    place = path.absolute().parent
    return read_trajectory(
        path, success_once=place.name == POSITIVE, complete=place.parent.name != UNFINISHED
    )


def _is_trajectory(path: Path) -> bool:
    if path.suffix.lower() != ".npy":
        return False
    try:
        with path.open("rb") as file:
            head = file.read(128)
    except OSError:
        return False
    damaged = not head.startswith(b"\x93NUMPY") and path.stem.isdecimal()  # its name says what it was
    return _OBJECT_HEADER in head or damaged
