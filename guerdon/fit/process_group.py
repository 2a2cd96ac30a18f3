"""`ProcessGroup`: the processes (ranks) that fit one model together, over `torch.distributed`.

A group of one answers at once and needs no backend, so the trainer is written for a group alone.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, Self, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from guerdon.core.errors import ConfigError, DataError, WorkerError

log = logging.getLogger("guerdon")

T = TypeVar("T")
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that `torchrun` sets in every process that it starts."""


class ProcessGroup:
    """This process among those that share every global batch. `ProcessGroup()` is a group of one.

    Attributes:
        rank: number of this process, from 0; rank 0 is the main process, which decides and writes.
        world_size: how many processes there are.
        local_rank: number of this process among those on its machine.
        local_size: how many there are on this machine.
        local_main: the lowest rank on this machine.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self.local_rank, self.local_size, self.local_main = 0, 1, 0
        self._joined = False
        self._timeout = timedelta(0)

    @classmethod
    def join(
        cls,
        rank: int,
        world_size: int,
        *,
        address: str | None = None,
        port: int | None = None,
        hosted: bool = False,
        communication: str = "auto",
        timeout_seconds: float = 1800.0,
    ) -> ProcessGroup:
        """Connect to the other processes; returns when all of them are there.

        Args:
            rank: of this process.
            world_size: how many there are; 1 needs no address.
            address: of the machine where rank 0 is; None: as `torchrun` says.
            port: a free one on that machine.
            hosted: the store at that port exists already; otherwise rank 0 opens it.
            communication: `gloo`, `nccl`, or `auto`: NCCL between GPUs, gloo otherwise.
            timeout_seconds: how long to wait for the others, now and later.
        """
        group = cls()
        if world_size == 1:
            return group
        timeout = timedelta(seconds=timeout_seconds)
        backend = backend_of(communication)
        try:
            if address is None or port is None:
                dist.init_process_group(backend, timeout=timeout)
            else:
                store = open_store(address, port, world_size, rank == 0 and not hosted, timeout)
                dist.init_process_group(
                    backend, store=store, rank=rank, world_size=world_size, timeout=timeout
                )
        except (RuntimeError, ValueError, OSError) as error:  # torch's DistError is a RuntimeError
            place = "as torchrun says" if address is None else f"at {address}:{port}"
            raise WorkerError(
                f"rank {rank} of {world_size} did not meet the others {place} "
                f"within {timeout_seconds:g} s: {str(error).splitlines()[0]}"
            ) from error
        group.rank, group.world_size, group._joined, group._timeout = rank, world_size, True, timeout
        hosts = group.all_gather(socket.gethostname())
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        group.local_rank, group.local_size, group.local_main = here.index(rank), len(here), here[0]
        if rank > 0:
            log.setLevel(max(log.getEffectiveLevel(), logging.WARNING))  # rank 0 logs for all
        return group

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Element-wise sum over the ranks."""
        if not self._joined:
            return values
        total = torch.from_numpy(np.array(values, np.float64))
        dist.all_reduce(total)
        return total.numpy()

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order."""
        if not self._joined:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def on_main(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 alone and give every rank its result; its error is raised on all ranks."""
        answer: list[Any] = [self._run_if(self.is_main, make)]
        if self._joined:
            dist.broadcast_object_list(answer, src=0)
        result: T = answer[0]
        return result

    def local_main_first(self, make: Callable[[], T]) -> T:
        """Call `make` on one process per machine, then on the others, which find its files there."""
        is_first = self.rank == self.local_main
        first, later = self._run_if(is_first, make), self._run_if(not is_first, make)
        return first if is_first else later  # type: ignore[return-value]  # one of the turns was ours

    def _run_if(self, is_turn: bool, make: Callable[[], T]) -> T | None:
        """Call `make` on the ranks whose turn it is; an error of one of them is raised on all."""
        result, error = None, None
        if is_turn:
            try:
                result = make()
            except Exception as caught:
                error = caught
        errors = [other for other in self.all_gather(error and picklable(error)) if other is not None]
        if errors:
            raise error or errors[0]
        return result

    def require_same(self, what: str, value: object) -> None:
        """Raise a `DataError` if the ranks differ in `value`."""
        values = self.all_gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise DataError(f"rank {rank} has another {what} than rank 0: {other} instead of {values[0]}")

    def new_group(self) -> dist.ProcessGroup | None:
        """A group of all ranks whose messages never mix with others, with the same timeout."""
        return dist.new_group(timeout=self._timeout)  # type: ignore[no-any-return]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self._joined:
            dist.barrier()

    def close(self) -> None:
        """Destroy the process group; may be called again."""
        if self._joined:
            self._joined = False
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_store(
    address: str, port: int, world_size: int | None, is_host: bool, timeout: timedelta, shared: bool = False
) -> Any:
    """The `TCPStore` through which ranks find each other; the host opens it (port 0: any that is free).

    The host listens on `address` alone; by itself torch would listen on all interfaces. If `shared`, whoever
    opens the same port in this process gets the same store.
    """
    listening: int | None = None
    if is_host:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, port), family=family, backlog=128)
        port, listening = server.getsockname()[1], server.detach()
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, world_size, is_master=is_host, timeout=timeout, wait_for_workers=False,
        multi_tenant=shared, master_listen_fd=listening,
    )  # fmt: skip


def under_torchrun() -> bool:
    """Whether this process is one of several that a launcher of torch's kind has started."""
    return all(os.environ.get(name) for name in TORCHRUN)


def is_main_process() -> bool:
    """Whether results are printed here: not in the other processes that `torchrun` has started."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def end_process(code: int) -> NoReturn:
    """End a process that was in a group, without Python's own shutdown.

    A thread of gloo may still hold the tensors of the last message, even after `close`. If it releases them
    while Python shuts down, it aborts the process, and torchrun takes that for a failure of the fit.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has gone, or it is closed
            stream.flush()
    os._exit(code)


class PeerLostError(WorkerError):
    """Another rank ended or hangs; if it still can, its own error tells the cause."""


@contextmanager
def explain_lost_peers(rank: int, world_size: int, timeout_seconds: float) -> Iterator[None]:
    """Say what an error means that only follows from another rank's end."""
    signs = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe")
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        if not isinstance(error, dist.DistError) and not any(sign in str(error).lower() for sign in signs):
            raise
        raise PeerLostError(
            f"rank {rank} of {world_size} lost contact with the others, one of which died or did not answer "
            f"within {timeout_seconds:g} s: {str(error).splitlines()[0]}"
        ) from error


def picklable(error: BaseException) -> BaseException:
    """The error itself if it can be sent to another process, its text otherwise."""
    with suppress(Exception):  # whatever pickling raises, the text is what remains
        if str(pickle.loads(pickle.dumps(error))) == str(error):  # noqa: S301  # our own bytes
            return error
    return WorkerError(f"{type(error).__name__}: {error}")


def backend_of(communication: str) -> str:
    """Torch's name for `fit.distributed.communication`; refuses what this machine does not have."""
    if communication == "auto":
        communication = "nccl" if torch.cuda.is_available() else "gloo"
    if communication == "nccl" and not torch.cuda.is_available():
        raise ConfigError("fit.distributed.communication is nccl, but there is no GPU: use gloo")
    # What lives on the CPU (decisions, sums, small arrays) goes over gloo in any case.
    return "cpu:gloo,cuda:nccl" if communication == "nccl" else "gloo"
