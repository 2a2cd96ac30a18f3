"""`maniskill-h5` (read only): ManiSkill's recorded trajectories, `*.h5` with a `.json` of the same name.

Each group `traj_N` holds `actions` and flags [T] and `obs` [T + 1]; the first observation belongs to the
reset: frames and states are those after it, and its state is the initial state. With images in the
observations (`obs/sensor_data/<camera>/rgb`) the state is what stands beside them (`agent`, then `extra`),
strung together in their order. Episodes without images get one black pixel per frame under the camera
`no_camera`: their states and actions are good for demonstrations, and no reward model takes them for frames.

A file is read as data alone: links out of it, and data sets that are kept elsewhere, are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from guerdon.errors import DataError
from guerdon.store.formats.base import Format
from guerdon.store.formats.common import (
    attempt,
    existing,
    files_in,
    stack_images,
    to_flags,
    to_floats,
    to_labels,
    to_vectors,
)
from guerdon.store.rebuild import one_line
from guerdon.store.safe_pickle import memory_budget
from guerdon.types import (
    BoolArray,
    Episode,
    Fault,
    FloatArray,
    UInt8Array,
    display_path,
    is_positive,
    with_control_mode,
)

NO_CAMERA = "no_camera"
_MAGIC = b"\x89HDF\r\n\x1a\n"
_PREFIX = "traj_"


class ManiSkillH5(Format):
    """A trajectory file, or a directory with some."""

    name: ClassVar[str] = "maniskill-h5"
    looks_for: ClassVar[str] = "*.h5 files of ManiSkill trajectories"
    writable: ClassVar[bool] = False

    def detect(self, path: Path) -> bool:
        """Whether there is a HDF5 file."""
        return any(_is_hdf5(file) for file in _files(path))

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """The trajectories of each file in the order of their numbers."""
        for file in _files(existing(path)):
            yield from _read_file(file)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else files_in(path, ".h5", ".hdf5")


def _is_hdf5(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return path.suffix.lower() in (".h5", ".hdf5") and file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _read_file(path: Path) -> Iterator[Episode | Fault]:
    try:
        import h5py
    except ImportError as error:
        raise DataError(f"maniskill-h5 needs h5py: pip install 'guerdon[maniskill]' ({error})") from error
    opened = attempt(path, partial(h5py.File, path, "r"))
    if isinstance(opened, Fault):
        yield opened
        return
    with opened as file:
        names = sorted(
            (name for name in file if name.startswith(_PREFIX) and name[len(_PREFIX) :].isdecimal()),
            key=lambda name: int(name[len(_PREFIX) :]),
        )
        described = attempt(path.with_suffix(".json"), partial(_described, path.with_suffix(".json")))
        if isinstance(described, Fault):
            yield described
            described = {}
        if not names:
            yield Fault(path=display_path(path), reason="has no group traj_N; it is no ManiSkill trajectory")
        for name in names:
            about = described.get(int(name[len(_PREFIX) :]), {})
            where = path.with_name(f"{path.name}:{name}")
            yield attempt(where, partial(_episode, file, name, about, display_path(where)))


def _described(path: Path) -> dict[int, Mapping[str, Any]]:
    """What the JSON file says of each episode, by number; nothing if there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"is no JSON: {error}") from error
    episodes = content.get("episodes") if isinstance(content, dict) else None
    if not isinstance(episodes, list):
        raise DataError("has no list of episodes")
    return {int(each["episode_id"]): each for each in episodes if isinstance(each, dict)}


def _episode(file: Any, name: str, about: Mapping[str, Any], source: str) -> Episode:
    group = _member(file, name)
    actions = _array(group, "actions")
    count = len(actions)
    if count == 0:
        raise DataError("has no actions, and so no frames")
    terminated, truncated = (_flags(group, each, count) for each in ("terminated", "truncated"))
    success = _flags(group, "success", count)
    if success is None:
        success = np.zeros(count, np.bool_)
        success[-1] = bool(about.get("success", False))
    frames, states = _observed(group, count)
    grasped: BoolArray | None = None
    obs: Any = _member(group, "obs") if "obs" in group else {}
    if _is_group(obs) and "extra" in obs and "is_grasped" in _member(obs, "extra"):
        grasped = (
            _after_reset(_array(_member(obs, "extra"), "is_grasped"), count).astype(np.bool_).reshape(-1)
        )
    ended = [flags[-1] for flags in (terminated, truncated) if flags is not None]
    seed, mode = about.get("episode_seed"), about.get("control_mode")
    rewards = _array(group, "rewards") if "rewards" in group else None
    return Episode(
        frames=frames,
        labels=to_labels(success, count),
        success=is_positive(success, bool(about.get("success", False))),
        actions=to_vectors(actions, count, "actions"),
        states=None if states is None else states[1:],
        initial_state=None if states is None else states[0],
        env_rewards=to_floats(rewards, count, "rewards"),
        terminated=terminated,
        truncated=truncated,
        is_grasped=grasped,
        seed=seed if isinstance(seed, int) else None,
        source=with_control_mode(source, mode if isinstance(mode, str) else None),
        complete=not ended or any(ended) or bool(success.any()),
    )


def _observed(group: Any, count: int) -> tuple[dict[str, UInt8Array], FloatArray | None]:
    """Frames after each action, and states [T + 1, S] with that of the reset."""
    blank: UInt8Array = np.zeros((count, 1, 1, 3), np.uint8)
    if "obs" not in group:
        return {NO_CAMERA: blank}, None
    obs = _member(group, "obs")
    if not _is_group(obs):
        states = to_vectors(_checked(obs, "obs"), count + 1, "states")
        return {NO_CAMERA: blank}, states
    frames: dict[str, UInt8Array] = {}
    if "sensor_data" in obs:
        sensors = _member(obs, "sensor_data")
        for camera in sensors:
            sensor = _member(sensors, camera)
            if "rgb" in sensor:
                frames[camera] = stack_images(_after_reset(_array(sensor, "rgb"), count), camera)
    parts = [part for key in ("agent", "extra") if key in obs for part in _leaves(_member(obs, key))]
    rows = [np.asarray(part, np.float32).reshape(len(part), -1) for part in parts]
    for row in rows:
        if len(row) != count + 1:
            raise DataError(f"has {len(row)} states for {count} actions; expected one more than actions")
    return frames or {NO_CAMERA: blank}, np.concatenate(rows, axis=1) if rows else None


def _leaves(group: Any) -> Iterator[NDArray[Any]]:
    """All data sets below a group, in its order."""
    for name in group:
        member = _member(group, name)
        if _is_group(member):
            yield from _leaves(member)
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


def _checked(data: Any, name: str) -> NDArray[Any]:
    """The numbers of a data set that is kept in this file and fits into memory."""
    if _is_group(data):
        raise DataError(f"{name!r} is a group, not a data set")
    if data.external or data.is_virtual:
        raise DataError(f"{name!r} is kept in another file, which is not read")
    if data.dtype.kind not in "biuf":
        raise DataError(f"{name!r} holds {data.dtype}, not numbers")
    if data.nbytes > memory_budget():
        raise DataError(f"{name!r} has {data.nbytes} bytes, more than fit into memory")
    array: NDArray[Any] = data[()]
    return array


def _flags(group: Any, name: str, count: int) -> BoolArray | None:
    return to_flags(_array(group, name), count, f"{name} flags") if name in group else None


def _after_reset(array: NDArray[Any], count: int) -> NDArray[Any]:
    """What followed each action, of an array with one entry more than actions."""
    if len(array) != count + 1:
        raise DataError(f"has {len(array)} observations for {count} actions; expected one more than actions")
    return array[1:]
