"""What is kept of transitions: a ring of them, to learn from or to replay, and episodes that are running."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from guerdon.core.errors import DataError
from guerdon.rewards.steps import StepBatch


class Experience:
    """Flat transitions, the latest `capacity` of them; memory is taken as it is filled."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._ring: dict[str, Tensor] = {}
        self._next, self._size = 0, 0

    def __len__(self) -> int:
        return self._size

    def add(self, batch: StepBatch) -> None:
        """Take a copy of a flat batch; the oldest rows make room."""
        count = min(len(batch), self.capacity)
        if not count:
            return
        parts = batch[len(batch) - count :].parts()
        if not self._ring:
            self._ring = {
                name: part.new_empty((self.capacity, *part.shape[1:])) for name, part in parts.items()
            }
        if parts.keys() != self._ring.keys():
            different = sorted(parts.keys() ^ self._ring.keys())
            raise DataError(f"transitions with and without {', '.join(different)} cannot be kept together")
        room = self.capacity - self._next
        for name, part in parts.items():
            self._ring[name][self._next : self._next + count] = part[:room].detach()
            if count > room:
                self._ring[name][: count - room] = part[room:].detach()
        self._next = (self._next + count) % self.capacity
        self._size = min(self._size + count, self.capacity)

    @property
    def rows(self) -> StepBatch:
        """All of it, [N], in no particular order; a view that later additions change."""
        if not self._size:
            raise DataError("there is no experience yet")
        return StepBatch(**{name: part[: self._size] for name, part in self._ring.items()})

    def sample(self, count: int, generator: torch.Generator) -> StepBatch:
        """`count` rows, drawn with replacement; copies."""
        return StepBatch(
            **dict(zip(self._ring, self.sample_parts(count, generator, *self._ring), strict=True))
        )

    def sample_parts(self, count: int, generator: torch.Generator, *names: str) -> list[Tensor]:
        """These parts of `count` rows, drawn with replacement; copies."""
        if not self._size:
            raise DataError("there is no experience yet")
        picked = torch.randint(self._size, (count,), generator=generator)
        return [self._ring[name].index_select(0, picked.to(self._ring[name].device)) for name in names]

    def clear(self) -> None:
        """Forget everything."""
        self._next, self._size = 0, 0

    def to(self, device: torch.device) -> Experience:
        """Move to another device; returns itself."""
        self._ring = {name: part.to(device) for name, part in self._ring.items()}
        return self

    def state_dict(self) -> dict[str, Any]:
        """A copy of what is there."""
        parts = {name: part[: self._size].clone() for name, part in self._ring.items()} if self._size else {}
        return {"parts": parts, "next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.clear()
        if state["parts"]:
            self.add(StepBatch(**state["parts"]))
        self._next = int(state["next"])


class RunningEpisodes:
    """Puts the episodes of N streams together again that come in pieces."""

    def __init__(self, num_streams: int) -> None:
        self._running: list[list[StepBatch]] = [[] for _ in range(num_streams)]

    def add(self, streams: StepBatch) -> list[StepBatch]:
        """Take the next steps, [T, N]; returns the episodes that are finished by them, [T] each."""
        finished: list[StepBatch] = []
        for env, running in enumerate(self._running):
            *ended, rest = streams.stream(env).pieces()
            for piece in ended:
                finished.append(StepBatch.cat([*running, piece]))
                running.clear()
            if len(rest):
                running.append(rest)
        return finished
