"""Which frames an epoch shows, and in which order: a function of seed and epoch, so that a run resumes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from guerdon.core.types import BoolArray, IntArray


@dataclass(frozen=True, kw_only=True)
class EpochSampler:
    """Draws new frames for each epoch, so that limits per episode lose no frame for good."""

    rows: IntArray
    """int [N], the frames to draw from."""
    positive: BoolArray
    """bool [N]."""
    episode: IntArray
    """int [N]."""
    num_samples_per_episode: int = 0
    """Frames drawn from each episode; 0: all."""
    fail_success_ratio: float | None = None
    """At most so many failure frames per success frame; None or 0: no limit."""
    seed: int = 0

    def epoch(self, number: int) -> IntArray:
        """The frames of epoch `number`, shuffled -> int [n]."""
        rng = np.random.default_rng([self.seed, number])
        picked = np.arange(len(self.rows))
        if self.num_samples_per_episode:
            picked = self._few_per_episode(rng)
        if self.fail_success_ratio:
            good, bad = picked[self.positive[picked]], picked[~self.positive[picked]]
            most = int(np.ceil(self.fail_success_ratio * len(good)))
            picked = np.concatenate([good, rng.permutation(bad)[:most]]) if len(good) else picked
        rows: IntArray = self.rows[rng.permutation(picked)]
        return rows

    def _few_per_episode(self, rng: np.random.Generator) -> IntArray:
        """Positions of a random few frames of each episode."""
        order = np.lexsort((rng.random(len(self.rows)), self.episode))
        episode = self.episode[order]
        first = np.flatnonzero(np.append(True, episode[1:] != episode[:-1]))
        rank = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
        return order[rank < self.num_samples_per_episode]


def global_batches(rows: IntArray, size: int, *, least: int = 1) -> Iterator[IntArray]:
    """Divide an epoch into batches of `size` frames; the last one may be smaller.

    What is left at the end, if it is less than `least`, belongs to the batch before it.
    """
    for start, stop in _parts(len(rows), size, least):
        yield rows[start:stop]


def _parts(count: int, size: int, least: int) -> list[tuple[int, int]]:
    """Where parts of `size` begin and end; a rest of less than `least` is joined to the last one."""
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] < least:
        starts.pop()
    return list(zip(starts, [*starts[1:], count], strict=True)) if starts else []


@dataclass(frozen=True, kw_only=True)
class Share:
    """The frames that one rank passes forward at once, and where they stand in the global batch."""

    rows: IntArray
    """int [n]; n may be 0 if the batch is smaller than the number of ranks."""
    positions: IntArray
    """int [n], their places in the global batch."""
    total: int
    """Frames of the global batch."""

    @classmethod
    def of(cls, rows: IntArray) -> Share:
        """A whole batch at once."""
        return cls(rows=rows, positions=np.arange(len(rows)), total=len(rows))


def shares(
    batch: IntArray, micro_size: int | None, *, rank: int = 0, world_size: int = 1, least: int = 1
) -> list[Share]:
    """The passes of one rank over a global batch, as many on every rank.

    Args:
        batch: int [n].
        micro_size: frames of one rank in a pass; None: all in one.
        rank: this one among `world_size`.
        world_size: how many share the batch; pass k of all ranks together is the k-th part of the batch.
        least: a last part of fewer frames belongs to the pass before it.
    """
    size = len(batch) if micro_size is None else micro_size * world_size
    everything = np.arange(len(batch))
    parts = [everything[start:stop][rank::world_size] for start, stop in _parts(len(batch), size, least)]
    return [Share(rows=batch[part], positions=part, total=len(batch)) for part in parts]
