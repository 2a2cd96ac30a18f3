"""From stored episodes to data to learn from: frames, splits, duplicates, audits."""

from typing import TYPE_CHECKING, Any

from guerdon.datasets.audit import AuditReport, audit
from guerdon.datasets.split import split_episodes

if TYPE_CHECKING:
    from guerdon.datasets.frames import RewardDataset

__all__ = ["AuditReport", "RewardDataset", "audit", "split_episodes"]


def __getattr__(name: str) -> Any:
    """`RewardDataset`, with which torch is loaded; audits do without."""
    if name == "RewardDataset":
        from guerdon.datasets.frames import RewardDataset

        return RewardDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
