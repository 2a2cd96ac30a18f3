"""Episodes of a LeRobot data set, one after another."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import SPLITS, Episode, Fault, FloatArray, UInt8Array, display_path
from guerdon.data.files.bounds import memory_budget
from guerdon.data.formats.base import EpisodeFacts, read_or_fault
from guerdon.data.formats.lerobot import labels
from guerdon.data.formats.lerobot.frames import VideoReader, check_video, pictures
from guerdon.data.formats.lerobot.labels import LabelAt, LabelChoice
from guerdon.data.formats.lerobot.meta import OWN, EpisodePlace, Feature, Meta, read_meta
from guerdon.data.formats.lerobot.tables import DataFile, numbers_of
from guerdon.data.formats.values import stack_images
from guerdon.data.store.shard import MAX_SIZE, MAX_TEXT

log = logging.getLogger("guerdon")

STATES = ("observation.state", "observation.environment_state")
ACTION = "action"
ROW_FLAGS = ("is_grasped", "at_rest")
"""Columns `guerdon.NAME` of data sets that Guerdon wrote."""
INTENDED, TERMINATED = f"{OWN}.intended", f"{OWN}.terminated"
NO_CAMERA = "no_camera"
_SPARE = 1 << 30
_PACKED = 2000  # a video of a scene in which little moves is so many times smaller than its frames


class LeRobotData:
    """A data set that is open for reading; also for random access to its frames.

    Args:
        root: the folder with `meta/info.json`.
        label_at: which frame a label belongs to, see `labels`.
        label_from: the column that holds labels; `auto` finds it.
        outcomes: a file that tells which episodes succeeded.
    """

    def __init__(
        self,
        root: Path,
        *,
        label_at: LabelAt = "auto",
        label_from: str = "auto",
        outcomes: Path | None = None,
    ) -> None:
        self.root = root
        self.meta: Meta = read_meta(root)
        self.videos = VideoReader()
        self._settings: dict[str, Any] = {
            "label_at": label_at,
            "label_from": label_from,
            "outcomes": outcomes,
        }
        self._file: DataFile | None = None

    def close(self) -> None:
        """Close all files."""
        self.videos.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    # Labels

    @cached_property
    def label_columns(self) -> dict[str, list[NDArray[Any]]]:
        """The columns that may hold labels -> their values in each episode that can be read, [T] each."""
        recorded = (labels.SUCCESS, labels.REWARD, *labels.OUTCOME_COLUMNS, *labels.PROGRESS_COLUMNS)
        known = {*recorded, labels.PROB, *(labels.RECORDED + name for name in recorded)}
        there = labels.label_columns(self.meta)
        names = [name for name in there if name in known or name == self._settings["label_from"]]
        columns: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
        for place in self.meta.episodes if names else ():
            found = read_or_fault(place.data, partial(self.numbers, place, names))
            if not isinstance(found, Fault):  # reading names it
                for name, values in found.items():
                    columns[name].append(values.reshape(-1))
        return {name: values for name, values in columns.items() if values}

    @cached_property
    def choice(self) -> LabelChoice:
        """How labels are made; said in the log when it is asked for first."""
        chosen = labels.choose(self.meta, self.label_columns, **self._settings)
        level = logging.WARNING if chosen.meaning != "frames" and chosen.outcomes is None else logging.INFO
        log.log(level, "%s: %s", display_path(self.root), chosen.why)
        return chosen

    def findings(self) -> list[tuple[str, str, str]]:
        """(level, check, message) for an audit."""
        column = self.label_columns.get(self.choice.column or "")
        return labels.findings(self.choice, column)

    # Rows

    def numbers(self, place: EpisodePlace, names: list[str]) -> dict[str, NDArray[Any]]:
        """Columns of an episode, [T, width] each."""
        if place.length > MAX_SIZE:
            raise DataError(f"has {place.length} rows; an episode has at most {MAX_SIZE}")
        file = self._opened(place.data)
        table = file.numbers(file.span(place.index, place.length), names)
        return {name: numbers_of(table.column(name), self.meta.features[name].width, name) for name in names}

    def _opened(self, path: Path) -> DataFile:
        if self._file is None or self._file.path != path:
            if self._file is not None:
                self._file.close()
            self._file = None
            self._file = DataFile(path)
        return self._file

    @property
    def _env_reward(self) -> str:
        """The column with what the environment gave, also where a reward model has written others."""
        is_learned = labels.PROB in self.meta.features
        return labels.RECORDED + labels.REWARD if is_learned else labels.REWARD

    def _wanted(self) -> list[str]:
        """The columns that become fields of an episode."""
        names = [
            *STATES,
            ACTION,
            self._env_reward,
            labels.DONE,
            labels.TRUNCATED,
            TERMINATED,
            INTENDED,
            "timestamp",
        ]
        names += [f"{OWN}.{flag}" for flag in ROW_FLAGS] + [self.choice.column or ""]
        return [name for name in dict.fromkeys(names) if name in self.meta.features]

    # Episodes

    def items(self) -> Iterator[Episode | Fault]:
        """Every episode; faults of `meta/` come first."""
        yield from self.meta.faults
        _ = self.choice
        for place in self.meta.episodes:
            yield self._or_fault(place, partial(self.episode, place))

    def named_items(self, done: Collection[str] = ()) -> Iterator[Episode | Fault]:
        """The same with sources that no two episodes share, but those whose source is in `done`."""
        yield from self.meta.faults
        _ = self.choice
        for place in self.meta.episodes:
            if (name := self._name(place)) not in done:
                item = self._or_fault(place, partial(self.episode, place))
                yield item if isinstance(item, Fault) else replace(item, source=name)

    def _name(self, place: EpisodePlace) -> str:
        """Where an episode lies, and then its own source, which others may share."""
        own = place.own.get("source")
        kept = own[-MAX_TEXT // 2 :] if isinstance(own, str) else ""  # a longer one could not be stored
        return self.meta.source(place) + f" from {kept}" * bool(kept)

    def facts(self) -> Iterator[EpisodeFacts | Fault]:
        """What can be told of every episode without decoding frames; that its videos open is tried."""
        yield from self.meta.faults
        _ = self.choice
        for place in self.meta.episodes:
            yield self._or_fault(place, partial(self._facts, place))

    def _or_fault(self, place: EpisodePlace, make: Any) -> Any:
        """What `make` gives, or a fault that names the episode and the file."""
        inside = f"{display_path(self.root)}/"

        def attempt() -> Any:
            try:
                return make()
            except DataError as error:  # paths inside the data set are short
                raise DataError(str(error).replace(inside, "")) from error

        return read_or_fault(place.data, attempt, f"episode {place.index}")

    def _facts(self, place: EpisodePlace) -> EpisodeFacts:
        for video in dict.fromkeys(video.path for video in place.videos.values()):
            self._check_video(video)
        fields = self._fields(place)
        shapes = {name: each.image_shape for name, each in self.meta.cameras.items()}
        marks = fields["labels"]
        return EpisodeFacts(
            source=fields["source"],
            success=fields["success"],
            complete=fields["complete"],
            num_frames=len(marks),
            num_positive_frames=int(np.count_nonzero(marks >= 0.5)),
            camera_shapes=shapes or {NO_CAMERA: (1, 1, 3)},
        )

    def _check_video(self, path: Path) -> None:
        known: dict[Path, str | None] = self.__dict__.setdefault("_checked", {})
        if path not in known:
            try:
                check_video(path)
                known[path] = None
            except DataError as error:
                known[path] = str(error)
        if (reason := known[path]) is not None:
            raise DataError(reason)

    def episode(self, place: EpisodePlace) -> Episode:
        """One episode with its frames."""
        fields = self._fields(place)
        rows = np.arange(place.length - len(fields["labels"]), place.length)
        cameras = self.meta.cameras
        frames = {name: self._frames(place, feature, rows) for name, feature in cameras.items()}
        if not frames:
            frames = {NO_CAMERA: np.zeros((len(rows), 1, 1, 3), np.uint8)}
        return Episode(frames=frames, **fields)

    def _fields(self, place: EpisodePlace) -> dict[str, Any]:
        """All of an episode but its frames."""
        choice, own, count = self.choice, place.own, place.length
        columns = self.numbers(place, self._wanted())
        column = columns[choice.column].reshape(-1) if choice.column in columns else None
        marks, success, known = labels.frame_labels(choice, place.index, column, count)
        ended, cut = self._ends(columns, marks)
        vectors = [columns[name].astype(np.float32) for name in STATES if name in columns]
        states = np.concatenate(vectors, axis=1) if vectors else None
        rewards = columns.get(self._env_reward)
        if self.meta.own.get("reward") == "label":
            rewards = None
        fields: dict[str, Any] = {
            "labels": marks,
            "states": states,
            "initial_state": _vector(own.get("initial_state"), None if states is None else states.shape[1]),
            "actions": _shifted(columns.get(ACTION), own.get("initial_action")),
            "intended": columns.get(INTENDED),
            "env_rewards": None if rewards is None else rewards.astype(np.float32).reshape(-1),
            "terminated": ended,
            "truncated": cut,
            **{flag: _flags(columns.get(f"{OWN}.{flag}")) for flag in ROW_FLAGS},
        }
        if choice.at == "next":
            fields = _next_frames(fields, columns.get(ACTION))
        seed, split = own.get("seed"), own.get("split") or self.meta.split_of(place.index)
        is_asked = choice.outcomes is not None or self._settings["label_from"] != "auto"  # for other outcomes
        return {
            **fields,
            "success": success or (not is_asked and bool(own.get("success", False))),
            "complete": bool(own.get("complete", True)) and known,
            "seed": seed if type(seed) is int else None,
            "source": text if isinstance(text := own.get("source"), str) else self.meta.source(place),
            "split": split if split in SPLITS else "",
        }

    def _ends(self, columns: dict[str, NDArray[Any]], marks: FloatArray) -> tuple[Any, Any]:
        """(terminated, truncated), bool [T] each or None."""
        done, cut = _flags(columns.get(labels.DONE)), _flags(columns.get(labels.TRUNCATED))
        if self.meta.own:
            return _flags(columns.get(TERMINATED)), cut
        if done is not None and cut is None:  # an end without success is taken for a time limit
            cut = done & ~(marks >= 0.5)
        return None if done is None or cut is None else done & ~cut, cut

    def _frames(self, place: EpisodePlace, feature: Feature, rows: NDArray[np.int64]) -> UInt8Array:
        """The frames of one camera, uint8 [T, H, W, C]."""
        shape = feature.image_shape
        path = place.videos[feature.name].path if feature.dtype == "video" else place.data
        size = len(rows) * int(np.prod(shape))
        room = _SPARE + _PACKED * path.stat().st_size if path.exists() else _SPARE
        if size > min(room, memory_budget()):
            raise DataError(f"has {size} bytes of frames of {feature.name!r}, more than fit into memory")
        stack = np.empty((len(rows), *shape), np.uint8)
        if feature.dtype == "video":
            times = self.times(place, feature)[rows]
            found: Iterator[UInt8Array] = self.videos.decoded(path, times, shape)
        else:
            file = self._opened(path)
            start, _ = file.span(place.index, place.length)
            found = pictures(file.cells(start + rows, feature.name), shape)
        for step, frame in enumerate(found):
            stack[step] = frame
        return stack

    def times(self, place: EpisodePlace, feature: Feature) -> NDArray[np.float64]:
        """When the frames of an episode are in their video, in seconds [T]."""
        times = self.numbers(place, ["timestamp"])["timestamp"].reshape(-1).astype(np.float64)
        if not np.isfinite(times).all() or times.min() < 0:
            raise DataError("has timestamps that are no times")
        exact = np.rint(times * self.meta.fps) / self.meta.fps  # a row's number and not its float32 time
        times = np.where(np.abs(exact - times) < 1e-4, exact, times)
        return times + place.videos[feature.name].from_seconds

    def frames(self, index: int, camera: str, rows: Any) -> UInt8Array:
        """Some frames of an episode in any order, uint8 [n, H, W, C]: random access.

        Args:
            index: position in `meta.episodes`.
            camera: its name.
            rows: int [n], rows within the episode.
        """
        place, feature = self.meta.episodes[index], self.meta.cameras[camera]
        steps = np.asarray(rows, np.int64)
        if not len(steps):
            return np.empty((0, *feature.image_shape), np.uint8)
        if not (steps.min() >= 0 and steps.max() < place.length):
            raise DataError(f"episode {place.index} has {place.length} rows; {steps.max()} is none of them")
        if feature.dtype == "video":
            path, times = place.videos[feature.name].path, self.times(place, feature)[steps]
            return self.videos.frames(path, times, feature.image_shape)
        file = self._opened(place.data)
        start, _ = file.span(place.index, place.length)
        kept, places = np.unique(steps, return_inverse=True)
        images = list(pictures(file.cells(start + kept, feature.name), feature.image_shape))
        return stack_images(images, camera)[places]


def _flags(column: NDArray[Any] | None) -> NDArray[np.bool_] | None:
    return None if column is None else column.reshape(-1) >= 0.5


def _vector(value: Any, size: int | None) -> FloatArray | None:
    """A vector that Guerdon noted."""
    if not isinstance(value, list) or not value or (size is not None and len(value) != size):
        return None
    return np.asarray(value, np.float32)


def _shifted(actions: NDArray[Any] | None, initial: Any) -> FloatArray | None:
    """The action that led to each row's frame: that of the row before.

    What led to the first frame is not recorded by others; zeros stand for it.
    """
    if actions is None:
        return None
    shifted = np.zeros(actions.shape, np.float32)
    shifted[1:] = actions[:-1]
    first = _vector(initial, actions.shape[1])
    if first is not None:
        shifted[0] = first
    return shifted


def _next_frames(fields: dict[str, Any], actions: NDArray[Any] | None) -> dict[str, Any]:
    """The same for `label_at=next`: step t is the frame of row t + 1, and what was recorded in row t."""
    if len(fields["labels"]) < 2:
        raise DataError("has one row; with label_at=next its label has no frame")
    states = fields["states"]
    led_to = ("states",)
    moved = {
        name: None if value is None else value[1:] if name in led_to else value[:-1]
        for name, value in fields.items()
        if name not in ("initial_state", "actions")
    }
    return {
        **moved,
        "initial_state": None if states is None else states[0],
        "actions": None if actions is None else actions[:-1].astype(np.float32),
    }
