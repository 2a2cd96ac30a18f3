"""`pkl-episode`: one pickle for each episode, in `success/` and `failure/` under one common counter.

A file is a dict with `frames`, a list of `{obs {main_images, states}, action, reward, done, grasp, success}`,
and `success` and `label`. To those keys the writer adds what else an `Episode` knows, so nothing is lost:
`camera_names`, `seed`, `source`, `split`, `complete`, `initial_state`, and in each frame `terminated`,
`truncated`, and `success_label` where a label is neither 0 nor 1.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from guerdon.core.atomic import NumberedFiles
from guerdon.core.errors import DataError
from guerdon.core.types import Episode, is_positive
from guerdon.data.files.bounds import Allowance
from guerdon.data.files.safe_pickle import load
from guerdon.data.formats import base, values

SUCCESS = "success"
_NAME = re.compile(r"episode_\d+\.pkl")
_COLUMNS = {
    "actions": "action",
    "env_rewards": "reward",
    "terminated": "terminated",
    "truncated": "truncated",
    "is_grasped": "grasp",
}
"""Field of an `Episode` -> key of a frame."""


def _label(frame: Mapping[str, Any], step: int) -> Any:
    if "success_label" in frame:
        return frame["success_label"]
    return values.require(frame, "success", f"label missing: frame {step}")


def _declared_success(record: Mapping[str, Any], path: Path) -> bool:
    for key in ("success", "label"):
        if record.get(key) is not None:
            return bool(values.to_scalar(record[key], key))
    return path.absolute().parent.name == SUCCESS


def to_record(episode: Episode) -> dict[str, Any]:
    """The dict that a file holds."""
    return {
        "frames": [_frame_record(episode, step) for step in range(episode.num_frames)],
        "success": episode.success,
        "label": int(episode.success),
        "camera_names": list(episode.frames),
        "initial_state": episode.initial_state,
        **values.extras_of(episode),
    }


def _frame_record(episode: Episode, step: int) -> dict[str, Any]:
    def at(array: Any, kind: type) -> Any:
        return None if array is None else kind(array[step])

    label = float(episode.labels[step])
    terminated, truncated = at(episode.terminated, bool), at(episode.truncated, bool)
    done = bool(terminated or truncated)
    if terminated is None and truncated is None:  # unknown: a complete episode ends with its last frame
        done = episode.complete and step == episode.num_frames - 1
    record = {
        "obs": values.observation_at(episode, step),
        "action": None if episode.actions is None else episode.actions[step],
        "reward": at(episode.env_rewards, float),
        "done": done,
        "grasp": at(episode.is_grasped, bool),
        "success": label >= 0.5,
        "terminated": terminated,
        "truncated": truncated,
    }
    return record if label in (0.0, 1.0) else {**record, "success_label": label}


class PklEpisodeWriter(base.LabelledWriter):
    """Numbers the episodes of both directories together."""

    def __init__(self, success_dir: Path, failure_dir: Path) -> None:
        super().__init__(success_dir, failure_dir)
        self._files = NumberedFiles(tuple(self.directories.values()), prefix="episode_", suffix=".pkl")

    def _write(self, episode: Episode, positive: bool) -> str:
        record = to_record(episode)
        directory = self.directories[positive]
        return str(self._files.write(directory, lambda file: pickle.dump(record, file, protocol=5)))


class PklEpisode(base.LabelledFiles):
    """A directory with `success/` and `failure/`, a directory of episode files, or one of them."""

    name: ClassVar[str] = "pkl-episode"
    kinds, suffix = (SUCCESS, "failure"), ".pkl"
    writer_class = PklEpisodeWriter
    looks_for: ClassVar[str] = "success/episode_*.pkl and failure/episode_*.pkl"

    def detect(self, path: Path) -> bool:
        """Whether there is a file with the name of an episode."""
        return any(_NAME.fullmatch(file.name) for file in self.files(path))

    def files(self, path: Path) -> list[Path]:
        """In the order of the counter, whatever the directory; truncated episodes come last."""
        if path.is_file():
            return [path]
        loose = [file for file in base.files_in(path, self.suffix) if _NAME.fullmatch(file.name)]
        placed = base.labelled_files(path, self.kinds, self.suffix)
        return loose + sorted(placed, key=lambda file: (file.parent.parent != path, file.name))

    def read_file(self, path: Path) -> Episode:
        """One episode."""
        record = load(path)
        frames = values.require(record, "frames")
        if not isinstance(frames, list | tuple) or not frames:
            raise DataError("has no frames")
        room = Allowance.of(path)
        room.take_steps(len(frames))
        observations = [values.require(frame, "obs", f"frame {step}") for step, frame in enumerate(frames)]
        count = len(frames)
        labels = values.to_labels([_label(frame, step) for step, frame in enumerate(frames)], count)
        columns = {name: [frame.get(key) for frame in frames] for name, key in _COLUMNS.items()}
        extras = values.extras_from(record, path)
        if base.is_unfinished(path):
            extras["complete"] = False
        return Episode(
            labels=labels,
            success=is_positive(labels, _declared_success(record, path)),
            initial_state=values.to_vector(record.get("initial_state"), "initial_state"),
            **values.observed(observations, room, values.main_camera(record)),
            **values.step_fields(columns, count, room),
            **extras,
        )
