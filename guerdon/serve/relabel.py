"""The only place where probabilities become rewards."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from guerdon.config import RewardConfig
from guerdon.types import FloatArray


def map_rewards(prob_success: NDArray[np.floating], cfg: RewardConfig, threshold: float) -> FloatArray:
    """Learned rewards of judged frames -> float32 [N].

    `binary`: `success_reward` where `prob_success > threshold`, else `fail_reward`; `continuous`: the
    probability itself.

    Args:
        prob_success: [N].
        cfg: the `reward` section.
        threshold: the checkpoint's own, or the number that `cfg.reward_threshold` gives.
    """
    if cfg.reward_type == "continuous":
        return prob_success.astype(np.float32)
    fires = prob_success > threshold
    return np.where(fires, np.float32(cfg.success_reward), np.float32(cfg.fail_reward)).astype(np.float32)
