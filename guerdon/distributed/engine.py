"""Engines: the same worker classes as plain objects in this process, or as actors on a cluster.

A `Group` holds the workers of one role. `submit` asks one of them and returns a `Pending` answer, which may
be handed to another worker as an argument: on a cluster the answer then goes from worker to worker without
passing through this process. Code that uses groups is the same for all engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from guerdon.core.errors import ClusterError, WorkerError, WorkerLostError

MAX_RESTARTS_IN_A_ROW = 3
"""A worker that is lost so often without answering in between is not started again."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """How a worker is made: its class, which must be importable, and the arguments."""

    cls: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None
    """Threads of torch in a process of its own; None: as in this process."""

    def make(self) -> Any:
        """The worker, in this process."""
        return self.cls(*self.args, **self.kwargs)


class Pending(ABC):
    """An answer that may not be there yet; as an argument of `submit` it stands for its value."""

    @abstractmethod
    def result(self, timeout_seconds: float | None = None) -> Any:
        """The answer; raises what the worker raised.

        Raises:
            WorkerLostError: the worker has gone, or gave no answer in time.
            WorkerError: it failed with something else than one of our own errors.
        """


class Handle(ABC):
    """A way for one worker to ask another; can be sent to workers."""

    @abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Ask and wait."""


class Group(ABC):
    """The workers of one role."""

    def __init__(self, role: str, size: int) -> None:
        self.role, self.size = role, size

    @abstractmethod
    def submit(self, rank: int, method: str, *args: Any) -> Pending:
        """Ask one worker; arguments may be `Pending`."""

    @abstractmethod
    def submit_pair(self, rank: int, method: str, *args: Any) -> tuple[Pending, Pending]:
        """The same for a method that returns two things, so that one of them can stay where it is."""

    @abstractmethod
    def first_ready(self, pending: Sequence[Pending], timeout_seconds: float | None) -> int | None:
        """The place in `pending` of an answer that is there; None if there is none in time."""

    @abstractmethod
    def restart(self, rank: int, reason: str) -> None:
        """Replace a worker that is lost or stalls.

        Raises:
            ClusterError: it cannot be replaced; the message says why.
        """

    @abstractmethod
    def handle(self, rank: int) -> Handle:
        """For other workers."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Ask all workers the same at the same time; answers in the order of ranks."""
        pending = [self.submit(rank, method, *args) for rank in range(self.size)]
        return [item.result() for item in pending]


class Engine(ABC):
    """Makes groups of workers."""

    shares_memory: bool
    """Whether workers live in this process, so that they may share objects with it."""

    def __init__(self) -> None:
        self.restarts: Counter[str] = Counter()
        """Role -> workers that were replaced so far."""

    @abstractmethod
    def num_workers(self, role: str) -> int:
        """How many workers of a role the settings ask for; 0 if it has no processes of its own."""

    @abstractmethod
    def workers_beside(self, role: str) -> int:
        """The most workers of a role that share a machine."""

    @abstractmethod
    def group(self, role: str, specs: Sequence[WorkerSpec]) -> Group:
        """Make a worker of each spec."""

    @abstractmethod
    def log_notices(self, *, wait: bool = True) -> None:
        """Log what workers had to warn of since the last call, where nobody sees what they log.

        Args:
            wait: a moment for each; otherwise those that are busy are heard at a later call.
        """

    @abstractmethod
    def put(self, value: Any) -> Pending:
        """Something large that several workers will be given."""

    @abstractmethod
    def close(self) -> None:
        """Stop all workers and leave nothing behind; safe to call twice."""


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


def worker_error(role: str, rank: int, error: BaseException) -> WorkerError:
    """An error of a worker in one line."""
    told = str(error).strip().splitlines() or ["no message"]
    return WorkerError(f"{role} worker {rank} failed: {type(error).__name__}: {told[0]}")


class RestartCounter:
    """Refuses to start one worker again and again when nothing comes of it."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._in_a_row: Counter[int] = Counter()

    def answered(self, rank: int) -> None:
        """A worker did its work."""
        self._in_a_row.pop(rank, None)

    def lost(self, error: WorkerLostError) -> None:
        """A worker was lost; raises if that happens to it too often."""
        self._in_a_row[error.rank] += 1
        if self._in_a_row[error.rank] > MAX_RESTARTS_IN_A_ROW:
            raise ClusterError(
                f"{self._role} worker {error.rank} was lost {self._in_a_row[error.rank]} times in a row "
                f"without doing its work, at last because {error.reason}"
            ) from error
