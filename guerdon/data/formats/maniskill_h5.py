"""`maniskill-h5` (read only): ManiSkill's recorded trajectories, `*.h5` with a `.json` of the same name.

Each group `traj_N` holds `actions` and flags [T] and `obs` [T + 1]; the first observation belongs to the
reset: frames and states are those after it, and its state is the initial state. With images in the
observations (`obs/sensor_data/<camera>/rgb`) the state is what stands beside them (`agent`, then `extra`),
strung together in their order. Episodes without images get one black pixel per frame under the camera
`no_camera`: their states and actions are good for demonstrations, and no reward model takes them for frames.

A file is read as data alone: links out of it, and data sets that are kept elsewhere, are refused. It is read
in a process of its own (`h5_process`), because libhdf5 may crash or hang on a damaged file.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import (
    Episode,
    Fault,
    FloatArray,
    UInt8Array,
    display_path,
    is_positive,
    with_control_mode,
)
from guerdon.data.files.bounds import memory_budget, one_line, read_json
from guerdon.data.formats import h5_process, values
from guerdon.data.formats.base import Format, existing, files_in, head_of, read_or_fault
from guerdon.data.store.shard import MAX_SIZE

NO_CAMERA = "no_camera"
_MAGIC = b"\x89HDF\r\n\x1a\n"
_NAME = re.compile(r"traj_([0-9]{1,9})")
_MAX_DEPTH = 8
_MAX_LEAVES = 1000
_MAX_JSON = 64 << 20
_MAX_NUMBERS = 64 << 20
"""Bytes of a data set that holds no frames."""


class ManiSkillH5(Format):
    """A trajectory file, or a directory with some."""

    name: ClassVar[str] = "maniskill-h5"
    looks_for: ClassVar[str] = "*.h5 files of ManiSkill trajectories"

    def detect(self, path: Path) -> bool:
        """Whether there is a HDF5 file."""
        return any(_is_hdf5(file) for file in _files(path))

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """The trajectories of each file in the order of their numbers."""
        if importlib.util.find_spec("h5py") is None:
            raise DataError("maniskill-h5 needs h5py: pip install 'guerdon[maniskill]'")
        for file in _files(existing(path)):
            yield from h5_process.read_guarded(file)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else files_in(path, ".h5", ".hdf5")


def _is_hdf5(path: Path) -> bool:
    return path.suffix.lower() in (".h5", ".hdf5") and head_of(path, len(_MAGIC)) == _MAGIC


def read_file(
    path: Path, done: Collection[str], on_start: Callable[[str], None]
) -> Iterator[Episode | Fault]:
    """The trajectories of a file that are not in `done`, read in this process.

    `on_start` is called with the name of each trajectory before it is read.
    """
    import h5py

    opened = read_or_fault(path, partial(h5py.File, path, "r"))
    if isinstance(opened, Fault):
        yield opened
        return
    with opened as file:
        numbers = read_or_fault(path, partial(_numbers, file))
        if isinstance(numbers, Fault):
            yield numbers
            return
        described = read_or_fault(path.with_suffix(".json"), partial(_described, path.with_suffix(".json")))
        if isinstance(described, Fault):
            if not done:
                yield described
            described = {}
        if not numbers:
            yield Fault(path=display_path(path), reason="has no group traj_N; it is no ManiSkill trajectory")
        for number, name in numbers:
            if name in done:
                continue
            on_start(name)
            where = path.with_name(f"{path.name}:{name}")
            about = described.get(number, {})
            yield read_or_fault(where, partial(_episode, file, name, about, display_path(where)))


def _numbers(file: Any) -> list[tuple[int, str]]:
    """The trajectories of a file by number."""
    found = (_NAME.fullmatch(name) for name in file if isinstance(name, str))
    return sorted((int(match[1]), match[0]) for match in found if match)


def _described(path: Path) -> dict[int, Mapping[str, Any]]:
    """What the JSON file says of each episode, by number; nothing if there is no such file."""
    try:
        content = read_json(path, _MAX_JSON)
    except FileNotFoundError:
        return {}
    episodes = content.get("episodes") if isinstance(content, dict) else None
    if not isinstance(episodes, list):
        raise DataError("has no list of episodes")
    return {int(each["episode_id"]): each for each in episodes if isinstance(each, dict)}


def _episode(file: Any, name: str, about: Mapping[str, Any], source: str) -> Episode:
    group = _member(file, name)
    actions = _array(group, "actions")
    count = len(actions)
    if not 0 < count <= MAX_SIZE:
        raise DataError(f"has {count} actions; an episode has 1 to {MAX_SIZE}")
    stored = {"env_rewards": "rewards", "terminated": "terminated", "truncated": "truncated"}
    columns = {field: _array(group, key) for field, key in stored.items() if key in group}
    if "success" in group:
        success = values.to_row(_array(group, "success"), count, "success flags").astype(np.bool_)
    else:
        success = np.zeros(count, np.bool_)
        success[-1] = bool(about.get("success", False))
    frames, states = _observed(group, count)
    obs: Any = _member(group, "obs") if "obs" in group else {}
    if _is_group(obs) and "extra" in obs and "is_grasped" in _member(obs, "extra"):
        columns["is_grasped"] = _after_reset(_array(_member(obs, "extra"), "is_grasped"), count)
    fields = values.step_fields({"actions": actions, **columns}, count)
    ended = [flags[-1] for each in ("terminated", "truncated") if (flags := fields[each]) is not None]
    seed, mode = about.get("episode_seed"), about.get("control_mode")
    return Episode(
        frames=frames,
        labels=success.astype(np.float32),
        success=is_positive(success, bool(about.get("success", False))),
        states=None if states is None else states[1:],
        initial_state=None if states is None else states[0],
        seed=seed if isinstance(seed, int) else None,
        source=with_control_mode(source, mode if isinstance(mode, str) else None),
        complete=not ended or any(ended) or bool(success.any()),
        **fields,
    )


def _observed(group: Any, count: int) -> tuple[dict[str, UInt8Array], FloatArray | None]:
    """Frames after each action, and states [T + 1, S] with that of the reset."""
    blank: UInt8Array = np.zeros((count, 1, 1, 3), np.uint8)
    if "obs" not in group:
        return {NO_CAMERA: blank}, None
    obs = _member(group, "obs")
    if not _is_group(obs):
        states = values.to_vectors(_checked(obs, "obs"), count + 1, "states")
        return {NO_CAMERA: blank}, states
    frames: dict[str, UInt8Array] = {}
    if "sensor_data" in obs:
        sensors = _member(obs, "sensor_data")
        for camera in sensors:
            sensor = _member(sensors, camera)
            if "rgb" in sensor:
                data = _member(sensor, "rgb")
                is_bytes = getattr(data, "dtype", None) == np.uint8  # what is not has to be small
                images = _checked(data, "rgb", memory_budget() if is_bytes else _MAX_NUMBERS)
                frames[camera] = values.stack_images(_after_reset(images, count), camera)
    parts = [part for key in ("agent", "extra") if key in obs for part in _leaves(_member(obs, key))]
    rows = [np.asarray(part, np.float32).reshape(len(part), -1) for part in parts]
    for row in rows:
        if len(row) != count + 1:
            raise DataError(f"has {len(row)} states for {count} actions; expected one more than actions")
    return frames or {NO_CAMERA: blank}, np.concatenate(rows, axis=1) if rows else None


def _leaves(group: Any, depth: int = 1, seen: set[Any] | None = None) -> Iterator[NDArray[Any]]:
    """All data sets below a group, in its order; none is read twice, in however many ways it is linked."""
    import h5py

    seen = set() if seen is None else seen
    for name in group:
        member = _member(group, name)
        place = h5py.h5o.get_info(member.id).addr
        if place in seen or len(seen) >= _MAX_LEAVES or depth > _MAX_DEPTH:
            raise DataError(f"{one_line(name)!r} is linked twice, or there are too many groups")
        seen.add(place)
        if _is_group(member):
            yield from _leaves(member, depth + 1, seen)
        else:
            yield _checked(member, name)


def _is_group(member: Any) -> bool:
    return hasattr(member, "keys")


def _member(group: Any, name: str) -> Any:
    """A member of a group that is stored right there."""
    import h5py

    if name not in group:
        raise DataError(f"has no {name!r}; it has {one_line(sorted(group))}")
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise DataError(f"{name!r} is a link to somewhere else, which is not followed")
    return group[name]


def _array(group: Any, name: str) -> NDArray[Any]:
    return _checked(_member(group, name), name)


def _checked(data: Any, name: str, max_bytes: int = _MAX_NUMBERS) -> NDArray[Any]:
    """The numbers of a data set that is kept in this file, was written, and is not too large."""
    if _is_group(data):
        raise DataError(f"{name!r} is a group, not a data set")
    if data.external or data.is_virtual:
        raise DataError(f"{name!r} is kept in another file, which is not read")
    if data.dtype.kind not in "biuf":
        raise DataError(f"{name!r} holds {data.dtype}, not numbers")
    size = math.prod(data.shape) * data.dtype.itemsize
    if size > max_bytes:
        raise DataError(f"{name!r} has {size} bytes; at most {max_bytes} are read")
    if size and not _is_written(data, size):
        raise DataError(f"{name!r} has {size} bytes that were never written")
    if max_bytes > _MAX_NUMBERS:
        h5_process.limit_memory(2 * size)
    array: NDArray[Any] = data[()]
    return array


def _is_written(data: Any, size: int) -> bool:
    """Whether the file holds all of a data set, and not a promise of zeros."""
    if data.chunks is not None:
        wanted = math.prod(-(-side // chunk) for side, chunk in zip(data.shape, data.chunks, strict=True))
        return bool(data.id.get_num_chunks() >= wanted)
    return bool(data.id.get_storage_size() >= size)


def _after_reset(array: NDArray[Any], count: int) -> NDArray[Any]:
    """What followed each action, of an array with one entry more than actions."""
    if len(array) != count + 1:
        raise DataError(f"has {len(array)} observations for {count} actions; expected one more than actions")
    return array[1:]
