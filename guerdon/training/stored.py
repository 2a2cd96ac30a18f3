"""Chunks in the replay buffer as the monitor sees them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.images import latest_frames
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.distributed.engine import Pending
from guerdon.monitoring.monitor import Watched
from guerdon.training.chunks import Chunk
from guerdon.training.feed import judged_row, looked_at
from guerdon.training.loop import feature_rows
from guerdon.training.reward_group import FramesLostError, RewardGroup

log = logging.getLogger("guerdon")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A chunk that was judged and stored; arrays are [K, n]."""

    rank: int
    """Of its env worker."""
    chunk: Chunk
    frames: Pending
    """Of the judged steps, wherever they are."""
    done: BoolArray
    prob_success: FloatArray
    """NaN where nothing was judged, 0 for a robot in motion if the model judges those at rest alone."""
    disagreement: FloatArray
    """NaN where nothing was looked at."""
    elapsed: IntArray
    """The step within its episode."""
    policy_lag: int
    """Updates between the weights that acted and those of the moment when it was stored."""
    queue_seconds: float
    """From the request to the buffer, without the time of acting."""
    reward_version: str | None
    """Of the reward model that judged it."""

    def value(self, name: str) -> NDArray[Any]:
        """One of the values of each step, [K, n]."""
        array: NDArray[Any] = getattr(self if hasattr(self, name) else self.chunk, name)
        return array


_NOTHING = {"prob_success": np.nan, "disagreement": np.nan, "done": False, "success": False, "elapsed": 1}
"""What stands where a worker has stored fewer steps than another: a step that means nothing."""


def watch(
    stored: Sequence[Stored],
    parts: Sequence[tuple[int, int]],
    rewards: RewardGroup,
    env_steps: int,
    knows_success: bool,
) -> Watched:
    """The chunks of all workers side by side, [T, N].

    Args:
        stored: in the order of storing.
        parts: (start, stop) of the environments of each worker.
        rewards: who judged.
        env_steps: of the run so far.
        knows_success: whether the environments tell success.
    """
    mine = [[item for item in stored if item.rank == rank] for rank in range(len(parts))]
    length = max(sum(len(item.chunk) for item in items) for items in mine)

    def joined(name: str) -> NDArray[Any]:
        values = np.full((length, parts[-1][1]), _NOTHING[name], stored[0].value(name).dtype)
        for (start, stop), items in zip(parts, mine, strict=True):
            if items:
                column = np.concatenate([item.value(name) for item in items])
                values[: len(column), start:stop] = column
        return values

    def frame(t: int, env: int) -> UInt8Array:
        rank = next(rank for rank, (_, stop) in enumerate(parts) if env < stop)
        start, stop = parts[rank]
        for item in mine[rank]:
            if t < len(item.chunk):
                row = judged_row(item.chunk.rows, t * (stop - start) + env - start, stop - start)
                frames: UInt8Array = item.frames.result()[rewards.facts.image_keys[0]]
                one: UInt8Array = latest_frames(frames[row : row + 1])[0]
                return one
            t -= len(item.chunk)
        raise IndexError(f"environment {env} has no stored step {t} in this iteration")

    return Watched(
        prob_success=looked_at(joined("prob_success"), joined("disagreement")),
        done=joined("done"),
        env_success=joined("success") if knows_success else None,
        elapsed=joined("elapsed"),
        disagreement=joined("disagreement") if rewards.facts.num_members > 1 else None,
        features=_features(stored, rewards, env_steps),
        frame=frame,
    )


def _features(stored: Sequence[Stored], rewards: RewardGroup, env_steps: int) -> FloatArray | None:
    """Of some of the judged frames, drawn from all chunks."""
    counts = [len(item.chunk.rows) for item in stored]
    if not sum(counts):
        return None
    picked = feature_rows(sum(counts), env_steps)
    edges = np.cumsum([0, *counts])
    rows = [picked[(picked >= low) & (picked < high)] - low for low, high in itertools.pairwise(edges)]
    try:
        return rewards.features([item.frames for item in stored], rows)
    except FramesLostError:
        log.warning("the frames of a lost machine are left out of the monitor's look at features")
        return None
