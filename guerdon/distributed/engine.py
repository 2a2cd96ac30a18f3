"""The interface of engines: the same worker classes as objects in this process, or as actors on a cluster.

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

from guerdon.core.errors import WorkerError


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
            ClusterError: it cannot be replaced, or was too often without doing its work in between.
        """

    @abstractmethod
    def answered(self, rank: int) -> None:
        """A worker did its work; if it is lost later, that counts as the first time."""

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


def worker_error(role: str, rank: int, error: BaseException) -> WorkerError:
    """An error of a worker in one line."""
    lines = str(error).strip().splitlines() or ["no message"]
    return WorkerError(f"{role} worker {rank} failed: {type(error).__name__}: {lines[0]}")
