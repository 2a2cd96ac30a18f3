"""MiniGrid's observations (extra `minigrid`) as vectors that a perceptron learns from.

What the agent sees of a cell is three numbers that name kinds, not sizes: object, colour, state. They become
one-hot, and so does the direction; the mission's text is left out.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict

from guerdon.core.types import FloatArray

NUM_DIRECTIONS = 4


def sees_grid(space: Any) -> bool:
    """Whether observations of this space are those of MiniGrid."""
    return isinstance(space, Dict) and set(space.spaces) == {"image", "direction", "mission"}


class FlatGrid(gym.ObservationWrapper[Any, Any, Any]):
    """Observations float32 [height * width * kinds + 4], all 0 or 1."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX

        super().__init__(env)
        kinds = np.array([len(OBJECT_TO_IDX), len(COLOR_TO_IDX), len(STATE_TO_IDX)])
        height, width, _ = env.observation_space["image"].shape  # type: ignore[index]
        self._kinds, self._first = int(kinds.sum()), np.cumsum(kinds) - kinds
        self._cells = np.arange(height * width)[:, None] * self._kinds
        self._size = height * width * self._kinds
        self.observation_space = Box(0.0, 1.0, (self._size + NUM_DIRECTIONS,), np.float32)

    def observation(self, observation: Any) -> FloatArray:
        """The kinds of all cells, and where the agent looks."""
        flat: FloatArray = np.zeros(self._size + NUM_DIRECTIONS, np.float32)
        seen = np.asarray(observation["image"], np.int64).reshape(-1, 3)
        flat[self._cells + self._first + seen] = 1.0
        flat[self._size + int(observation["direction"])] = 1.0
        return flat


def flat_grid(env: gym.Env[Any, Any]) -> Any:
    """The environment with vectors as observations if it is one of MiniGrid's, otherwise as it is."""
    return FlatGrid(env) if sees_grid(env.observation_space) else env
