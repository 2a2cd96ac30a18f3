"""The recording core under both collectors: steps of many environments in, finished episodes out.

Every environment fills a slot of a preallocated pool. When its episode ends the slot goes to the writer
thread as it is, without a copy, and the environment takes a free one; when none is free, stepping waits for
the disk (back-pressure, not growth).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.errors import DataError
from guerdon.types import Episode, FloatArray, IntArray, UInt8Array, is_positive

STEP_FIELDS: Mapping[str, Any] = {
    "labels": np.float32,
    "actions": np.float32,
    "states": np.float32,
    "env_rewards": np.float32,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "is_grasped": np.bool_,
}
POOL_BYTES = 1 << 30
"""Spare slots are allotted only as far as they fit in this many bytes."""


class EpisodeRecorder:
    """Buffers for a number of environments; calls `on_episode` with each episode and its release function."""

    def __init__(
        self,
        num_envs: int,
        on_episode: Callable[[Episode, Callable[[], None]], None],
        *,
        capacity: int = 64,
        source: str = "",
    ) -> None:
        """Make room for `num_envs` environments.

        Args:
            num_envs: how many environments are recorded.
            on_episode: receives every ended episode; its arrays stay valid until the function is called
                that it receives beside it.
            capacity: expected number of steps of an episode; longer ones make the pool grow.
            source: stored with every episode.
        """
        self.num_envs = num_envs
        self.source = source
        self._on_episode = on_episode
        self._capacity = capacity
        self._pool: dict[str, NDArray[Any]] = {}
        self._cameras: tuple[str, ...] = ()
        self._free: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._generation = 0
        self._slot: IntArray = np.full(num_envs, -1, np.int64)
        self._length: IntArray = np.zeros(num_envs, np.int64)
        self._initial: dict[int, FloatArray] = {}
        self._seeds: dict[int, int] = {}

    def begin(
        self, env_ids: IntArray, initial_states: FloatArray | None, seeds: IntArray | None = None
    ) -> None:
        """Start new episodes: note the state each starts in ([n, S]) and its seed ([n])."""
        for position, env in enumerate(env_ids.tolist()):
            if initial_states is not None:
                self._initial[env] = np.array(initial_states[position], np.float32)
            if seeds is not None:
                self._seeds[env] = int(seeds[position])

    def length(self, env: int) -> int:
        """How many steps environment `env` has recorded of its running episode."""
        return int(self._length[env])

    def record(
        self,
        env_ids: IntArray,
        frames: Mapping[str, UInt8Array],
        labels: NDArray[Any],
        **fields: NDArray[Any] | None,
    ) -> None:
        """Add one step of the environments `env_ids` (int [n]).

        Args:
            env_ids: which environments stepped.
            frames: camera -> uint8 [n, H, W, C].
            labels: [n], success of each frame.
            **fields: any of `STEP_FIELDS`, each [n] or [n, size]; the same ones at every step.
        """
        values: dict[str, NDArray[Any]] = {f"frames/{name}": images for name, images in frames.items()}
        values["labels"] = np.asarray(labels, np.float32)
        for name, value in fields.items():
            if value is not None:
                values[name] = np.asarray(value, STEP_FIELDS[name])
        if not self._pool:
            self._allocate(values)
        self._check_shapes(values, len(env_ids))
        fresh = env_ids[self._slot[env_ids] < 0]
        for env in fresh.tolist():
            self._slot[env] = self._take_slot()
        if int(self._length[env_ids].max(initial=0)) >= self._capacity:
            self._grow()
        slots, steps = self._slot[env_ids], self._length[env_ids]
        for name, value in values.items():
            self._pool[name][slots, steps] = value
        self._length[env_ids] += 1

    def _check_shapes(self, values: Mapping[str, NDArray[Any]], count: int) -> None:
        if values.keys() != self._pool.keys():
            raise DataError(
                f"this step has {sorted(values)}, earlier ones had {sorted(self._pool)}: cameras and fields "
                "must stay the same"
            )
        for name, value in values.items():
            wanted = (count, *self._pool[name].shape[2:])
            if value.shape != wanted:
                raise DataError(f"{name} has shape {list(value.shape)}; expected {list(wanted)}")

    def end(self, env: int, *, success_once: bool = False, complete: bool = True) -> None:
        """The episode of `env` is over: hand it on and start with an empty slot."""
        steps, slot = int(self._length[env]), int(self._slot[env])
        seed, initial = self._seeds.pop(env, None), self._initial.pop(env, None)
        if steps == 0:
            return
        cut = {name: array[slot, :steps] for name, array in self._pool.items()}
        frames = {name: cut.pop(f"frames/{name}") for name in self._cameras}
        fields: dict[str, Any] = cut
        episode = Episode(
            frames=frames,
            success=is_positive(cut["labels"], success_once),
            initial_state=initial,
            seed=seed,
            source=self.source,
            complete=complete,
            **fields,
        )
        self._slot[env], self._length[env] = -1, 0
        generation = self._generation
        self._on_episode(episode, lambda: self._free.put((generation, slot)))

    def end_all_unfinished(self) -> int:
        """Hand on what is still running, marked as incomplete; returns how many episodes that were."""
        running = np.flatnonzero(self._length > 0)
        for env in running.tolist():
            self.end(env, complete=False)
        return len(running)

    def drop(self, env: int) -> None:
        """Forget the running episode of `env`."""
        if self._slot[env] >= 0:
            self._free.put((self._generation, int(self._slot[env])))
        self._slot[env], self._length[env] = -1, 0
        self._initial.pop(env, None)
        self._seeds.pop(env, None)

    def _allocate(self, values: Mapping[str, NDArray[Any]]) -> None:
        self._cameras = tuple(name.removeprefix("frames/") for name in values if name.startswith("frames/"))
        if not self._cameras:
            raise DataError("a step without frames cannot be recorded: no camera was given")
        slot_bytes = self._capacity * sum(value[0].nbytes for value in values.values())
        spare = int(np.clip(POOL_BYTES // slot_bytes, 1, self.num_envs))
        count = self.num_envs + spare
        self._pool = {
            name: np.empty((count, self._capacity, *value.shape[1:]), value.dtype)
            for name, value in values.items()
        }
        for slot in range(count):
            self._free.put((self._generation, slot))

    def _take_slot(self) -> int:
        while True:
            generation, slot = self._free.get()
            if generation == self._generation:
                return slot

    def _grow(self) -> None:
        """Double the capacity; slots that the writer holds stay valid, since it holds the old arrays."""
        taken = np.flatnonzero(self._slot >= 0)
        count = len(next(iter(self._pool.values())))
        for name, old in self._pool.items():
            self._pool[name] = np.empty((count, 2 * self._capacity, *old.shape[2:]), old.dtype)
            self._pool[name][: len(taken), : self._capacity] = old[self._slot[taken]]
        self._capacity *= 2
        self._generation += 1
        self._slot[taken] = np.arange(len(taken))
        for slot in range(len(taken), count):
            self._free.put((self._generation, slot))
