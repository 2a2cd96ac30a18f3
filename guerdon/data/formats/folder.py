"""`folder`: pictures in `success/` and `failure/`; the directory is the label of the frame.

The writer's files are named `{source}_{episode:06d}_frame{step:03d}[_{camera}].png`; the camera is left out
if it is the only one and is called base_camera. Files with such names are put together to episodes again,
though the frames of one may lie in both directories. A picture with another name is an episode of one frame.

While an episode is written, a hidden file `.{source}_{episode:06d}.writing` lies beside the two directories.
If its writer is killed, readers know by it that the frames are not all there, and the next writer removes
both.

Lost in writing: actions, states, rewards, flags, seed and split; labels between 0 and 1 are rounded; whether
an episode counts as a success is known only from its frames.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, ClassVar
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from guerdon.core.atomic import (
    clear_stale,
    fsync_directory,
    locked_directory,
    next_number,
    storage_errors,
    write_atomic,
)
from guerdon.core.errors import DataError
from guerdon.core.types import Episode, Fault, FloatArray, UInt8Array, display_path, is_positive
from guerdon.data.files.bounds import memory_budget, one_line
from guerdon.data.formats.base import (
    UNFINISHED,
    Format,
    LabelledWriter,
    existing,
    files_in,
    labelled_files,
    read_or_fault,
    to_fault,
)
from guerdon.data.formats.values import BASE_CAMERA, stack_images

log = logging.getLogger("guerdon")

KINDS = SUCCESS, FAILURE = "success", "failure"
WRITING = ".writing"
MAX_LOOKS = 4
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg")
_NAME = re.compile(r"(?P<stem>(?P<source>.*)_(?P<episode>\d{6,}))_frame(?P<step>\d{3,})(?:_(?P<camera>.+))?")
_NUMBER = re.compile(r".*_(\d{6,})_frame\d{3,}(?:_.+)?\.(?:png|jpg|jpeg)")
_DECODERS = ("PNG", "JPEG")
_MAX_FILE = 256 << 20  # bytes
MAX_PIXELS = 50_000_000  # decoding takes 11 bytes for each
_JPEG_SCAN = b"\xff\xda"
_MAX_SCANNED_PIXELS = 10 * MAX_PIXELS  # a progressive JPEG goes over its pixels once for each scan
_MAX_SOURCE = 120  # characters of a file name, which has at most 255


@dataclass(frozen=True, kw_only=True)
class _Picture:
    """One file and what its name and place say."""

    path: Path
    positive: bool
    source: str
    stem: str = ""
    """What the names of an episode's files begin with."""
    step: int = 0
    camera: str = BASE_CAMERA


def _pictures(root: Path) -> list[list[_Picture]]:
    """The pictures below `root` by episode: those with other names first, then in the order of numbers."""
    groups: dict[tuple[int, str], list[_Picture]] = {}
    for kind in (SUCCESS, FAILURE):
        for path in files_in(root / kind, *PICTURE_SUFFIXES):
            match = _NAME.fullmatch(path.stem)
            positive = kind == SUCCESS
            if match is None:
                groups[-1, str(path)] = [_Picture(path=path, positive=positive, source=display_path(path))]
                continue
            picture = _Picture(
                path=path,
                positive=positive,
                source=unquote(match["source"]),
                stem=match["stem"],
                step=int(match["step"]),
                camera=unquote(match["camera"] or BASE_CAMERA),
            )
            groups.setdefault((int(match["episode"]), match["source"]), []).append(picture)
    return [sorted(groups[key], key=lambda picture: (picture.step, picture.camera)) for key in sorted(groups)]


def _being_written(root: Path) -> dict[str, Path]:
    """Stem -> mark of the episodes that are being written, or were when their writer was killed."""
    return {mark.name[1 : -len(WRITING)]: mark for mark in root.glob(f".*{WRITING}")}


def _settled(root: Path) -> tuple[list[list[_Picture]], set[str]]:
    """The pictures by episode and the stems of unfinished ones; looked at again if a writer came between."""
    unfinished: set[str] = set()
    groups: list[list[_Picture]] = []
    for _ in range(MAX_LOOKS):
        if not root.is_dir():
            break
        before = root.stat().st_mtime_ns  # marks that come and go change it
        unfinished = set(_being_written(root))
        groups = _pictures(root)
        unfinished |= set(_being_written(root))
        if root.stat().st_mtime_ns == before:
            break
    return groups, unfinished


def _read_group(pictures: list[_Picture], complete: bool) -> Iterator[Episode | Fault]:
    """The episode of these pictures; those that cannot be read are named, and their steps left out."""
    images: dict[int, dict[str, NDArray[Any]]] = {}
    positive: dict[int, bool] = {}
    bad: set[int] = set()
    room = memory_budget() // 2  # the pictures, and the frames that are made of them
    for picture in pictures:
        views = images.setdefault(picture.step, {})
        try:
            if picture.camera in views:
                raise DataError("is there twice: another picture has the same episode, step and camera")
            image = read_picture(picture.path)
            room -= image.nbytes
            if room < 0:
                raise DataError("belongs to an episode that does not fit into memory")
            views[picture.camera] = image
        except (DataError, OSError) as error:
            bad.add(picture.step)
            yield to_fault(picture.path, error)
        positive[picture.step] = positive.get(picture.step, False) or picture.positive
    kept = {step: images[step] for step in sorted(images.keys() - bad)}
    if kept:
        labels = np.array([positive[step] for step in kept], np.float32)
        first = pictures[0]
        yield read_or_fault(first.path, partial(_episode, kept, labels, first.source, complete))


def _episode(
    images: Mapping[int, Mapping[str, NDArray[Any]]], labels: FloatArray, source: str, complete: bool
) -> Episode:
    """The episode of `images` (step -> camera -> image)."""
    cameras = sorted({camera for views in images.values() for camera in views})
    for step, views in images.items():
        missing = [camera for camera in cameras if camera not in views]
        if missing:
            raise DataError(f"missing camera key: step {step} has no picture of {missing[0]!r}")
    return Episode(
        frames={name: stack_images([views[name] for views in images.values()], name) for name in cameras},
        labels=labels,
        success=is_positive(labels),
        source=source,
        complete=complete,
    )


def read_picture(path: Path) -> UInt8Array:
    """A PNG or JPEG, uint8 [H, W] or [H, W, 3]."""
    if path.stat().st_size > _MAX_FILE:
        raise DataError(f"is larger than {_MAX_FILE >> 20} MiB")
    return decode_picture(path.read_bytes())


def decode_picture(content: bytes) -> UInt8Array:
    """A PNG or JPEG, uint8 [H, W] or [H, W, 3]; other decoders, which may start programs, are not asked."""
    try:
        with Image.open(BytesIO(content), formats=_DECODERS) as image:
            width, height = image.size
            scans = content.count(_JPEG_SCAN) if image.format != "PNG" else 1
            if width * height > MAX_PIXELS or width * height * scans > _MAX_SCANNED_PIXELS:
                raise DataError(f"has {width}x{height} pixels in {scans} scans, more than are read")
            if image.mode in ("I", "F") or image.mode.startswith("I;"):
                raise DataError(f"has the pixel format {image.mode}; expected 8 bits for each channel")
            gray = image.mode in ("1", "L", "LA")
            return np.asarray(image.convert("L" if gray else "RGB"))
    except DataError:
        raise
    except Exception as error:  # decoders of damaged pictures fail in many ways
        raise DataError(f"is not a readable picture: {one_line(error) or type(error).__name__}") from error


class FolderWriter(LabelledWriter):
    """Writes each frame as a picture; returns the common beginning of an episode's paths."""

    def __init__(self, success_dir: Path, failure_dir: Path) -> None:
        super().__init__(success_dir, failure_dir)
        for directory in (self.root, *self.directories.values()):
            clear_stale(directory)

    def _write(self, episode: Episode, positive: bool) -> str:
        source = _file_name_part(episode.source)
        written: list[Path] = []
        with locked_directory(self.root) as locked:  # no other writer takes the same number
            if locked:
                self._clear_unfinished()
            number = max(next_number(directory, _NUMBER) for directory in self.directories.values())
            stem = f"{source}_{number:06d}"
            mark = self.root / f".{stem}{WRITING}"
            write_atomic(mark, lambda file: file.write(b""))
            try:
                for name, shows_success, image in _named_frames(episode, stem):
                    path = self.directories[shows_success] / name
                    write_atomic(path, partial(_write_png, image), exclusive=True)
                    written.append(path)
            except BaseException:
                for path in written:  # all frames of an episode or none
                    path.unlink()
                mark.unlink()
                raise
            with storage_errors(mark):
                mark.unlink()
                fsync_directory(self.root)
        return str(self.root / stem)

    def _clear_unfinished(self) -> None:
        """Remove what a killed writer left of its last episode; nobody else writes at this moment."""
        marks = _being_written(self.root)
        if not marks:
            return
        for directory in self.directories.values():
            for path in files_in(directory, *PICTURE_SUFFIXES):
                if (match := _NAME.fullmatch(path.stem)) and match["stem"] in marks:
                    path.unlink()
            fsync_directory(directory)
        for stem, mark in marks.items():
            log.info("%s: a writer was killed in the middle of it; its frames are removed", stem)
            mark.unlink()


def _file_name_part(source: str) -> str:
    """The end of `source`, as far as it fits, with everything but plain characters encoded."""
    while len(encoded := quote(source, safe="", errors="replace")) > _MAX_SOURCE:
        source = source[1:]
    return "%2E" + encoded[1:] if encoded.startswith(".") else encoded  # a leading dot would hide the file


def _named_frames(episode: Episode, stem: str) -> Iterator[tuple[str, bool, UInt8Array]]:
    """(file name, whether it shows success, image) of every frame."""
    for camera, images in episode.frames.items():
        plain = len(episode.frames) == 1 and camera == BASE_CAMERA
        suffix = "" if plain else f"_{quote(camera, safe='')}"
        for step, image in enumerate(images):
            yield f"{stem}_frame{step:03d}{suffix}.png", bool(episode.labels[step] >= 0.5), image


def _write_png(image: UInt8Array, file: BinaryIO) -> None:
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, format="PNG")


class Folder(Format):
    """A directory with pictures in `success/` and `failure/`."""

    name: ClassVar[str] = "folder"
    looks_for: ClassVar[str] = "success/*.png and failure/*.png"

    def detect(self, path: Path) -> bool:
        """Whether there is a picture where they are kept."""
        return bool(labelled_files(path, KINDS, *PICTURE_SUFFIXES))

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """In the order of episode numbers; truncated ones come last."""
        for root in (existing(path), path / UNFINISHED):
            complete = root.absolute().name != UNFINISHED
            groups, unfinished = _settled(root)
            for pictures in groups:
                if pictures[0].stem in unfinished:
                    reason = "its episode is being written at this moment, or its writer was killed"
                    yield to_fault(pictures[0].path, DataError(reason))
                else:
                    yield from _read_group(pictures, complete)

    def writer(self, path: Path) -> FolderWriter:
        """Append to `success/` and `failure/` below `path`."""
        return FolderWriter(Path(path) / SUCCESS, Path(path) / FAILURE)
