"""Scripted policies: the base of those with habits of their own, and rules for the small classic tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import BoolArray, FloatArray


class ScriptedPolicy(ABC):
    """Acts from state vectors in N environments; N is that of the first states.

    Args:
        noise: 0 (none) to about 1 (most episodes fail).
        seed: what environment i does in its n-th episode depends on (seed, i, n) and the states alone.
    """

    _episodes: Any
    """int [N], how many episodes have ended in each."""
    intended: FloatArray | None = None
    """float32 [N, A]; what the last `act` would have been without noise, where the policy tells."""

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        if not 0.0 <= noise <= 2.0:
            raise ConfigError(f"noise must lie between 0 and 2, not {noise!r}")
        if seed < 0:
            raise ConfigError(f"seed must not be negative, not {seed!r}")
        self.noise, self.seed = float(noise), int(seed)
        self._num_envs: int | None = None

    def reset(self, mask: BoolArray | None = None) -> None:
        """Say that new episodes have started, in the environments of `mask` (bool [N]) or in all of them.

        Without a mask the count of episodes starts again, as if the policy were new.
        """
        if mask is None:
            self._num_envs = None
        elif self._num_envs is not None:
            if mask.shape != (self._num_envs,) or mask.dtype != np.bool_:
                raise DataError(f"mask must be bool [{self._num_envs}], not {mask.dtype} {list(mask.shape)}")
            self._episodes[mask] += 1
            self._draw_habits(mask)

    def _check_state(self, state: FloatArray, size: int) -> None:
        """Refuse states that are not [N, size]; the first ones start all episodes."""
        if state.ndim != 2 or state.shape[1] != size:
            raise DataError(f"state must have shape [N, {size}], not {list(state.shape)}")
        if self._num_envs is None:
            self._num_envs = len(state)
            self._allocate(len(state))
            self._draw_habits(np.ones(len(state), np.bool_))
        if len(state) != self._num_envs:
            raise DataError(f"the expert plays {self._num_envs} environments, not {len(state)}; call reset()")

    @abstractmethod
    def _allocate(self, num_envs: int) -> None:
        """Make room for so many environments."""

    @abstractmethod
    def _draw_habits(self, mask: BoolArray) -> None:
        """Draw the habits of the present episodes in the environments of `mask`, bool [N]."""


def balance(obs: Any) -> NDArray[np.int64]:
    """CartPole: push towards where the pole leans, [N, 4] -> int64 [N]."""
    x, speed, angle, turn = np.asarray(obs, np.float64).T
    pushes: NDArray[np.int64] = (0.1 * x + 0.3 * speed + 3.0 * angle + turn > 0.0).astype(np.int64)
    return pushes


def reach(obs: Any) -> NDArray[np.float32]:
    """PointReach: brake and push towards the middle, [N, 4] -> float32 [N, 2]."""
    state = np.asarray(obs, np.float64)
    return np.clip(-4.0 * state[:, :2] - 12.0 * state[:, 2:4], -1.0, 1.0).astype(np.float32)


def swing_up(obs: Any) -> NDArray[np.float32]:
    """Pendulum: gain energy until the pole comes up, then hold it, [N, 3] -> float32 [N, 1]."""
    cosine, sine, turn = np.asarray(obs, np.float64).T
    angle = np.arctan2(sine, cosine)
    # Energy, in units in which gravity turns by 15 sin(angle).
    missing = 15.0 * (1.0 - cosine) - 0.5 * turn**2
    swing = np.where(np.abs(turn) < 1e-3, 2.0, 2.0 * np.sign(turn) * np.clip(missing, -1.0, 1.0))
    hold = -8.0 * angle - 2.0 * turn
    near = np.abs(angle + 0.25 * turn) < 0.4
    return np.clip(np.where(near, hold, swing), -2.0, 2.0).astype(np.float32)[:, None]


EXPERTS: dict[str, Callable[[Any], NDArray[Any]]] = {
    "CartPole-v1": balance,
    "guerdon/FixedCartPole-v0": balance,
    "Pendulum-v1": swing_up,
    "guerdon/PointReach-v0": reach,
}
"""Environment id -> scripted policy of batches of observations."""


def scripted_policy(env_id: str) -> Callable[[Any], NDArray[Any]]:
    """The script for an environment."""
    if env_id not in EXPERTS:
        known = ", ".join(EXPERTS)
        raise ConfigError(f"there is no scripted policy for {env_id!r}; there are some for {known}")
    return EXPERTS[env_id]
