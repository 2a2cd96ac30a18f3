"""`pkl-episode`: one pickle for each episode, in `success/` and `failure/` under one common counter.

A file is a dict with `frames`, a list of `{obs {main_images, states}, action, reward, done, grasp, success}`,
and `success` and `label`. To those keys the writer adds what else an `Episode` knows, so nothing is lost:
`camera_names`, `seed`, `source`, `split`, `complete`, `initial_state`, and in each frame `terminated`,
`truncated`, and `success_label` where a label is neither 0 nor 1.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from guerdon.core.atomic import NumberedFiles, make_directory
from guerdon.core.errors import DataError
from guerdon.core.types import Episode, Fault, is_positive
from guerdon.data.files.bounds import Allowance
from guerdon.data.files.safe_pickle import load
from guerdon.data.formats.base import EpisodeWriter, Format
from guerdon.data.formats.common import (
    BASE_CAMERA,
    UNFINISHED,
    camera_name,
    existing,
    extras_from,
    extras_of,
    files_in,
    read_files,
    require,
    to_flags,
    to_floats,
    to_labels,
    to_scalar,
    to_vector,
    to_vectors,
)
from guerdon.data.formats.observations import frames_from, observation_at, states_from

SUCCESS, FAILURE = "success", "failure"
_NAME = re.compile(r"episode_\d+\.pkl")


def read_episode(path: Path) -> Episode:
    """One file."""
    record = load(path)
    frames = require(record, "frames")
    if not isinstance(frames, list | tuple) or not frames:
        raise DataError("has no frames")
    room = Allowance.of(path)
    room.take_steps(len(frames))
    observations = [require(frame, "obs", f"frame {step}") for step, frame in enumerate(frames)]
    count = len(frames)
    labels = to_labels([_label(frame, step) for step, frame in enumerate(frames)], count)
    initial_state = record.get("initial_state")
    extras = extras_from(record, path)
    if path.absolute().parent.parent.name == UNFINISHED:
        extras["complete"] = False
    return Episode(
        frames=frames_from(observations, room, _main_camera(record)),
        labels=labels,
        success=is_positive(labels, _declared_success(record, path)),
        actions=to_vectors(_column(frames, "action"), count, "actions", room),
        states=states_from(observations, room),
        initial_state=None if initial_state is None else to_vector(initial_state, "initial_state"),
        env_rewards=to_floats(_column(frames, "reward"), count, "rewards"),
        terminated=to_flags(_column(frames, "terminated"), count, "terminated flags"),
        truncated=to_flags(_column(frames, "truncated"), count, "truncated flags"),
        is_grasped=to_flags(_column(frames, "grasp"), count, "grasp flags"),
        **extras,
    )


def _column(frames: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [frame.get(key) for frame in frames]


def _label(frame: Mapping[str, Any], step: int) -> Any:
    if "success_label" in frame:
        return frame["success_label"]
    return require(frame, "success", f"label missing: frame {step}")


def _declared_success(record: Mapping[str, Any], path: Path) -> bool:
    for key in ("success", "label"):
        if record.get(key) is not None:
            return bool(to_scalar(record[key], key))
    return path.absolute().parent.name == SUCCESS


def _main_camera(record: Mapping[str, Any]) -> str:
    names = record.get("camera_names")
    return camera_name(names[0]) if isinstance(names, list) and names else BASE_CAMERA


def to_record(episode: Episode) -> dict[str, Any]:
    """The dict that a file holds."""
    frames = [_frame_record(episode, step) for step in range(episode.num_frames)]
    return {
        "frames": frames,
        "success": episode.success,
        "label": int(episode.success),
        "camera_names": list(episode.frames),
        "initial_state": episode.initial_state,
        **extras_of(episode),
    }


def _frame_record(episode: Episode, step: int) -> dict[str, Any]:
    def at(values: Any, kind: type) -> Any:
        return None if values is None else kind(values[step])

    label = float(episode.labels[step])
    terminated, truncated = at(episode.terminated, bool), at(episode.truncated, bool)
    done = bool(terminated or truncated)
    if (
        terminated is None and truncated is None
    ):  # not known: an episode that is complete ends with its last frame
        done = episode.complete and step == episode.num_frames - 1
    record = {
        "obs": observation_at(episode, step),
        "action": None if episode.actions is None else episode.actions[step],
        "reward": at(episode.env_rewards, float),
        "done": done,
        "grasp": at(episode.is_grasped, bool),
        "success": label >= 0.5,
        "terminated": terminated,
        "truncated": truncated,
    }
    return record if label in (0.0, 1.0) else {**record, "success_label": label}


class PklEpisodeWriter(EpisodeWriter):
    """Writes to `success/` and `failure/`; episodes that were cut off go to `unfinished/` beside them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._directories = {True: make_directory(path / SUCCESS), False: make_directory(path / FAILURE)}
        self._files = NumberedFiles(tuple(self._directories.values()), prefix="episode_", suffix=".pkl")
        self._apart: PklEpisodeWriter | None = None

    def add(self, episode: Episode) -> str:
        """Write one episode; return its path."""
        if not episode.complete and self._path.absolute().name != UNFINISHED:
            self._apart = self._apart or PklEpisodeWriter(self._path / UNFINISHED)
            return self._apart.add(episode)
        record = to_record(episode)
        directory = self._directories[is_positive(episode.labels, episode.success)]
        return str(self._files.write(directory, lambda file: pickle.dump(record, file, protocol=5)))


class PklEpisode(Format):
    """A directory with `success/` and `failure/`, a directory of episode files, or one of them."""

    name: ClassVar[str] = "pkl-episode"
    looks_for: ClassVar[str] = "success/episode_*.pkl and failure/episode_*.pkl"

    def detect(self, path: Path) -> bool:
        """Whether there is a file with the name of an episode."""
        return any(_NAME.fullmatch(file.name) for file in _files(path))

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """In the order of the counter, whatever the directory; those that were cut off come last."""
        return read_files(_files(existing(path)), read_episode)

    def count(self, path: Path) -> tuple[int, int]:
        """By the directories alone; a collector asks before every run, and reading all files takes long."""
        return len(files_in(path / SUCCESS, ".pkl")), len(files_in(path / FAILURE, ".pkl"))

    def writer(self, path: Path) -> PklEpisodeWriter:
        """Append to `success/` and `failure/` below `path`."""
        return PklEpisodeWriter(Path(path))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    loose = [file for file in files_in(path, ".pkl") if _NAME.fullmatch(file.name)]
    found: list[Path] = []
    for root in (path, path / UNFINISHED):
        files = [file for kind in (SUCCESS, FAILURE) for file in files_in(root / kind, ".pkl")]
        found += sorted(files, key=lambda file: file.name)
    return loose + found
