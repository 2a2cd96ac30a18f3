"""Clears up after a local Ray cluster whose owner was killed: `python guardian.py MARK FOLDER`.

The owner holds the other end of this process's stdin. When it ends, whatever the reason, all processes that
carry the mark in their environment are killed and the cluster's folder is removed. After an orderly shutdown
there is nothing left to do. Ray's own processes follow their owner too, but some take minutes.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

VARIABLE = "GUERDON_RAY_CLUSTER"
"""Holds the mark."""
ROUND_SECONDS, QUIET_ROUNDS = 0.05, 10
"""A process that is just being started shows no environment: one look is not enough."""


def marked(mark: str) -> list[int]:
    """Ids of the processes that carry the mark, but for this one."""
    line = f"{VARIABLE}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if line in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # it has ended, or is another user's
            continue
    return [pid for pid in found if pid != os.getpid()]


def main(mark: str, folder: str) -> None:
    """Wait for the owner's end, then clear up."""
    sys.stdin.buffer.read()
    quiet = 0 if Path(folder).exists() else QUIET_ROUNDS
    while quiet < QUIET_ROUNDS:
        found = marked(mark)
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
