"""The engine of asynchronous runs on one machine: workers in this process, each with a thread of its own.

Environments that wait (for a robot, a simulator in another process, a clock) and torch's kernels release the
interpreter lock, so that the threads run side by side. Where an environment computes in Python, `engine: ray`
gives every worker a process instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from guerdon.core.errors import GuerdonError, WorkerLostError
from guerdon.distributed.engine import LocalEngine, LocalGroup, Pending, WorkerSpec, worker_error

log = logging.getLogger("guerdon")

END_SECONDS = 5.0
"""How long a thread may take to end after its last call."""


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
