"""Replay: what was experienced, stored once, and sampled as the learners need it.

Rows form a ring [num_rows, num_envs]. An observation is stored once: what follows row t is the observation of
row t + 1, and only where an episode ended is its final observation kept beside, in a store that grows as
needed. `env_rewards` are what the environment gave and are never overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from guerdon.agents import replay_files
from guerdon.agents.networks import STATE, ObsSpec
from guerdon.core.batches import ReplayBatch
from guerdon.core.errors import ConfigError, DataError

Field: TypeAlias = tuple[tuple[int, ...], DTypeLike]
"""Shape of one transition's value, and its type."""


class ReplayBuffer:
    """A ring of transitions of a number of environments that step together."""

    def __init__(
        self,
        spec: ObsSpec,
        action_shape: tuple[int, ...],
        action_dtype: DTypeLike,
        num_envs: int,
        capacity: int,
        extras: Mapping[str, Field] | None = None,
        *,
        seed: int,
    ) -> None:
        """Make room; memory is taken as rows are filled.

        Args:
            spec: what an observation holds.
            action_shape: (A,), or () for discrete actions.
            action_dtype: float32, or int64 for discrete actions.
            num_envs: environments that step together.
            capacity: transitions, of all environments together.
            extras: name -> (shape, type) of what else is kept of each transition.
            seed: of sampling.
        """
        if num_envs < 1 or capacity < 2 * num_envs:
            raise ConfigError(f"a buffer of {capacity} transitions is too small for {num_envs} environments")
        self.num_envs, self.num_rows = num_envs, capacity // num_envs
        obs: dict[str, Field] = {name: (shape, np.uint8) for name, shape in spec.images}
        if spec.state_size:
            obs[STATE] = ((spec.state_size,), np.float32)
        extras = dict(extras or {})
        taken = extras.keys() & {"actions", "env_rewards", "terminated", "truncated", "final_slot"}
        if taken:
            raise ConfigError(f"an extra of the replay buffer cannot be called {sorted(taken)[0]}")
        steps: dict[str, Field] = {
            "actions": (action_shape, action_dtype),
            "env_rewards": ((), np.float32),
            "terminated": ((), np.bool_),
            "truncated": ((), np.bool_),
            "final_slot": ((), np.int32),
            **extras,
        }
        self._extras = tuple(extras)
        self._obs = {name: self._ring(*each) for name, each in obs.items()}
        self._steps = {name: self._ring(*each) for name, each in steps.items()}
        self._finals = {name: np.empty((0, *shape), dtype) for name, (shape, dtype) in obs.items()}
        self._free: list[int] = []
        self._row = 0  # where the next step goes
        self._size = 0  # rows that are filled
        self._rng = np.random.default_rng(seed)

    def _ring(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return np.zeros((self.num_rows, self.num_envs, *shape), dtype)

    def __len__(self) -> int:
        """Transitions that are stored."""
        return self._size * self.num_envs

    @property
    def num_complete(self) -> int:
        """Transitions that can be sampled: those of the latest step only where their episode ended."""
        if not self._size:
            return 0
        latest = self._steps["final_slot"][(self._row - 1) % self.num_rows]
        return (self._size - 1) * self.num_envs + int((latest >= 0).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of a full ring and of the final observations so far."""
        arrays = (*self._obs.values(), *self._steps.values(), *self._finals.values())
        return sum(array.nbytes for array in arrays)

    def add(
        self,
        obs: Any,
        actions: NDArray[Any],
        env_rewards: NDArray[Any],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        final_obs: Any = None,
        **extras: NDArray[Any],
    ) -> None:
        """Add one step of all environments.

        Args:
            obs: in which the actions were chosen; a mapping or states, [num_envs, ...].
            actions: [num_envs, ...].
            env_rewards: [num_envs]; what the environment gave.
            terminated: bool [num_envs].
            truncated: bool [num_envs].
            final_obs: like `obs`, after the step; only the rows of ended episodes are read. The next `obs`
                of such an environment is the first one of its new episode.
            **extras: each [num_envs, ...].
        """
        parts = _parts(obs)
        values = {
            "actions": actions,
            "env_rewards": env_rewards,
            "terminated": terminated,
            "truncated": truncated,
            **extras,
        }
        self._check(parts, values)
        ended = np.flatnonzero(np.logical_or(terminated, truncated))
        finals = self._final_parts(final_obs) if len(ended) else {}
        row = self._row
        old = self._steps["final_slot"][row]
        if self._size == self.num_rows:
            self._free.extend(old[old >= 0].tolist())
        old[:] = -1
        for name, part in parts.items():
            self._obs[name][row] = part
        for name, value in values.items():
            self._steps[name][row] = value
        self._keep_finals(row, ended, finals)
        self._row = (row + 1) % self.num_rows
        self._size = min(self._size + 1, self.num_rows)

    def truncate_running_episodes(self, final_obs: Any, envs: slice = slice(None)) -> None:
        """The running episodes will not go on: mark the latest step as truncated, with what it led to.

        Args:
            final_obs: of all environments.
            envs: whose episodes are truncated; all by default.
        """
        if not self._size:
            return
        row = (self._row - 1) % self.num_rows
        running = np.flatnonzero(self._steps["final_slot"][row] < 0)
        running = running[np.isin(running, np.arange(self.num_envs)[envs])]
        self._steps["truncated"][row, running] = True
        self._keep_finals(row, running, self._final_parts(final_obs))

    def add_transitions(
        self,
        obs: Mapping[str, NDArray[Any]],
        values: Mapping[str, NDArray[Any]],
        next_obs: Mapping[str, NDArray[Any]],
    ) -> None:
        """Add M transitions that stand alone, each with what it led to; for a buffer of one environment.

        Args:
            obs: name -> [M, ...].
            values: `actions`, `env_rewards`, `terminated` and `truncated` (one of the two is true), [M, ...].
            next_obs: as `obs`.
        """
        assert self.num_envs == 1
        count = min(len(values["terminated"]), self.num_rows)  # the latest ones
        rows = (self._row + np.arange(count)) % self.num_rows
        slots = self._steps["final_slot"][:, 0]
        old = slots[rows[rows < self._size]]  # of rows that are filled
        self._free.extend(old[old >= 0].tolist())
        if len(self._free) < count:
            self._grow(count)
        slots[rows] = [self._free.pop() for _ in range(count)]
        for name, part in obs.items():
            self._obs[name][rows, 0] = part[len(part) - count :]
            self._finals[name][slots[rows]] = next_obs[name][len(part) - count :]
        for name, value in values.items():
            self._steps[name][rows, 0] = value[len(value) - count :]
        self._row = (self._row + count) % self.num_rows
        self._size = min(self._size + count, self.num_rows)

    def sample(self, batch_size: int, *, gamma: float, num_n_steps: int = 1) -> ReplayBatch:
        """Draw transitions with replacement, each that has a successor equally often.

        Args:
            batch_size: B.
            gamma: discount of a step.
            num_n_steps: n; a stretch is shorter where its episode ends or the data do.
        """
        latest = (self._row - 1) % self.num_rows
        slots = _flat(self._steps["final_slot"])
        whole = max(self._size - 1, 0) * self.num_envs  # all rows but the latest have a successor
        ended = np.flatnonzero(self._steps["final_slot"][latest] >= 0)
        if not self._size or whole + len(ended) == 0:
            raise DataError("the replay buffer has no complete transition to sample yet")
        drawn = self._rng.integers(whole + len(ended), size=batch_size)
        first = (self._row - self._size) % self.num_rows * self.num_envs
        size = self.num_rows * self.num_envs
        rows = (first + drawn) % size
        if len(ended):
            rows = np.where(
                drawn < whole, rows, latest * self.num_envs + ended[np.maximum(drawn - whole, 0) % len(ended)]
            )
        steps, mask = [rows], [np.ones(batch_size, np.float32)]
        for _ in range(num_n_steps - 1):
            last = steps[-1]
            after = (last + self.num_envs) % size
            # On while the episode runs, up to the latest row if that one has a successor.
            on = (slots[last] < 0) & ((after // self.num_envs != latest) | (slots[after] >= 0))
            mask.append(mask[-1] * on)
            steps.append(np.where(mask[-1] > 0, after, last))
        return self._batch(np.stack(steps, 1), np.stack(mask, 1), gamma)

    def _batch(self, rows: NDArray[np.int64], mask: NDArray[np.float32], gamma: float) -> ReplayBatch:
        first, last = rows[:, 0], rows[:, -1]
        after = (last + self.num_envs) % (self.num_rows * self.num_envs)
        slots = _flat(self._steps["final_slot"])[last]
        ended = np.flatnonzero(slots >= 0)
        next_obs = {name: _flat(ring).take(after, 0) for name, ring in self._obs.items()}
        if len(ended):
            for name, part in next_obs.items():
                part[ended] = self._finals[name][slots[ended]]

        def taken(name: str, where: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(_flat(self._steps[name]).take(where, 0))

        steps_mask = torch.from_numpy(mask)
        return ReplayBatch(
            obs={name: torch.from_numpy(_flat(ring).take(first, 0)) for name, ring in self._obs.items()},
            actions=taken("actions", first),
            env_rewards=taken("env_rewards", rows) * steps_mask,
            mask=steps_mask,
            next_obs={name: torch.from_numpy(part) for name, part in next_obs.items()},
            terminated=taken("terminated", last),
            truncated=taken("truncated", last),
            discount=torch.from_numpy(np.float32(gamma) ** mask.sum(1)),
            gamma=gamma,
            rows=rows,
            extras={name: taken(name, rows) for name in self._extras},
        )

    def _check(self, parts: Mapping[str, NDArray[Any]], values: Mapping[str, NDArray[Any]]) -> None:
        known = [name for name in self._steps if name != "final_slot"]
        if parts.keys() != self._obs.keys() or values.keys() != set(known):
            raise DataError(
                f"the step has {sorted((*parts, *values))}; the replay buffer keeps "
                f"{sorted((*self._obs, *known))}"
            )
        for arrays, rings in ((parts, self._obs), (values, self._steps)):
            for name, value in arrays.items():
                shape, wanted = np.shape(value), rings[name].shape[1:]
                if shape != wanted:
                    raise DataError(f"{name} has shape {list(shape)}; the replay buffer keeps {list(wanted)}")
                if rings[name].dtype == np.uint8 and value.dtype != np.uint8:  # a cast would wrap around
                    raise DataError(f"{name} is {value.dtype}; the replay buffer keeps images as uint8")

    def _final_parts(self, final_obs: Any) -> dict[str, NDArray[Any]]:
        if final_obs is None:
            raise DataError("an episode ended, but its final observation was not given")
        parts = _parts(final_obs)
        if parts.keys() != self._obs.keys():
            raise DataError(f"the final observation has {sorted(parts)}, not {sorted(self._obs)}")
        for name, part in parts.items():
            if part.shape != self._obs[name].shape[1:]:
                raise DataError(f"the final {name} has shape {list(part.shape)}, not that of the others")
        return parts

    def _keep_finals(self, row: int, envs: NDArray[np.int64], parts: Mapping[str, NDArray[Any]]) -> None:
        if not len(envs):
            return
        if len(self._free) < len(envs):
            self._grow(len(envs))
        slots = np.array([self._free.pop() for _ in envs], np.int32)
        self._steps["final_slot"][row, envs] = slots
        for name, part in parts.items():
            self._finals[name][slots] = part[envs]

    def _grow(self, needed: int) -> None:
        """More room for final observations, by a quarter at least."""
        have = len(next(iter(self._finals.values())))
        added = max(needed, have // 4, 16)
        for name, old in self._finals.items():
            self._finals[name] = np.concatenate([old, np.zeros((added, *old.shape[1:]), old.dtype)])
        self._free.extend(range(have + added - 1, have - 1, -1))

    # Saving; see `replay_files.py`

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Everything that later samples depend on, as a copy."""
        return {name: array.copy() for name, array in replay_files.arrays_of(self).items()}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a state of a buffer of the same shape: the same batches follow."""
        replay_files.restore(self, {name: array.copy() for name, array in state.items()})

    def save(self, path: Path) -> None:
        """Write everything that later samples depend on to a file, completely or not at all."""
        replay_files.save(self, path)

    def load(self, path: Path) -> None:
        """Go on from a file that `save` wrote for a buffer of the same shape: the same batches follow."""
        replay_files.load(self, path)


def _parts(obs: Any) -> dict[str, NDArray[Any]]:
    parts = obs if isinstance(obs, Mapping) else {STATE: obs}
    return {name: np.asarray(part) for name, part in parts.items()}


def _flat(ring: NDArray[Any]) -> NDArray[Any]:
    """[num_rows, num_envs, ...] -> [num_rows * num_envs, ...], the same memory."""
    return ring.reshape(-1, *ring.shape[2:])


class ReplayParts:
    """A ring holds environments that step together; here those of every worker have a ring of their own."""

    def __init__(
        self, parts: Sequence[ReplayBuffer], *, seed: int = 0, rng: np.random.Generator | None = None
    ) -> None:
        """Sample `parts` as one; `rng` is used instead of a generator of its own that begins with `seed`."""
        self.parts = list(parts)
        self.rng = np.random.default_rng(seed) if rng is None else rng
        """Shares a batch out among the parts; `save` leaves its state to the run's own."""

    def __len__(self) -> int:
        """Transitions that are stored."""
        return sum(len(part) for part in self.parts)

    def sample(self, batch_size: int, *, gamma: float, num_n_steps: int = 1) -> ReplayBatch:
        """Draw transitions with replacement, each of all parts equally often; see `ReplayBuffer.sample`."""
        if len(self.parts) == 1:
            return self.parts[0].sample(batch_size, gamma=gamma, num_n_steps=num_n_steps)
        sizes = np.array([part.num_complete for part in self.parts], np.float64)
        if not sizes.any():
            raise DataError("the replay buffer has no complete transition to sample yet")
        counts = self.rng.multinomial(batch_size, sizes / sizes.sum())
        return ReplayBatch.cat(
            [
                part.sample(int(count), gamma=gamma, num_n_steps=num_n_steps)
                for part, count in zip(self.parts, counts, strict=True)
                if count
            ]
        )

    def truncate_running_episodes(self, final_obs: Sequence[Any]) -> None:
        """The running episodes of all parts will not go on; `final_obs` are those of each part."""
        for part, obs in zip(self.parts, final_obs, strict=True):
            part.truncate_running_episodes(obs)

    def save(self, path: Path) -> None:
        """Write a file for each part; a single one is the file of a plain buffer."""
        for place, part in zip(self._places(path), self.parts, strict=True):
            part.save(place)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote with as many parts."""
        replay_files.check_layout(path, len(self.parts))
        for place, part in zip(self._places(path), self.parts, strict=True):
            part.load(place)

    def _places(self, path: Path) -> list[Path]:
        return replay_files.part_places(path, len(self.parts))
