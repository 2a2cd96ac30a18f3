"""The small episode that seeds of the targets hold."""

from __future__ import annotations

import numpy as np

from guerdon.core.types import Episode

STEPS = 2


def make_episode(cameras: int = 1, seed: int = 3) -> Episode:
    """A success of two steps with every field set; frames have 8 x 8 pixels."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(2, STEPS, 3)).astype(np.float32)
    return Episode(
        frames={
            f"camera_{number}": rng.integers(0, 255, (STEPS, 8, 8, 3), np.uint8) for number in range(cameras)
        },
        labels=np.array([0, 1], np.float32),
        success=True,
        actions=vectors[0],
        states=vectors[1],
        initial_state=vectors[1, 0],
        env_rewards=np.array([0, 1], np.float32),
        terminated=np.array([False, True]),
        truncated=np.array([False, False]),
        is_grasped=np.array([False, True]),
        seed=seed,
        source=f"episode {seed}",
    )
