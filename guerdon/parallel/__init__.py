"""From one process to a cluster: engines, placement, ranks for torch.distributed. Ray is used here alone."""

from __future__ import annotations

from typing import Literal

from guerdon.config import ClusterConfig
from guerdon.parallel.engine import Engine, Group, Handle, LocalEngine, Pending, WorkerSpec

__all__ = ["Engine", "Group", "Handle", "LocalEngine", "Pending", "WorkerSpec", "make_engine"]


def make_engine(name: Literal["local", "ray"], cluster: ClusterConfig) -> Engine:
    """The engine that the config names; Ray is imported only for `ray`."""
    if name == "local":
        return LocalEngine()
    from guerdon.parallel.ray_engine import RayEngine

    return RayEngine(cluster)
