"""Clears up after a local Ray cluster whose owner was killed: `python watchdog.py MARK FOLDER`.

The owner holds the other end of this process's stdin. When it ends, whatever the reason, all processes that
belong to the cluster are killed and the cluster's folder is removed. After an orderly shutdown there is
nothing left to do. Ray's own processes follow their owner too, but some take minutes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

VARIABLE = "GUERDON_RAY_CLUSTER"
"""Holds the mark."""
ROUND_SECONDS, QUIET_ROUNDS = 0.1, 20
"""A process that is just being started shows nothing of itself: one look is not enough."""


def members(mark: str, folder: str) -> list[int]:
    """Ids of the cluster's processes, but for this one.

    They carry the mark in their environment; or they are Ray's and name the cluster's folder in their command
    line, or have files of it open, such as their logs. No single sign will do: Ray's workers write their
    titles over their command line and over a part of their environment.
    """
    found = [entry for entry in Path("/proc").glob("[0-9]*") if _belongs(entry, mark, folder)]
    return [int(entry.name) for entry in found if int(entry.name) != os.getpid()]


def _belongs(process: Path, mark: str, folder: str) -> bool:
    with suppress(OSError):  # it has ended, or is another user's
        if f"{VARIABLE}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
            return True
        command = (process / "cmdline").read_bytes()
        if command.startswith(b"ray::") or b"/ray/" in command:
            return folder.encode() in command or any(
                target.startswith(f"{folder}/") for target in _open_files(process)
            )
    return False


def _open_files(process: Path) -> Iterator[str]:
    with suppress(OSError):
        for file in (process / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                yield os.readlink(file)  # noqa: PTH115 - half of them are no paths


def main(mark: str, folder: str) -> None:
    """Wait for the owner's end, then clear up."""
    sys.stdin.buffer.read()
    quiet = 0 if Path(folder).exists() else QUIET_ROUNDS
    while quiet < QUIET_ROUNDS:
        found = members(mark, folder)
        quiet = 0 if found else quiet + 1
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(ROUND_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
