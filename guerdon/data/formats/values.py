"""Values from files -> checked arrays: numbers, images, and the observations in RLinf's pickles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.images import ValueRange, to_uint8_hwc
from guerdon.core.types import SPLITS, Episode, FloatArray, UInt8Array, display_path
from guerdon.data.files.bounds import Allowance, as_array, memory_budget, one_line

BASE_CAMERA = "base_camera"
_MORE_VIEWS = {"wrist_images": "wrist_camera", "extra_view_images": "extra_view"}
_STEP_COLUMNS: Mapping[str, tuple[str, Any]] = {
    "env_rewards": ("rewards", np.float32),
    "terminated": ("terminated flags", np.bool_),
    "truncated": ("truncated flags", np.bool_),
    "is_grasped": ("grasp flags", np.bool_),
}
"""Field of an `Episode` -> (what messages call it, its type)."""
_CHUNK = 8 << 20  # bytes of images that are converted at a time
_MAX_CAMERA_NAME = 200


# Numbers


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
    if not isinstance(values, list | tuple):
        numbers = as_array(values)
        if numbers.dtype.kind not in "biuf" or numbers.ndim == 0 or numbers.size != len(numbers):
            raise DataError(f"has {name} of shape {list(numbers.shape)}, not one for each frame")
        values = numbers.reshape(-1)
    if len(values) != count:
        raise DataError(f"has {len(values)} {name} for {count} frames")
    return values if isinstance(values, np.ndarray) else np.array([to_scalar(each, name) for each in values])


def to_column(values: Any, count: int, name: str, dtype: Any) -> NDArray[Any] | None:
    """One number or flag for each frame -> [T] of that type; None if there are none."""
    return None if _all_missing(values, name) else to_row(values, count, name).astype(dtype)


def to_labels(values: Any, count: int) -> FloatArray:
    """Success labels -> float32 [T] in [0, 1]."""
    labels = to_row(values, count, "labels").astype(np.float32)
    bad = np.flatnonzero(~((labels >= 0.0) & (labels <= 1.0)))  # also NaN
    if bad.size:
        raise DataError(f"has the label {labels[bad[0]]:g} in frame {bad[0]}; labels lie in [0, 1]")
    return labels


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


def to_vector(value: Any, name: str) -> FloatArray | None:
    """A vector, also with leading axes of size 1 -> float32 [size]; None stays None."""
    if value is None:
        return None
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


# Fields of an episode


def step_fields(columns: Mapping[str, Any], count: int, room: Allowance | None = None) -> dict[str, Any]:
    """Keyword arguments for `Episode`: actions, rewards and flags, from what a file holds for each."""
    fields: dict[str, Any] = {
        name: to_column(columns.get(name), count, what, dtype)
        for name, (what, dtype) in _STEP_COLUMNS.items()
    }
    fields["actions"] = to_vectors(columns.get("actions"), count, "actions", room)
    return fields


def extras_of(episode: Episode) -> dict[str, Any]:
    """Plain values that a file can carry in addition to what its format prescribes."""
    return {name: getattr(episode, name) for name in ("seed", "source", "split", "complete")}


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


def main_camera(record: Mapping[str, Any]) -> str:
    """The name of the first camera, if a file tells it."""
    names = record.get("camera_names")
    return camera_name(names[0]) if isinstance(names, list) and names else BASE_CAMERA


# Observations: dicts with `main_images`, `states` and further views


def observed(observations: Sequence[Any], room: Allowance, camera: str = BASE_CAMERA) -> dict[str, Any]:
    """Keyword arguments for `Episode`: `frames` and `states`.

    `main_images` is the camera `camera`. `wrist_images` and `extra_view_images` are a dict of images by
    camera, one image, or an array of several views, which are then numbered. `room` is what the file may
    still give; the caller has counted the steps.
    """
    steps = [_views(observation, step, camera, room) for step, observation in enumerate(observations)]
    if not steps:
        raise DataError("has no frames")
    for step, views in enumerate(steps):
        missing = sorted(steps[0].keys() - views.keys()) or sorted(views.keys() - steps[0].keys())
        if missing:
            raise DataError(f"missing camera key: {missing[0]!r} is in some frames only (see frame {step})")
    frames = {name: stack_images([views[name] for views in steps], name, room) for name in steps[0]}
    states = to_vectors([item.get("states") for item in observations], len(steps), "states", room)
    return {"frames": frames, "states": states}


def _views(observation: Any, step: int, main_camera: str, room: Allowance) -> dict[str, Any]:
    views = {main_camera: require(observation, "main_images", f"missing camera key: frame {step}")}
    for key, camera in _MORE_VIEWS.items():
        value = observation.get(key)
        if value is None:
            continue
        if isinstance(value, Mapping):
            room.take_steps(len(value))
            views.update((camera_name(name), image) for name, image in value.items())
            continue
        array = as_array(value)
        if array.ndim == 4 and len(array) > 1:
            room.take_steps(len(array))
            views.update((f"{camera}_{index}", image) for index, image in enumerate(array))
        else:
            views[camera] = array
    return views


def observation_at(episode: Episode, step: int) -> dict[str, Any]:
    """The observation dict of one frame; views beyond the first camera by name under `extra_view_images`."""
    main, *others = episode.frames
    observation: dict[str, Any] = {
        "main_images": episode.frames[main][step],
        "states": None if episode.states is None else episode.states[step],
    }
    if others:
        observation["extra_view_images"] = {camera: episode.frames[camera][step] for camera in others}
    return observation


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
