"""Demonstrations of states and actions: reading them in several forms, and writing them in one.

The form of ours is one safetensors file with the parts of `StepBatch`, all episodes in a row. Others are
told apart by what is there; see `read_demonstrations`. No code in a file is run.
"""

from __future__ import annotations

import math
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.errors import DataError, UnsafeDataError
from guerdon.core.types import display_path
from guerdon.data.datasets.frames import open_store
from guerdon.data.files import safe_pickle
from guerdon.data.files.bounds import Allowance, as_array, one_line
from guerdon.data.files.rebuild import check_sizes
from guerdon.data.formats import FORMATS
from guerdon.envs.wrappers import GOAL_KEYS
from guerdon.rewards.steps import ITEM_KEYS, StepBatch, from_items
from guerdon.rewards.zoo.columns import (
    COLUMN_NAMES,
    NAMES,
    WANTED,
    check_number,
    column_episodes,
    episode_of,
    is_columns,
)
from guerdon.rewards.zoo.imitation_files import Row, arrow_rows, npz_rows

SUFFIX = ".safetensors"
DI_ENGINE_FILE = "expert_data.pkl"
"""What DI-engine calls its file of demonstrations: a list of dicts of tensors."""
RANKED_FILES = ("episodes_data.pkl", "learning_returns.pkl")
"""What DI-engine writes for T-REX: observations of episodes, and their returns."""


def write_demonstrations(path: Path | str, episodes: Sequence[StepBatch]) -> None:
    """Write whole episodes, [T] each, to one file, at once or not at all."""
    path = Path(path)
    if path.suffix != SUFFIX:
        raise DataError(
            f"demonstrations are written to a file that ends in {SUFFIX}, not {display_path(path)}"
        )
    rows = StepBatch.cat(episodes)
    if not all(bool(each.done[-1]) for each in episodes) or int(rows.done.sum()) != len(episodes):
        raise DataError("demonstrations must be whole episodes: the last step, and no other, ends one")
    content = save({name: part.contiguous() for name, part in rows.parts().items()})
    make_directory(path.parent)
    write_atomic(path, lambda file: file.write(content))


def read_demonstrations(source: Any) -> list[StepBatch]:
    """Episodes, [T] each, from a path, transitions, a dict of arrays, or a list of episodes in these forms.

    Transitions are a list of dicts or `StepBatch`. A dict of arrays has the names of `columns.NAMES`, and
    holds one episode or several in a row.

    A path leads to a file of ours (`.safetensors`), to an `.npz` with such arrays, to DI-engine's
    `expert_data.pkl` or a folder with one, to a folder with its `episodes_data.pkl` and
    `learning_returns.pkl` (for T-REX on observations), to imitation's trajectories (a folder of Arrow files,
    or the older `.npz`), or to a data set of episodes with states and actions in any format of
    `guerdon.data.formats`, whose successful episodes are taken.

    An episode that is cut off at the end of the data is kept; its last step then counts as truncated.
    """
    if not isinstance(source, str | Path):
        return _from_items(source)
    path = Path(source)
    if not path.exists():
        raise DataError(f"there are no demonstrations at {display_path(path)}")
    if (path / DI_ENGINE_FILE).is_file():
        path = path / DI_ENGINE_FILE
    if (path / RANKED_FILES[0]).is_file():
        return _from_ranked(path)
    if not path.is_dir():
        return _from_file(path)
    arrow = sorted(path.glob("*.arrow"))
    return [each for file in arrow for each in _from_file(file)] if arrow else _from_store(path)


def _from_items(source: Any) -> list[StepBatch]:
    if is_columns(source):
        return column_episodes(source)
    if isinstance(source, Sequence) and source and _is_episode(source[0]):
        return [episode for each in source for episode in _one_episode(each)]
    rows = from_items(_renamed(source))
    return _whole_episodes(rows if isinstance(source, StepBatch) else _cut_at_jumps(rows))


def _is_episode(item: Any) -> bool:
    """Whether an item of a list is an episode, and no transition."""
    return not isinstance(item, Mapping) or is_columns(item)


def _one_episode(item: Any) -> list[StepBatch]:
    if hasattr(item, "obs") and hasattr(item, "acts"):  # a trajectory of imitation
        names = ("obs", "acts", "rews", "terminal")
        kept = {name: getattr(item, name) for name in names if hasattr(item, name)}
        return column_episodes({**kept, "terminal": [kept.get("terminal", True)]})
    return column_episodes(item) if is_columns(item) else _whole_episodes(from_items(_renamed(item)))


def _renamed(items: Any) -> Any:
    """Transitions under the names of `ITEM_KEYS`."""
    if not isinstance(items, Sequence) or not all(isinstance(item, Mapping) for item in items):
        return items
    return [{**item, **_missing_keys(item)} for item in items]


def _missing_keys(item: Mapping[str, Any]) -> dict[str, Any]:
    parts = {"obs": "obs", "action": "actions", "reward": "rewards", "next_obs": "next_obs", "done": "done"}
    found = {key: [name for name in NAMES[part] if name in item] for key, part in parts.items()}
    return {key: item[names[0]] for key, names in found.items() if key not in item and names}


def _from_file(path: Path) -> list[StepBatch]:
    with safe_pickle.named(path):
        if path.suffix == SUFFIX:
            return _from_safetensors(path)
        if path.suffix == ".npz":
            return _from_npz(path)
        if path.suffix == ".arrow":
            return _from_imitation(arrow_rows(path))
        if path.suffix in (".pkl", ".pickle"):
            return _from_pickle(path)
        if _is_store(path):
            return _from_store(path)
        raise DataError(
            f"holds no demonstrations that are known: {SUFFIX}, .npz or .pkl with {WANTED}; DI-engine's "
            ".pkl, a folder of .arrow files (imitation), or a data set of episodes"
        )


def _from_pickle(path: Path) -> list[StepBatch]:
    """Transitions or arrays; what is neither may be a data set with pictures."""
    try:
        return _from_items(_checked_items(safe_pickle.load(path), Allowance.of(path)))
    except UnsafeDataError:
        raise
    except DataError as error:
        if path.name == DI_ENGINE_FILE or not _is_store(path):
            raise
        try:
            return _from_store(path)
        except DataError as other:
            raise error from other  # the first says what is wanted


def _is_store(path: Path) -> bool:
    """Whether a file is a data set of a known format."""
    return any(each.detect(path) for each in FORMATS.values())


def _from_npz(path: Path) -> list[StepBatch]:
    """Arrays under the names that people use, or imitation's older trajectories, which have `indices`."""
    data = safe_pickle.load_npz(path, (*COLUMN_NAMES, "indices"))
    if "indices" in data:
        return _from_imitation(npz_rows(path))
    if not data:
        with zipfile.ZipFile(path) as archive:
            there = [name.removesuffix(".npy") for name in archive.namelist()[:20]]
        raise DataError(f"holds no demonstrations: wanted are {WANTED}; found are {one_line(there, 120)}")
    return column_episodes(data)


def _from_safetensors(path: Path) -> list[StepBatch]:
    try:
        parts = load_file(path)
        for name, part in parts.items():
            check_sizes(f"the shape of `{one_line(name)}`", list(part.shape))
        rows = StepBatch(**parts)
    except (SafetensorError, TypeError) as error:
        raise DataError(f"holds no demonstrations: {one_line(error)}") from error
    check_number(int(rows.done.sum()) + math.prod(rows.shape[1:]))
    return _whole_episodes(rows)


def _checked_items(content: Any, room: Allowance) -> Any:
    """Dicts of arrays, a list of dicts, or a list of such lists, from a file, with arrays as values."""
    if isinstance(content, Mapping):
        content = [content]
    if not isinstance(content, list | tuple) or not content:
        raise DataError(f"holds no demonstrations: {one_line(content, 40)}")
    known: dict[int, Any] = {}

    def value(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {
                key: value(item[key])
                for key in GOAL_KEYS
                if key in item and not isinstance(item[key], Mapping)
            }
        if id(item) not in known:
            known[id(item)] = item if isinstance(item, torch.Tensor) else as_array(item)
        room.take_bytes(2 * known[id(item)].nbytes)
        return known[id(item)]

    def items(part: Any) -> Any:
        if not isinstance(part, list | tuple):
            raise DataError(f"a list of transitions is needed, not {one_line(part, 40)}")
        room.take_steps(len(part))
        return [
            {key: value(item[key]) for key in _read_keys(item) if key in item}
            if isinstance(item, Mapping)
            else None
            for item in part
        ]

    if isinstance(content[0], Mapping):
        return items(content)
    check_number(len(content))
    return [items(part) for part in content]


def _read_keys(item: Mapping[str, Any]) -> tuple[str, ...]:
    """What is read of a dict in a file: of transitions as DI-engine writes them nothing else."""
    keys = (*ITEM_KEYS, "truncated", "log_prob")
    return keys if all(key in item for key in ITEM_KEYS) else tuple(dict.fromkeys((*keys, *COLUMN_NAMES)))


def _cut_at_jumps(rows: StepBatch) -> StepBatch:
    """Collectors put pieces of several environments in a row: where a step begins elsewhere, one ends."""
    if len(rows.shape) != 1 or len(rows) < 2:
        return rows
    jump = torch.zeros_like(rows.done)
    jump[:-1] = ~torch.isclose(rows.next_obs[:-1], rows.obs[1:], equal_nan=True).flatten(1).all(1)
    return replace(rows, truncated=rows.truncated | (jump & ~rows.done))


def _from_imitation(rows: Iterable[Row]) -> list[StepBatch]:
    """Episodes of imitation's trajectories."""
    episodes: list[StepBatch] = []
    for number, row in enumerate(rows):
        check_number(number)
        if row.get("obs") is None or row.get("acts") is None:
            raise DataError("holds no trajectories of imitation: no obs and acts")
        obs, actions = np.asarray(row["obs"], np.float32), np.asarray(row["acts"])
        count = len(actions)
        if len(obs) != count + 1 or not count:
            raise DataError(f"trajectory {number} has {len(obs)} observations, {count} actions")
        episodes.append(
            episode_of(obs[:-1], actions, obs[1:], row.get("rews"), bool(row.get("terminal", True)))
        )
    if not episodes:
        raise DataError("holds no trajectories")
    return episodes


def _from_store(path: Path) -> list[StepBatch]:
    """The successful, complete episodes of a data set with states and actions.

    Step t led to state t: action t was chosen in the state before, action 0 in the initial one; where that
    was not recorded, the first step is left out.
    """
    shown, found = display_path(path), list[StepBatch]()
    with tempfile.TemporaryDirectory() as copy:
        store, _ = open_store(str(path), None, None, Path(copy))
        for number in np.flatnonzero(store.success & store.complete).tolist():
            each = store.read_episode(number)
            if each.actions is None or each.states is None:
                lack = "actions" if each.actions is None else "states"
                raise DataError(f"{shown} has no {lack} to learn from; collect with keep_states")
            first, states = 1, each.states
            if each.initial_state is not None:
                first, states = 0, np.concatenate((each.initial_state[None], each.states))
            rewards = None if each.env_rewards is None else each.env_rewards[first:]
            terminated = each.terminated is not None and bool(each.terminated[-1])
            found.append(episode_of(states[:-1], each.actions[first:], states[1:], rewards, terminated))
    if not found:
        raise DataError(f"{shown} has no successful, complete episode to learn from")
    return found


def _whole_episodes(rows: StepBatch) -> list[StepBatch]:
    if len(rows.shape) == 1 and len(rows) and not bool(rows.done[-1]):
        last = torch.arange(len(rows), device=rows.done.device) == len(rows) - 1
        rows = replace(rows, truncated=rows.truncated | last)
    episodes = rows.episodes()
    if not episodes:
        raise DataError("the demonstrations hold no finished episode")
    return episodes


def first_steps(episodes: Sequence[StepBatch], count: int) -> list[StepBatch]:
    """Episodes with `count` steps in all, the last one cut off; 0: all of them."""
    found: list[StepBatch] = []
    for each in episodes if count else ():
        if count <= 0:
            break
        found += [each] if len(each) <= count else _whole_episodes(each[:count])
        count -= len(each)
    return found if found else list(episodes)


def _from_ranked(folder: Path) -> list[StepBatch]:
    """DI-engine's episodes for T-REX: observations alone; the return stands at the last step."""
    parts = []
    for name in RANKED_FILES:
        with safe_pickle.named(folder / name):
            content = safe_pickle.load(folder / name)
            if not isinstance(content, list) or not all(isinstance(each, list) for each in content):
                raise DataError("holds no lists of episodes, as DI-engine writes them for T-REX")
            check_number(sum(map(len, content)))  # one list may stand there any number of times
            parts.append([item for group in content for item in group])
    observed, returns = parts
    with safe_pickle.named(folder / RANKED_FILES[0]):
        if len(observed) != len(returns) or not observed:
            raise DataError(f"has {len(observed)} episodes, and {RANKED_FILES[1]} {len(returns)} returns")
        room, episodes = Allowance.of(folder / RANKED_FILES[0]), list[StepBatch]()
        known: dict[int, Any] = {}  # one episode may stand there any number of times
        for each in observed:
            if id(each) not in known:
                known[id(each)] = as_array(each)
            room.take_bytes(2 * known[id(each)].nbytes)
        for each, total in zip(observed, returns, strict=True):
            obs = known[id(each)]
            if obs.dtype.kind not in "biuf" or obs.ndim < 2 or len(obs) < 2 or not _is_number(total):
                raise DataError("has an episode that is no list of observations, or no return for it")
            rewards = np.zeros(len(obs) - 1, np.float32)
            rewards[-1] = float(total)
            actions = np.zeros(len(obs) - 1, np.int64)  # not recorded; T-REX looks at observations
            episodes.append(episode_of(obs[:-1], actions, obs[1:], rewards, False))
    return episodes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def returns_of(episodes: Sequence[StepBatch]) -> torch.Tensor:
    """Sums of the env rewards, float32 [number of episodes]."""
    return torch.stack([each.env_rewards.sum() for each in episodes])
