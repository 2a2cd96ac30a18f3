"""Reads HDF5 files in a process of its own, with limits on memory and time.

libhdf5 can crash, hang or take any amount of memory on a damaged file, and nothing in the process that calls
it can prevent that. So a child process alone opens files, and sends finished episodes as plain bytes.
If it dies over an episode, a new one goes on behind it. A child that is not needed ends after some seconds.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import Episode, Fault, display_path
from guerdon.data.files.bounds import memory_budget
from guerdon.data.formats.base import read_or_fault

resource: Any
try:
    import resource
except ImportError:  # Windows; a child's time is still limited
    resource = None

START_SECONDS = 60.0
"""For Python to start and to import h5py, on a busy machine."""
EPISODE_SECONDS = 5.0
FILE_SECONDS = 15.0
BYTES_PER_SECOND = 10 << 20
"""What is granted on top: so slow may reading be."""
MEMORY = 512 << 20
"""Bytes that a child may take above what it holds at the start and the frames that it reads."""
IDLE_SECONDS = 3.0
_MAX_CRASHES = 3
_MAX_HEAD = 64 << 20
_DTYPES = {"uint8": np.uint8, "float32": np.float32, "bool": np.bool_}


def read_guarded(path: Path, reader: str = "maniskill_h5") -> Iterator[Episode | Fault]:
    """Every episode of a file; those that end the child, or that take too long, are faults.

    Args:
        path: the file.
        reader: the module in this package whose `read_file` reads it.
    """
    shown = display_path(path)
    left = FILE_SECONDS + path.stat().st_size / BYTES_PER_SECOND
    done: list[str] = []
    crashes = 0
    while True:
        child = _Child.acquire()
        try:
            child.ask({"path": str(path), "done": done, "reader": reader})
            current: str | None = None
            while True:
                limit = min(left, EPISODE_SECONDS + path.stat().st_size / BYTES_PER_SECOND)
                began = time.monotonic()
                head, arrays = child.answer(limit)
                left -= time.monotonic() - began
                if head["kind"] == "end":
                    child.release()
                    return
                if head["kind"] == "begin":
                    current = str(head["name"])
                    done.append(current)
                elif head["kind"] == "fault":
                    yield Fault(path=str(head["path"]), reason=str(head["reason"]))
                else:
                    where = Path(f"{path}:{current}")
                    yield read_or_fault(where, partial(_episode, head, arrays))
        except (TimeoutError, EOFError, BrokenPipeError) as error:
            timed_out = isinstance(error, TimeoutError)
            left -= EPISODE_SECONDS if timed_out else 0.0
            crashes += 1
            reason = f"not read: {'it took too long' if timed_out else child.how_it_ended()}"
            yield Fault(path=shown if current is None else f"{shown}:{current}", reason=reason)
            if current is None or left <= 0 or crashes >= _MAX_CRASHES:
                if current is not None:
                    yield Fault(path=shown, reason=f"what comes after {current} is not read")
                return
        finally:
            child.end_unless_released()


def _episode(head: dict[str, Any], arrays: list[NDArray[Any]]) -> Episode:
    """What the child sent; cameras are the arrays called `frames/NAME`."""
    named: dict[str, Any] = {"frames": {}}
    for (name, *_), array in zip(head["arrays"], arrays, strict=True):
        if name.startswith("frames/"):
            named["frames"][name.removeprefix("frames/")] = array
        else:
            named[name] = array
    return Episode(**head["facts"], **named)


class _Child:
    """A process that reads files; one is kept for the next file."""

    _idle: list[_Child] = []  # noqa: RUF012 - shared on purpose
    _lock = threading.Lock()

    def __init__(self) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as child; child.serve({IDLE_SECONDS})"
        )
        # Isolated: nothing in the working directory, which may be that of the data, is imported.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._owner = os.getpid()
        self._is_idle = False
        try:
            self.answer(START_SECONDS)
        except (TimeoutError, EOFError) as error:
            self.end_unless_released()
            raise DataError(f"the process that reads HDF5 files did not start: {error}") from error

    @classmethod
    def acquire(cls) -> _Child:
        """A child that waits for a file."""
        while True:
            with cls._lock:
                if not cls._idle:
                    break
                child = cls._idle.pop()
            child._is_idle = False
            if child._owner == os.getpid() and child._process.poll() is None:
                with suppress(EOFError, BrokenPipeError, TimeoutError):
                    child.ask({})  # it may be about to leave
                    child.answer(START_SECONDS)
                    return child
            child.end_unless_released()
        return cls()

    def release(self) -> None:
        """It has done its work and may do more."""
        self._is_idle = True
        with self._lock:
            self._idle.append(self)

    def end_unless_released(self) -> None:
        """End it, if it has not been released."""
        if self._is_idle or self._owner != os.getpid():  # after a fork it is another's
            return
        self._process.kill()
        self._process.communicate()

    def how_it_ended(self) -> str:
        """How it ended."""
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"libhdf5 failed on it ({how}); the file is damaged"

    def ask(self, request: dict[str, Any]) -> None:
        """Send a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, seconds: float) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        """The next message; raises EOFError if the child is gone, TimeoutError after it has ended it."""
        end = time.monotonic() + max(0.0, seconds)
        watch = threading.Timer(max(0.0, seconds), self._process.kill)
        watch.start()
        try:
            return self._read()
        except (ValueError, KeyError, TypeError, MemoryError) as error:  # a broken answer before a crash
            raise EOFError from error
        except EOFError:
            if time.monotonic() >= end:
                raise TimeoutError from None
            raise
        finally:
            watch.cancel()

    def _read(self) -> tuple[dict[str, Any], list[NDArray[Any]]]:
        """A line of JSON, and the bytes of the arrays that it lists."""
        answers = self._process.stdout
        assert answers is not None
        line = answers.readline(_MAX_HEAD)
        if not line.endswith(b"\n"):
            raise EOFError
        head: dict[str, Any] = json.loads(line)
        kinds = [(_DTYPES[kind], tuple(shape)) for _, kind, shape in head.get("arrays", ())]
        if sum(math.prod(shape) * np.dtype(kind).itemsize for kind, shape in kinds) > memory_budget():
            raise MemoryError
        arrays: list[NDArray[Any]] = [np.empty(shape, kind) for kind, shape in kinds]
        for array in arrays:
            if array.size and answers.readinto(array.data.cast("B")) < array.nbytes:  # type: ignore[attr-defined]
                raise EOFError
        return head, arrays


# In the child


def serve(idle_seconds: float) -> None:
    """Answer requests, one line of JSON each, until there are none for a while."""
    from guerdon.data.formats import maniskill_h5, minari_h5

    readers = {"maniskill_h5": maniskill_h5.read_file, "minari_h5": minari_h5.read_file}
    answers, requests = os.fdopen(os.dup(1), "wb"), os.fdopen(0, "rb")
    os.dup2(2, 1)  # whatever prints does not print into the answers
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import h5py  # noqa: F401 - before memory is limited

    _send(answers, {"kind": "ready"})
    while select.select([requests], [], [], idle_seconds)[0] and (line := requests.readline()):
        request = json.loads(line)
        if "path" in request:
            limit_memory(0)
            on_start: Callable[[str], None] = lambda name: _send(answers, {"kind": "begin", "name": name})  # noqa: E731
            read_file = readers[request["reader"]]
            for item in read_file(Path(request["path"]), set(request["done"]), on_start):
                _send_item(answers, item)
        _send(answers, {"kind": "end"})


def limit_memory(frames: int) -> None:
    """Let this process take `frames` bytes and `MEMORY` more than it holds now, where the system can tell."""
    statm = Path("/proc/self/statm")
    if resource is None or not statm.exists():
        return
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = used + frames + MEMORY
    resource.setrlimit(
        resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )


def _send(answers: BinaryIO, head: dict[str, Any]) -> None:
    answers.write(json.dumps(head).encode() + b"\n")
    answers.flush()


def _send_item(answers: BinaryIO, item: Episode | Fault) -> None:
    if isinstance(item, Fault):
        _send(answers, {"kind": "fault", "path": item.path, "reason": item.reason})
        return
    named: dict[str, NDArray[Any]] = {f"frames/{name}": images for name, images in item.frames.items()}
    values = {each.name: getattr(item, each.name) for each in fields(item) if each.name != "frames"}
    named |= {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    facts = {name: value for name, value in values.items() if name not in named and value is not None}
    shapes = [(name, str(array.dtype), array.shape) for name, array in named.items()]
    _send(answers, {"kind": "episode", "facts": facts, "arrays": shapes})
    for array in named.values():
        if array.size:
            answers.write(np.ascontiguousarray(array).data.cast("B"))
    answers.flush()
