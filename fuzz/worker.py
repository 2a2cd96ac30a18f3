"""The process that runs inputs, many in a row; how it ends is for its parent to see.

Before an input is run it is written to a file that the parent can read, together with the time. A crash or a
hang of this process therefore costs no more than the process, and the input that did it is known.
"""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import logging
import mmap
import random
import resource
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fuzz.mutations import MAX_INPUT, mutate_bytes
from guerdon.core.errors import GuerdonError

MEMORY = 1 << 30
"""Bytes that an input may take above what it returns."""
_ADDRESS_SPACE = 6 << 30  # beyond this an allocation fails: a finding must not take the machine along
MAX_BASE = 32 << 10
"""Bytes; larger inputs are run as they are, for their changed copies would take too long."""
_HEAD = struct.Struct("<qqd")  # number of the input, its length, when it began
_CORPUS = Path(__file__).parent / "corpus"
_FORBIDDEN = ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork", "socket.connect")
_H5_READER = "guerdon.data.formats.h5_process"
"""The one process that a reader starts: HDF5 files are read there, and it is replaced when a file ends it."""


@dataclass(frozen=True)
class Target:
    """Something that reads foreign bytes."""

    seeds: Callable[[Path], list[bytes]]
    """Makes valid inputs in a scratch folder; called once in every process, before `run` with that folder."""
    run: Callable[[bytes, Path], int | None]
    """Reads one input in the scratch folder; returns (the bytes it took for what was read, if that may be
    much) or raises `GuerdonError`. Anything else is a finding."""
    mutate: Callable[[bytes, random.Random], bytes] | None = None
    """A change that knows the format; else `mutate_bytes`."""


@dataclass(frozen=True)
class Finding:
    """An input on which a target did not keep its promise."""

    target: str
    kind: str
    data: bytes
    detail: str

    @property
    def signature(self) -> str:
        """The same for findings that are likely to have the same cause: kind, and where in Guerdon."""
        places = [
            line
            for line in self.detail.splitlines()
            if line.lstrip().startswith("File") and "guerdon/" in line
        ]
        return f"{self.target} {self.kind} {places[-1:]}"


@dataclass
class Chunk:
    """What a row of inputs gave."""

    target: str
    inputs: int = 0
    refused: int = 0
    """Inputs that were answered with a `GuerdonError`; the others were read."""
    seconds: float = 0.0
    """With making them."""
    slowest: float = 0.0
    findings: list[Finding] = field(default_factory=list)


def corpus(name: str) -> list[bytes]:
    """The inputs in the tree for a target: what once was a finding, and what `fuzz.make_corpus` wrote."""
    return [file.read_bytes() for file in sorted((_CORPUS / name).glob("*")) if file.is_file()]


class Slate:
    """The file by which a process tells what it is doing."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_HEAD.size + 2 * MAX_INPUT)
            self._map = mmap.mmap(file.fileno(), 0)

    def begin(self, number: int, data: bytes) -> None:
        """Before an input is run."""
        self._map[_HEAD.size : _HEAD.size + len(data)] = data
        self._map[: _HEAD.size] = _HEAD.pack(number, len(data), time.monotonic())

    def end(self) -> None:
        """No input is being run."""
        self._map[: _HEAD.size] = _HEAD.pack(-1, 0, 0.0)

    def running(self) -> tuple[int, bytes, float] | None:
        """(number, input, when it began), or None."""
        number, length, began = _HEAD.unpack(self._map[: _HEAD.size])
        return None if number < 0 else (number, bytes(self._map[_HEAD.size : _HEAD.size + length]), began)


class Runner:
    """One target in this process."""

    def __init__(
        self, name: str, target: Target, scratch: Path, slate: Slate, watch: list[str], memory: int
    ) -> None:
        self._name, self._target, self._slate, self._watch = name, target, slate, watch
        self._scratch, self._memory = scratch, memory
        self._scratch.mkdir(parents=True, exist_ok=True)
        seeds = target.seeds(self._scratch)
        self._known = seeds + corpus(name)
        self._bases = [data for data in self._known if len(data) <= MAX_BASE]
        self._valid = [data for data in seeds if len(data) <= MAX_BASE]

    def input(self, number: int, seed: int) -> bytes:
        """Input `number`: first those that are known as they are, then changed ones."""
        if number < len(self._known):
            return self._known[number]
        rng = random.Random(f"{seed} {self._name} {number}")
        data = rng.choice(rng.choice((self._valid, self._bases)))  # valid ones lead furthest into a reader
        if self._target.mutate is not None:
            return self._target.mutate(data, rng)[:MAX_INPUT]
        return mutate_bytes(data, rng, self._bases)

    def run(self, numbers: range, seed: int) -> Chunk:
        """Run inputs `numbers`."""
        chunk = Chunk(self._name)
        gc.collect()
        before = _reset_peak()
        started = time.perf_counter()
        for number in numbers:
            data, began = b"", time.perf_counter()
            self._slate.begin(number, data)  # a mutation that hangs, crashes or fails is seen, too
            try:
                data = self.input(number, seed)
                self._slate.begin(number, data)
                began = time.perf_counter()
                returned = self._target.run(data, self._scratch) or 0
            except GuerdonError:
                chunk.refused += 1
                returned = 0
            except Exception as error:
                chunk.findings.append(
                    Finding(self._name, f"uncaught {type(error).__name__}", data, traceback.format_exc())
                )
                returned = 0
            took = time.perf_counter() - began
            self._slate.end()
            chunk.inputs += 1
            chunk.slowest = max(chunk.slowest, took)
            if self._watch:
                chunk.findings.append(Finding(self._name, "door", data, f"asked for {self._watch}"))
                self._watch.clear()
            limit = before + self._memory + returned
            if (peak := _peak(limit)) > limit:
                megabytes = (peak - before) >> 20
                chunk.findings.append(Finding(self._name, "memory", data, f"took {megabytes} MiB"))
                gc.collect()
                before = _reset_peak()
        chunk.seconds = time.perf_counter() - started
        return chunk


def _peak(above: int = 0) -> int:
    """The highest use of memory since it was reset, in bytes; 0 where it is not over `above`."""
    usage = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )  # at least that of the parent at its fork
    if usage <= above:  # reading the file takes longer than some inputs
        return 0
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split(maxsplit=1)[0]) * 1024


def _reset_peak() -> int:
    """Forget the highest use of memory so far; returns what is in use now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _limit_address_space() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def work(
    connection: Connection,
    load: Callable[[], Mapping[str, Target]],
    folder: Path,
    seed: int,
    memory: int,
) -> None:
    """Answer requests (target, number of the first input, how many) with a `Chunk` each, until None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    with (folder / "trace").open("w") as trace:
        faulthandler.enable(trace)
        faulthandler.register(signal.SIGUSR1, trace)
        warnings.simplefilter("ignore")
        logging.disable()
        targets, slate, asked = load(), Slate(folder / "slate"), []

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            ours = event == "subprocess.Popen" and any(_H5_READER in str(part) for part in arguments[1])
            if event in _FORBIDDEN and not ours and slate.running() is not None:
                asked.append(event)

        sys.addaudithook(watch)
        _limit_address_space()
        gc.freeze()  # what was imported: looking through it before every chunk takes 0.2 s
        runners: dict[str, Runner] = {}
        while (request := connection.recv()) is not None:
            name, first, count = request
            if name not in runners:
                runners[name] = Runner(name, targets[name], folder / name, slate, asked, memory)
            connection.send(runners[name].run(range(first, first + count), seed))


def file_name(finding: Finding) -> str:
    """A name for a finding's input; the same input has the same name."""
    kind = "".join(char if char.isalnum() else "-" for char in finding.kind)
    return f"{finding.target}-{kind}-{hashlib.sha256(finding.data).hexdigest()[:12]}"
