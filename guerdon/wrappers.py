"""Public names: environments whose reward is a learned one; see `guerdon.integrations`.

The Stable-Baselines3 classes are imported on first use, as it is an optional dependency.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from guerdon.envs.wrappers import KeepFinalFrame
from guerdon.integrations.gymnasium import LearnedRewardVectorWrapper, LearnedRewardWrapper
from guerdon.integrations.scoring import FrameScorer
from guerdon.integrations.steps import RewardStep, StepScorer

if TYPE_CHECKING:
    from guerdon.integrations.sb3 import GymVectorToSB3, LearnedRewardVecEnv

__all__ = [
    "FrameScorer",
    "GymVectorToSB3",
    "KeepFinalFrame",
    "LearnedRewardVecEnv",
    "LearnedRewardVectorWrapper",
    "LearnedRewardWrapper",
    "RewardStep",
    "StepScorer",
]

_SB3_NAMES = ("GymVectorToSB3", "LearnedRewardVecEnv")


def __getattr__(name: str) -> Any:
    """Import what needs Stable-Baselines3 when it is asked for."""
    if name in _SB3_NAMES:
        from guerdon.integrations import sb3

        return getattr(sb3, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
