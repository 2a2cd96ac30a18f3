"""Runs targets in worker processes, notices how they end, and keeps count.

Limits of one input: 20 s, 1 GiB above what it returns, no process started, no connection opened. A crash of a
worker or a hang is a finding like an exception that is no `GuerdonError`; a new worker takes its place.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from fuzz.results import Log, Result
from fuzz.worker import MEMORY, Chunk, Finding, Slate, Target, file_name, work

__all__ = ["Finding", "Result", "Target", "fuzz"]

SECONDS = 20.0
"""How long one input may take."""
_CHUNK_SECONDS = 1.0
_MAX_FINDINGS = 25  # of one target; it is not run on after that
_FLOOR = 6  # a target gets at least one part in so many of an equal share, however slow it is


class _Worker:
    """A process and what it has been asked for."""

    def __init__(
        self, load: Callable[[], Mapping[str, Target]], scratch: Path, seed: int, memory: int
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=scratch))
        self.slate = Slate(self.folder / "slate")
        self.slate.end()
        (self.folder / "trace").touch()
        context = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=work, args=(theirs, load, self.folder, seed, memory), daemon=True
        )
        self.process.start()
        theirs.close()
        self.request: tuple[str, int, int] | None = None
        self._first_seen: tuple[int, float] | None = None
        """Number of the input that is running, and the processor seconds used when it was first seen."""

    def ask(self, name: str, first: int, count: int) -> None:
        self.request = (name, first, count)
        self.connection.send(self.request)

    def hangs(self, seconds: float) -> bool:
        """Whether its input takes too long; a process that wants to run on a busy machine does not hang."""
        running = self.slate.running()
        if running is None or self.process.pid is None:
            return False
        number, _, began = running
        is_ready, used = _processor_use(self.process.pid)
        if self._first_seen is None or self._first_seen[0] != number:
            self._first_seen = (number, used)
        is_starved = is_ready and used - self._first_seen[1] <= seconds
        return time.monotonic() - began > seconds and not is_starved

    def autopsy(self, kind: str) -> Chunk:
        """What a process that hung or died leaves behind: its finding, and how many inputs it had run."""
        assert self.request is not None
        name, first, _ = self.request
        running = self.slate.running()
        trace = (self.folder / "trace").read_text(errors="replace")
        if running is None:
            raise RuntimeError(f"the worker of {name} ended outside of an input ({kind}): {trace[-2000:]}")
        number, data, began = running
        took = time.monotonic() - began
        return Chunk(name, number - first + 1, 0, took, took, [Finding(name, kind, data, trace)])

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill_hanging(self) -> Chunk:
        """End a process that hangs; its trace says where."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self.autopsy("hang")

    def died(self) -> Chunk:
        self.process.join()
        code = self.process.exitcode or 0
        kind = signal.Signals(-code).name if code < 0 else f"exit {code}"
        return self.autopsy(f"crash {kind}")


def _processor_use(pid: int) -> tuple[bool, float]:
    """Whether a process runs or waits for a processor, and the processor seconds it has used."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return False, 0.0
    return fields[0] == "R", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def fuzz(
    load: Callable[[], Mapping[str, Target]],
    names: Sequence[str],
    *,
    inputs: int | None = None,
    each: int | None = None,
    minutes: float | None = None,
    seed: int = 0,
    workers: int = 1,
    seconds: float = SECONDS,
    memory: int = MEMORY,
    findings: Path | None = None,
    log: Path | None = None,
    report: Callable[[Mapping[str, Result]], None] | None = None,
) -> dict[str, Result]:
    """Run inputs until a budget is used up.

    Args:
        load: a function of a module, by which a worker process gets the targets.
        names: of the targets to run. At any time each has got a sixth of an equal share at least; the rest
            goes to where the least time was spent.
        inputs: how many in all, with those of the log, and
        each: how many of every target, and
        minutes: how long; those that are None do not end it.
        seed: of the generator; the same seed gives the same inputs.
        workers: processes at a time.
        seconds: how long one input may take.
        memory: bytes that one input may take above what it returns.
        findings: a folder for inputs and traces of findings.
        log: a file with what was run so far; the run goes on from there and adds to it.
        report: called about every ten seconds.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kept = None if log is None else Log(log, seed)
    results = {name: Result() for name in names} if kept is None else kept.results(names)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    reported = time.monotonic()

    left_over: list[tuple[str, int, int]] = []  # of workers that ended in the middle of a chunk

    def next_request() -> tuple[str, int, int] | None:
        if deadline is not None and time.monotonic() > deadline:
            return None
        while left_over:
            request = left_over.pop()
            if results[request[0]].num_findings < _MAX_FINDINGS:
                return request
        given = sum(item.given for item in results.values())
        left = float("inf") if inputs is None else inputs - given
        open_ones = [
            name
            for name, item in results.items()
            if item.num_findings < _MAX_FINDINGS and (each is None or item.given < each)
        ]
        if left <= 0 or not open_ones:
            return None
        floor = given / (_FLOOR * len(names))
        name = min(open_ones, key=lambda name: (results[name].given >= floor, results[name].seconds))
        item = results[name]
        rate = item.inputs / item.seconds if item.seconds else 20.0
        count = int(
            min(left, max(10, rate * _CHUNK_SECONDS), float("inf") if each is None else each - item.given)
        )
        first = item.next
        item.given += count
        item.next += count
        return name, first, count

    def take(chunk: Chunk, first: int) -> None:
        if kept is not None:
            kept.append(chunk, first)
        for finding in results[chunk.target].add(chunk):
            if findings is not None:
                _save(finding, findings)

    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as folder:
        team: list[_Worker] = []
        try:
            while True:
                for worker in team:
                    if worker.request is None and (request := next_request()) is not None:
                        worker.ask(*request)
                while len(team) < workers and (request := next_request()) is not None:
                    team.append(_Worker(load, Path(folder), seed, memory))
                    team[-1].ask(*request)
                busy = [worker for worker in team if worker.request is not None]
                if not busy:
                    return results
                ready = wait([worker.connection for worker in busy], timeout=0.5)
                for worker in busy:
                    assert worker.request is not None
                    name, first, count = worker.request
                    lost: Chunk | None = None
                    if worker.connection in ready:
                        try:
                            take(worker.connection.recv(), first)
                            worker.request = None
                        except (EOFError, ConnectionError):
                            lost = worker.died()
                    elif worker.hangs(seconds):
                        lost = worker.kill_hanging()
                    if lost is not None:
                        take(lost, first)
                        if count > lost.inputs:
                            left_over.append((name, first + lost.inputs, count - lost.inputs))
                        worker.end()
                        team.remove(worker)
                if report is not None and time.monotonic() - reported > 10:
                    reported = time.monotonic()
                    report(results)
        finally:
            for worker in team:
                worker.end()


def _save(finding: Finding, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(finding)
    path.with_suffix(".bin").write_bytes(finding.data)
    path.with_suffix(".txt").write_text(f"{finding.target}: {finding.kind}\n{finding.detail}\n")
