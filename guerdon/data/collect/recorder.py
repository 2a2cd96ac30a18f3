"""The recording core under both collectors: steps of many environments in, finished episodes out.

Every environment fills a slot of a preallocated pool. When its episode ends the slot goes to the writer
thread as it is, without a copy, and the environment takes a free one; when none is free, stepping waits for
the disk (back-pressure, not growth). All that is not a frame shares one array of numbers, so that a step
costs one copy for each camera and one for the rest.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import BoolArray, Episode, FloatArray, IntArray, UInt8Array, is_positive
from guerdon.data.store.shard import SCALARS

STEP_FIELDS: Mapping[str, Any] = {
    **dict.fromkeys(("labels", "actions", "intended", "states"), np.float32),
    **SCALARS,
}
"""Field of an `Episode` with an entry for each step -> its type."""
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
        self._frames: dict[str, UInt8Array] = {}
        self._numbers: FloatArray = np.empty((0, 0, 0), np.float32)
        self._columns: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self._free: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._generation = 0
        self._slot: IntArray = np.full(num_envs, -1, np.int64)
        self._length: IntArray = np.zeros(num_envs, np.int64)
        self._initial: dict[int, FloatArray] = {}
        self._seeds: dict[int, int] = {}
        self.success_once: BoolArray = np.zeros(num_envs, np.bool_)
        """bool [num_envs]; set where a running episode succeeded in a frame that is not recorded."""

    def reset(
        self, env_ids: IntArray, initial_states: FloatArray | None, seeds: IntArray | None = None
    ) -> None:
        """Start new episodes: note the state each starts in ([n, S]) and its seed ([n])."""
        envs = env_ids.tolist()
        for env in envs:
            self._forget(env)
        if initial_states is not None:
            self._initial.update(zip(envs, np.array(initial_states, np.float32), strict=True))
        if seeds is not None:
            self._seeds.update(zip(envs, seeds.tolist(), strict=True))

    @property
    def lengths(self) -> IntArray:
        """How many steps each environment has recorded of its running episode, int [num_envs]."""
        return self._length

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
        values = {name: value for name, value in fields.items() if value is not None}
        values["labels"] = labels
        if not self._frames:
            self._allocate(frames, values)
        count = len(env_ids)
        if frames.keys() != self._frames.keys() or values.keys() != self._columns.keys():
            raise DataError(
                f"this step has {sorted((*frames, *values))}, earlier ones had "
                f"{sorted((*self._frames, *self._columns))}: cameras and fields must stay the same"
            )
        numbers = np.empty((count, self._numbers.shape[2]), np.float32)
        for name, value in values.items():
            columns, shape = self._columns[name]
            _expect(name, value, (count, *shape))
            numbers[:, columns] = value if shape else value[:, None]
        for name, images in frames.items():
            _expect(f"frames/{name}", images, (count, *self._frames[name].shape[2:]))
        slots, steps = self._places(env_ids)
        for name, images in frames.items():
            self._frames[name][slots, steps] = images
        self._numbers[slots, steps] = numbers
        self._length[env_ids] = steps + 1

    def _places(self, env_ids: IntArray) -> tuple[IntArray, IntArray]:
        """Where the next step of each environment goes: its slot and the row in it, int [n] each."""
        slots, steps = self._slot[env_ids], self._length[env_ids]
        if slots.min(initial=0) < 0:
            for env in env_ids[slots < 0].tolist():
                self._slot[env] = self._take_slot()
            slots = self._slot[env_ids]
        if steps.max(initial=0) >= self._capacity:
            self._grow()
            slots = self._slot[env_ids]
        return slots, steps

    def end(self, env: int, *, complete: bool = True) -> None:
        """The episode of `env` is over: hand it on and start with an empty slot."""
        steps, slot = int(self._length[env]), int(self._slot[env])
        seed, initial, once = self._seeds.get(env), self._initial.get(env), bool(self.success_once[env])
        self._forget(env)
        if steps == 0:
            return
        numbers = self._numbers[slot, :steps]
        fields: dict[str, Any] = {
            name: numbers[:, columns if shape else columns.start].astype(STEP_FIELDS[name], copy=False)
            for name, (columns, shape) in self._columns.items()
        }
        episode = Episode(
            frames={name: images[slot, :steps] for name, images in self._frames.items()},
            success=is_positive(fields["labels"], once),
            initial_state=initial,
            seed=seed,
            source=self.source,
            complete=complete,
            **fields,
        )
        self._slot[env], self._length[env] = -1, 0
        generation = self._generation
        self._on_episode(episode, lambda: self._free.put((generation, slot)))

    def truncate(self, env_ids: IntArray | None = None) -> int:
        """Hand on the running episodes (of `env_ids`), marked as incomplete; returns how many there were."""
        envs = np.arange(self.num_envs) if env_ids is None else env_ids
        running = envs[self._length[envs] > 0].tolist()
        for env in running:
            self.end(env, complete=False)
        return len(running)

    def drop(self, env: int) -> None:
        """Forget the running episode of `env`."""
        if self._slot[env] >= 0:
            self._free.put((self._generation, int(self._slot[env])))
        self._slot[env], self._length[env] = -1, 0
        self._forget(env)

    def _forget(self, env: int) -> None:
        self._initial.pop(env, None)
        self._seeds.pop(env, None)
        self.success_once[env] = False

    def _allocate(self, frames: Mapping[str, UInt8Array], values: Mapping[str, NDArray[Any]]) -> None:
        if not frames:
            raise DataError("a step without frames cannot be recorded: no camera was given")
        width = 0
        for name, value in values.items():
            shape = value.shape[1:]
            self._columns[name] = (slice(width, width + math.prod(shape)), shape)
            width += math.prod(shape)
        slot_bytes = self._capacity * (4 * width + sum(images[0].nbytes for images in frames.values()))
        spare = int(np.clip(POOL_BYTES // slot_bytes, 1, self.num_envs))
        count = self.num_envs + spare
        self._numbers = np.empty((count, self._capacity, width), np.float32)
        self._frames = {
            name: np.empty((count, self._capacity, *images.shape[1:]), np.uint8)
            for name, images in frames.items()
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
        count = len(self._numbers)

        def doubled(old: NDArray[Any]) -> NDArray[Any]:
            new = np.empty((count, 2 * self._capacity, *old.shape[2:]), old.dtype)
            new[: len(taken), : self._capacity] = old[self._slot[taken]]
            return new

        self._frames = {name: doubled(old) for name, old in self._frames.items()}
        self._numbers = doubled(self._numbers)
        self._capacity *= 2
        self._generation += 1
        self._slot[taken] = np.arange(len(taken))
        for slot in range(len(taken), count):
            self._free.put((self._generation, slot))


def _expect(name: str, value: NDArray[Any], shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise DataError(f"{name} has shape {list(value.shape)}; expected {list(shape)}")
