"""`realworld-pkl`: one `data.pkl` of a robot, a list of transitions one after the other.

A transition is `{"transitions": {"obs", "next_obs"}, "action", "rewards", "terminations", "truncations"}`;
values are tensors, mostly with a leading batch axis of size 1. The frame that is scored is the one that the
action led to: `next_obs`, and `obs` only where a file has no `next_obs`. A reward over 0.5 means that this
frame shows success. An episode ends with a termination or a truncation; what follows the last of them is an
episode that is not complete.

The writer loses nothing: what the layout has no place for stands in `episode_info` of an episode's last
transition. There is no frame before the first action in an `Episode`, so the first `obs` repeats the first
`next_obs`. `rewards` holds the success labels; the environment's rewards are in `episode_info`.

An episode is a file of its own first, in `data.pkl.parts/`; closing makes one file of all of them. Several
writers may do so at the same time. Readers see what a killed writer left in `data.pkl.parts/`. A part has a
token in `episode_info` of its last transition, by which it is known once it is in the file.
"""

from __future__ import annotations

import dataclasses
import pickle
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from guerdon.core.atomic import NumberedFiles, clear_stale, locked_directory, make_directory, write_atomic
from guerdon.core.errors import DataError, StorageError
from guerdon.core.types import BoolArray, Episode, Fault, FloatArray, display_path, is_positive
from guerdon.data.files.bounds import Allowance
from guerdon.data.files.safe_pickle import load
from guerdon.data.formats import values
from guerdon.data.formats.base import Format, SpooledWriter, existing, head_of, read_or_fault

FILE_NAME = "data.pkl"
_INFO, _PART = "episode_info", "part"
_MAX_LOOKS = 4
_PREFIX, _SUFFIX = "episode_", ".pkl"
_NAME, _OLD_NAME = re.compile(r"episode_[0-9]{6,}\.pkl"), re.compile(r"[0-9]{1,18}\.pkl")
_ARRAYS = ("labels", "env_rewards", "terminated", "truncated", "is_grasped")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedEpisode:
    """An episode, and what a robot's recorder tells beside it."""

    episode: Episode
    at_target: BoolArray
    """bool [T]; rewards over 0.5, before anybody asked for how long."""
    hold_steps: int | None = None
    """Frames in a row at the target that make a success; None if the file does not tell."""
    key: str = ""
    """What the operator ended it with: `c` success, `a` failure."""
    frame_age: Mapping[str, FloatArray] = dataclasses.field(default_factory=dict)
    """Camera -> float32 [T], how old its picture was when it was looked at, in seconds; empty if unknown."""
    intervened: BoolArray | None = None
    """bool [T]; where a person drove."""


def read_recorded(path: Path) -> Iterator[RecordedEpisode | Fault]:
    """The episodes of a `data.pkl` as they were recorded."""
    given, path = Path(path), data_file(Path(path))
    if not _find_parts(path):
        existing(given)
        existing(path)
    opened = read_or_fault(path, partial(_open, path))
    if isinstance(opened, Fault):
        yield opened
        return
    parts, room = opened
    for number, (steps, ended) in enumerate(parts):
        yield read_or_fault(path, partial(_read_recorded, steps, ended, path, room), f"episode {number}")


def _read_recorded(steps: Sequence[Any], ended: bool, path: Path, room: Allowance) -> RecordedEpisode:
    next_obs = [_next_obs(step, index) for index, step in enumerate(steps)]
    rewards, terminated, truncated = (
        [values.require(step, key, f"transition {index}") for index, step in enumerate(steps)]
        for key in ("rewards", "terminations", "truncations")
    )
    count, info = len(steps), steps[-1].get(_INFO) or {}
    numbers = values.to_column(rewards, count, "rewards", np.float32)
    if numbers is None:
        raise DataError("has no rewards, and so no labels")
    columns: dict[str, Any] = {
        "labels": numbers > 0.5,
        "actions": [step.get("action") for step in steps],
        "env_rewards": numbers,
        "terminated": terminated,
        "truncated": truncated,
        **{name: info[name] for name in _ARRAYS if name in info},
    }
    labels = values.to_labels(columns["labels"], count)
    extras = values.extras_from(info, path)
    extras["complete"] = extras["complete"] and ended
    before = info["initial_state"] if "initial_state" in info else _state_before(steps[0])
    episode = Episode(
        labels=labels,
        success=is_positive(labels, bool(info.get("success", False))),
        initial_state=values.to_vector(before, "states"),
        **values.observed(next_obs, room, values.main_camera(info)),
        **values.step_fields(columns, count, room),
        **extras,
    )
    hold = info.get("hold_steps")
    ages = {
        values.camera_name(camera): values.to_column(each, count, "ages of frames", np.float32)
        for camera, each in (info.get("frame_age") or {}).items()
    }
    return RecordedEpisode(
        episode=episode,
        at_target=numbers > 0.5,
        hold_steps=None if hold is None else int(values.to_scalar(hold, "hold_steps")),
        key=key if isinstance(key := info.get("key"), str) else "",
        frame_age={camera: each for camera, each in ages.items() if each is not None},
        intervened=values.to_column(info.get("intervened"), count, "interventions", np.bool_),
    )


def _open(path: Path) -> tuple[list[tuple[Sequence[Any], bool]], Allowance]:
    """(what `_split` gives, what the file and the parts beside it may give together)."""
    content = _load_transitions(path)
    parts = [part for _, part in _find_parts(path)]
    room = Allowance.of(*(file for file in (path, *parts) if file.exists()))
    room.take_steps(len(content))
    return list(_split(content)), room


def _split(transitions: Sequence[Any]) -> Iterator[tuple[Sequence[Any], bool]]:
    """(transitions of one episode, whether it ended)."""
    start = 0
    for index, transition in enumerate(transitions):
        if _ends(transition):
            yield transitions[start : index + 1], True
            start = index + 1
    if start < len(transitions):
        yield transitions[start:], False


def _next_obs(step: Any, index: int) -> Any:
    """The observation that the action led to."""
    pair = values.require(step, "transitions", f"transition {index}")
    if isinstance(pair, Mapping) and pair.get("next_obs") is not None:
        return pair["next_obs"]
    return values.require(pair, "obs", f"transition {index}")


def _state_before(step: Mapping[str, Any]) -> Any:
    pair = step["transitions"]
    has_both = pair.get("next_obs") is not None and isinstance(pair.get("obs"), Mapping)
    return pair["obs"].get("states") if has_both else None


def to_transitions(episode: Episode, recorded: RecordedEpisode | None = None) -> list[dict[str, Any]]:
    """The transitions that stand for one episode; `recorded` adds what a robot's recorder tells."""
    import torch

    observations = [_to_tensors(values.observation_at(episode, step)) for step in range(episode.num_frames)]
    before = {**observations[0], "states": _to_tensors(episode.initial_state)}
    count = episode.num_frames
    terminated = bool(episode.terminated is not None and episode.terminated[-1])
    rewards = episode.labels if recorded is None else recorded.at_target
    transitions: list[dict[str, Any]] = []
    for step in range(count):
        last = step == count - 1
        transitions.append(
            {
                "transitions": {
                    "obs": observations[step - 1] if step else before,
                    "next_obs": observations[step],
                },
                "action": _to_tensors(None if episode.actions is None else episode.actions[step]),
                "rewards": torch.tensor([[float(rewards[step])]]),
                "terminations": torch.tensor([[last and terminated]]),
                "truncations": torch.tensor([[last and not terminated]]),
            }
        )
    arrays = {name: _copy(getattr(episode, name)) for name in _ARRAYS}
    transitions[-1][_INFO] = {
        **arrays,
        **values.extras_of(episode),
        "success": episode.success,
        "initial_state": _copy(episode.initial_state),
        "camera_names": list(episode.frames),
    }
    if recorded is not None:
        transitions[-1][_INFO] |= {
            "hold_steps": recorded.hold_steps,
            "key": recorded.key,
            "frame_age": {camera: _copy(ages) for camera, ages in recorded.frame_age.items()},
            "intervened": _copy(recorded.intervened),
        }
    return transitions


def _copy(array: Any) -> Any:
    return None if array is None else np.array(array)


def _to_tensors(value: Any) -> Any:
    """Arrays -> tensors of their own with a batch axis; a view would be pickled with all that it views."""
    if isinstance(value, Mapping):
        return {key: _to_tensors(item) for key, item in value.items()}
    if value is None:
        return None
    import torch

    return torch.from_numpy(np.array(value)[None])


# The files


def data_file(path: Path) -> Path:
    """The `data.pkl` at or below `path`."""
    return path if path.suffix == ".pkl" and not path.is_dir() else path / FILE_NAME


def _load_transitions(path: Path) -> list[Any]:
    """The transitions of a file and of the parts beside it; again if a writer has joined them meanwhile."""
    for _ in range(_MAX_LOOKS - 1):
        before = _version(path)
        try:
            content = _load_once(path)
        except DataError:  # a part that was joined is gone
            if _version(path) == before:
                raise
        else:
            if _version(path) == before:
                return content
    return _load_once(path)


def _version(path: Path) -> tuple[int, int] | None:
    """Changes when the file is replaced."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _load_once(path: Path) -> list[Any]:
    parts = _find_parts(path)
    content = _load_list(path) if path.exists() or not parts else []
    joined = {token for step in content if (token := _token(step))}
    for first, part in parts:
        if first is not None and first < len(content):
            continue  # it is in the file already: only its removal was interrupted
        steps = _load_list(part)
        if steps and _token(steps[-1]) in joined:
            continue  # the same
        content = _closed(content)
        content += steps
    return content


def _load_list(path: Path) -> list[Any]:
    content = load(path)
    if not isinstance(content, list):
        raise DataError(f"{display_path(path)}: holds a {type(content).__name__}, not a list of transitions")
    return content


def _token(transition: Any) -> str | None:
    info = transition.get(_INFO) if isinstance(transition, Mapping) else None
    token = info.get(_PART) if isinstance(info, Mapping) else None
    return token if isinstance(token, str) else None


def _parts_folder(path: Path) -> Path:
    return path.with_name(f"{path.name}.parts")


def _find_parts(path: Path) -> list[tuple[int | None, Path]]:
    """Files of episodes that are not in `data.pkl` yet, in order.

    Those of an older version are named by the number of their first transition, which is returned too.
    """
    folder = _parts_folder(path)
    files = sorted(folder.glob(f"*{_SUFFIX}")) if folder.is_dir() else []
    old = [(int(file.stem), file) for file in files if _OLD_NAME.fullmatch(file.name)]
    return [*sorted(old), *((None, file) for file in files if _NAME.fullmatch(file.name))]


def _ends(transition: Any) -> bool:
    """Whether an episode ends with this transition."""
    if not isinstance(transition, Mapping):
        return False
    flags = (transition.get("terminations"), transition.get("truncations"))
    return any(flag is not None and bool(values.to_scalar(flag, "an end flag")) for flag in flags)


def _closed(transitions: list[Any]) -> list[Any]:
    """The transitions that are there, with an end after the last, so that the next episode stays apart."""
    if not transitions or _ends(transitions[-1]) or not isinstance(transitions[-1], Mapping):
        return transitions
    import torch

    last = dict(transitions[-1])
    last["truncations"] = torch.tensor([[True]])
    last[_INFO] = {**(last.get(_INFO) or {}), "complete": False}
    return [*transitions[:-1], last]


class RealworldPklWriter(SpooledWriter):
    """Adds episodes to a `data.pkl`, also beside other writers; what is in it already is kept.

    They are on disk when `add` returns, and one file after `close`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(data_file(Path(path)))
        self._folder = _parts_folder(self.path)
        make_directory(self.path.parent)
        for place in (self.path.parent, self._folder):
            clear_stale(place)
        with locked_directory(self.path.parent):
            there = self.path.exists() or bool(_find_parts(self.path))
            self._num_transitions = len(_load_transitions(self.path)) if there else 0  # raises if damaged

    def add(self, episode: Episode | RecordedEpisode) -> str:
        """Write one episode; return where its transitions begin, if nobody else writes."""
        if isinstance(episode, RecordedEpisode):  # of a robot, which does not wait: none is refused
            transitions = to_transitions(episode.episode, episode)
        else:
            self._reserve(episode)
            transitions = to_transitions(episode)
        transitions[-1][_INFO][_PART] = secrets.token_hex(8)
        with locked_directory(self.path.parent):  # whoever joins the parts removes their folder
            files = NumberedFiles([make_directory(self._folder)], prefix=_PREFIX, suffix=_SUFFIX)
            files.write(self._folder, lambda file: pickle.dump(transitions, file, protocol=5))
        self._num_transitions += len(transitions)
        return f"{self.path}#{self._num_transitions - len(transitions)}"

    def close(self) -> None:
        """Make one file of all episodes, also those of other writers; safe to call twice."""
        with locked_directory(self.path.parent):
            parts = _find_parts(self.path)
            if parts:
                content = _load_transitions(self.path)
                try:
                    write_atomic(self.path, lambda file: pickle.dump(content, file, protocol=5))
                except StorageError as error:
                    kept = f"all episodes are safe in {display_path(self._folder)}, and read from there"
                    raise StorageError(f"{error}; {kept}") from error
            for _, part in parts:
                part.unlink()
            if self._folder.is_dir() and not any(self._folder.iterdir()):
                self._folder.rmdir()
        self._free()


class RealworldPkl(Format):
    """A `data.pkl`, or the directory that it is in."""

    name: ClassVar[str] = "realworld-pkl"
    looks_for: ClassVar[str] = "data.pkl, a pickled list of transitions"

    def detect(self, path: Path) -> bool:
        """Whether there is a `data.pkl`, or the file is a pickled list."""
        if path.is_dir():
            return (path / FILE_NAME).is_file() or bool(_find_parts(path / FILE_NAME))
        return path.name == FILE_NAME or (path.suffix == ".pkl" and _is_pickled_list(path))

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """In the order of recording."""
        for item in read_recorded(path):
            yield item if isinstance(item, Fault) else item.episode

    def writer(self, path: Path) -> RealworldPklWriter:
        """Append to the `data.pkl` at or below `path`."""
        return RealworldPklWriter(path)


def _is_pickled_list(path: Path) -> bool:
    """Whether the first bytes are those of a pickle whose first object is a list."""
    head = head_of(path, 16)
    start = 11 if head[2:3] == pickle.FRAME else 2
    return head[:1] == pickle.PROTO and head[start : start + 1] == pickle.EMPTY_LIST
