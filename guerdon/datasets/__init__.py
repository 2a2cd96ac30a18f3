"""From stored episodes to data to learn from: frames, splits, duplicates, audits."""

from guerdon.datasets.audit import AuditReport, audit
from guerdon.datasets.frames import RewardDataset
from guerdon.datasets.split import split_episodes

__all__ = ["AuditReport", "RewardDataset", "audit", "split_episodes"]
