"""Environments whose reward nobody can read unnoticed."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import VectorWrapper


class HiddenReward(VectorWrapper):
    """The env reward is NaN: a learner that reads it ends in an error."""

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As the environment steps, without its reward."""
        obs, env_rewards, terminated, truncated, info = self.env.step(actions)
        return obs, np.full_like(env_rewards, np.nan), terminated, truncated, info
