"""From one process to a cluster: engines, placement, ranks for torch.distributed. Ray is used here alone."""

from __future__ import annotations

from typing import Literal

from guerdon.config import ClusterConfig
from guerdon.distributed.engine import Engine, Group, Handle, Pending, WorkerSpec
from guerdon.distributed.local_engine import LocalEngine, ThreadEngine

__all__ = ["Engine", "Group", "Handle", "LocalEngine", "Pending", "ThreadEngine", "WorkerSpec", "make_engine"]


def make_engine(name: Literal["local", "ray"], cluster: ClusterConfig, *, threads: bool = False) -> Engine:
    """The engine that the config names; Ray is imported only for `ray`.

    Args:
        name: `engine`.
        cluster: the `cluster` section.
        threads: whether workers in this process get a thread each, so that they work side by side.
    """
    if name == "local":
        return ThreadEngine() if threads else LocalEngine()
    from guerdon.distributed.ray_engine import RayEngine

    return RayEngine(cluster)
