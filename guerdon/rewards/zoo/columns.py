"""Demonstrations as arrays, under the names that people use: D4RL, Stable-Baselines3, imitation, one's own.

All episodes in a row with marks where they end, one episode, or episodes of one length side by side [E, T].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.images import to_numpy
from guerdon.data.files.bounds import one_line
from guerdon.envs.wrappers import GOAL_KEYS
from guerdon.rewards.steps import StepBatch, as_actions

NAMES: dict[str, tuple[str, ...]] = {
    "obs": ("obs", "observations", "states", "observation", "state"),
    "actions": ("actions", "acts"),
    "rewards": ("rewards", "rews"),
    "next_obs": ("next_obs", "next_observations", "next_states"),
    "terminated": ("terminated", "terminals", "terminal"),
    "truncated": ("truncated", "timeouts"),
    "done": ("dones", "done"),
    "episode_ends": ("episode_ends",),
    "episode_starts": ("episode_starts",),
}
"""What is read -> the names that it may have, the first that is there counts."""
COLUMN_NAMES = tuple(name for names in NAMES.values() for name in names)
WANTED = (
    "obs (or observations, states) and actions (or acts); if known rewards, next_obs, and where episodes "
    "end: terminals (or terminated), timeouts (or truncated), dones, episode_ends or episode_starts"
)


MAX_EPISODES = 100_000  # each is an object with parts


def check_number(episodes: int) -> None:
    """Refuse a number of episodes that only a hostile file has."""
    if episodes > MAX_EPISODES:
        raise DataError(f"holds {episodes} episodes; at most {MAX_EPISODES} are read from a file")


def is_columns(item: Any) -> bool:
    """Whether a dict holds arrays over steps, and not a single transition (`action`, or plain numbers)."""
    if not isinstance(item, Mapping) or "action" in item:
        return False
    actions = next((item[name] for name in NAMES["actions"] if name in item), None)
    rewards = next((item[name] for name in NAMES["rewards"] if name in item), None)
    return actions is None or np.ndim(actions if rewards is None else rewards) > 0


def column_episodes(columns: Mapping[str, Any]) -> list[StepBatch]:
    """The episodes, [T] each, of a dict of arrays.

    `episode_ends` are the numbers of steps after which episodes end (or a flag for each step). Observations
    may have one more for each episode than there are actions. Otherwise, without `next_obs`, the last step of
    each episode is left out: nobody recorded what it led to.
    """
    found = {
        part: columns[names[0]]
        for part, known in NAMES.items()
        if (names := [name for name in known if columns.get(name) is not None])
    }
    if "obs" not in found or "actions" not in found:
        there = one_line(sorted(map(str, columns)), 120)
        raise DataError(f"holds no demonstrations: wanted are {WANTED}; found are {there}")
    arrays = {part: _numbers(value, part) for part, value in found.items()}
    flags = next((arrays[name] for name in ("rewards", "done", "terminated") if name in arrays), None)
    if flags is not None and flags.ndim == 2 and flags.shape[1] > 1:
        check_number(len(flags))
        if any(len(each) != len(flags) for each in arrays.values()):
            raise DataError(f"has parts of different lengths for {len(flags)} episodes")
        rows = [{part: each[number] for part, each in arrays.items()} for number in range(len(flags))]
        return [episode for row in rows for episode in _flat_episodes(row)]
    return _flat_episodes(arrays)


def _flat_episodes(arrays: Mapping[str, NDArray[Any]]) -> list[StepBatch]:
    obs, actions, count = arrays["obs"], arrays["actions"], len(arrays["actions"])
    if not count:
        raise DataError("holds no step")
    ends = _ends(arrays, count)  # [E], the number of steps after which each episode ends
    check_number(len(ends))
    starts = np.concatenate(([0], ends[:-1]))
    after = arrays.get("next_obs")
    extra = len(ends) if after is None and len(obs) == count + len(ends) else 0
    lengths = {part: len(arrays[part]) for part in ("next_obs", "rewards", "terminated") if part in arrays}
    if len(obs) != count + extra or any(length not in (count, len(ends)) for length in lengths.values()):
        raise DataError(
            f"has parts of different lengths: {count} actions, {len(obs)} observations, {len(ends)} episodes"
            + "".join(f", {length} {part}" for part, length in lengths.items())
        )
    if after is not None and after.shape != obs.shape:
        raise DataError(f"has obs of shape {list(obs.shape)} and next_obs of {list(after.shape)}")
    rewards = arrays.get("rewards")
    terminated = _terminated(arrays, ends, count)
    episodes = []
    for number, (start, stop) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        first, last = start + (number if extra else 0), stop
        if after is not None:
            states, reached = obs[start:stop], after[start:stop]
        elif extra:
            states, reached = obs[first : first + stop - start], obs[first + 1 : first + 1 + stop - start]
        else:
            last = stop - 1
            states, reached = obs[start:last], obs[start + 1 : stop]
        if last > start:
            earned = None if rewards is None else rewards.reshape(-1)[start:last]
            episodes.append(
                episode_of(states, actions[start:last], reached, earned, bool(terminated[number]))
            )
    if not episodes:
        raise DataError(
            "holds no step with the observation that it led to: give next_obs, or longer episodes"
        )
    return episodes


def _ends(arrays: Mapping[str, NDArray[Any]], count: int) -> NDArray[np.int64]:
    """Where episodes end, as numbers of steps; the last always ends with the data."""
    marks = np.zeros(count, np.bool_)
    for name in ("terminated", "truncated", "done"):
        flags = arrays.get(name)
        if flags is not None and flags.size == count:
            marks |= flags.reshape(-1).astype(np.bool_)
    begun = arrays.get("episode_starts")
    if begun is not None and begun.size == count:
        marks[:-1] |= begun.reshape(-1)[1:].astype(np.bool_)
    given = arrays.get("episode_ends")
    if given is not None and given.dtype == np.bool_ and given.size == count:
        marks |= given.reshape(-1)
    elif given is not None:
        cuts = given.reshape(-1).astype(np.int64)
        if not len(cuts) or (np.diff(np.concatenate(([0], cuts))) <= 0).any() or cuts[-1] > count:
            raise DataError(f"has `episode_ends` that do not cut its {count} steps into episodes")
        marks[cuts - 1] = True
    marks[-1] = True
    return (np.flatnonzero(marks) + 1).astype(np.int64)


def _terminated(arrays: Mapping[str, NDArray[Any]], ends: NDArray[np.int64], count: int) -> NDArray[np.bool_]:
    """Whether each episode ended by itself -> bool [E]; `dones` alone do not tell it from a time limit."""
    flags, cut = arrays.get("terminated", arrays.get("done")), arrays.get("truncated")
    if flags is None:
        return np.zeros(len(ends), np.bool_)
    ended = flags.reshape(-1).astype(np.bool_)
    ended = ended[ends - 1] if len(ended) == count else np.resize(ended, len(ends))
    if "terminated" not in arrays and cut is not None and cut.size == count:
        ended &= ~cut.reshape(-1).astype(np.bool_)[ends - 1]
    return ended


def episode_of(
    obs: NDArray[Any], actions: NDArray[Any], next_obs: NDArray[Any], rewards: Any, terminated: bool
) -> StepBatch:
    """An episode [T]; env rewards may be unknown (None)."""
    count = len(actions)
    last = torch.arange(count) == count - 1
    known = np.full(count, np.nan) if rewards is None else rewards
    return StepBatch(
        obs=torch.from_numpy(np.array(obs, np.float32)),
        actions=as_actions(torch.from_numpy(np.array(actions)), count),
        next_obs=torch.from_numpy(np.array(next_obs, np.float32)),
        env_rewards=torch.from_numpy(np.array(known, np.float32)),
        terminated=last & terminated,
        truncated=last & (not terminated),
    )


def _numbers(value: Any, part: str) -> NDArray[Any]:
    """An array of numbers with at least one axis; goal-conditioned observations are made flat."""
    if isinstance(value, Mapping):
        lacking = [key for key in GOAL_KEYS if key not in value]
        if lacking:
            raise DataError(f"has `{part}` as a dict without {lacking[0]}; {', '.join(GOAL_KEYS)} are wanted")
        return np.concatenate([_numbers(value[key], part) for key in GOAL_KEYS], axis=-1)
    try:
        array = to_numpy(value)
    except ValueError as error:  # lists of different lengths
        raise DataError(f"has `{part}` that is no array: {one_line(error)}") from error
    if not array.ndim or array.dtype.kind not in "biuf":
        raise DataError(f"has `{part}` that is no array of numbers but {array.dtype} {list(array.shape)}")
    return array
