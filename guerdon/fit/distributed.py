"""Running a fit in several processes: started here, by `torchrun`, or one by one by another launcher.

torch's own `start_processes`, on which `torchrun` is built, starts and ends the processes on this machine.
`torchrun`'s agent itself is not used for them: it tells errors as text instead of raising them, and on Ctrl-C
it signals processes which the terminal has signalled already, so that they would end without saving.

Another launcher (Ray) calls `run_rank` once in each of its processes, with the same job and the address of
the machine where rank 0 is.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessException,
    ProcessExitedException,
    start_processes,
)

from guerdon.config import FitConfig
from guerdon.core.atomic import write_atomic
from guerdon.core.errors import ConfigError, GuerdonError, RunInterrupted, WorkerError
from guerdon.core.interrupts import Interrupts, also_ask
from guerdon.core.parent_watch import end_with
from guerdon.fit.distributed_model import strategy_of
from guerdon.fit.fit import FitJob, FitProcess, FitResult
from guerdon.fit.inputs import FEATURES_FILE
from guerdon.fit.process_group import (
    PeerLostError,
    ProcessGroup,
    backend_of,
    end_process,
    explain_lost_peers,
    open_store,
    picklable,
    under_torchrun,
)
from guerdon.rewards.image.quantize import require_int8

log = logging.getLogger("guerdon")

LOCALHOST = "127.0.0.1"
START_METHOD = "spawn"
"""A spawned process knows nothing of what this one has loaded or changed; starting it takes seconds."""
GRACE_SECONDS = 5.0
"""A rank that lost its peers waits so long before it ends: the peer that is the cause can tell why first."""


def run_job(job: FitJob, group: ProcessGroup | None = None) -> FitResult:
    """Fit in as many processes as the job says, as `torchrun` has started, or as are in `group`."""
    count = job.cfg.distributed.num_processes
    if group is None and under_torchrun():
        with torchrun_group(job.cfg) as group:
            return run_job(job, group)
    if group is None or group.world_size == 1:
        strategy_of(job.cfg, count)
        if count > 1:
            gpus = torch.cuda.device_count()
            if "nccl" in backend_of(job.cfg.distributed.communication) and gpus < count:
                raise ConfigError(
                    f"fit.distributed.num_processes is {count}, but there are {gpus} GPUs here: "
                    "NCCL needs one for each, fit.distributed.communication=gloo uses the CPU"
                )
            if job.model.precision == "int8":
                require_int8()
            return launch(job)
        group = ProcessGroup()
    patience = job.cfg.distributed.timeout_seconds
    with explain_lost_peers(group.rank, group.world_size, patience), FitProcess(job, group) as process:
        return process.run()


def torchrun_group(cfg: FitConfig) -> ProcessGroup:
    """The processes that `torchrun` has started; a group of one without it."""
    if not under_torchrun():
        return ProcessGroup()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun itself is our parent
        end_with(os.getppid())
    rank, there = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    section = cfg.distributed
    if section.num_processes not in (1, there):
        raise ConfigError(
            f"fit.distributed.num_processes is {section.num_processes}, but torchrun started {there}"
        )
    return ProcessGroup.join(
        rank, there, communication=section.communication, timeout_seconds=section.timeout_seconds
    )


class FSDPRewardWorker:
    """One process of a sharded fit. A plain class; engines decide where it lives.

    Every rank calls the same methods in the same order; rank 0 decides and writes. With `world_size` 1 it is
    the trainer in this process, and needs no address.

    Args:
        job: what to fit, the same on every rank; the data must be readable from here.
        rank: of this worker, from 0.
        world_size: how many there are.
        address: of the machine where rank 0 is; None (with `port`): as `torchrun` says.
        port: a free one on that machine.
        hosted: somebody else has opened that port as a `torch.distributed.TCPStore`; otherwise rank 0 does.
    """

    def __init__(
        self,
        job: FitJob,
        *,
        rank: int = 0,
        world_size: int = 1,
        address: str | None = None,
        port: int | None = None,
        hosted: bool = False,
    ) -> None:
        self.job, self.rank, self.world_size = job, rank, world_size
        self._meeting: dict[str, Any] = {"address": address, "port": port, "hosted": hosted}
        self._process: FitProcess | None = None
        self._open = ExitStack()

    def init_worker(self) -> None:
        """Connect to the other workers, open the data, build the model and go to `resume_dir`'s step."""
        section = self.job.cfg.distributed
        with ExitStack() as stack:  # also on Ctrl-C: the others must not wait for this one
            group = ProcessGroup.join(
                self.rank,
                self.world_size,
                **self._meeting,
                communication=section.communication,
                timeout_seconds=section.timeout_seconds,
            )
            stack.enter_context(group)
            self._process = stack.enter_context(FitProcess(self.job, group))
            self._open = stack.pop_all()

    def fit(self) -> FitResult:
        """Train, calibrate, save; the same result on every rank."""
        return self.process.run()

    def save_checkpoint(self, path: Path | str, step: int) -> Path:
        """Save the training state as `path/step_{step}/checkpoint.pt`, whole; returns that folder.

        Every rank must call it. Any number of workers, or one process, can go on from it.
        """
        target = Path(path) / f"step_{step}"
        self.process.trainer.start()
        self.process.trainer.save(target / "checkpoint.pt")
        return target

    def close(self) -> None:
        """Leave the others and remove temporary files."""
        self._process = None
        self._open.close()

    def __enter__(self) -> Self:
        self.init_worker()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process(self) -> FitProcess:
        """This worker's part in the fit."""
        if self._process is None:
            raise ConfigError("the reward worker is not in a fit yet: call init_worker() first")
        return self._process


def run_rank(
    rank: int,
    world_size: int,
    address: str | None,
    port: int | None,
    job: FitJob,
    *,
    hosted: bool = False,
) -> FitResult:
    """Take part in a fit as one of several processes; blocks until it ends. See `FSDPRewardWorker`.

    Raises:
        WorkerError: another process died or did not answer in `fit.distributed.timeout_seconds`.
    """
    worker = FSDPRewardWorker(
        job, rank=rank, world_size=world_size, address=address, port=port, hosted=hosted
    )
    with explain_lost_peers(rank, world_size, job.cfg.distributed.timeout_seconds), worker:
        return worker.fit()


# Processes on this machine


def launch(job: FitJob) -> FitResult:
    """Fit in `fit.distributed.num_processes` processes on this machine, which end when this call does."""
    count = job.cfg.distributed.num_processes
    # The store is opened here, on a port that is ours from the start.
    store = open_store(LOCALHOST, 0, count, True, timedelta(seconds=job.cfg.distributed.timeout_seconds))
    threads = max(1, torch.get_num_threads() // count)
    stop = multiprocessing.get_context(START_METHOD).RawValue("b", 0)  # Ctrl-C is for this process
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # our own error tells more
    ranks: ProcessContext | None = None
    with tempfile.TemporaryDirectory(prefix="guerdon-fit-") as answers:
        try:
            with Interrupts(tell=lambda: setattr(stop, "value", 1)) as interrupts, interrupts.deferred():
                ranks = start_processes(  # type: ignore[no-untyped-call]
                    _run_spawned_rank,
                    (count, store.port, job, Path(answers), threads, log.getEffectiveLevel(), stop),
                    count,
                    join=False,
                    start_method=START_METHOD,
                )
                while not ranks.join():
                    pass
            result: FitResult = pickle.loads((Path(answers) / "0").read_bytes())[0]  # noqa: S301  # our own
            return result
        except ProcessException as ended:
            _raise_cause(Path(answers), count, ended)
        finally:
            for process in ranks.processes if ranks is not None else ():
                process.kill()
                process.join()
            (job.folder / FEATURES_FILE).unlink(missing_ok=True)  # a process that was ended could not


def _run_spawned_rank(
    rank: int, count: int, port: int, job: FitJob, answers: Path, threads: int, level: int, stop: Any
) -> NoReturn:
    """The main function of a started process; leaves its result or its error in the folder `answers`."""
    parent: Any = multiprocessing.parent_process()
    end_with(parent.pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which sets `stop`
    also_ask(lambda: bool(stop.value))
    logging.basicConfig(stream=sys.stderr, level=level, format="%(message)s")
    torch.set_num_threads(threads)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine
    result, failure, trace = None, None, ""
    try:
        result = run_rank(rank, count, LOCALHOST, port, job, hosted=True)
    except (Exception, RunInterrupted) as error:
        failure, trace = picklable(error), traceback.format_exc()
    answer = pickle.dumps((result, failure, trace))
    write_atomic(answers / str(rank), lambda file: file.write(answer))
    if isinstance(failure, PeerLostError):
        time.sleep(GRACE_SECONDS)
    end_process(0 if failure is None else 1)


class _RemoteTrace(Exception):
    """Shows where in another process an error arose."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _raise_cause(answers: Path, count: int, ended: ProcessException) -> NoReturn:
    """Raise the error of the rank that failed, or say how it died without one.

    A rank that only lost its peers knows least: the error of another one is preferred.
    """
    failed = ended.error_index
    if not (answers / str(failed)).exists():
        how = "with an error"
        if isinstance(ended, ProcessExitedException):
            signalled = ended.signal_name
            how = f"by signal {signalled}" if signalled else f"with exit code {ended.exit_code}"
            how += " (out of memory, or somebody killed it)" if signalled == "SIGKILL" else ""
        raise WorkerError(
            f"rank {failed} of {count} of the fit died {how}; the others were ended. "
            "runner.resume_dir goes on from the last checkpoint"
        ) from ended
    errors: list[tuple[int, BaseException, str]] = []
    for rank in (failed, *range(count)):
        if (answers / str(rank)).exists():
            _, error, trace = pickle.loads((answers / str(rank)).read_bytes())  # noqa: S301  # our own bytes
            errors += [(rank, error, trace)] if error else []
    rank, error, trace = min(errors, key=lambda each: isinstance(each[1], PeerLostError))
    if not isinstance(error, GuerdonError | RunInterrupted):
        error = WorkerError(f"rank {rank} of {count} failed: {type(error).__name__}: {error}")
    raise error from _RemoteTrace(trace)
