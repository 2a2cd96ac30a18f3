"""Small tasks on which a learned reward is proved: batched, without informative endings.

In ordinary CartPole an episode ends when the pole falls, so that its length gives success away: a policy can
learn from a reward of zero. Here every episode has the same length, whatever happens in it.

- `guerdon/FixedCartPole-v0`: balance a pole for 200 steps; a pole that fell stays where it fell.
- `guerdon/PointReach-v0`: push a point to the middle and hold it there (real-valued actions); it can be seen.
- `guerdon/DeepSea-v0`: dive to the right in every row; any other path pays nothing (exploration).
- `guerdon/BitFlip-v0`, `guerdon/PointGoal-v0`: reach a goal that each episode chooses (goal-conditioned).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from guerdon.core.errors import ConfigError
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array

Obs = Any
POINT_BOUND: FloatArray = np.array([2.0, 2.0, 1.0, 1.0], np.float32)
"""Of a point's place and speed, along x and y each."""
CAMERA, CAMERA_SIZE, CAMERA_VIEW = "base_camera", 16, 1.25
"""The camera above PointReach's plane: its name, the side of its pictures in pixels, how far out it sees."""


class FixedLengthVectorEnv(VectorEnv[Any, Any, Any], ABC):
    """N episodes of one length that start and end together, with auto-reset in the same step."""

    metadata = {  # noqa: RUF012 - as Gymnasium declares it
        "autoreset_mode": AutoresetMode.SAME_STEP,
        "render_modes": [],
    }
    horizon: int
    terminates: bool = False
    """Whether nothing comes after the last step; otherwise episodes are truncated there."""
    _last_obs: Obs
    """What the last actions led to, also where the episodes are over by now."""

    def __init__(
        self,
        num_envs: int,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        horizon: int,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
    ) -> None:
        if AutoresetMode(autoreset_mode) != AutoresetMode.SAME_STEP:
            raise ConfigError(f"{type(self).__name__} resets in the same step, not with {autoreset_mode}")
        if num_envs < 1 or horizon < 1:
            raise ConfigError(f"num_envs and horizon must be at least 1, not {num_envs} and {horizon}")
        self.num_envs, self.horizon = num_envs, horizon
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self.observation_space = batch_space(observation_space, num_envs)
        self.action_space = batch_space(action_space, num_envs)
        self._elapsed = 0
        self._rng = np.random.default_rng()

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        """Start new episodes; one generator draws for all of them."""
        if seed is not None:
            first = seed if isinstance(seed, int) else next((each for each in seed if each is not None), None)
            self._rng = np.random.default_rng(first)
        self._elapsed = 0
        self._start()
        self._last_obs = self._observe()
        return self._observe(), {}

    def step(self, actions: Any) -> tuple[Obs, FloatArray, BoolArray, BoolArray, dict[str, Any]]:
        """One step of all; at the horizon all episodes end and new ones start."""
        env_rewards, info = self._advance(np.asarray(actions))
        self._elapsed += 1
        over = self._elapsed >= self.horizon
        done: BoolArray = np.full(self.num_envs, over)
        obs = self._last_obs = self._observe()
        if over:
            info = {**info, "final_obs": obs, "_final_obs": done.copy(), "final_info": info}
            self._elapsed = 0
            self._start()
            obs = self._observe()
        never: BoolArray = np.zeros(self.num_envs, np.bool_)
        terminated, truncated = (done, never) if self.terminates else (never, done)
        return obs, env_rewards.astype(np.float32), terminated, truncated, info

    @abstractmethod
    def _start(self) -> None:
        """Draw the first states of all."""

    @abstractmethod
    def _observe(self) -> Obs:
        """What all of them show."""

    @abstractmethod
    def _advance(self, actions: NDArray[Any]) -> tuple[NDArray[Any], dict[str, Any]]:
        """One step: the environment's rewards [N] and infos."""


class FixedCartPole(FixedLengthVectorEnv):
    """CartPole's mechanics (Barto et al., 1983); 1 for each step on which the pole stands within bounds."""

    def __init__(self, num_envs: int = 1, horizon: int = 200, **kwargs: Any) -> None:
        bound = np.array([4.8, 10.0, 0.84, 10.0], np.float32)
        super().__init__(num_envs, Box(-bound, bound), Discrete(2), horizon, **kwargs)

    def _start(self) -> None:
        self._state = self._rng.uniform(-0.05, 0.05, (self.num_envs, 4))

    def _observe(self) -> FloatArray:
        return self._state.astype(np.float32)

    def _advance(self, actions: NDArray[Any]) -> tuple[NDArray[Any], dict[str, Any]]:
        before = self._standing()
        x, speed, angle, turn = self._state.T
        force = np.where(actions == 1, 10.0, -10.0)
        sine, cosine = np.sin(angle), np.cos(angle)
        push = (force + 0.05 * turn**2 * sine) / 1.1  # pole: mass 0.1, half length 0.5; cart: mass 1
        turning = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3.0 - 0.1 * cosine**2 / 1.1))
        pushing = push - 0.05 * turning * cosine / 1.1
        after = np.stack(
            [x + 0.02 * speed, speed + 0.02 * pushing, angle + 0.02 * turn, turn + 0.02 * turning], axis=1
        )
        self._state = np.where(before[:, None], after, self._state)  # what fell stays where it fell
        standing = self._standing()
        return standing.astype(np.float32), {"success": standing}

    def _standing(self) -> BoolArray:
        up: BoolArray = (np.abs(self._state[:, 0]) <= 2.4) & (np.abs(self._state[:, 2]) <= np.deg2rad(12.0))
        return up


class PointReach(FixedLengthVectorEnv):
    """A point with inertia on a plane; the reward is 1 at the middle and falls with the distance.

    Observations are places and speeds; pictures, of places alone, are made when they are asked for.
    """

    def __init__(self, num_envs: int = 1, horizon: int = 50, **kwargs: Any) -> None:
        action = Box(-1.0, 1.0, (2,), np.float32)
        super().__init__(num_envs, Box(-POINT_BOUND, POINT_BOUND), action, horizon, **kwargs)

    def _start(self) -> None:
        turn = self._rng.uniform(0.0, 2.0 * np.pi, self.num_envs)
        far = self._rng.uniform(0.6, 1.0, self.num_envs)
        self._place = np.stack([far * np.cos(turn), far * np.sin(turn)], 1)
        self._speed = np.zeros((self.num_envs, 2))

    def _observe(self) -> FloatArray:
        return np.concatenate([self._place, self._speed], 1).astype(np.float32)

    def _advance(self, actions: NDArray[Any]) -> tuple[NDArray[Any], dict[str, Any]]:
        self._place, self._speed = _push(self._place, self._speed, actions)
        distance = np.linalg.norm(self._place, axis=1)
        return np.exp(-4.0 * distance), {"success": distance < 0.1}

    def state(self) -> FloatArray:
        """Present places and speeds, float32 [N, 4]."""
        return self._observe()

    def final_state(self) -> FloatArray:
        """Those that the last actions led to, float32 [N, 4]."""
        final: FloatArray = self._last_obs
        return final

    def render_frames(
        self, camera: str, env_ids: IntArray | None = None, *, final: bool = False
    ) -> UInt8Array:
        """Pictures of the environments `env_ids`, uint8 [n, 16, 16, 3]; see `from_above`."""
        if camera != CAMERA:
            raise ConfigError(f"PointReach has no camera {camera!r}, only {CAMERA!r}")
        state = self.final_state() if final else self.state()
        return from_above(state[slice(None) if env_ids is None else env_ids, :2])


def _push(
    place: NDArray[Any], speed: NDArray[Any], actions: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Places and speeds of points with inertia, [N, 2] each, after a push by `actions` [N, 2]."""
    speed = np.clip(0.8 * speed + 0.05 * np.clip(actions, -1.0, 1.0), -1.0, 1.0)
    return np.clip(place + speed, -2.0, 2.0), speed


def from_above(places: FloatArray) -> UInt8Array:
    """Pictures of points on the plane, [n, 2] -> uint8 [n, 16, 16, 3]: red spots, the middle green."""
    pixels = (np.arange(CAMERA_SIZE) + 0.5) / CAMERA_SIZE * 2.0 * CAMERA_VIEW - CAMERA_VIEW
    width = 1.2 * CAMERA_VIEW / CAMERA_SIZE  # wider than a pixel: it tells places between pixels, too
    across = np.exp(-0.5 * ((pixels - places[:, :, None]) / width) ** 2)  # [n, 2, 16]
    frames: UInt8Array = np.full((len(places), CAMERA_SIZE, CAMERA_SIZE, 3), 40, np.uint8)
    frames[..., 0] += (200.0 * across[:, 1, :, None] * across[:, 0, None, :]).astype(np.uint8)
    centre = slice(CAMERA_SIZE // 2 - 1, CAMERA_SIZE // 2 + 1)
    frames[:, centre, centre, 1] = 160
    return frames


class DeepSea(FixedLengthVectorEnv):
    """A grid in which one goes down a row each step (Osband et al., 2019, arXiv:1908.03568).

    Only who goes right in every row finds the treasure in the last corner (reward 1); each step to the right
    costs 0.01 / size. Which action is `right` differs from cell to cell. A random policy finds the treasure
    once in 2 ** size episodes.
    """

    terminates = True  # below the last row there is nothing

    def __init__(self, num_envs: int = 1, size: int = 10, mapping_seed: int = 0, **kwargs: Any) -> None:
        super().__init__(num_envs, Box(0.0, 1.0, (2 * size,), np.float32), Discrete(2), size, **kwargs)
        self.size = size
        self._right = np.random.default_rng(mapping_seed).integers(2, size=(size, size))

    def _start(self) -> None:
        self._column: NDArray[np.int64] = np.zeros(self.num_envs, np.int64)

    def _observe(self) -> FloatArray:
        """Row and column, one-hot each; below the last row no row is marked."""
        obs = np.zeros((self.num_envs, 2 * self.size), np.float32)
        if self._elapsed < self.size:
            obs[:, self._elapsed] = 1.0
        obs[np.arange(self.num_envs), self.size + self._column] = 1.0
        return obs

    def _advance(self, actions: NDArray[Any]) -> tuple[NDArray[Any], dict[str, Any]]:
        to_the_right = actions == self._right[self._elapsed, self._column]
        found = to_the_right & (self._column == self.size - 1)
        self._column = np.clip(self._column + np.where(to_the_right, 1, -1), 0, self.size - 1)
        return found - 0.01 / self.size * to_the_right, {"success": found}


class GoalVectorEnv(FixedLengthVectorEnv):
    """Goal-conditioned: observations are dicts, the reward is 0 at the goal and -1 elsewhere."""

    def __init__(
        self, num_envs: int, space: Box, goal: Box, action_space: gym.Space[Any], horizon: int, **kwargs: Any
    ) -> None:
        parts: dict[str, gym.Space[Any]] = {"observation": space, "achieved_goal": goal, "desired_goal": goal}
        super().__init__(num_envs, Dict(parts), action_space, horizon, **kwargs)

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any = None) -> FloatArray:
        """0 where the goal is achieved, else -1; goals [..., G] -> float32 [...]."""
        success = self._achieved(np.asarray(achieved_goal), np.asarray(desired_goal))
        return np.where(success, 0.0, -1.0).astype(np.float32)

    @abstractmethod
    def _achieved(self, achieved: NDArray[Any], desired: NDArray[Any]) -> BoolArray:
        """Whether goals [..., G] are the same, as far as it matters: [...]."""


class BitFlip(GoalVectorEnv):
    """Flip one of n bits in each step until they are as wanted (Andrychowicz et al., 2017)."""

    def __init__(self, num_envs: int = 1, num_bits: int = 10, **kwargs: Any) -> None:
        self.num_bits = num_bits
        bits = Box(0.0, 1.0, (num_bits,), np.float32)
        super().__init__(num_envs, bits, bits, Discrete(num_bits), num_bits, **kwargs)

    def _start(self) -> None:
        drawn = self._rng.integers(2, size=(2, self.num_envs, self.num_bits))
        self._bits, self._goal = drawn.astype(np.float32)

    def _observe(self) -> dict[str, FloatArray]:
        bits, goal = self._bits.copy, self._goal.copy
        return {"observation": bits(), "achieved_goal": bits(), "desired_goal": goal()}

    def _advance(self, actions: NDArray[Any]) -> tuple[NDArray[Any], dict[str, Any]]:
        rows = np.flatnonzero(~self._achieved(self._bits, self._goal))  # elsewhere nothing is left to do
        self._bits[rows, actions[rows]] = 1.0 - self._bits[rows, actions[rows]]
        return self.compute_reward(self._bits, self._goal), {
            "success": self._achieved(self._bits, self._goal)
        }

    def _achieved(self, achieved: NDArray[Any], desired: NDArray[Any]) -> BoolArray:
        same: BoolArray = (achieved == desired).all(-1)
        return same


class PointGoal(GoalVectorEnv):
    """The point of `PointReach`, from the middle to a place that each episode chooses."""

    def __init__(self, num_envs: int = 1, horizon: int = 50, tolerance: float = 0.08, **kwargs: Any) -> None:
        self.tolerance = tolerance
        goal, action = Box(-2.0, 2.0, (2,), np.float32), Box(-1.0, 1.0, (2,), np.float32)
        super().__init__(num_envs, Box(-POINT_BOUND, POINT_BOUND), goal, action, horizon, **kwargs)

    def _start(self) -> None:
        self._place, self._speed = np.zeros((2, self.num_envs, 2))
        self._goal = self._rng.uniform(-1.5, 1.5, (self.num_envs, 2))

    def _observe(self) -> dict[str, FloatArray]:
        state = np.concatenate([self._place, self._speed], 1).astype(np.float32)
        place, goal = self._place.astype(np.float32), self._goal.astype(np.float32)
        return {"observation": state, "achieved_goal": place, "desired_goal": goal}

    def _advance(self, actions: NDArray[Any]) -> tuple[NDArray[Any], dict[str, Any]]:
        self._place, self._speed = _push(self._place, self._speed, actions)
        success = self._achieved(self._place, self._goal)
        return self.compute_reward(self._place, self._goal), {"success": success}

    def _achieved(self, achieved: NDArray[Any], desired: NDArray[Any]) -> BoolArray:
        near: BoolArray = np.linalg.norm(achieved - desired, axis=-1) < self.tolerance
        return near
