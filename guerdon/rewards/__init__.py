"""Rewards: the zoo of learned models behind one interface, and rewards by rule for text.

The zoo is imported on first use: rules for text, and the process that checks them, do without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from guerdon.rewards.text.rules import (
    TEXT_REWARDS,
    CombinedTextReward,
    ExactMatchReward,
    FormatReward,
    MathReward,
    RegexReward,
    TextReward,
    create_text_reward,
)

if TYPE_CHECKING:
    from guerdon.rewards.checker import RewardModelError, check_reward_model
    from guerdon.rewards.model import BaseRewardModel
    from guerdon.rewards.registry import REWARD_MODELS, create_reward_model, register_reward_model
    from guerdon.rewards.steps import StepBatch
    from guerdon.rewards.zoo.base import ZooModel, ZooSettings
    from guerdon.rewards.zoo.demonstrations import read_demonstrations, write_demonstrations
    from guerdon.rewards.zoo.networks import RewardNetwork

__all__ = [
    "REWARD_MODELS",
    "TEXT_REWARDS",
    "BaseRewardModel",
    "CombinedTextReward",
    "ExactMatchReward",
    "FormatReward",
    "MathReward",
    "RegexReward",
    "RewardModelError",
    "RewardNetwork",
    "StepBatch",
    "TextReward",
    "ZooModel",
    "ZooSettings",
    "check_reward_model",
    "create_reward_model",
    "create_text_reward",
    "read_demonstrations",
    "register_reward_model",
    "write_demonstrations",
]
_ZOO = {
    "zoo.base": ("ZooModel", "ZooSettings"),
    "checker": ("RewardModelError", "check_reward_model"),
    "zoo.demonstrations": ("read_demonstrations", "write_demonstrations"),
    "model": ("BaseRewardModel",),
    "zoo.networks": ("RewardNetwork",),
    "registry": ("REWARD_MODELS", "create_reward_model", "register_reward_model"),
    "steps": ("StepBatch",),
}


def __getattr__(name: str) -> Any:
    """A part of the zoo, and with it torch."""
    for module, names in _ZOO.items():
        if name in names:
            return getattr(import_module(f"guerdon.rewards.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
