"""What callers hand to environments, checked and turned into arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from guerdon.config.tabletop import unknown_name
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import BoolArray, IntArray

ACTION_SIZE = 4


def check_actions(actions: Any, num_envs: int) -> NDArray[np.float64]:
    """Actions [N, 4] -> float64 [4, N] in [-1, 1]."""
    array = np.asarray(actions)
    if array.shape != (num_envs, ACTION_SIZE):
        raise DataError(f"actions must have shape [{num_envs}, {ACTION_SIZE}], not {list(array.shape)}")
    if not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array):
        raise DataError(f"actions must be real numbers, not {array.dtype}")
    action = array.T.astype(np.float64, order="C")
    finite = np.isfinite(action)
    if not finite.all():
        first = int(np.flatnonzero(~finite.all(axis=0))[0])
        raise DataError(f"the action of environment {first} is not finite: {array[first].tolist()}")
    np.maximum(action, -1.0, out=action)
    return np.minimum(action, 1.0, out=action)


def check_num_envs(num_envs: Any) -> int:
    """How many environments there shall be."""
    if isinstance(num_envs, bool) or not hasattr(num_envs, "__index__") or int(num_envs) < 1:
        raise ConfigError(f"num_envs must be a whole number of at least 1, not {num_envs!r}")
    return int(num_envs)


def check_autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    """The mode, or the one of that name."""
    if isinstance(mode, AutoresetMode):
        return mode
    names = {name: each for each in AutoresetMode for name in (each.value, each.name, each.name.lower())}
    if mode not in names:
        raise ConfigError(unknown_name("autoreset_mode", mode, names))
    return names[mode]


def check_going_on(done: BoolArray, mode: AutoresetMode) -> None:
    """Refuse a step in episodes that are over (bool [N]) where nobody else begins new ones."""
    if mode is AutoresetMode.DISABLED and done.any():
        first = int(np.flatnonzero(done)[0])
        raise DataError(f"the episode of environment {first} is over: reset it before the next step")


def check_env_ids(env_ids: IntArray | Sequence[int] | None, num_envs: int) -> IntArray:
    """Numbers of environments as int64 [n]; None means all."""
    if env_ids is None:
        return np.arange(num_envs)
    ids = np.asarray(env_ids)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise DataError(f"env_ids must be whole numbers [n], not {ids.dtype} {list(ids.shape)}")
    if ids.size and (ids.min() < 0 or ids.max() >= num_envs):
        raise DataError(f"env_ids must lie between 0 and {num_envs - 1}, not {ids.tolist()}")
    return ids.astype(np.int64)


def check_reset_mask(options: Mapping[str, Any] | None, num_envs: int) -> BoolArray:
    """`reset_mask` of the options of `reset`, bool [N]; all True where there is none."""
    options = options or {}
    for name in options:
        if name != "reset_mask":
            raise ConfigError(unknown_name("reset option", name, ["reset_mask"]))
    mask = np.asarray(options.get("reset_mask", np.ones(num_envs, np.bool_)))
    if mask.dtype != np.bool_ or mask.shape != (num_envs,) or not mask.any():
        raise DataError(f"reset_mask must be bool [{num_envs}] with at least one True")
    return mask


def check_seeds(
    seed: int | Sequence[int | None] | None, num_envs: int
) -> tuple[BoolArray, NDArray[np.uint64]]:
    """Which environments get a seed, bool [N], and which one, uint64 [N]; a number s means s + i for all."""
    if seed is None:
        return np.zeros(num_envs, np.bool_), np.zeros(num_envs, np.uint64)
    seeds = [seed] if isinstance(seed, (int, np.integer)) else list(seed)
    for value in seeds:
        whole = hasattr(value, "__index__") and not isinstance(value, bool)
        if value is not None and not (whole and 0 <= value < 2**62):
            raise DataError(f"a seed must be a whole number from 0 to 2^62 - 1, not {value!r}")
    values: NDArray[np.uint64] = np.array([0 if value is None else int(value) for value in seeds], np.uint64)
    if isinstance(seed, (int, np.integer)):
        values = values.repeat(num_envs)
        values += np.arange(num_envs, dtype=np.uint64)
        return np.ones(num_envs, np.bool_), values
    if len(seeds) != num_envs:
        raise DataError(f"{len(seeds)} seeds were given for {num_envs} environments")
    return np.array([value is not None for value in seeds]), values


def give_seeds(
    env_seeds: NDArray[np.uint64],
    episodes: IntArray,
    seed: int | Sequence[int | None] | None,
    mask: BoolArray,
) -> NDArray[np.uint64]:
    """Seeds of the environments, uint64 [N], after a reset of those in `mask`.

    Args:
        env_seeds: uint64 [N], before it.
        episodes: int [N], number of the present episode of each, -1 where there was none yet; those that get
            a seed begin anew at -1, in place.
        seed: as `reset` takes it; environments without any get a random one.
        mask: bool [N].
    """
    given, values = check_seeds(seed, len(mask))
    first_time = mask & ~given & (episodes < 0)
    if first_time.any():
        entropy = np.random.SeedSequence().generate_state(len(mask), np.uint64) >> np.uint64(16)
        env_seeds = np.where(first_time, entropy, env_seeds)
    episodes[mask & given] = -1
    return np.where(mask & given, values, env_seeds)
