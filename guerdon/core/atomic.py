"""Files that are either complete or not there: temp file in the same directory, fsync, then the final name.

Nothing here overwrites a file unless it is asked to, also if several processes write to one directory. A temp
file is locked for as long as its writer lives, so that others can tell what a killed writer left behind.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeAlias

from guerdon.core import portable
from guerdon.core.errors import StorageError
from guerdon.core.types import display_path

log = logging.getLogger("guerdon")

_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than this process may write",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file, not a directory",
    errno.EEXIST: "it exists already",
}
TEMP_SUFFIX = ".tmp"
_TEMP_NAME = re.compile(r"\.\d+-[0-9a-f]+\.tmp")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""What writing can run into halfway; libraries hide it behind errors of their own."""
_LOOK_SHARE = 100.0
"""A directory is searched for temp files again after so many times as long as the search took."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class NameTakenError(StorageError):
    """A file of that name is there already; it was left as it is."""


def storage_error(path: Path, error: OSError, *, kept: int | None = None) -> StorageError:
    """What a failed write means to the user, in one line; `kept` is how many episodes are safe."""
    reason = _REASONS.get(error.errno or 0) or error.strerror or str(error) or type(error).__name__
    safe = "" if kept is None else f"; the {kept} episodes before it are safe"
    return StorageError(f"cannot write {display_path(path)}: {reason}{safe}")


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a StorageError of one line that names the path."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def make_directory(path: Path) -> Path:
    """Make a directory with its parents, if it is not there."""
    with storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


Content: TypeAlias = bytes | str | Callable[[BinaryIO], object]


def write_atomic(path: Path, content: Content, *, exclusive: bool = False) -> None:
    """Write a file such that `path` never holds half of it, and such that it survives a power cut.

    Args:
        path: the final name; its directory must exist.
        content: bytes, text (UTF-8), or a function that writes into an open file.
        exclusive: raise `NameTakenError` if `path` exists, also if another process makes it meanwhile;
            otherwise an existing file is replaced.
    """
    with storage_errors(path), _finished_temp(path.parent, content) as temp:
        if exclusive:
            _link_new(temp, path)
        else:
            temp.replace(path)
        fsync_directory(path.parent)


def append_whole(handle: int, data: bytes) -> None:
    """Append to an open file all of `data`, or raise and leave the file as it was."""
    end = os.lseek(handle, 0, os.SEEK_END)
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
    except OSError:
        with suppress(OSError):  # the first error is the one to report
            os.ftruncate(handle, end)
        raise


def next_number(directory: Path, pattern: re.Pattern[str]) -> int:
    """One more than the highest number among the files in `directory`; 0 if there is none.

    Args:
        directory: may be missing.
        pattern: matches the whole file name; its first group is the number.
    """
    if not directory.is_dir():
        return 0
    matches = (pattern.fullmatch(entry.name) for entry in directory.iterdir())
    return max((int(match[1]) + 1 for match in matches if match), default=0)


class NumberedFiles:
    """Writes files such as `000000.npy` under the next free number, also among several processes.

    Args:
        directories: they share one counter; a number is free if no directory has it. Made when needed.
        prefix: of the file names, before the six digits.
        suffix: of the file names, with its dot.
    """

    def __init__(self, directories: Sequence[Path], *, prefix: str = "", suffix: str) -> None:
        self._directories = tuple(directories)
        self._prefix, self._suffix = prefix, suffix
        for directory in self._directories:
            clear_stale(directory)
        pattern = re.compile(re.escape(prefix) + r"(\d+)" + re.escape(suffix))
        self._next = max(next_number(directory, pattern) for directory in directories)

    def name(self, number: int) -> str:
        """The name of the file with that number."""
        return f"{self._prefix}{number:06d}{self._suffix}"

    def write(self, directory: Path, content: Content) -> Path:
        """Write the next file into one of the directories; return its path."""
        make_directory(directory)
        path = directory / self.name(self._next)
        with storage_errors(path), _finished_temp(directory, content) as temp:
            # The lock keeps a number unique over all directories; the link never overwrites, lock or not.
            with locked_directory(self._directories[0]):
                while True:
                    path = directory / self.name(self._next)
                    self._next += 1
                    if any((each / path.name).exists() for each in self._directories):
                        continue
                    with suppress(NameTakenError):
                        _link_new(temp, path)
                        break
            fsync_directory(directory)
        return path


@contextmanager
def locked_directory(directory: Path) -> Iterator[bool]:
    """Keep other processes that use this function out; yields whether locks are supported here."""
    make_directory(directory)
    if not portable.POSIX:
        yield False
        return
    handle = os.open(directory, os.O_RDONLY)
    locked = False
    try:
        with suppress(OSError):
            locked = portable.lock(handle)
        yield locked
    finally:
        with suppress(OSError):
            portable.unlock(handle)
        os.close(handle)


def fsync_directory(directory: Path) -> None:
    """Make new names in `directory` survive a power cut."""
    if not portable.POSIX:
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_temporary(name: str) -> bool:
    """Whether a file's name says that it is being written, or was when its writer died."""
    return name.startswith(".") and name.endswith(TEMP_SUFFIX)


def clear_stale(directory: Path, *, below: bool = False) -> None:
    """Remove the temp files that killed writers left in `directory`; those of living writers stay.

    Args:
        directory: may be missing.
        below: also in all directories below it.
    """
    for place, _, names in os.walk(directory):
        for name in filter(_TEMP_NAME.fullmatch, names):
            _remove_if_stale(Path(place, name))
        if not below:
            return


def _remove_if_stale(temp: Path) -> None:
    try:
        handle = os.open(temp, os.O_RDWR)
    except OSError:  # gone meanwhile, or another user's
        return
    try:
        if portable.lock(handle, wait=False):
            temp.unlink(missing_ok=True)
    except OSError as error:  # its writer lives, or nobody can tell
        log.debug("%s is left alone: %s", temp, error)
    finally:
        os.close(handle)


_next_look: dict[Path, float] = {}


def _clear_stale_now_and_then(directory: Path) -> None:
    """Before a write; in a directory of many files a search takes longer than a write, so not before each."""
    began = time.monotonic()
    if began < _next_look.get(directory, 0.0):
        return
    clear_stale(directory)
    ended = time.monotonic()
    _next_look[directory] = ended + _LOOK_SHARE * (ended - began)


def _new_temp(directory: Path) -> tuple[Path, int]:
    """A new temp file, open for writing and locked; another process may be clearing up at this moment."""
    while True:
        temp = directory / f".{os.getpid()}-{secrets.token_hex(6)}{TEMP_SUFFIX}"
        handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | portable.BINARY, 0o666)
        with suppress(OSError):  # without locks nobody clears up
            portable.lock(handle)
        if os.fstat(handle).st_nlink:
            return temp, handle
        os.close(handle)  # it was taken for a leftover before it was locked


@contextmanager
def _finished_temp(directory: Path, content: Content) -> Iterator[Path]:
    """A complete, synced and locked temp file in `directory`; removed in the end unless it was renamed."""
    _clear_stale_now_and_then(directory)
    temp, handle = _new_temp(directory)
    try:
        file = os.fdopen(handle, "wb", closefd=False)  # the lock is held until the file has its final name
        try:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(handle)
        except BaseException as error:
            with suppress(OSError):  # closing flushes once more; the first error is the one to report
                file.close()
            cause = _disk_error(error)
            if cause is not None:
                raise cause from error
            raise
        file.close()
        if not portable.POSIX:  # an open file could not get its final name
            os.close(handle)
            handle = -1
        yield temp
    finally:
        if handle >= 0 and not portable.POSIX:  # nor be removed
            os.close(handle)
            handle = -1
        temp.unlink(missing_ok=True)
        if handle >= 0:
            os.close(handle)


def _disk_error(error: BaseException) -> OSError | None:
    """The full disk behind an error: torch.save shows a RuntimeError, a zip archive a ValueError."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return None if seen is error else seen
        seen = seen.__cause__ or seen.__context__
    return None


def _link_new(temp: Path, path: Path) -> None:
    """Give a finished temp file its final name unless that name is taken."""
    try:
        try:
            os.link(temp, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # A file system without hard links: claim the name, then replace what holds it.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            temp.replace(path)
    except FileExistsError:
        raise NameTakenError(f"cannot write {display_path(path)}: it exists already") from None
