"""The engine on a Ray cluster: workers are actors, slots are placement groups.

Every slot that is used gets a placement group of one bundle on its machine; the workers of all components
that share the slot share the bundle.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from guerdon.config import ClusterConfig
from guerdon.core.errors import ClusterError, ConfigError
from guerdon.distributed import watchdog
from guerdon.distributed.engine import Engine, WorkerSpec
from guerdon.distributed.placement import Node, Slot, make_plan, order_nodes, own_rollout_group

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray's workers are nice to all others (15): beside a learner on the same cores they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")

try:
    import ray
    from ray.exceptions import AuthenticationError, RayError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as missing:  # the extra is not installed
    raise ConfigError("engine=ray needs Ray: pip install 'guerdon[ray]'") from missing

# these import Ray as well
from guerdon.distributed.ray_access import check_loopback, joined_cluster, own_cluster
from guerdon.distributed.ray_actors import Answer, RayGroup, RayPending

log = logging.getLogger("guerdon")

SLOT_SECONDS = 15.0
"""How long a free slot may take to be given to us."""
NOTICE_SECONDS = 2.0
"""How long to wait for workers that may be busy before their warnings are left for later."""
START_TRIES = 3
"""How often a cluster of our own is started before that is given up."""
NODE_SECONDS = 60.0
"""How long the cluster may take to notice that a machine has gone."""


class RayEngine(Engine):
    """Workers on a Ray cluster: the one at `cluster.address`, or one of our own on this machine alone."""

    shares_memory = False

    def __init__(self, cfg: ClusterConfig) -> None:
        """Connect and plan; a placement that cannot be satisfied is refused here."""
        super().__init__()
        self.cfg = cfg
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._folder, self._owns = "", False
        self.groups: list[RayGroup] = []
        """All that were begun, also those that did not get to their end."""
        self._slots: dict[Slot, PlacementGroup] = {}
        self._order: list[str] = []
        try:
            self._connect()
            self._plan_now()
        except BaseException:
            self.close()
            raise

    # The cluster

    def _connect(self) -> None:
        """Join the cluster that the settings name, or start one, unless this process is connected already."""
        debug = log.isEnabledFor(logging.DEBUG)
        _print_to_stderr(debug)
        if ray.is_initialized():
            return
        level = logging.INFO if debug else logging.ERROR
        shared = {"log_to_driver": debug, "logging_level": level, "namespace": "guerdon"}
        if self.cfg.address is None:
            self._start_cluster(shared)
        else:
            self._join(self.cfg.address, shared)
        self._owns = True

    def _join(self, address: str, shared: dict[str, Any]) -> None:
        try:
            _knock(address)
        except OSError as error:
            raise ClusterError(f"there is no Ray cluster at {address!r}: {error}") from error
        try:
            with joined_cluster(address):
                ray.init(address=address, **shared)
        except (OSError, RuntimeError, ValueError, AuthenticationError) as error:
            raise ClusterError(
                f"the Ray cluster at {address!r} cannot be joined: {_first_line(error)} "
                "(is it there, and is its token ours?)"
            ) from error

    def _start_cluster(self, shared: dict[str, Any]) -> None:
        """A cluster on this machine, with a watchdog that clears up if we are killed."""
        if named := os.environ.get("RAY_ADDRESS"):
            log.warning("RAY_ADDRESS is not used: set cluster.address=%s to join that cluster", named)
        folder = tempfile.mkdtemp(prefix="guerdon-ray-", dir=_short_temporary())
        self._folder = folder
        self._watchdog = subprocess.Popen(
            [sys.executable, watchdog.__file__, folder, folder],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is not for it
        )
        os.environ[watchdog.VARIABLE] = folder  # what the cluster starts inherits it
        try:
            self._init_own(folder, shared)
        finally:
            del os.environ[watchdog.VARIABLE]
        self._owns = True
        check_loopback()

    def _init_own(self, folder: str, shared: dict[str, Any]) -> None:
        """Ray gives its processes 30 s to start, which a busy machine may exceed: it is tried again then."""
        for tries_left in reversed(range(START_TRIES)):
            try:
                with own_cluster():
                    ray.init(address="local", include_dashboard=False, _temp_dir=folder, **shared)
                return
            except Exception as error:  # Ray has no class of its own for it
                ray.shutdown()
                for pid in watchdog.members(folder, folder):  # what had started
                    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                        os.kill(pid, signal.SIGKILL)
                if not tries_left:
                    raise ClusterError(f"Ray does not start on this machine: {_first_line(error)}") from error
                log.warning("Ray did not start and is started again: %s", _first_line(error))

    def nodes(self) -> list[Node]:
        """The machines that are alive, in the order of their slots."""
        alive = [
            Node(
                id=item["NodeID"],
                name=item["NodeManagerHostname"],
                num_cpus=int(item["Resources"].get("CPU", 0)),
                num_gpus=int(item["Resources"].get("GPU", 0)),
                labels=item.get("Labels", {}),
            )
            for item in ray.nodes()  # type: ignore[no-untyped-call]
            if item["Alive"]
        ]
        return order_nodes(alive, ray.get_runtime_context().get_node_id(), self._order)

    def is_alive(self, slot: Slot, *, wait: bool = False) -> bool:
        """Whether the machine of a slot is there; `wait` gives the cluster time to notice that it is not."""
        wait = wait and slot.node_id != ray.get_runtime_context().get_node_id()  # this one is there
        until = time.monotonic() + (NODE_SECONDS if wait else 0.0)
        while True:
            alive = slot.node_id in {node.id for node in self.nodes()}
            if not alive or time.monotonic() >= until:
                return alive
            time.sleep(0.2)  # nothing tells us when the cluster notices

    def _plan_now(self) -> None:
        nodes = self.nodes()
        self.plan = make_plan(self.cfg, nodes)
        self._order = [node.id for node in nodes]

    # Slots

    def num_workers(self, role: str) -> int:
        """As planned."""
        if role == "rollout" and not own_rollout_group(self.plan):
            return 0
        return len(self.plan[role])

    def workers_beside(self, role: str) -> int:
        """On the fullest machine."""
        nodes = [slot.node_id for slot in self.plan[role]]
        return max(nodes.count(node) for node in nodes)

    def options(self, role: str, rank: int) -> dict[str, Any]:
        """Ray's options for a worker: its bundle and its share of it."""
        if not self.is_alive(self.plan[role][rank]):
            self._plan_now()
        slot = self.plan[role][rank]
        bundle = self._bundle(slot)
        sharing = sum(slot in self.plan[name] for name in ("env", "rollout", "reward"))
        share = int(1e3 / sharing) / 1e3
        strategy = PlacementGroupSchedulingStrategy(bundle, placement_group_bundle_index=0)
        resources = {"num_gpus": share} if slot.kind == "GPU" else {"num_cpus": share}
        return {"scheduling_strategy": strategy, "num_cpus": 0, **resources}

    def _bundle(self, slot: Slot) -> PlacementGroup:
        """The placement group of a slot; refused, not waited for, if others hold what it needs."""
        if slot in self._slots:
            return self._slots[slot]
        unit = {"GPU": 1.0} if slot.kind == "GPU" else {"CPU": 1.0}
        pinned = [{"ray.io/node-id": slot.node_id}]
        group: PlacementGroup = placement_group([unit], strategy="STRICT_PACK", bundle_label_selector=pinned)
        if not group.wait(SLOT_SECONDS):
            remove_placement_group(group)
            free = ray.available_resources()  # type: ignore[no-untyped-call]
            listed = ", ".join(f"{free.get(kind, 0.0):g} {kind}" for kind in ("CPU", "GPU"))
            raise ClusterError(
                f"slot {slot.index} ({slot.kind}) was not given to us in {SLOT_SECONDS:g} s: it is taken; "
                f"free in the whole cluster: {listed}"
            )
        self._slots[slot] = group
        return group

    # Workers

    def group(self, role: str, specs: Sequence[WorkerSpec]) -> RayGroup:
        """Start an actor for each spec."""
        return RayGroup(self, role, specs)

    def log_notices(self, *, wait: bool = True) -> None:
        """The same words from several workers of a role are logged once."""
        for group in self.groups:
            for level, text in dict.fromkeys(group.notices(NOTICE_SECONDS if wait else 0.0)):
                log.log(level, "%s worker: %s", group.role, text)

    def put(self, value: Any) -> RayPending:
        """Once into the store of this machine."""
        return RayPending(ray.put(value), "driver", 0)

    def close(self) -> None:
        """Kill the actors, give the slots back, shut down what is ours."""
        if ray.is_initialized():
            self._release()
        if self._watchdog is not None:
            assert self._watchdog.stdin is not None
            self._watchdog.stdin.close()  # after an orderly shutdown it has nothing left to do
            self._watchdog.wait()
            self._watchdog = None

    def _release(self) -> None:
        with contextlib.suppress(RayError):  # the cluster may be what broke
            for group in self.groups:
                group.close()
            for bundle in self._slots.values():
                remove_placement_group(bundle)
        self.groups, self._slots = [], {}
        if self._owns:
            ray.shutdown()
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _knock(address: str) -> None:
    """Raise an OSError at once if nobody listens at `host:port`; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if port.isdecimal() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=10.0).close()


def _print_to_stderr(debug: bool) -> None:
    """Keep what Ray prints (deaths of workers, their output) off stdout, where our results go.

    Ray has no setting for it: `log_to_driver=False` leaves out the workers' output, but not the deaths. What
    we know of them is logged anyway, so that they are shown with `--debug` alone.
    """
    real = ray._private.worker.print_worker_logs
    real = getattr(real, "guerdon_real", real)

    def printed(data: dict[str, Any], print_file: Any, ignore_prefix: bool = False) -> None:
        if debug:
            real(data, sys.stderr, ignore_prefix)

    printed.guerdon_real = real  # type: ignore[attr-defined]
    ray._private.worker.print_worker_logs = printed


def _short_temporary() -> str | None:
    """A place for sockets, whose paths must be short; None for the system's own."""
    return "/tmp" if len(tempfile.gettempdir()) > 20 and Path("/tmp").is_dir() else None


def ray_works(seconds: float = 60.0) -> tuple[bool, str]:
    """Whether an actor can be started and asked; and what is there, in words."""
    engine = RayEngine(ClusterConfig())
    try:
        group = engine.group("env", [WorkerSpec(cls=Answer)])
        answer = group.submit(0, "double", 21).result(seconds)
        listed = ", ".join(f"{node.name} ({node.offers})" for node in engine.nodes())
        return answer == 42, f"a worker answers on {listed}"
    finally:
        engine.close()
