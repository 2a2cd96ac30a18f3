"""What the learner of an asynchronous run knows of its env workers: what they were asked, what came of it."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.agents.episodes import EpisodeRecord, EpisodeTracker
from guerdon.agents.replay import ReplayBuffer
from guerdon.core.images import latest_frames
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.distributed.engine import Pending
from guerdon.monitoring.monitor import Watched
from guerdon.training.acting import StepChunk
from guerdon.training.loop import feature_rows, frame_row, scored_frames_only
from guerdon.training.reward_workers import FramesLostError, PendingScores, RewardWorkers


@dataclass(eq=False)
class Request:
    """Steps that an env worker was asked for and that are not stored yet."""

    num_steps: int
    version: int
    """Of the weights that act."""
    answer: Pending
    frames: Pending
    began: float = field(default_factory=time.monotonic)
    chunk: StepChunk | None = None
    """The answer, once it is here ..."""
    scores: PendingScores | None = None
    """... and the verdicts on its frames; None where nothing is judged."""

    @property
    def is_whole(self) -> bool:
        """Whether it can be stored."""
        return self.chunk is not None and (self.scores is None or self.scores.done)


@dataclass(eq=False)
class WorkerState:
    """What the learner knows of an env worker."""

    rank: int
    first_env: int
    num_envs: int
    replay: ReplayBuffer
    episodes: EpisodeTracker
    requests: deque[Request] = field(default_factory=deque)
    version: int | None = None
    """Of the weights that it was given last."""
    obs: Any = None
    """Observations after the latest step that is stored."""
    stored_steps: int = 0
    """Steps of its environments since their episodes were begun from here."""

    def reset(self, obs: Any) -> None:
        """Its episodes were reset, perhaps in a new process."""
        self.requests.clear()
        self.obs, self.stored_steps, self.version = obs, 0, None
        self.episodes.reset()

    def store(self, chunk: StepChunk, done: BoolArray, extras: dict[str, NDArray[Any]]) -> IntArray:
        """Add the steps one after another; returns the step within its episode of each, int64 [K, n]."""
        elapsed = np.empty(done.shape, np.int64)
        for t in range(len(chunk)):
            elapsed[t] = self.episodes.lengths
            self.episodes.add(chunk.env_rewards[t], done[t], chunk.success[t])
            self.replay.add(
                chunk.obs_at(t),
                chunk.actions[t],
                chunk.env_rewards[t],
                chunk.terminated[t],
                chunk.truncated[t],
                chunk.final_obs.get(t),
                **{name: values[t] for name, values in extras.items()},
            )
        self.obs = chunk.last_obs
        self.stored_steps += len(chunk)
        return elapsed

    def records(self) -> list[EpisodeRecord]:
        """Episodes that ended, numbered over all workers."""
        return [replace(record, env=record.env + self.first_env) for record in self.episodes.pop()]


log = logging.getLogger("guerdon")


@dataclass(frozen=True, kw_only=True)
class StoredChunk:
    """A chunk that was judged and stored; arrays are [K, n]."""

    rank: int
    """Of its env worker."""
    chunk: StepChunk
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
    stored: Sequence[StoredChunk],
    parts: Sequence[tuple[int, int]],
    rewards: RewardWorkers,
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
                row = frame_row(item.chunk.rows, t * (stop - start) + env - start, stop - start)
                frames: UInt8Array = item.frames.result()[rewards.facts.image_keys[0]]
                one: UInt8Array = latest_frames(frames[row : row + 1])[0]
                return one
            t -= len(item.chunk)
        raise IndexError(f"environment {env} has no stored step {t} in this iteration")

    return Watched(
        prob_success=scored_frames_only(joined("prob_success"), joined("disagreement")),
        done=joined("done"),
        env_success=joined("success") if knows_success else None,
        elapsed=joined("elapsed"),
        disagreement=joined("disagreement") if rewards.facts.num_members > 1 else None,
        features=_features(stored, rewards, env_steps),
        frame=frame,
    )


def _features(stored: Sequence[StoredChunk], rewards: RewardWorkers, env_steps: int) -> FloatArray | None:
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
