"""Reward models at work: managers and workers that turn frames into learned rewards."""

from guerdon.serve.manager import RewardManager, Verdict
from guerdon.serve.worker import EmbodiedRewardWorker, ImageRewardWorker, RewardWorker

__all__ = ["EmbodiedRewardWorker", "ImageRewardWorker", "RewardManager", "RewardWorker", "Verdict"]
