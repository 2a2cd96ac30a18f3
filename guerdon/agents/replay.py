"""Replay: what was experienced, stored once, and sampled as the learners need it.

Rows form a ring [num_rows, num_envs]. An observation is stored once: what follows row t is the observation of
row t + 1, and only where an episode ended is its final observation kept beside, in a store that grows as
needed. `env_rewards` are what the environment gave and are never overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from guerdon.agents.batches import ReplayBatch, TrainBatch, n_step_return
from guerdon.agents.networks import STATE, ObsSpec
from guerdon.core.atomic import write_atomic
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line
from guerdon.data.files.checksums import load_npz

__all__ = ["ReplayBatch", "ReplayBuffer", "TrainBatch", "n_step_return"]

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
        """StepBatch that are stored."""
        return self._size * self.num_envs

    @property
    def num_complete(self) -> int:
        """StepBatch that can be sampled: those of the latest step only where their episode ended."""
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

    def cut(self, final_obs: Any, envs: slice = slice(None)) -> None:
        """The running episodes will not go on: mark the latest step as truncated, with what it led to.

        Args:
            final_obs: of all environments.
            envs: whose episodes are cut off; all by default.
        """
        if not self._size:
            return
        row = (self._row - 1) % self.num_rows
        running = np.flatnonzero(self._steps["final_slot"][row] < 0)
        running = running[np.isin(running, np.arange(self.num_envs)[envs])]
        self._steps["truncated"][row, running] = True
        self._keep_finals(row, running, self._final_parts(final_obs))

    def write_extra(self, name: str, rows: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Replace what is kept under `name` at `rows`, as a batch gave them."""
        if name not in self._extras:
            raise DataError(f"the replay buffer keeps no {name}; it keeps {list(self._extras)}")
        _flat(self._steps[name])[rows] = values

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

    def _state(self) -> dict[str, NDArray[Any]]:
        """All arrays by name, not copied; rows that were never filled are left out."""
        rings = {f"obs/{name}": ring for name, ring in self._obs.items()}
        rings |= {f"step/{name}": ring for name, ring in self._steps.items()}
        arrays = {name: ring[: self._size] for name, ring in rings.items()}
        arrays |= {f"final/{name}": store for name, store in self._finals.items()}
        arrays["free"] = np.array(self._free, np.int64)
        place = {"row": self._row, "size": self._size, "num_rows": self.num_rows, "num_envs": self.num_envs}
        arrays["meta"] = np.array(json.dumps({**place, "rng": self._rng.bit_generator.state}))
        return arrays

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Everything that later samples depend on, as a copy."""
        return {name: array.copy() for name, array in self._state().items()}

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go on from a state of a buffer of the same shape: the same batches follow."""
        self._restore({name: array.copy() for name, array in state.items()})

    def _restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take over a state; full rings are adopted, not copied: they may fill most of the memory."""
        own = self._state()
        if state.keys() != own.keys():
            raise DataError(f"the replay buffer keeps {sorted(own)}, the saved one {sorted(state)}")
        meta = json.loads(str(state["meta"]))
        if (meta["num_rows"], meta["num_envs"]) != (self.num_rows, self.num_envs):
            raise DataError(
                f"the saved replay buffer has {meta['num_rows']} rows of {meta['num_envs']} environments, "
                f"this one {self.num_rows} of {self.num_envs}: "
                "resume with the env.train.num_envs and the buffer_size that it was saved with"
            )
        for name, array in own.items():
            if state[name].dtype != array.dtype and name != "meta":
                raise DataError(f"{name} of the saved buffer is {state[name].dtype}, not {array.dtype}")
            if state[name].shape[1:] != array.shape[1:]:
                raise DataError(f"{name} of the saved buffer has shape {list(state[name].shape)}")
        row, size = int(meta["row"]), int(meta["size"])
        if not (0 <= row < self.num_rows and 0 <= size <= self.num_rows):
            raise DataError(f"the saved replay buffer claims to be at row {row} with {size} filled")
        self._row, self._size = row, size
        for kind, rings in (("obs", self._obs), ("step", self._steps)):
            for name, ring in rings.items():
                saved = state[f"{kind}/{name}"]
                if len(saved) == self.num_rows:
                    rings[name] = saved
                else:
                    ring[: len(saved)] = saved
        self._finals = {name: state[f"final/{name}"] for name in self._finals}
        self._free = state["free"].tolist()
        self._rng.bit_generator.state = meta["rng"]

    def save(self, path: Path) -> None:
        """Write the state to a file, completely or not at all."""
        write_atomic(path, lambda file: np.savez(file, allow_pickle=False, **self._state()))

    def load(self, path: Path) -> None:
        """Go on from a file that `save` wrote."""
        try:
            state = load_npz(path)
        except DataError as error:
            raise DataError(f"cannot read the replay buffer {error}") from error
        try:
            self._restore(state)
        except DataError:
            raise
        except Exception as error:  # hostile bytes can fail in any way
            shown = display_path(path)
            raise DataError(f"cannot use the replay buffer {shown}: {one_line(error)}") from error


def _parts(obs: Any) -> dict[str, NDArray[Any]]:
    parts = obs if isinstance(obs, Mapping) else {STATE: obs}
    return {name: np.asarray(part) for name, part in parts.items()}


def _flat(ring: NDArray[Any]) -> NDArray[Any]:
    """[num_rows, num_envs, ...] -> [num_rows * num_envs, ...], the same memory."""
    return ring.reshape(-1, *ring.shape[2:])
