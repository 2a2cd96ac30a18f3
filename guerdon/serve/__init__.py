"""Reward models at work: managers and workers that turn frames into learned rewards."""

from guerdon.models.judge import Verdict
from guerdon.serve.manager import RewardManager
from guerdon.serve.worker import EmbodiedRewardWorker, ImageRewardWorker, RewardWorker

__all__ = ["EmbodiedRewardWorker", "ImageRewardWorker", "RewardManager", "RewardWorker", "Verdict"]
