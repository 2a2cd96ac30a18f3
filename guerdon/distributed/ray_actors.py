"""Workers as Ray actors: the process that holds one, answers from it, and the group of a role.

An actor is not restarted by Ray but by `RayGroup.restart`, because a new worker has to be told what the old
one knew, and because its machine may have gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from guerdon.core.errors import ClusterError, GuerdonError, WorkerLostError
from guerdon.distributed.engine import Group, Handle, Pending, WorkerSpec, worker_error

if TYPE_CHECKING:
    from guerdon.distributed.ray_engine import RayEngine

log = logging.getLogger("guerdon")

MAX_RESTARTS_IN_A_ROW = 3
"""A worker that is lost so often without doing its work in between is not started again."""
START_SECONDS = 240.0
"""How long a worker may take to start and to be made: importing torch on a busy machine takes a while."""


class RemoteTraceback(Exception):
    """What happened in the worker; the cause of the error that the user sees."""


class _Host:
    """The actor: a process that holds one worker."""

    def __init__(self, threads: int | None, folder: str) -> None:
        logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
        try:
            os.chdir(folder)  # relative paths in the settings mean the same here
        except OSError as error:  # another machine need not have it
            log.info("relative paths begin at %s: %s", Path.cwd(), error)
        self._notices: SimpleQueue[logging.LogRecord] = SimpleQueue()
        keeper = QueueHandler(self._notices)  # what a worker logs itself nobody sees
        keeper.setLevel(logging.WARNING)
        log.addHandler(keeper)
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        self._worker: Any = None

    def make(self, spec: WorkerSpec) -> int:
        """Make the worker; returns the process id."""
        self._worker = spec.make()
        return os.getpid()

    def notices(self) -> list[tuple[int, str]]:
        """Level and text of all warnings since the last call."""
        records = [self._notices.get() for _ in range(self._notices.qsize())]
        return [(record.levelno, record.message) for record in records]

    def call(self, method: str, *args: Any) -> Any:
        """One method of the worker."""
        return getattr(self._worker, method)(*args)


class RayPending(Pending):
    """An object in Ray's store."""

    def __init__(self, ref: Any, role: str, rank: int) -> None:
        self.ref, self._role, self._rank = ref, role, rank

    def result(self, timeout_seconds: float | None = None) -> Any:
        """Arrays are views of the store where it is on this machine, and read-only."""
        try:
            return ray.get(self.ref, timeout=timeout_seconds)
        except GetTimeoutError as error:
            raise WorkerLostError(self._role, self._rank, f"no answer in {timeout_seconds:g} s") from error
        except RayError as error:
            cause = RemoteTraceback(str(error)) if isinstance(error, RayTaskError) else error
            raise _readable(error, self._role, self._rank) from cause


def _readable(error: RayError, role: str, rank: int) -> GuerdonError:
    """One of our errors, in a line, from one of Ray's."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, WorkerLostError):  # of another worker that this one talked to
            return cause
        if isinstance(cause, RayError):
            return _readable(cause, role, rank)
        if isinstance(cause, GuerdonError):
            return type(cause)(*cause.args)
        return worker_error(role, rank, cause)
    if isinstance(error, ObjectLostError):
        return WorkerLostError("object", rank, "the machine that held its data has gone")
    if isinstance(error, RayActorError | WorkerCrashedError):
        return WorkerLostError(role, rank, "its process has gone")
    return worker_error(role, rank, error)


class RayHandle(Handle):
    """An actor, for another worker."""

    def __init__(self, actor: Any, role: str, rank: int) -> None:
        self._actor, self._role, self._rank = actor, role, rank

    def call(self, method: str, *args: Any) -> Any:
        """Ask and wait."""
        return RayPending(self._actor.call.remote(method, *args), self._role, self._rank).result()


class RayGroup(Group):
    """Actors of one role."""

    def __init__(self, engine: RayEngine, role: str, specs: Sequence[WorkerSpec]) -> None:
        super().__init__(role, len(specs))
        self._engine, self._specs = engine, list(specs)
        engine.groups.append(self)
        self._actors: list[Any] = [None] * self.size
        self._unheard: dict[int, Any] = {}
        self._lost_in_a_row: Counter[int] = Counter()
        self.pids: list[int] = [0] * self.size
        made = [self._begin(rank) for rank in range(self.size)]
        for rank, pending in enumerate(made):
            self.pids[rank] = self._finish(rank, pending)

    def submit(self, rank: int, method: str, *args: Any) -> RayPending:
        """Ask one worker; what is `Pending` is passed by reference."""
        ref = self._actors[rank].call.remote(method, *map(_given, args))
        return RayPending(ref, self.role, rank)

    def submit_pair(self, rank: int, method: str, *args: Any) -> tuple[Pending, Pending]:
        """Two objects."""
        call = self._actors[rank].call.options(num_returns=2)
        one, other = call.remote(method, *map(_given, args))
        return RayPending(one, self.role, rank), RayPending(other, self.role, rank)

    def first_ready(self, pending: Sequence[Pending], timeout_seconds: float | None) -> int | None:
        """Wait for one of them."""
        refs = [item.ref for item in pending if isinstance(item, RayPending)]
        ready, _ = ray.wait(refs, num_returns=1, timeout=timeout_seconds, fetch_local=False)
        return refs.index(ready[0]) if ready else None

    def restart(self, rank: int, reason: str) -> None:
        """Kill what may be left, and make the worker again, on another machine if its own has gone."""
        self._lost_in_a_row[rank] += 1
        if self._lost_in_a_row[rank] > MAX_RESTARTS_IN_A_ROW:
            raise ClusterError(
                f"{self.role} worker {rank} was lost {self._lost_in_a_row[rank]} times in a row without "
                f"doing its work, at last because {reason}"
            )
        ray.kill(self._actors[rank], no_restart=True)
        self._engine.restarts[self.role] += 1
        log.warning("%s worker %d is started again: %s", self.role, rank, reason)
        self.pids[rank] = self._finish(rank, self._begin(rank))

    def answered(self, rank: int) -> None:
        """It may be lost again."""
        self._lost_in_a_row.pop(rank, None)

    def handle(self, rank: int) -> RayHandle:
        """The actor."""
        return RayHandle(self._actors[rank], self.role, rank)

    def notices(self, seconds: float) -> list[tuple[int, str]]:
        """What the workers have to warn of; one that is busy tells it at a later call."""
        for rank, actor in enumerate(self._actors):
            if actor is not None and rank not in self._unheard:
                self._unheard[rank] = actor.notices.remote()
        if not self._unheard:
            return []
        refs = list(self._unheard.values())
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=seconds)
        self._unheard = {rank: ref for rank, ref in self._unheard.items() if ref not in ready}
        reported: list[tuple[int, str]] = []
        for ref in ready:
            with contextlib.suppress(RayError):  # a worker that is lost is noticed when it is needed
                reported += ray.get(ref)
        return reported

    def close(self) -> None:
        """Kill the actors."""
        for actor in self._actors:
            if actor is not None:
                ray.kill(actor, no_restart=True)

    def _begin(self, rank: int) -> Any:
        spec = self._specs[rank]
        options = {**self._engine.options(self.role, rank), "max_restarts": 0}
        actor: Any = ray.remote(_Host).options(**options).remote(spec.threads, str(Path.cwd()))
        self._actors[rank] = actor
        log.debug("%s-%d starts on %s", self.role, rank, self._engine.plan[self.role][rank])
        return actor.make.remote(spec)

    def _finish(self, rank: int, made: Any) -> int:
        """Wait for a new worker; where its machine goes away meanwhile, begin again on another one."""
        until = time.monotonic() + START_SECONDS
        while True:
            ready, _ = ray.wait([made], timeout=1.0, fetch_local=False)
            slot = self._engine.plan[self.role][rank]
            try:
                if ready:
                    return int(RayPending(made, self.role, rank).result())
            except WorkerLostError as error:
                if self._engine.is_alive(slot, wait=True):
                    raise ClusterError(f"{self.role} worker {rank} does not start: {error.reason}") from error
            if not self._engine.is_alive(slot):
                made = self._begin(rank)
            elif time.monotonic() > until:
                raise ClusterError(f"{self.role} worker {rank} did not start in {START_SECONDS:g} s")


def _given(item: Any) -> Any:
    return item.ref if isinstance(item, RayPending) else item


class Answer:
    """A worker that shows that workers can be started and asked."""

    def double(self, value: int) -> int:
        """Twice the value."""
        return 2 * value
