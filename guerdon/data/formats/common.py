"""What the formats share: values from files -> checked arrays, and one bad file -> one `Fault`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError, StorageError
from guerdon.core.images import ValueRange, to_uint8_hwc
from guerdon.core.types import SPLITS, BoolArray, Episode, Fault, FloatArray, UInt8Array, display_path
from guerdon.data.files.bounds import Allowance, as_array
from guerdon.data.files.rebuild import one_line
from guerdon.data.files.safe_pickle import memory_budget
from guerdon.data.formats.base import EpisodeWriter

BASE_CAMERA = "base_camera"
UNFINISHED = "unfinished"
"""Directory beside the others for episodes that were cut off, in formats that cannot mark them."""


T = TypeVar("T")
_CHUNK = 8 << 20  # bytes of images that are converted at a time
_MAX_CAMERA_NAME = 200


# Faults


def to_fault(path: Path, error: Exception) -> Fault:
    """What is wrong with a file; the path is not repeated in the reason."""
    name = display_path(path)
    if isinstance(error, DataError):
        reason = str(error).removeprefix(f"{name}: ")
    elif isinstance(error, OSError):
        reason = f"cannot be read: {error.strerror or error}"
    else:
        reason = f"has unexpected content: {type(error).__name__}: {error}"
    return Fault(path=name, reason=one_line(reason, 300))


def attempt(path: Path, make: Callable[[], T]) -> T | Fault:
    """What `make` reads from a file, or the fault that keeps it from being read."""
    try:
        return make()
    except Exception as error:  # hostile bytes can fail in any way, and the other files are read all the same
        return to_fault(path, error)


def read_files(paths: Iterable[Path], read: Callable[[Path], Episode]) -> Iterator[Episode | Fault]:
    """One episode or fault for each file."""
    for path in paths:
        yield attempt(path, partial(read, path))


def files_in(directory: Path, *suffixes: str) -> list[Path]:
    """The files with one of these suffixes, sorted; hidden files (also unfinished writes) are left out."""
    if not directory.is_dir():
        return []
    return sorted(
        item
        for item in directory.iterdir()
        if item.suffix.lower() in suffixes and not item.name.startswith(".") and item.is_file()
    )


def existing(path: Path) -> Path:
    """The path itself; raises if nothing is there."""
    if not path.exists():
        raise DataError(f"{display_path(path)} does not exist")
    return path


# Values


def require(record: Any, key: str, what: str = "it") -> Any:
    """`record[key]`; raises an error that names the key if it is missing."""
    if not isinstance(record, Mapping):
        raise DataError(f"{what} is a {type(record).__name__}, not a dict")
    if key not in record:
        there = sorted(one_line(name, 40) for name in islice(record, 20))
        raise DataError(f"{what} has no {key!r}; it has {one_line(there)}")
    return record[key]


def to_scalar(value: Any, name: str) -> Any:
    """The one number or flag in a tensor, array or plain value."""
    array = as_array(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        raise DataError(f"{name} is not a single number")
    return array.item()


def to_row(values: Any, count: int, name: str) -> NDArray[Any]:
    """One number for each frame -> [T]."""
    if isinstance(values, list | tuple):
        if len(values) != count:
            raise DataError(f"has {len(values)} {name} for {count} frames")
        numbers: NDArray[Any] = np.array([to_scalar(value, name) for value in values])
    else:
        numbers = as_array(values)
        if numbers.dtype.kind not in "biuf" or numbers.ndim == 0 or numbers.size != len(numbers):
            raise DataError(f"has {name} of shape {list(numbers.shape)}, not one for each frame")
        numbers = numbers.reshape(-1)
    if len(numbers) != count:
        raise DataError(f"has {len(numbers)} {name} for {count} frames")
    return numbers


def to_labels(values: Any, count: int) -> FloatArray:
    """Success labels -> float32 [T] in [0, 1]."""
    labels = to_row(values, count, "labels").astype(np.float32)
    bad = np.flatnonzero(~((labels >= 0.0) & (labels <= 1.0)))  # also NaN
    if bad.size:
        raise DataError(f"has the label {labels[bad[0]]:g} in frame {bad[0]}; labels lie in [0, 1]")
    return labels


def to_flags(values: Any, count: int, name: str) -> BoolArray | None:
    """Flags -> bool [T]; None if there are none."""
    if _all_missing(values, name):
        return None
    return to_row(values, count, name).astype(np.bool_)


def to_floats(values: Any, count: int, name: str) -> FloatArray | None:
    """One number for each frame -> float32 [T]; None if there are none."""
    if _all_missing(values, name):
        return None
    return to_row(values, count, name).astype(np.float32)


def to_vectors(values: Any, count: int, name: str, room: Allowance | None = None) -> FloatArray | None:
    """One vector for each frame -> float32 [T, size]; None if there are none."""
    if _all_missing(values, name):
        return None
    if not hasattr(values, "__len__") or len(values) != count:
        raise DataError(
            f"has {len(values) if hasattr(values, '__len__') else 'no'} {name} for {count} frames"
        )
    rows = _as_arrays(values)
    for step, row in enumerate(rows):
        if row.size != rows[0].size:
            raise DataError(f"has {name} of size {row.size} in frame {step} and {rows[0].size} in frame 0")
        if row.dtype.kind not in "biuf":
            raise DataError(f"has {name} that are not numbers")
    if room is not None:
        room.take_bytes(4 * count * rows[0].size)
    vectors = np.empty((count, rows[0].size), np.float32)
    for step, row in enumerate(rows):
        vectors[step] = row.reshape(-1)
    return vectors


def to_vector(value: Any, name: str) -> FloatArray:
    """A vector, also with leading axes of size 1 -> float32 [size]."""
    array = as_array(value)
    if array.dtype.kind not in "biuf":
        raise DataError(f"has {name} that are not numbers")
    return array.astype(np.float32).reshape(-1)


def _as_arrays(values: Iterable[Any]) -> list[NDArray[Any]]:
    """Each of them as an array; one that is there several times is converted once."""
    known: dict[int, NDArray[Any]] = {}
    kept: list[Any] = []  # keeps the keys of `known` in use
    arrays: list[NDArray[Any]] = []
    for value in values:
        if id(value) not in known:
            kept.append(value)
            known[id(value)] = as_array(value)
        arrays.append(known[id(value)])
    return arrays


def _all_missing(values: Any, name: str) -> bool:
    if values is None:
        return True
    if not isinstance(values, list | tuple):
        return False
    missing = [step for step, value in enumerate(values) if value is None]
    if missing and len(missing) < len(values):
        raise DataError(f"has no {name} in frame {missing[0]}, but in others")
    return bool(missing)


# Images


def camera_name(value: Any) -> str:
    """The name of a camera in a file."""
    if not isinstance(value, str | int) or len(text := str(value)) > _MAX_CAMERA_NAME:
        raise DataError(f"has a camera that is called {one_line(value)}")
    return text


def stack_images(images: Any, camera: str, room: Allowance | None = None) -> UInt8Array:
    """Images of one camera over time -> uint8 [T, H, W, C].

    Args:
        images: a list of images, or one array or tensor [T, ...]; layouts and types of `to_uint8_hwc`. All
            are converted with one range of values, so that a dark frame is not taken for one of another.
        camera: its name, for messages.
        room: what the file may still give; by default what fits into memory.
    """
    frames = _same_images(images, camera)
    count, size, name = len(frames), frames[0].size, f"camera {camera!r}"
    if room is not None:
        room.take_bytes(count * size)
    elif count * size > memory_budget():  # one stored image can be referred to many times
        raise DataError(f"{name} has {count} frames, more than fit into memory")
    at_a_time = max(1, _CHUNK // max(1, frames[0].nbytes))
    chunks = [slice(start, start + at_a_time) for start in range(0, count, at_a_time)]
    unit = frames[0].dtype.kind == "f" and _highest(frames, chunks, name) <= 1.0
    stacked: UInt8Array | None = None
    for chunk in chunks:
        value_range: ValueRange = "unit" if unit else "byte"
        converted = to_uint8_hwc(np.stack(frames[chunk]), name=name, value_range=value_range)
        if stacked is None:
            stacked = np.empty((count, *converted.shape[1:]), np.uint8)
        stacked[chunk] = converted
    assert stacked is not None  # there is a frame, and so a chunk
    return stacked


def _same_images(images: Any, camera: str) -> Sequence[NDArray[Any]]:
    """Images [H, W, C] or [C, H, W] of one shape and type; there is at least one."""
    if not isinstance(images, list | tuple):
        array = as_array(images)
        if array.dtype != object and array.ndim != 4:
            raise DataError(
                f"camera {camera!r} has images of shape {list(array.shape)}; expected [T, H, W, C]"
            )
        images = list(array) if array.ndim else [array]
    frames = [_one_image(array, step, camera) for step, array in enumerate(_as_arrays(images))]
    if not frames:
        raise DataError("has no frames")
    first = frames[0]
    for step, image in enumerate(frames):
        if image.shape != first.shape:
            sizes = f"{list(image.shape)}, frame 0 has {list(first.shape)}"
            raise DataError(f"mixed image sizes: frame {step} of camera {camera!r} has shape {sizes}")
        if image.dtype != first.dtype:
            raise DataError(f"frame {step} of camera {camera!r} is {image.dtype}, frame 0 is {first.dtype}")
    return frames


def _highest(frames: Sequence[NDArray[Any]], chunks: Sequence[slice], name: str) -> float:
    """The highest value of all; raises if one is not finite."""
    highest = -np.inf
    for chunk in chunks:
        images = np.stack(frames[chunk])
        bad = np.flatnonzero(~np.isfinite(images.sum(axis=(1, 2, 3), dtype=np.float64)))
        if bad.size:
            raise DataError(f"frame {chunk.start + bad[0]} of {name} holds NaN or infinite values")
        highest = max(highest, float(images.max(initial=-np.inf)))
    return highest


def _one_image(array: NDArray[Any], step: int, camera: str) -> NDArray[Any]:
    while array.ndim > 3 and array.shape[0] == 1:  # a batch of one
        array = array[0]
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3:
        raise DataError(f"frame {step} of camera {camera!r} has shape {list(array.shape)}; it is no image")
    return array


# What a format can keep beside the frames


def extras_of(episode: Episode) -> dict[str, Any]:
    """Plain values that a file can carry in addition to what its format prescribes."""
    return {
        "seed": episode.seed,
        "source": episode.source,
        "split": episode.split,
        "complete": episode.complete,
    }


def extras_from(record: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Keyword arguments for `Episode` from what `extras_of` wrote, or their defaults for a foreign file."""
    seed, split = record.get("seed"), record.get("split", "")
    if split not in SPLITS:
        raise DataError(f"has the split {one_line(split)!r}; known are {[name for name in SPLITS if name]}")
    source = record.get("source")
    return {
        "seed": None if seed is None else int(to_scalar(seed, "the seed")),
        "source": source if isinstance(source, str) else display_path(path),
        "split": split,
        "complete": bool(to_scalar(record.get("complete", True), "complete")),
    }


class SpooledWriter(EpisodeWriter):
    """For formats that are one file, which `close` writes; leaving a `with` block closes too.

    All episodes are in memory then. That is bounded: beyond a quarter of what is available `add` refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._free()

    def _free(self) -> None:
        """Nothing is kept in memory (any more)."""
        self._room = memory_budget() // 2

    def _reserve(self, episode: Episode) -> None:
        """Take room for an episode that is kept in memory."""
        size = sum(images.nbytes for images in episode.frames.values())
        if size > self._room:
            raise StorageError(
                f"cannot write {display_path(self.path)}: this format is one file, and its episodes do not "
                "fit into memory; use the format native"
            )
        self._room -= size
