"""Rewards by rule, without a learned model."""

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

__all__ = [
    "TEXT_REWARDS",
    "CombinedTextReward",
    "ExactMatchReward",
    "FormatReward",
    "MathReward",
    "RegexReward",
    "TextReward",
    "create_text_reward",
]
