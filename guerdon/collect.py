"""Public names: record labelled experience while a policy runs; see `guerdon.data.collect`."""

from guerdon.data.collect import DataCollectorWrapper, RewardDataCollector, VectorDataCollectorWrapper

__all__ = ["DataCollectorWrapper", "RewardDataCollector", "VectorDataCollectorWrapper"]
