"""`minari` (read only): data sets of Minari, `<data set>/data/main_data.hdf5`.

Each group `episode_N` holds `actions`, `rewards`, `terminations` and `truncations` [T], and `observations`
[T + 1], of which the first belongs to the reset: frames and states are those after it, and its state is the
initial state. Images (uint8, 32 pixels or more a side, raw or as JPEG) become frames, everything else is
strung together as the state. Success is what the infos tell (`success` or `is_success`); an episode whose
infos do not tell it counts as incomplete, as it proves no failure.

The file is read as `maniskill-h5` is: as data alone, in a process of its own. Minari itself is not imported.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from guerdon.core.errors import DataError
from guerdon.core.types import Episode, Fault, FloatArray, UInt8Array, display_path, is_positive
from guerdon.data.files.bounds import memory_budget, one_line, read_json
from guerdon.data.formats import h5_process, values
from guerdon.data.formats.base import Format, read_or_fault
from guerdon.data.formats.h5_values import (
    MAX_NUMBERS,
    array_of,
    checked,
    data_sets,
    is_group,
    is_hdf5,
    member,
)
from guerdon.data.formats.maniskill_h5 import NO_CAMERA
from guerdon.data.store.shard import MAX_SIZE

log = logging.getLogger("guerdon")

FILE = "main_data.hdf5"
SUCCESS_KEYS = ("success", "is_success")
GOAL_KEYS = ("observation", "achieved_goal", "desired_goal")
"""Of a goal-conditioned observation, in the order of the state vectors of `envs.wrappers.FlatGoals`."""
MIN_SIDE = 32
"""Of an image in pixels; Minari takes smaller arrays, such as those of MiniGrid, for numbers."""
_JPEG = b"\xff\xd8\xff"
_NAME = re.compile(r"episode_([0-9]{1,9})")
_MAX_JSON = 1 << 20


class Minari(Format):
    """A data set's folder or its file; or, where there is no such path, the id of a local data set."""

    name: ClassVar[str] = "minari"
    looks_for: ClassVar[str] = f"data/{FILE} of a Minari data set"

    def detect(self, path: Path) -> bool:
        """Whether Minari's file is there, or its folder with other storage."""
        return _find(path) is not None or _metadata(path) is not None

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """The episodes in the order of their numbers."""
        if importlib.util.find_spec("h5py") is None:
            raise DataError("minari needs h5py: pip install 'guerdon[minari]'")
        place = path if path.exists() else local_dataset(str(path))
        file = _find(place)
        if file is None:
            raise DataError(_no_file(place))
        unknown = 0
        for item in h5_process.read_guarded(file, "minari_h5"):
            unknown += isinstance(item, Episode) and not item.complete
            yield item
        if unknown:
            log.warning(
                "%s: %d episode(s) tell no success in their infos, or were cut off: they count neither as "
                "successes nor as failures",
                display_path(place),
                unknown,
            )


def local_dataset(name: str) -> Path:
    """The folder of a local data set by its id, such as `D4RL/pen/human-v2`, where Minari keeps it."""
    root = os.environ.get("MINARI_DATASETS_PATH")
    folder = (Path.home() / ".minari" / "datasets" if root is None else Path(root)) / name
    if not folder.is_dir():
        raise DataError(f"{one_line(name)} does not exist, and is no data set in {display_path(folder)}")
    return folder


def _find(path: Path) -> Path | None:
    places = (path,) if path.is_file() else (path / FILE, path / "data" / FILE)
    return next((place for place in places if place.name == FILE and is_hdf5(place)), None)


def _metadata(path: Path) -> dict[str, Any] | None:
    """What `metadata.json` of a data set in another storage says; None if it is none of Minari's."""
    for place in (path / "metadata.json", path / "data" / "metadata.json"):
        try:
            found = read_json(place, _MAX_JSON)
        except (OSError, DataError):
            continue
        if isinstance(found, dict) and {"data_format", "total_episodes", "action_space"} <= set(found):
            return found
    return None


def _no_file(path: Path) -> str:
    about = _metadata(path)
    if about is None or about.get("data_format") == "hdf5":
        return f"{display_path(path)} has no data/{FILE}"
    return (
        f"{display_path(path)} is a Minari data set with the storage {one_line(about['data_format'])!r}, and "
        "only hdf5, Minari's default, is read"
    )


# In the process that reads HDF5


def read_file(
    path: Path, done: Collection[str], on_start: Callable[[str], None]
) -> Iterator[Episode | Fault]:
    """The episodes of a file that are not in `done`; `on_start` is called with the name of each before."""
    import h5py

    opened = read_or_fault(path, partial(h5py.File, path, "r"))
    if isinstance(opened, Fault):
        yield opened
        return
    with opened as file:
        found = read_or_fault(path, lambda: [_NAME.fullmatch(name) for name in file if isinstance(name, str)])
        if isinstance(found, Fault):
            yield found
            return
        names = sorted((int(match[1]), match[0]) for match in found if match)
        if not names:
            yield Fault(path=display_path(path), reason="has no group episode_N; it is no Minari data set")
        for _, name in names:
            if name not in done:
                on_start(name)
                where = path.with_name(f"{path.name}:{name}")
                yield read_or_fault(where, partial(_episode, file, name, display_path(where)))


def _episode(file: Any, name: str, source: str) -> Episode:
    group = member(file, name)
    rewards = array_of(group, "rewards")
    count = len(rewards) if rewards.ndim else 0
    if not 0 < count <= MAX_SIZE:
        raise DataError(f"has {count} rewards; an episode has 1 to {MAX_SIZE}")
    stored = {"terminated": "terminations", "truncated": "truncations"}
    columns = {field: array_of(group, key) for field, key in stored.items() if key in group}
    if "actions" in group:
        columns["actions"] = _vectors(member(group, "actions"), "actions", count)
    fields = values.step_fields({"env_rewards": rewards, **columns}, count)
    frames, states = _observed(group, count)
    success = _success(group, count)
    labels = np.zeros(count, np.float32) if success is None else success.astype(np.float32)
    ended = [bool(flags[-1]) for each in stored if (flags := fields[each]) is not None]
    seed = group.attrs.get("seed")
    return Episode(
        frames=frames,
        labels=labels,
        success=is_positive(labels),
        states=None if states is None else states[1:],
        initial_state=None if states is None else states[0],
        seed=int(seed) if isinstance(seed, int | np.integer) else None,
        source=source,
        complete=success is not None and (any(ended) or not ended or bool(success.any())),
        **fields,
    )


def _success(group: Any, count: int) -> NDArray[np.bool_] | None:
    """After each action, bool [T]; None if the infos do not tell."""
    infos: Any = member(group, "infos") if "infos" in group else {}
    for key in SUCCESS_KEYS:
        if is_group(infos) and key in infos:
            flags = array_of(infos, key)
            if flags.ndim and len(flags) == count + 1:  # with the info of the reset
                flags = flags[1:]
            return values.to_row(flags, count, f"infos {key!r}") >= 0.5
    return None


def _observed(group: Any, count: int) -> tuple[dict[str, UInt8Array], FloatArray | None]:
    """Frames after each action, and states [T + 1, S] with that of the reset."""
    import h5py

    frames: dict[str, UInt8Array] = {}
    states: dict[str, FloatArray] = {}
    whole = "observations"
    for name, data in _parts(member(group, whole), whole):
        camera = values.BASE_CAMERA if name == whole else name.replace("/", "_")
        if h5py.check_string_dtype(data.dtype) is not None:
            continue  # texts, such as a mission
        if _holds_jpeg(data):
            frames[camera] = values.stack_images(_decoded(data, count), camera)
        elif _holds_images(data):
            images = checked(data, name, memory_budget())
            frames[camera] = values.stack_images(_counted(images, count)[1:], camera)
        else:
            states[name] = _vectors(data, name, count + 1)
    if set(states) == set(GOAL_KEYS):
        states = {key: states[key] for key in GOAL_KEYS}
    if not frames:
        frames = {NO_CAMERA: np.zeros((count, 1, 1, 3), np.uint8)}
    return frames, np.concatenate(list(states.values()), axis=1) if states else None


def _parts(found: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The data sets of a space by their paths."""
    return data_sets(found) if is_group(found) else iter([(name, found)])


def _vectors(found: Any, name: str, count: int) -> FloatArray:
    """Numbers of a space, strung together, float32 [count, S]."""
    rows = [_counted(checked(data, each), count - 1) for each, data in _parts(found, name)]
    if not rows:
        raise DataError(f"{name!r} is empty")
    return np.concatenate([np.asarray(row, np.float32).reshape(count, -1) for row in rows], axis=1)


def _counted(array: NDArray[Any], count: int) -> NDArray[Any]:
    if not array.ndim or len(array) != count + 1:
        have = len(array) if array.ndim else 1
        raise DataError(f"has {have} entries where {count + 1} are expected")
    return array


def _holds_images(data: Any) -> bool:
    """Whether it is uint8 [T + 1, H, W, C] or [T + 1, C, H, W], or [T + 1, H, W] of gray images."""
    shape: tuple[int, ...] = tuple(data.shape[1:])
    if data.dtype != np.uint8 or len(shape) not in (2, 3):
        return False
    if len(shape) == 3:
        if shape[2] not in (1, 3) and shape[0] not in (1, 3):
            return False
        shape = shape[:2] if shape[2] in (1, 3) else shape[1:]
    return min(shape) >= MIN_SIDE


def _holds_jpeg(data: Any) -> bool:
    """Whether the entries are JPEG files: of any length, or of one that all happen to have."""
    import h5py

    if data.external or data.is_virtual or not data.shape or not data.shape[0]:
        return False
    if h5py.check_vlen_dtype(data.dtype) == np.uint8 and len(data.shape) == 1:
        return True
    is_rows = data.dtype == np.uint8 and len(data.shape) == 2 and 3 <= data.shape[1] <= MAX_NUMBERS
    return is_rows and bytes(data[0, :3]) == _JPEG


def _decoded(data: Any, count: int) -> UInt8Array:
    """The images after each action, uint8 [T, H, W, C], of T + 1 JPEG files."""
    if len(data) != count + 1:
        raise DataError(f"has {len(data)} images for {count} actions; expected one more than actions")
    images: UInt8Array | None = None
    for step in range(count):
        content = np.asarray(data[step + 1], np.uint8).tobytes()
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as picture:
            width, height = picture.size
            if images is None:
                size = count * height * width * len(picture.getbands())
                if size > memory_budget():
                    raise DataError(f"has {size} bytes of frames; at most {memory_budget()} are read")
                h5_process.limit_memory(2 * size)
                shape = (height, width, len(picture.getbands()))
                images = np.empty((count, *shape), np.uint8)
            if (height, width, len(picture.getbands())) != images.shape[1:]:
                raise DataError(f"mixed image sizes: frame {step} is {width} x {height}")
            images[step] = np.asarray(picture, np.uint8).reshape(images.shape[1:])
    assert images is not None
    return images
