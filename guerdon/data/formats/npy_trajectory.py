"""`npy-trajectory`: one `.npy` file for each trajectory, in `positive/` and `negative/`.

A file is `np.save` of `{"images": {camera: float32 [T, C, H, W] in [0, 1]}, "labels": float32 [T]}`.
Lost in writing: everything else (actions, states, rewards, flags, seed, source, split).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from guerdon.core.atomic import NumberedFiles
from guerdon.core.errors import DataError
from guerdon.core.images import CHANNELS, to_unit_chw
from guerdon.core.types import Episode, Fault, UInt8Array, display_path, is_positive
from guerdon.data.files.bounds import Allowance, as_array
from guerdon.data.files.safe_pickle import load_npy
from guerdon.data.formats import base, values

POSITIVE = "positive"
_OBJECT_HEADER = b"'descr': '|O'"


def read_trajectory(path: Path, *, success_once: bool = False) -> Episode:
    """One file. It counts as a success if `success_once` or by its labels."""
    content = load_npy(path)
    if content.dtype != object or content.ndim != 0:
        raise DataError(f"holds an array of shape {list(content.shape)}, not a dict of images and labels")
    record = content.item()
    images = values.require(record, "images")
    if not isinstance(images, Mapping) or not images:
        raise DataError("missing camera key: 'images' is not a dict with an array for each camera")
    room = Allowance.of(path)
    room.take_steps(len(images))
    named = [(values.camera_name(camera), value) for camera, value in images.items()]
    frames = {camera: _frames(value, camera, room) for camera, value in named}
    counts = {camera: len(value) for camera, value in frames.items()}
    if len(set(counts.values())) > 1:
        raise DataError(f"has different numbers of frames: {counts}")
    labels = values.to_labels(values.require(record, "labels"), next(iter(counts.values())))
    return Episode(
        frames=frames,
        labels=labels,
        success=is_positive(labels, success_once),
        source=display_path(path),
        complete=not base.is_unfinished(path),
    )


def _frames(value: Any, camera: str, room: Allowance) -> UInt8Array:
    """RLinf writes channels first; a file with channels last is read too."""
    if isinstance(value, list | tuple):
        room.take_steps(len(value))
    else:
        value = as_array(value)
        if value.ndim == 4 and value.shape[1] in CHANNELS:
            value = np.moveaxis(value, 1, -1)
    return values.stack_images(value, camera, room)


def read_directories(positive_dir: Path, negative_dir: Path) -> Iterator[Episode | Fault]:
    """All trajectories of two directories, whatever their names."""
    for directory, positive in ((positive_dir, True), (negative_dir, False)):
        for file in base.files_in(directory, ".npy"):
            yield base.read_or_fault(file, partial(read_trajectory, file, success_once=positive))


class NpyTrajectoryWriter(base.LabelledWriter):
    """Numbers the trajectories of each directory on their own."""

    def __init__(self, positive_dir: Path, negative_dir: Path) -> None:
        super().__init__(Path(positive_dir), Path(negative_dir))
        self._files = {
            positive: NumberedFiles([directory], suffix=".npy")
            for positive, directory in self.directories.items()
        }

    def _write(self, episode: Episode, positive: bool) -> str:
        images = {camera: to_unit_chw(frames) for camera, frames in episode.frames.items()}
        content = np.array({"images": images, "labels": episode.labels}, dtype=object)
        write = partial(np.save, arr=content, allow_pickle=True)
        return str(self._files[positive].write(self.directories[positive], write))


class NpyTrajectory(base.LabelledFiles):
    """A directory with `positive/` and `negative/`, a directory of `.npy` trajectories, or one of them."""

    name: ClassVar[str] = "npy-trajectory"
    kinds, suffix = (POSITIVE, "negative"), ".npy"
    writer_class = NpyTrajectoryWriter
    looks_for: ClassVar[str] = "positive/*.npy and negative/*.npy"

    def detect(self, path: Path) -> bool:
        """Whether there is a `.npy` file with an object in it where trajectories are kept."""
        return any(_is_trajectory(file) for file in self.files(path))

    def read_file(self, path: Path) -> Episode:
        """One trajectory."""
        return read_trajectory(path, success_once=path.absolute().parent.name == POSITIVE)


def _is_trajectory(path: Path) -> bool:
    if path.suffix.lower() != ".npy":
        return False
    head = base.head_of(path, 128)
    damaged = not head.startswith(b"\x93NUMPY") and path.stem.isdecimal()  # its name says what it was
    return _OBJECT_HEADER in head or damaged
