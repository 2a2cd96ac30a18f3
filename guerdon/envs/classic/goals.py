"""Goal-conditioned environments for learners of vectors: the three parts of an observation side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from guerdon.core.errors import ConfigError
from guerdon.core.types import BoolArray, FloatArray

GOAL_KEYS = ("observation", "achieved_goal", "desired_goal")
"""Of a goal-conditioned observation, as in gymnasium-robotics, in the order of the flat vector."""


def has_goals(space: Any) -> bool:
    """Whether observations of this space are goal-conditioned."""
    return isinstance(space, Dict) and set(space.spaces) == set(GOAL_KEYS)


class FlatGoals(VectorWrapper):
    """Observations [N, S + 2 * G] of a goal-conditioned vector environment."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        spaces = [env.single_observation_space[key] for key in GOAL_KEYS]  # type: ignore[index]
        low, high = (
            np.concatenate([getattr(each, side).ravel() for each in spaces]) for side in ("low", "high")
        )
        self.single_observation_space = Box(low.astype(np.float32), high.astype(np.float32))
        self.observation_space = batch_space(self.single_observation_space, env.num_envs)
        self.goal_size = int(np.prod(spaces[2].shape))

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes."""
        obs, info = self.env.reset(seed=seed, options=options)
        return flat_batch(obs), info

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step; final observations are flat too."""
        obs, env_rewards, terminated, truncated, info = self.env.step(actions)
        if info.get("final_obs") is not None:
            info = {**info, "final_obs": _flat_finals(info["final_obs"], self.num_envs)}
        return flat_batch(obs), env_rewards, terminated, truncated, info


def goal_rules(env: Any) -> tuple[Any, int]:
    """Who knows `compute_reward` among goal-conditioned vector environments, and the size of a goal."""
    while not isinstance(env, FlatGoals):
        if not isinstance(env, VectorWrapper):
            raise ConfigError(
                f"{env} is not goal-conditioned: its observations have no {', '.join(GOAL_KEYS)}"
            )
        env = env.env
    inner = env.unwrapped
    rules = inner if hasattr(inner, "compute_reward") else getattr(inner, "envs", [inner])[0].unwrapped
    if not hasattr(rules, "compute_reward"):
        raise ConfigError(f"{rules} has no compute_reward, which gives the rewards of other goals")
    return rules, env.goal_size


def flat_batch(obs: Any) -> FloatArray:
    """Parts [N, ...] -> float32 [N, S + 2 * G]."""
    parts = [np.asarray(obs[key], np.float32) for key in GOAL_KEYS]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def _flat_finals(finals: Any, num_envs: int) -> Any:
    """Batched parts as one array; Gymnasium's own object array of dicts, one by one."""
    if not isinstance(finals, np.ndarray):
        return flat_batch(finals)
    result = np.full(num_envs, None, object)
    there: BoolArray = np.array([each is not None for each in finals])
    for env in np.flatnonzero(there).tolist():
        one = {key: np.asarray(finals[env][key])[None] for key in GOAL_KEYS}
        result[env] = flat_batch(one)[0]
    return result
