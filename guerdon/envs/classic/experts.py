"""Scripted policies for the small tasks of `classic.py` and for those of Gymnasium that they resemble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import ConfigError


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
    missing = (
        15.0 * (1.0 - cosine) - 0.5 * turn**2
    )  # energy, in units in which gravity turns by 15 sin(angle)
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
        raise ConfigError(
            f"there is no scripted policy for {env_id!r}; there are some for {', '.join(EXPERTS)}"
        )
    return EXPERTS[env_id]
