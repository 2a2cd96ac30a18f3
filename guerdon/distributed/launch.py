"""Ranks for torch.distributed: start a function once per rank, each in a Ray actor of its own.

Every rank finds `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` in
its environment, as `torch.distributed.init_process_group(init_method="env://")` reads them. If one rank fails
or is lost, the others, which would wait for it for ever, are stopped.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from guerdon.config import ClusterConfig
from guerdon.core.errors import ClusterError, GuerdonError, WorkerError, WorkerLostError
from guerdon.distributed.engine import Group, Pending, WorkerSpec
from guerdon.distributed.placement import entries_of
from guerdon.distributed.ray_engine import RayEngine
from guerdon.fit.process_group import PeerLostError, open_store

STORE_TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for what another one writes to the meeting point; torch's own default."""
WAKE_SECONDS = 2.0
"""How much longer than its follower the rank that failed first may take to be noticed."""


class Rank:
    """One of several processes that compute together."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Take part in what `environment` describes."""
        os.environ.update(environment)
        self._store: Any = None

    def open(self) -> tuple[str, int]:
        """Open the meeting point of the ranks here, which is rank 0; returns its address and port.

        The port is ours from now on. torch shares the store with whoever opens that port in this process once
        more, as `init_process_group` does on rank 0.
        """
        import ray

        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._store = open_store(host, 0, None, True, STORE_TIMEOUT, shared=True)
        return host, int(self._store.port)

    def meet(self, address: str, port: int) -> None:
        """Where rank 0 waits for the others."""
        os.environ.update({"MASTER_ADDR": address, "MASTER_PORT": str(port)})
        if sys.platform == "linux" and ipaddress.ip_address(address).is_loopback:
            # gloo would take the interface of the host's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's own result."""
        return function(*args)


def launch_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    cluster: ClusterConfig | None = None,
    component: str = "reward",
    threads: int | None = None,
    timeout_seconds: float | None = None,
) -> list[Any]:
    """Call `function(*args)` in `num_ranks` processes at the same time.

    Args:
        function: importable, the same for all; it learns its rank from the environment.
        num_ranks: how many.
        *args: handed to every rank.
        cluster: the `cluster` section; without a placement of `component`, ranks take the first slots.
        component: whose placement the ranks have: `reward` for fitting a reward model.
        threads: of torch in each rank; None: as in this process.
        timeout_seconds: for the whole; None waits as long as it takes.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        ClusterError: there is no room for so many ranks, or one of them was lost.
        GuerdonError: what the first rank that failed raised.
    """
    cfg = _placed(ClusterConfig() if cluster is None else cluster, component, num_ranks)
    engine = RayEngine(cfg)
    try:
        slots = engine.plan[component]
        if len(slots) != num_ranks:
            raise ClusterError(f"{num_ranks} ranks are asked for, {component} has {len(slots)} slots")
        nodes = [slot.node_id for slot in slots]
        specs = [
            WorkerSpec(cls=Rank, args=(_environment(rank, nodes),), threads=threads)
            for rank in range(num_ranks)
        ]
        group = engine.group(component, specs)
        group.call("meet", *group.submit(0, "open").result())
        pending = [group.submit(rank, "run", function, *args) for rank in range(num_ranks)]
        answers = _all_or_none(group, pending, timeout_seconds)
        engine.log_notices()
        return answers
    finally:
        engine.close()


def _placed(cfg: ClusterConfig, component: str, num_ranks: int) -> ClusterConfig:
    """The settings with the first slots for `component`, unless they have a place for it.

    The other components do not run then, and leave it their slots.
    """
    if component in entries_of(cfg):
        return cfg
    return replace(cfg, component_placement={component: f"0-{num_ranks - 1}"})


def _environment(rank: int, nodes: Sequence[str]) -> dict[str, str]:
    """What a rank knows of itself; `nodes` has the machine of each."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(nodes)),
        "LOCAL_RANK": str(nodes[:rank].count(nodes[rank])),
        "LOCAL_WORLD_SIZE": str(nodes.count(nodes[rank])),
    }


def _all_or_none(group: Group, pending: Sequence[Pending], timeout_seconds: float | None) -> list[Any]:
    """Wait for all; the first failure ends the waiting.

    When a rank dies, the others fail after it, so a failure is reported only after all ranks were looked at.
    """
    waiting, answers = dict(enumerate(pending)), dict[int, Any]()
    failure: GuerdonError | None = None
    while waiting:
        ranks = list(waiting)
        seconds = timeout_seconds if failure is None else WAKE_SECONDS
        place = group.first_ready([waiting[rank] for rank in ranks], seconds)
        if place is None:
            raise failure or WorkerError(f"ranks {ranks} did not finish in {timeout_seconds:g} s")
        try:
            answers[ranks[place]] = waiting.pop(ranks[place]).result()
        except WorkerLostError as error:
            raise ClusterError(f"rank {error.rank} of {len(pending)} was lost: {error.reason}") from error
        except GuerdonError as error:
            if failure is None or isinstance(failure, PeerLostError):  # an echo, which knows least
                failure = error
    if failure is not None:
        raise failure
    return [answers[rank] for rank in range(len(pending))]
