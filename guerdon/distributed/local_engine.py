"""Engines of one machine: workers are objects in this process; asynchronously each has a thread of its own.

Environments that wait (for a robot, a simulator in another process, a clock) and torch's kernels release the
interpreter lock, so that the threads run side by side. Where an environment computes in Python, `engine: ray`
gives every worker a process instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from guerdon.core.errors import ClusterError, GuerdonError, WorkerLostError
from guerdon.distributed.engine import Engine, Group, Handle, Pending, WorkerSpec, worker_error

log = logging.getLogger("guerdon")

END_SECONDS = 5.0
"""How long a thread may take to end after its last call."""


class LocalEngine(Engine):
    """One worker of each role, in this process; it answers before `submit` returns."""

    shares_memory = True

    def num_workers(self, role: str) -> int:
        """One; rollout workers are part of the env worker."""
        return 0 if role == "rollout" else 1

    def workers_beside(self, role: str) -> int:
        """One."""
        return 1

    def group(self, role: str, specs: Sequence[WorkerSpec]) -> LocalGroup:
        """Make the workers here."""
        return LocalGroup(role, [spec.make() for spec in specs])

    def log_notices(self, *, wait: bool = True) -> None:
        """Nothing: workers in this process log themselves."""

    def put(self, value: Any) -> Pending:
        """The value itself."""
        return Ready(value)

    def close(self) -> None:
        """Nothing to do: workers are closed by their owner."""


@dataclass(frozen=True)
class Ready(Pending):
    """An answer that is there: a value, or the error that came instead."""

    value: Any
    error: Exception | None = None

    def result(self, timeout_seconds: float | None = None) -> Any:
        """At once."""
        if self.error is not None:
            raise self.error
        return self.value


class LocalGroup(Group):
    """Plain objects."""

    def __init__(self, role: str, workers: Sequence[Any]) -> None:
        super().__init__(role, len(workers))
        self.workers = list(workers)

    def submit(self, rank: int, method: str, *args: Any) -> Pending:
        """Call the method now; an error is kept for `result`."""
        try:
            return Ready(self._call(rank, method, args))
        except Exception as error:
            return Ready(None, error)

    def _call(self, rank: int, method: str, args: Sequence[Any]) -> Any:
        given = [item.result() if isinstance(item, Pending) else item for item in args]
        return getattr(self.workers[rank], method)(*given)

    def submit_pair(self, rank: int, method: str, *args: Any) -> tuple[Pending, Pending]:
        """Both at once."""
        try:
            first, second = self._call(rank, method, args)
            return Ready(first), Ready(second)
        except Exception as error:
            return Ready(None, error), Ready(None, error)

    def first_ready(self, pending: Sequence[Pending], timeout_seconds: float | None) -> int | None:
        """The first: all are."""
        return 0 if pending else None

    def restart(self, rank: int, reason: str) -> None:
        """Workers in this process cannot be lost."""
        raise ClusterError(f"{self.role} worker {rank} runs in this process and cannot be replaced: {reason}")

    def answered(self, rank: int) -> None:
        """They cannot be lost."""

    def handle(self, rank: int) -> Handle:
        """For workers in this process."""
        return LocalHandle(self, rank)


@dataclass(frozen=True)
class LocalHandle(Handle):
    """A worker of a group in this process; where it has a thread, callers wait for it."""

    group: LocalGroup
    rank: int

    def call(self, method: str, *args: Any) -> Any:
        """Ask and wait."""
        return self.group.submit(self.rank, method, *args).result()


class ThreadPending(Pending):
    """What a worker's thread will have done; `part` picks one of two answers."""

    def __init__(self, future: Future[Any], role: str, rank: int, part: int | None = None) -> None:
        self.future, self._role, self._rank, self._part = future, role, rank, part

    def result(self, timeout_seconds: float | None = None) -> Any:
        """Wait for it; errors that are not ours become a `WorkerError` of one line, as on a cluster."""
        wait([self.future], timeout_seconds)
        if not self.future.done():
            raise WorkerLostError(self._role, self._rank, f"no answer in {timeout_seconds:g} s")
        if self.future.cancelled():
            raise WorkerLostError(self._role, self._rank, "its thread has ended")
        error = self.future.exception()
        if isinstance(error, GuerdonError):
            raise error
        if error is not None:
            raise worker_error(self._role, self._rank, error) from error
        answer = self.future.result()
        return answer if self._part is None else answer[self._part]


class _WorkerThread:
    """One call after another. A daemon, so that a worker that hangs cannot keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Put a call behind those that wait."""
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def end(self) -> None:
        """Drop the calls that wait and let the running one finish."""
        while not self._calls.empty():
            item = self._calls.get()
            if item is not None:
                item[0].cancel()
                item[0].set_running_or_notify_cancel()  # wakes who waits for it
        self._calls.put(None)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            log.warning("the thread %s still runs after %g s and is left", self._thread.name, END_SECONDS)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                answer = call()
            except BaseException as error:  # it is raised again where the answer is asked for
                future.set_exception(error)
            else:
                future.set_result(answer)
                del answer
            del item, future, call  # an answer is not kept alive by who made it


class ThreadGroup(LocalGroup):
    """Plain objects, each of them used by its own thread alone."""

    def __init__(self, role: str, specs: Sequence[WorkerSpec]) -> None:
        self._threads = [_WorkerThread(f"{role}-{rank}") for rank in range(len(specs))]
        made = [  # in its own thread: some simulators and renderers belong to the thread that made them
            ThreadPending(thread.submit(spec.make), role, rank)
            for rank, (thread, spec) in enumerate(zip(self._threads, specs, strict=True))
        ]
        try:
            super().__init__(role, [item.result() for item in made])
        except BaseException:
            self.close()
            raise

    def submit(self, rank: int, method: str, *args: Any) -> ThreadPending:
        """Ask a worker; returns at once."""
        future = self._threads[rank].submit(partial(self._call, rank, method, args))
        return ThreadPending(future, self.role, rank)

    def submit_pair(self, rank: int, method: str, *args: Any) -> tuple[Pending, Pending]:
        """Both are there at the same moment."""
        future = self.submit(rank, method, *args).future
        return ThreadPending(future, self.role, rank, 0), ThreadPending(future, self.role, rank, 1)

    def first_ready(self, pending: Sequence[Pending], timeout_seconds: float | None) -> int | None:
        """Wait for one of them; answers of other engines are there already."""
        futures = [item.future if isinstance(item, ThreadPending) else None for item in pending]
        if pending and None not in futures:
            wait([item for item in futures if item is not None], timeout_seconds, FIRST_COMPLETED)
        for place, future in enumerate(futures):
            if future is None or future.done():
                return place
        return None

    def close(self) -> None:
        """End the threads."""
        for thread in self._threads:
            thread.end()


class ThreadEngine(LocalEngine):
    """One worker of each role in this process; `submit` returns at once."""

    def __init__(self) -> None:
        super().__init__()
        self._groups: list[ThreadGroup] = []

    def group(self, role: str, specs: Sequence[WorkerSpec]) -> ThreadGroup:
        """Make the workers, each in its thread."""
        group = ThreadGroup(role, specs)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """End all threads."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.close()
