"""What the learner of an asynchronous run knows of its env workers: what they were asked, what came of it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.agents.episodes import EpisodeRecord, EpisodeTracker
from guerdon.agents.replay import ReplayBuffer
from guerdon.core.types import BoolArray, IntArray
from guerdon.distributed.engine import Pending
from guerdon.training.chunks import Chunk
from guerdon.training.reward_group import Judging


@dataclass(eq=False)
class Request:
    """Steps that an env worker was asked for and that are not stored yet."""

    num_steps: int
    version: int
    """Of the weights that act."""
    answer: Pending
    frames: Pending
    began: float = field(default_factory=time.monotonic)
    chunk: Chunk | None = None
    """The answer, once it is here ..."""
    judging: Judging | None = None
    """... and the verdicts on its frames; None where nothing is judged."""

    @property
    def is_whole(self) -> bool:
        """Whether it can be stored."""
        return self.chunk is not None and (self.judging is None or self.judging.done)


@dataclass(eq=False)
class Outpost:
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

    def begin(self, obs: Any) -> None:
        """Its episodes have begun anew, perhaps in a new process."""
        self.requests.clear()
        self.obs, self.stored_steps, self.version = obs, 0, None
        self.episodes.reset()

    def store(self, chunk: Chunk, done: BoolArray, extras: dict[str, NDArray[Any]]) -> IntArray:
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
                chunk.reached.get(t),
                **{name: values[t] for name, values in extras.items()},
            )
        self.obs = chunk.last_obs
        self.stored_steps += len(chunk)
        return elapsed

    def records(self) -> list[EpisodeRecord]:
        """Episodes that ended, numbered over all workers."""
        return [replace(record, env=record.env + self.first_env) for record in self.episodes.pop()]
