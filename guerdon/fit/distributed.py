"""Starting the processes of a fit: on this machine, under `torchrun`, or one by one from another launcher.

A launcher of its own kind (Ray) calls `run_rank` once in each of its processes, with the same job and the
address of the machine where rank 0 is.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from guerdon.config import FitConfig
from guerdon.core.errors import ConfigError, GuerdonError, RunInterrupted, WorkerError
from guerdon.core.interrupts import Interrupts, also_ask
from guerdon.core.parent_watch import end_with
from guerdon.fit.features import FILE
from guerdon.fit.fit import FitJob, FitResult, Fitting
from guerdon.fit.spread import strategy_of
from guerdon.fit.team import Team, backend_of, end_process, lost_contact, open_store, portable, under_torchrun
from guerdon.fit.worker import FSDPRewardWorker
from guerdon.rewards.image.quantize import require_int8

log = logging.getLogger("guerdon")

LOCALHOST = "127.0.0.1"
START_METHOD = "spawn"
"""A process that is started anew knows nothing of what this one has loaded or changed; it takes seconds."""
GRACE_SECONDS = 5.0
"""How long a process may take to end when it is told to, and the others to say why they failed."""


def run_job(job: FitJob, team: Team | None = None) -> FitResult:
    """Fit in as many processes as the job says, as `torchrun` has started, or as have met in `team`."""
    count = job.cfg.distributed.num_processes
    if team is None and under_torchrun():
        with torchrun_team(job.cfg) as team:
            return run_job(job, team)
    if team is None or team.world_size == 1:
        strategy_of(job.cfg, count)
        if count > 1:
            _check_devices(job.cfg)
            if job.model.precision == "int8":
                require_int8()
            return launch(job)
        team = Team()
    with _explained(team.rank, team.world_size, job.cfg), Fitting(job, team) as fitting:
        return fitting.run()


def _check_devices(cfg: FitConfig) -> None:
    """Refuse here what every process would fail on."""
    count, gpus = cfg.distributed.num_processes, torch.cuda.device_count()
    if "nccl" in backend_of(cfg.distributed.communication) and gpus < count:
        raise ConfigError(
            f"fit.distributed.num_processes is {count}, but there are {gpus} GPUs here: "
            "NCCL needs one for each, fit.distributed.communication=gloo uses the CPU"
        )


def torchrun_team(cfg: FitConfig) -> Team:
    """The processes that `torchrun` has started; a team of one without it."""
    if not under_torchrun():
        return Team()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun itself is our parent
        end_with(os.getppid())
    rank, there = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    section = cfg.distributed
    if section.num_processes not in (1, there):
        raise ConfigError(
            f"fit.distributed.num_processes is {section.num_processes}, but torchrun started {there}"
        )
    return Team.join(
        rank, there, communication=section.communication, timeout_seconds=section.timeout_seconds
    )


def run_rank(
    rank: int,
    world_size: int,
    address: str | None,
    port: int | None,
    job: FitJob,
    *,
    hosted: bool = False,
) -> FitResult:
    """Take part in a fit as one of several processes; blocks until it ends.

    Args:
        rank: of this process; rank 0 decides, writes and logs.
        world_size: how many processes call this.
        address: of the machine where rank 0 is; None (with `port`): as `torchrun` says.
        port: a free one on that machine.
        job: the same for all; the data must be readable from here.
        hosted: somebody else has opened that port as a `torch.distributed.TCPStore`; otherwise rank 0 does.

    Raises:
        WorkerError: another process died or did not answer in `fit.distributed.timeout_seconds`.
    """
    worker = FSDPRewardWorker(
        job, rank=rank, world_size=world_size, address=address, port=port, hosted=hosted
    )
    with _explained(rank, world_size, job.cfg), worker:
        return worker.fit()


@contextmanager
def _explained(rank: int, world_size: int, cfg: FitConfig) -> Iterator[None]:
    """Say what a broken connection means."""
    try:
        yield
    except RuntimeError as error:
        if not lost_contact(error):
            raise
        raise LostContact(
            f"rank {rank} of {world_size} lost contact with the others, one of which died or did not answer "
            f"within {cfg.distributed.timeout_seconds:g} s: {str(error).splitlines()[0]}"
        ) from error


class LostContact(WorkerError):
    """Another rank is the cause; if it can still speak, its own error says more."""


# Processes on this machine


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What a process says when it ends."""

    result: FitResult | None = None
    error: BaseException | None = None
    trace: str = ""


class _RemoteTrace(Exception):
    """Shows where in another process an error arose."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def launch(job: FitJob) -> FitResult:
    """Fit in `fit.distributed.num_processes` processes on this machine, which end when this call does."""
    count = job.cfg.distributed.num_processes
    # The meeting point is here, on a port that is ours from the start.
    timeout = timedelta(seconds=job.cfg.distributed.timeout_seconds)
    store = open_store(LOCALHOST, 0, count, True, timeout)
    context: Any = multiprocessing.get_context(START_METHOD)
    threads = max(1, torch.get_num_threads() // count)
    stop = context.RawValue("b", 0)  # Ctrl-C is for this process, which hands it on
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            place = (rank, count, store.port)
            process = context.Process(
                target=_process,
                args=(place, job, theirs, threads, log.getEffectiveLevel(), stop),
                name=f"fit rank {rank}",
            )
            pipes.append(ours)
            processes.append(process)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
        with Interrupts(tell=lambda: setattr(stop, "value", 1)) as interrupts, interrupts.deferred():
            result = _outcome(pipes, processes)
        for process in processes:
            process.join(GRACE_SECONDS)
        return result
    finally:
        _end(processes)
        for pipe in pipes:
            pipe.close()
        (job.folder / FILE).unlink(missing_ok=True)  # a process that was ended could not clear up


def _outcome(pipes: list[Connection], processes: list[BaseProcess]) -> FitResult:
    """Wait for rank 0's result, or for the first process that fails."""
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    results: dict[int, _Answer] = {}
    failed: dict[int, _Answer] = {}
    deadline: float | None = None
    while waiting and (deadline is None or time.monotonic() < deadline):
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        for pipe in wait(list(waiting), timeout=left):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            answer = _hear(pipe, processes[rank], rank, len(processes))
            (results if answer.error is None else failed)[rank] = answer
        if failed and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS  # whoever caused it may still be about to speak
        if any(not isinstance(answer.error, LostContact) for answer in failed.values()):
            break
    if not failed:
        result = results[0].result
        assert result is not None
        return result
    # Those that only lost contact know least.
    first = min(failed, key=lambda rank: (isinstance(failed[rank].error, LostContact), rank))
    error = failed[first].error
    assert error is not None
    if isinstance(error, GuerdonError | RunInterrupted):
        raise error from (_RemoteTrace(failed[first].trace) if failed[first].trace else None)
    text = f"rank {first} of {len(processes)} failed: {type(error).__name__}: {error}"
    raise WorkerError(text) from _RemoteTrace(failed[first].trace)


def _hear(pipe: Connection, process: BaseProcess, rank: int, count: int) -> _Answer:
    """What a process says, or what its silence means."""
    try:
        answer: _Answer = pipe.recv()
        return answer
    except EOFError:
        process.join(GRACE_SECONDS)
        code = process.exitcode
        how = f"with exit code {code}"
        if code is not None and code < 0:
            how = f"by signal {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                how += " (out of memory, or somebody killed it)"
        return _Answer(
            error=WorkerError(
                f"rank {rank} of {count} of the fit died {how}; the others were ended. "
                "runner.resume_dir goes on from the last checkpoint"
            )
        )


def _end(processes: list[BaseProcess]) -> None:
    """End what still runs: politely, then not."""
    for kill in (False, True):
        running = [process for process in processes if process.pid is not None and process.is_alive()]
        for process in running:
            (process.kill if kill else process.terminate)()
        limit = time.monotonic() + GRACE_SECONDS
        for process in running:
            process.join(max(limit - time.monotonic(), 0.0))
    for process in processes:
        if process.pid is not None and not process.is_alive():
            process.join()


def _process(
    place: tuple[int, int, int], job: FitJob, pipe: Connection, threads: int, level: int, stop: Any
) -> None:
    """The main function of a started process."""
    rank, count, port = place
    parent: Any = multiprocessing.parent_process()
    end_with(parent.pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which tells this process
    also_ask(lambda: bool(stop.value))
    logging.basicConfig(stream=sys.stderr, level=level, format="%(message)s")
    torch.set_num_threads(threads)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine
    try:
        answer = _Answer(result=run_rank(rank, count, LOCALHOST, port, job, hosted=True))
        if rank > 0:
            answer = replace(answer, result=None)  # rank 0's is the one that is used
    except (Exception, RunInterrupted) as error:
        answer = _Answer(error=portable(error), trace=traceback.format_exc())
    with suppress(BrokenPipeError):  # the parent has ended the fit already
        pipe.send(answer)
    pipe.close()
    end_process(0)
