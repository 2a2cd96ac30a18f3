"""Public names: from frames to rewards; see `guerdon.rewards.image`."""

from guerdon.rewards.image.manager import RewardManager
from guerdon.rewards.image.scorer import Scores
from guerdon.rewards.image.worker import EmbodiedRewardWorker, ImageRewardWorker, RewardWorker

__all__ = ["EmbodiedRewardWorker", "ImageRewardWorker", "RewardManager", "RewardWorker", "Scores"]
