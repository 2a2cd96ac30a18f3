"""Demonstrations of states and actions: reading them in several forms, and writing them in one.

The form of ours is one safetensors file with the parts of `StepBatch`, all episodes in a row. Others are
told apart by what is there; see `read_demonstrations`. No code in a file is run.
"""

from __future__ import annotations

import math
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.errors import DataError
from guerdon.core.types import display_path
from guerdon.data.datasets.frames import open_store
from guerdon.data.files import safe_pickle
from guerdon.data.files.bounds import Allowance, as_array, memory_budget, one_line
from guerdon.data.files.rebuild import check_sizes
from guerdon.envs.wrappers import GOAL_KEYS
from guerdon.rewards.steps import ITEM_KEYS, StepBatch, as_actions, from_items

SUFFIX = ".safetensors"
DI_ENGINE_FILE = "expert_data.pkl"
RANKED_FILES = ("episodes_data.pkl", "learning_returns.pkl")
"""What DI-engine writes for T-REX: observations of episodes, and their returns."""
"""What DI-engine calls its file of demonstrations: a list of dicts of tensors."""
_MAX_EPISODES = 100_000  # of one file; each is an object with parts
Row: TypeAlias = Mapping[str, Any]
"""`obs` [T + 1, ...], `acts` [T, ...], `terminal`, and `rews` [T] if they were kept."""

_COLUMNS = ("obs", "acts", "rews", "terminal")
_FILE_MAGIC = b"ARROW1\0\0"
_MAX_DEPTH = 8
_HEADER, _BATCH_DATA, _COMPRESSION = 2, 1, 3  # fields of Message, DictionaryBatch and RecordBatch


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
    """Episodes, [T] each, from a path, a list of dicts, `StepBatch`, or a list of episodes in these forms.

    A path leads to a file of ours (`.safetensors`), to DI-engine's `expert_data.pkl` or a folder with one, to
    a folder with its `episodes_data.pkl` and `learning_returns.pkl` (for T-REX on observations), to
    imitation's trajectories (a folder of Arrow files, or the older `.npz`), or to a data set of episodes with
    states and actions in any format of `guerdon.data.store`, whose successful episodes are taken.

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
    if isinstance(source, Sequence) and source and not isinstance(source[0], Mapping):
        return [episode for each in source for episode in _whole_episodes(from_items(each))]
    rows = from_items(source)
    return _whole_episodes(rows if isinstance(source, StepBatch) else _cut_at_jumps(rows))


def _from_file(path: Path) -> list[StepBatch]:
    with safe_pickle.named(path):
        if path.suffix == SUFFIX:
            return _from_safetensors(path)
        if path.suffix == ".npz":
            return _from_imitation(npz_rows(path))
        if path.suffix == ".arrow":
            return _from_imitation(arrow_rows(path))
        if path.suffix in (".pkl", ".pickle"):
            return _from_items(_checked_items(safe_pickle.load(path), Allowance.of(path)))
        raise DataError(
            f"holds no demonstrations that are known: {SUFFIX}, .pkl (DI-engine), .npz or a folder of .arrow "
            "files (imitation), or a data set of episodes"
        )


def _from_safetensors(path: Path) -> list[StepBatch]:
    try:
        parts = load_file(path)
        for name, part in parts.items():
            check_sizes(f"the shape of `{one_line(name)}`", list(part.shape))
        rows = StepBatch(**parts)
    except (SafetensorError, TypeError) as error:
        raise DataError(f"holds no demonstrations: {one_line(error)}") from error
    _check_number(int(rows.done.sum()) + math.prod(rows.shape[1:]))
    return _whole_episodes(rows)


def _check_number(episodes: int) -> None:
    if episodes > _MAX_EPISODES:
        raise DataError(f"holds {episodes} episodes; at most {_MAX_EPISODES} are read from a file")


def _checked_items(content: Any, room: Allowance) -> Any:
    """A list of dicts, or a list of such lists, from a file, with arrays and tensors as values."""
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
            {key: value(item[key]) for key in (*ITEM_KEYS, "truncated", "log_prob") if key in item}
            if isinstance(item, Mapping)
            else None
            for item in part
        ]

    if isinstance(content[0], Mapping):
        return items(content)
    _check_number(len(content))
    return [items(part) for part in content]


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
        _check_number(number)
        if row.get("obs") is None or row.get("acts") is None:
            raise DataError("holds no trajectories of imitation: no obs and acts")
        obs, actions = np.asarray(row["obs"], np.float32), np.asarray(row["acts"])
        count = len(actions)
        if len(obs) != count + 1 or not count:
            raise DataError(f"trajectory {number} has {len(obs)} observations, {count} actions")
        episodes.append(_episode(obs, actions, row.get("rews"), bool(row.get("terminal", True))))
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
                raise DataError(f"{shown} has no {lack} to learn from; collect with collect.keep_states=true")
            first, states = 1, each.states
            if each.initial_state is not None:
                first, states = 0, np.concatenate((each.initial_state[None], each.states))
            rewards = None if each.env_rewards is None else each.env_rewards[first:]
            terminated = each.terminated is not None and bool(each.terminated[-1])
            found.append(_episode(states, each.actions[first:], rewards, terminated))
    if not found:
        raise DataError(f"{shown} has no successful, complete episode to learn from")
    return found


def _episode(obs: NDArray[Any], actions: NDArray[Any], rewards: Any, terminated: bool) -> StepBatch:
    """An episode [T] from T + 1 observations, T actions and T env rewards, which may be unknown (None)."""
    count = len(actions)
    last = torch.arange(count) == count - 1
    known = np.full(count, np.nan) if rewards is None else rewards
    return StepBatch(
        obs=torch.from_numpy(obs[:-1].copy()),
        actions=as_actions(torch.from_numpy(actions.copy()), count),
        next_obs=torch.from_numpy(obs[1:].copy()),
        env_rewards=torch.from_numpy(np.array(known, np.float32)),
        terminated=last & terminated,
        truncated=last & (not terminated),
    )


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
            parts.append([item for group in content for item in group])
    observed, returns = parts
    with safe_pickle.named(folder / RANKED_FILES[0]):
        if len(observed) != len(returns) or not observed:
            raise DataError(f"has {len(observed)} episodes, and {RANKED_FILES[1]} {len(returns)} returns")
        _check_number(len(observed))
        room, episodes = Allowance.of(folder / RANKED_FILES[0]), list[StepBatch]()
        for each, total in zip(observed, returns, strict=True):
            obs = as_array(each)
            room.take_bytes(2 * obs.nbytes)
            if obs.dtype.kind not in "biuf" or obs.ndim < 2 or len(obs) < 2 or not _is_number(total):
                raise DataError("has an episode that is no list of observations, or no return for it")
            rewards = np.zeros(len(obs) - 1, np.float32)
            rewards[-1] = float(total)
            actions = np.zeros(len(obs) - 1, np.int64)  # not recorded; T-REX looks at observations
            episodes.append(_episode(obs.astype(np.float32), actions, rewards, terminated=False))
    return episodes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def returns_of(episodes: Sequence[StepBatch]) -> torch.Tensor:
    """Sums of the env rewards, float32 [number of episodes]."""
    return torch.stack([each.env_rewards.sum() for each in episodes])


# imitation's trajectories: Arrow files as Hugging Face's `datasets` writes them, and the older `.npz`
#
# A file may come from anywhere. Arrow trusts the offsets and lengths in it unless it is told to check them,
# and some of its types stand for any number of values without a byte; so only nested lists of numbers are
# read, and those after a full check. Nothing is mapped: a file that shrinks while it is read is no danger.


def arrow_rows(path: Path) -> Iterator[Row]:
    """The trajectories of one Arrow file; `infos` are not looked at."""
    size = path.stat().st_size
    if size > memory_budget():
        raise DataError(f"has {size} bytes, more than fit into memory")
    data = path.read_bytes()
    if data.startswith(_FILE_MAGIC):  # the layout of files is that of streams, with an index at the end
        data = data[len(_FILE_MAGIC) :]
    for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(data)):
        if message.type in ("record batch", "dictionary") and _is_compressed(message):
            raise DataError("is compressed; write it without, as datasets does")
    table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
    table = table.select([name for name in _COLUMNS if name in table.column_names])
    for name, kind in zip(table.column_names, table.schema.types, strict=True):
        if not _is_listed_numbers(kind):
            raise DataError(f"has the column {name!r} of type {kind}; lists of numbers are needed")
    table.validate(full=True)
    for batch in table.to_batches():
        for row in range(batch.num_rows):
            yield from batch.slice(row, 1).to_pylist()


def _is_listed_numbers(kind: Any) -> bool:
    """Numbers, or lists of them; a list of fixed size has at least one."""
    for _ in range(_MAX_DEPTH):
        fixed = pa.types.is_fixed_size_list(kind) and kind.list_size > 0
        if not (fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            break
        kind = kind.value_type
    return any(check(kind) for check in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def _is_compressed(message: Any) -> bool:
    """Whether a batch's header says that its buffers are compressed; few bytes could then stand for many."""
    data = message.metadata.to_pybytes()
    table = _follow(data, 0)
    found = _field(data, table, _HEADER)
    if found is not None and message.type == "dictionary":
        found = _field(data, _follow(data, found), _BATCH_DATA)
    if found is None:
        raise DataError("has a batch without a header")
    return _field(data, _follow(data, found), _COMPRESSION) is not None


def _follow(data: bytes, position: int) -> int:
    """Where an offset of a flatbuffer leads to."""
    (offset,) = struct.unpack_from("<I", data, position)
    return position + int(offset)


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where a field of a table of a flatbuffer stands; None if it is not there."""
    (back,) = struct.unpack_from("<i", data, table)
    listed = table - back
    if listed < 0:
        raise DataError("has a damaged header")
    (size,) = struct.unpack_from("<H", data, listed)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", data, listed + 4 + 2 * number)
    return table + offset if offset else None


def npz_rows(path: Path) -> Iterator[Row]:
    """The trajectories of the older file: all in a row, `indices` say where the actions are cut."""
    data = safe_pickle.load_npz(path, ("obs", "acts", "indices", "terminal", "rews"))
    missing = [name for name in ("obs", "acts", "indices", "terminal") if name not in data]
    if missing:
        raise DataError(f"holds no trajectories of imitation: no {missing[0]!r}")
    if not all(array.ndim and array.dtype.kind in "biuf" for array in data.values()):
        raise DataError("holds something else than arrays of numbers")
    obs, acts, terminal, rews = data["obs"], data["acts"], data["terminal"], data.get("rews")
    cuts, count = data["indices"].astype(np.int64), len(acts)
    edges = np.concatenate(([0], cuts, [count])) if cuts.ndim == 1 else np.zeros(0)
    if not len(edges) or not (np.diff(edges) > 0).all():
        raise DataError(f"has `indices` that do not cut its {count} actions into trajectories")
    number = len(edges) - 1
    if len(obs) != count + number or terminal.shape != (number,) or (rews is not None and len(rews) != count):
        raise DataError(f"has parts of different lengths for {number} trajectories of {count} actions")
    for each, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        yield {
            "obs": obs[start + each : stop + each + 1],
            "acts": acts[start:stop],
            "rews": None if rews is None else rews[start:stop],
            "terminal": bool(terminal[each]),
        }
