"""`rlinf-episode` (read only): RLinf's pickles, `rank_R_env_E_episode_N_step_S_{success,fail}.pkl`.

A file is a dict with the lists `observations`, `actions`, `rewards`, `terminated`, `truncated` and `infos`.
Where a list has one entry more than there are actions, its first entry belongs to the reset: frames are
`observations[1:]`, and the state of `observations[0]` is the initial state.

Labels come from `success` or `is_obj_placed` in `infos`. Where those say nothing, an episode that is declared
a failure has none, and in one that is declared a success the frames with a reward over 0.5 are labelled, or
the last frame if there is no such reward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from guerdon.core.errors import DataError
from guerdon.core.images import is_tensor
from guerdon.core.types import BoolArray, Episode, Fault, FloatArray, display_path, is_positive
from guerdon.data.files.bounds import Allowance
from guerdon.data.files.safe_pickle import load
from guerdon.data.formats.base import Format
from guerdon.data.formats.common import (
    existing,
    files_in,
    read_files,
    require,
    to_flags,
    to_floats,
    to_labels,
    to_scalar,
    to_vectors,
)
from guerdon.data.formats.observations import frames_from, states_from

_NAME = re.compile(r"rank_(\d+)_env_(\d+)_episode_(\d+)(?:_step_(\d+))?_(success|fail)\.pkl")
_LABEL_KEYS = ("success", "is_obj_placed")


def read_episode(path: Path) -> Episode:
    """One file."""
    record = load(path)
    room = Allowance.of(path)
    actions = _list(record, "actions", room)
    count = len(actions)
    if count == 0:
        raise DataError("has no actions, and so no frames")
    observations, reset = _aligned(record, "observations", count, room)
    infos, _ = _aligned(record, "infos", count, room)
    rewards = to_floats(_aligned(record, "rewards", count, room)[0], count, "rewards")
    terminated = to_flags(_aligned(record, "terminated", count, room)[0], count, "terminated flags")
    truncated = to_flags(_aligned(record, "truncated", count, room)[0], count, "truncated flags")
    declared = _declared_success(record, path)
    labels = _labels(infos, rewards, declared)
    ended = [flags.any() for flags in (terminated, truncated) if flags is not None]
    initial = states_from([reset], room) if isinstance(reset, Mapping) else None
    return Episode(
        frames=frames_from(observations, room),
        labels=labels,
        success=is_positive(labels, declared),
        actions=to_vectors(actions, count, "actions", room),
        states=states_from(observations, room),
        initial_state=None if initial is None else initial[0],
        env_rewards=rewards,
        terminated=terminated,
        truncated=truncated,
        is_grasped=_grasped(infos, count),
        source=display_path(path),
        complete=any(ended) if ended else True,
    )


def _list(record: Any, key: str, room: Allowance) -> Sequence[Any]:
    value = require(record, key)
    if not isinstance(value, list | tuple | np.ndarray) and not is_tensor(value):
        raise DataError(f"{key!r} is a {type(value).__name__}, not a list")
    if getattr(value, "ndim", 1) == 0:
        raise DataError(f"{key!r} is one number, not a list")
    room.take_steps(len(value) // 6)  # one of six lists
    return list(value)


def _aligned(record: Any, key: str, count: int, room: Allowance) -> tuple[Sequence[Any], Any]:
    """(one entry for each action, the entry of the reset or None)."""
    values = _list(record, key, room)
    if len(values) not in (count, count + 1):
        raise DataError(f"has {len(values)} {key} for {count} actions")
    return (values[1:], values[0]) if len(values) == count + 1 else (values, None)


def _declared_success(record: Mapping[str, Any], path: Path) -> bool:
    if record.get("success") is not None:
        return bool(to_scalar(record["success"], "success"))
    return path.stem.endswith("_success")


def _labels(infos: Sequence[Any], rewards: FloatArray | None, declared: bool) -> FloatArray:
    count = len(infos)
    for key in _LABEL_KEYS:
        if any(isinstance(info, Mapping) and key in info for info in infos):
            return to_labels([bool(to_scalar(require(info, key), key)) for info in infos], count)
    labels = np.zeros(count, np.float32)
    if declared and rewards is not None and bool((rewards > 0.5).any()):
        labels[rewards > 0.5] = 1.0
    elif declared:
        labels[-1] = 1.0
    return labels


def _grasped(infos: Sequence[Any], count: int) -> BoolArray | None:
    if not all(isinstance(info, Mapping) and "is_grasped" in info for info in infos):
        return None
    return to_flags([info["is_grasped"] for info in infos], count, "grasp flags")


class RlinfEpisode(Format):
    """A directory of RLinf's episode pickles, or one of them."""

    name: ClassVar[str] = "rlinf-episode"
    writable: ClassVar[bool] = False
    looks_for: ClassVar[str] = "rank_*_env_*_episode_*_{success,fail}.pkl"

    def detect(self, path: Path) -> bool:
        """Whether there is a file with such a name."""
        return bool(_files(path))

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """In the order of rank, environment and episode."""
        return read_files(_files(existing(path)), read_episode)


def _files(path: Path) -> list[Path]:
    candidates = [path] if path.is_file() else files_in(path, ".pkl")
    matches = [(match, file) for file in candidates if (match := _NAME.fullmatch(file.name))]
    return [
        file for _, file in sorted(matches, key=lambda pair: [int(pair[0][group]) for group in (1, 2, 3)])
    ]
