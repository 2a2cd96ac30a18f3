"""Statistics of running episodes, and a record of each that ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.types import BoolArray, IntArray


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """What an episode came to."""

    env: int
    """The number of its environment."""
    env_return: float
    """Sum of its env rewards."""
    length: int
    """Steps."""
    success_once: bool
    """Success at any step."""
    success_at_end: bool
    """Success at the last step."""


class EpisodeTracker:
    """Follows the episodes of a number of environments.

    Attributes:
        records: of the episodes that ended since the last `pop`.
        lengths: int64 [N], steps of each running episode.
    """

    def __init__(self, num_envs: int) -> None:
        self.records: list[EpisodeRecord] = []
        self._num_envs = num_envs
        self.reset()

    def reset_envs(self, envs: slice) -> None:
        """Forget the running episodes of some environments."""
        self.lengths[envs], self._returns[envs], self._succeeded[envs] = 0, 0.0, False

    def reset(self) -> None:
        """Forget the running episodes."""
        self.lengths: IntArray = np.zeros(self._num_envs, np.int64)
        self._returns = np.zeros(self._num_envs, np.float64)
        self._succeeded: BoolArray = np.zeros(self._num_envs, np.bool_)

    def add(self, env_rewards: NDArray[Any], done: BoolArray, success: BoolArray) -> None:
        """One step: env rewards, whether episodes ended, whether the step led to success; [N] each."""
        self._returns += env_rewards
        self.lengths += 1
        self._succeeded |= success
        if not done.any():
            return
        for env in np.flatnonzero(done).tolist():
            self.records.append(
                EpisodeRecord(
                    env=env,
                    env_return=float(self._returns[env]),
                    length=int(self.lengths[env]),
                    success_once=bool(self._succeeded[env]),
                    success_at_end=bool(success[env]),
                )
            )
        self._returns[done], self.lengths[done], self._succeeded[done] = 0.0, 0, False

    def pop(self) -> list[EpisodeRecord]:
        """The records of all episodes that ended since the last call."""
        popped, self.records = self.records, []
        return popped
