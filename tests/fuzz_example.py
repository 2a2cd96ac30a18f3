"""Targets that break each promise, for the tests of the fuzzing itself."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np

from fuzz.engine import Target
from guerdon.core.errors import DataError


def _seeds(scratch: Path) -> list[bytes]:
    (scratch / "made").touch()
    return [b"read", b"refuse"]


def _run(data: bytes, scratch: Path) -> int | None:
    assert (scratch / "made").exists()
    if data == b"refuse":
        raise DataError("refused")
    if data == b"raise":
        raise KeyError(3)
    if data == b"crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if data == b"hang":
        time.sleep(3600)
    if data == b"memory":
        np.ones(20 << 20)  # 160 MiB
    if data == b"returned":
        return np.ones(20 << 20).nbytes
    if data == b"process":
        subprocess.run(["true"], check=True)
    return None


def _always(word: bytes) -> Target:
    """Its third input, after the seeds, and every later one is `word`."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        return word

    return Target(_seeds, _run, mutate)


def load() -> dict[str, Target]:
    words = ("sound", "raise", "crash", "hang", "memory", "returned", "process")
    return {word: _always(word.encode()) for word in words}
