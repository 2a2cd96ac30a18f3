"""Public names: from frames to rewards; see `guerdon.rewards.image`."""

from guerdon.rewards.image.scorer import RewardManager, Scores
from guerdon.rewards.image.worker import EmbodiedRewardWorker, ImageRewardWorker
from guerdon.training.task_reward import RewardWorker

__all__ = ["EmbodiedRewardWorker", "ImageRewardWorker", "RewardManager", "RewardWorker", "Scores"]
