"""Rewards: the zoo of learned models behind one interface, and rewards by rule for text."""

from guerdon.rewards.base import BaseRewardModel, RewardNetwork, ZooModel, ZooSettings
from guerdon.rewards.checker import RewardModelError, check_reward_model
from guerdon.rewards.demonstrations import read_demonstrations, write_demonstrations
from guerdon.rewards.table import REWARD_MODELS, create_reward_model, register_reward_model
from guerdon.rewards.text import (
    TEXT_REWARDS,
    CombinedTextReward,
    ExactMatchReward,
    FormatReward,
    MathReward,
    RegexReward,
    TextReward,
    create_text_reward,
)
from guerdon.rewards.transitions import Transitions

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
    "TextReward",
    "Transitions",
    "ZooModel",
    "ZooSettings",
    "check_reward_model",
    "create_reward_model",
    "create_text_reward",
    "read_demonstrations",
    "register_reward_model",
    "write_demonstrations",
]
