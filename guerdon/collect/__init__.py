"""Stage 1: record labelled experience while a policy runs."""

from guerdon.collect.collector import RewardDataCollector
from guerdon.collect.wrapper import DataCollectorWrapper, VectorDataCollectorWrapper

__all__ = ["DataCollectorWrapper", "RewardDataCollector", "VectorDataCollectorWrapper"]
