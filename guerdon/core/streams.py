"""Environments that step together, as an off-policy loop follows them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.batches import StepChunk
from guerdon.core.episodes import EpisodeRecord, EpisodeTracker
from guerdon.core.types import FloatArray, IntArray


@dataclass(eq=False)
class EnvStream:
    """Environments that step together: their replay buffer, their episodes, and what they were asked."""

    rank: int
    first_env: int
    num_envs: int
    replay: Any
    """Its `ReplayBuffer`."""
    episodes: EpisodeTracker
    obs: Any = None
    """Observations after the latest step that is stored."""
    stored_steps: int = 0
    """Steps since the last reset."""
    last_scores: dict[str, FloatArray] = field(default_factory=dict)
    """Of the latest stored step, float [n]; where scores are reused."""
    requests: deque[Any] = field(default_factory=deque)
    """Asynchronously: steps that were asked for and are not stored yet."""
    version: int | None = None
    """Asynchronously: of the weights that its worker was given last."""

    def reset(self, obs: Any) -> None:
        """Its episodes were reset, perhaps in a new process."""
        self.requests.clear()
        self.obs, self.stored_steps, self.version = obs, 0, None
        self.episodes.reset()

    def store(self, chunk: StepChunk, extras: Mapping[str, NDArray[Any]]) -> IntArray:
        """Add the steps one after another; returns the step within its episode of each, int64 [K, n]."""
        done = chunk.done
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
