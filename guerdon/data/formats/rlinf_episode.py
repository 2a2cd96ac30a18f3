"""`rlinf-episode` (read only): RLinf's pickles, `rank_R_env_E_episode_N_step_S_{success,fail}.pkl`.

A file is a dict with the lists `observations`, `actions`, `rewards`, `terminated`, `truncated` and `infos`.
Where a list has one entry more than there are actions, its first entry belongs to the reset: frames are
`observations[1:]`, and the state of `observations[0]` is the initial state.

Labels come from `success` or `is_obj_placed` in `infos`, or from `episode.success_once` there, which stays
true after the first success: RLinf's own preprocessing reads it so. Where those say nothing, an episode that
is declared a failure has none, and in one that is declared a success the frames with a reward over 0.5 are
labelled, or the last frame if there is no such reward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from guerdon.core.errors import DataError
from guerdon.core.images import is_tensor
from guerdon.core.types import Episode, FloatArray, display_path, is_positive
from guerdon.data.files.bounds import Allowance
from guerdon.data.files.safe_pickle import load
from guerdon.data.formats import values
from guerdon.data.formats.base import EpisodeFiles, files_in

_NAME = re.compile(r"rank_(\d+)_env_(\d+)_episode_(\d+)(?:_step_(\d+))?_(success|fail)\.pkl")
_LABEL_KEYS = ("success", "is_obj_placed")


def _list(record: Any, key: str, room: Allowance) -> Sequence[Any]:
    value = values.require(record, key)
    if not isinstance(value, list | tuple | np.ndarray) and not is_tensor(value):
        raise DataError(f"{key!r} is a {type(value).__name__}, not a list")
    if getattr(value, "ndim", 1) == 0:
        raise DataError(f"{key!r} is one number, not a list")
    room.take_steps(len(value) // 6)  # one of six lists
    return list(value)


def _aligned(record: Any, key: str, count: int, room: Allowance) -> tuple[Sequence[Any], Any]:
    """(one entry for each action, the entry of the reset or None)."""
    entries = _list(record, key, room)
    if len(entries) not in (count, count + 1):
        raise DataError(f"has {len(entries)} {key} for {count} actions")
    return (entries[1:], entries[0]) if len(entries) == count + 1 else (entries, None)


def _labels(infos: Sequence[Any], rewards: FloatArray | None, declared: bool) -> FloatArray:
    count = len(infos)
    for key in _LABEL_KEYS:
        if any(isinstance(info, Mapping) and key in info for info in infos):
            return values.to_labels(
                [bool(values.to_scalar(values.require(info, key), key)) for info in infos], count
            )
    latched = [_success_once(info) for info in infos]
    if any(each is not None for each in latched):
        return values.to_labels([bool(each) for each in latched], count)
    labels = np.zeros(count, np.float32)
    if declared and rewards is not None and bool((rewards > 0.5).any()):
        labels[rewards > 0.5] = 1.0
    elif declared:
        labels[-1] = 1.0
    return labels


def _success_once(info: Any) -> Any:
    """`episode.success_once` of an info; None: it says nothing."""
    episode = info.get("episode") if isinstance(info, Mapping) else None
    value = episode.get("success_once") if isinstance(episode, Mapping) else None
    return None if value is None else values.to_scalar(value, "episode.success_once")


class RlinfEpisode(EpisodeFiles):
    """A directory of RLinf's episode pickles, or one of them."""

    name: ClassVar[str] = "rlinf-episode"
    looks_for: ClassVar[str] = "rank_*_env_*_episode_*_{success,fail}.pkl"

    def detect(self, path: Path) -> bool:
        """Whether there is a file with such a name."""
        return bool(self.files(path))

    def files(self, path: Path) -> list[Path]:
        """In the order of rank, environment and episode."""
        candidates = [path] if path.is_file() else files_in(path, ".pkl")
        matches = [(match, file) for file in candidates if (match := _NAME.fullmatch(file.name))]
        return [file for _, file in sorted(matches, key=lambda pair: [int(pair[0][n]) for n in (1, 2, 3)])]

    def read_file(self, path: Path) -> Episode:
        """One episode."""
        record = load(path)
        room = Allowance.of(path)
        actions = _list(record, "actions", room)
        count = len(actions)
        if count == 0:
            raise DataError("has no actions, and so no frames")
        observations, first = _aligned(record, "observations", count, room)
        infos, _ = _aligned(record, "infos", count, room)
        columns = {
            key: _aligned(record, key, count, room)[0] for key in ("rewards", "terminated", "truncated")
        }
        columns |= {"actions": actions, "env_rewards": columns["rewards"]}
        if all(isinstance(info, Mapping) and "is_grasped" in info for info in infos):
            columns["is_grasped"] = [info["is_grasped"] for info in infos]
        fields = values.step_fields(columns, count, room)
        declared = path.stem.endswith("_success")
        if record.get("success") is not None:
            declared = bool(values.to_scalar(record["success"], "success"))
        labels = _labels(infos, fields["env_rewards"], declared)
        ended = [flags.any() for name in ("terminated", "truncated") if (flags := fields[name]) is not None]
        before = (
            values.to_vectors([first.get("states")], 1, "states", room)
            if isinstance(first, Mapping)
            else None
        )
        return Episode(
            labels=labels,
            success=is_positive(labels, declared),
            initial_state=None if before is None else before[0],
            source=display_path(path),
            complete=any(ended) if ended else True,
            **values.observed(observations, room),
            **fields,
        )
