"""Stage 1: record labelled experience while a policy runs."""

from guerdon.data.collect.collector import RewardDataCollector
from guerdon.data.collect.wrapper import DataCollectorWrapper, VectorDataCollectorWrapper

__all__ = ["DataCollectorWrapper", "RewardDataCollector", "VectorDataCollectorWrapper"]
