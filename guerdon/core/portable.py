"""What differs between operating systems when files are written and shared: locks, preallocation, syncs.

Linux and macOS have `fcntl`, Windows has `msvcrt`. Where there is neither, files are not locked, with a
notice: then only one process may write to a folder at a time.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

fcntl: Any
msvcrt: Any
try:
    import fcntl
except ImportError:
    fcntl = None
try:
    import msvcrt
except ImportError:
    msvcrt = None

log = logging.getLogger("guerdon")

BINARY: int = getattr(os, "O_BINARY", 0)
"""For `os.open`: Windows would change line ends."""
POSIX = os.name == "posix"
"""Directories can be opened, locked and synced, and an open file can get another name."""
MAX_BUFFERS = 512
"""How many buffers one system call takes; systems allow 1,024."""
_LOCKED_BYTE = 1 << 40
"""Windows locks a part of a file, and keeps others from writing there: one byte behind all content."""
POLL_SECONDS = 0.02
"""Between two attempts to get such a lock."""
_told: set[str] = set()


def lock(handle: int, *, wait: bool = True) -> bool:
    """Lock an open file or directory for this process; released when it is closed, or the process ends.

    Returns:
        False if this system has no locks.

    Raises:
        BlockingIOError: another process holds it, and `wait` is False.
        OSError: the file system has no locks.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    if msvcrt is None:
        if "locks" not in _told:
            _told.add("locks")
            log.warning("files cannot be locked on this system: let one process at a time write to a folder")
        return False
    while True:
        try:
            _lock_byte(handle, msvcrt.LK_NBLCK)
            return True
        except OSError as error:
            if not wait:
                raise BlockingIOError(errno.EWOULDBLOCK, "another process holds the lock") from error
        time.sleep(POLL_SECONDS)


def unlock(handle: int) -> None:
    """Give up a lock; closing is not enough if this process was forked meanwhile."""
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_UN)
    elif msvcrt is not None:
        _lock_byte(handle, msvcrt.LK_UNLCK)


def _lock_byte(handle: int, mode: int) -> None:
    place = os.lseek(handle, 0, os.SEEK_CUR)
    try:
        os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(handle, mode, 1)
    finally:
        os.lseek(handle, place, os.SEEK_SET)


def preallocate(handle: int, size: int) -> None:
    """Give a file `size` bytes on the disk, so that a full disk shows now; macOS and Windows only note it."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
    else:
        os.ftruncate(handle, size)


def sync_data(handle: int) -> None:
    """Make the content of a file survive a power cut."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(handle)
    else:
        os.fsync(handle)


def write_at(handle: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all `buffers` one behind the other from `offset` on, however little the system takes at once."""
    rest = deque(buffer for buffer in buffers if buffer)
    while rest:
        written = _write_some(handle, list(islice(rest, MAX_BUFFERS)), offset)
        offset += written
        while rest and written >= len(rest[0]):
            written -= len(rest.popleft())
        if written:
            rest[0] = rest[0][written:]


def _write_some(handle: int, buffers: list[memoryview], offset: int) -> int:
    if hasattr(os, "pwritev"):
        return os.pwritev(handle, buffers, offset)
    os.lseek(handle, offset, os.SEEK_SET)
    return os.write(handle, buffers[0])
