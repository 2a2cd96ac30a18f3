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
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

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
from guerdon.data.files.bounds import memory_budget, read_json
from guerdon.data.formats import h5_process, values
from guerdon.data.formats.base import Format, existing, files_in, read_or_fault
from guerdon.data.formats.h5_values import (
    MAX_NUMBERS,
    after_reset,
    array_of,
    checked,
    data_sets,
    is_group,
    is_hdf5,
    member,
)
from guerdon.data.store.shard import MAX_SIZE

NO_CAMERA = "no_camera"
_NAME = re.compile(r"traj_([0-9]{1,9})")
_MAX_JSON = 64 << 20


class ManiSkillH5(Format):
    """A trajectory file, or a directory with some."""

    name: ClassVar[str] = "maniskill-h5"
    looks_for: ClassVar[str] = "*.h5 files of ManiSkill trajectories"

    def detect(self, path: Path) -> bool:
        """Whether there is a HDF5 file."""
        return any(is_hdf5(file) for file in _files(path))

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """The trajectories of each file in the order of their numbers."""
        if importlib.util.find_spec("h5py") is None:
            raise DataError("maniskill-h5 needs h5py: pip install 'guerdon[maniskill]'")
        for file in _files(existing(path)):
            yield from h5_process.read_guarded(file)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else files_in(path, ".h5", ".hdf5")


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
    group = member(file, name)
    actions = array_of(group, "actions")
    count = len(actions)
    if not 0 < count <= MAX_SIZE:
        raise DataError(f"has {count} actions; an episode has 1 to {MAX_SIZE}")
    stored = {"env_rewards": "rewards", "terminated": "terminated", "truncated": "truncated"}
    columns = {field: array_of(group, key) for field, key in stored.items() if key in group}
    if "success" in group:
        success = values.to_row(array_of(group, "success"), count, "success flags").astype(np.bool_)
    else:
        success = np.zeros(count, np.bool_)
        success[-1] = bool(about.get("success", False))
    frames, states = _observed(group, count)
    obs: Any = member(group, "obs") if "obs" in group else {}
    if is_group(obs) and "extra" in obs and "is_grasped" in member(obs, "extra"):
        columns["is_grasped"] = after_reset(array_of(member(obs, "extra"), "is_grasped"), count)
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
    obs = member(group, "obs")
    if not is_group(obs):
        states = values.to_vectors(checked(obs, "obs"), count + 1, "states")
        return {NO_CAMERA: blank}, states
    frames: dict[str, UInt8Array] = {}
    if "sensor_data" in obs:
        sensors = member(obs, "sensor_data")
        for camera in sensors:
            sensor = member(sensors, camera)
            if "rgb" in sensor:
                data = member(sensor, "rgb")
                is_bytes = getattr(data, "dtype", None) == np.uint8  # what is not has to be small
                images = checked(data, "rgb", memory_budget() if is_bytes else MAX_NUMBERS)
                frames[camera] = values.stack_images(after_reset(images, count), camera)
    found = [each for key in ("agent", "extra") if key in obs for each in data_sets(member(obs, key))]
    parts = [checked(data, name) for name, data in found]
    rows = [np.asarray(part, np.float32).reshape(len(part), -1) for part in parts]
    for row in rows:
        if len(row) != count + 1:
            raise DataError(f"has {len(row)} states for {count} actions; expected one more than actions")
    return frames or {NO_CAMERA: blank}, np.concatenate(rows, axis=1) if rows else None
