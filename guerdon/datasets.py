"""Public names: data to learn from; see `guerdon.data.datasets`."""

from guerdon.data.datasets.audit import AuditReport, audit
from guerdon.data.datasets.frames import RewardDataset
from guerdon.data.datasets.split import split_episodes

__all__ = ["AuditReport", "RewardDataset", "audit", "split_episodes"]
