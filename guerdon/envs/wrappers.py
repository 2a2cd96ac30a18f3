"""Wrappers: dict observations as vectors, final frames that outlive a reset, a hidden env reward."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from guerdon.core.errors import ConfigError
from guerdon.core.types import BoolArray, FloatArray
from guerdon.envs.observations import FINAL_FRAME

NUM_DIRECTIONS = 4
"""In which MiniGrid's agent can look."""
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
        """Start new episodes."""
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


class FlatGrid(gym.ObservationWrapper[Any, Any, Any], RecordConstructorArgs):
    """MiniGrid's observations (extra `minigrid`) as vectors float32 [height * width * kinds + 4], all 0 or 1.

    What the agent sees of a cell is three numbers that name kinds, not sizes: object, colour, state. They
    become one-hot, and so does the direction; the mission's text is left out.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX

        RecordConstructorArgs.__init__(self)
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


def flatten_grid(env: gym.Env[Any, Any]) -> Any:
    """The environment with vectors as observations if it is one of MiniGrid's, otherwise as it is."""
    space = env.observation_space
    is_grid = isinstance(space, Dict) and set(space.spaces) == {"image", "direction", "mission"}
    return FlatGrid(env) if is_grid else env


class KeepFinalFrame(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Renders the end of an episode before a vector environment resets it away.

    The frame is in `info["final_frame"]` and in the attribute `final_frame`. Needed around each environment
    of a batch that resets in the same step (also in Stable-Baselines3) and whose observations hold no images;
    make it with render_mode="rgb_array".
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        RecordConstructorArgs.__init__(self)
        super().__init__(env)
        self.metadata = {**env.metadata, FINAL_FRAME: True}
        self.final_frame: Any = None
        """What `render()` showed at the end of the last episode."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; render if the episode is over."""
        obs, env_reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            self.final_frame = self.env.render()
            info = {**info, FINAL_FRAME: self.final_frame}
        return obs, env_reward, terminated, truncated, info


def keep_final_frame(env: gym.Env[Any, Any]) -> Any:
    """`KeepFinalFrame` around an environment that renders images; others as they are."""
    return KeepFinalFrame(env) if env.render_mode == "rgb_array" else env


class NanReward(VectorWrapper):
    """The env reward is NaN: a learner that reads it ends in an error."""

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As the environment steps, without its reward."""
        obs, env_rewards, terminated, truncated, info = self.env.step(actions)
        return obs, np.full_like(env_rewards, np.nan), terminated, truncated, info
