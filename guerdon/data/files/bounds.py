"""How much a foreign file may ask for: bounded reads, bounded arrays, and messages of one line.

A pickle can name one object many times, so that a few bytes stand for any number of items. What is made of a
file is therefore counted before it is made, and compared with the file's size.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.images import is_tensor, to_numpy
from guerdon.core.types import display_path

MAX_BYTES = 16 << 20
"""Of a small file; JSON of this size takes some 300 MB in memory at most."""
_SPARE = 1 << 30  # bytes that a file may give beyond its own size, for one image can be named by many steps
_STEP = 64  # bytes; a step that is stored takes more
_SPARE_STEPS = 1000
_MAX_LISTED = 64 << 20  # bytes of an array that is made of lists
_NUMBER = 32  # bytes, for a number in a list
_MAX_DEPTH = 32
_KINDS = "biufc"


def memory_budget() -> int:
    """Bytes that reading one file may take: half of the memory that is available now."""
    try:
        available = Path("/proc/meminfo").read_bytes().partition(b"MemAvailable:")[2]
        return int(available.split(maxsplit=1)[0]) * 1024 // 2
    except (OSError, ValueError, IndexError):
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class _Brief(reprlib.Repr):
    """`repr` of data from a file, however it is nested and whatever it shares."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 12
        self.maxstring = 200

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 256 else f"an integer of {x.bit_length()} bits"

    def repr_instance(self, x: Any, level: int) -> str:
        plain = isinstance(x, float | complex | type(None) | np.bool_ | np.number)
        return repr(x) if plain else f"<{type(x).__name__}>"


_BRIEF = _Brief()


def one_line(value: object, limit: int = 160) -> str:
    """Text, an error or data from a file, for a message: one printable line of bounded length."""
    text = str(value) if isinstance(value, str | BaseException) else _BRIEF.repr(value)
    line = "".join(char if char.isprintable() else "?" for char in text[: limit + 1])
    return line if len(line) <= limit else line[: limit - 3] + "..."


_READ = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
"""How a small file is opened: a pipe would block, Windows would change line ends."""


def read_small(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file; raises `FileNotFoundError` if there is none, `DataError` on all else."""
    try:
        handle = os.open(path, _READ)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{display_path(path)}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{display_path(path)!r} is no file name: {error}") from error
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DataError(f"{display_path(path)}: cannot be read: it is no regular file")
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise DataError(f"{display_path(path)}: cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise DataError(f"{display_path(path)}: cannot be read: it has more than {max_bytes} bytes")
    return data


def parse_json(data: bytes | str, source: str) -> Any:
    """What `data` holds; a `DataError` that names `source` if that is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # ValueError: also wrong encodings and endless integers
        raise DataError(f"{source}: cannot be read as JSON: {error}") from error


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """What a JSON file holds; raises `FileNotFoundError` if there is none, `DataError` on all else."""
    return parse_json(read_small(path, max_bytes), display_path(path))


@dataclass
class Allowance:
    """What may still be made of one file."""

    size: int
    """Bytes of the file."""
    bytes_left: int
    steps_left: int

    @classmethod
    def of(cls, *files: Path) -> Allowance:
        """For files whose content is not compressed."""
        size = sum(file.stat().st_size for file in files)
        return cls(size, size + _SPARE, size // _STEP + _SPARE_STEPS)

    def take_bytes(self, count: int) -> None:
        """Before arrays of `count` bytes are made."""
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise DataError(
                f"names the same values over and over: it has {self.size} bytes, and what they stand for "
                f"takes over {_SPARE >> 30} GiB more"
            )

    def take_steps(self, count: int) -> None:
        """Before `count` images or other values are looked at one by one."""
        self.steps_left -= count
        if self.steps_left < 0:
            raise DataError(f"has {count} frames in {self.size} bytes: it names the same ones over and over")


def as_array(value: Any) -> NDArray[Any]:
    """A number, array, tensor or list of them from a file; a view where it can be.

    What is no number becomes an array of one object, so that the caller's check of the type refuses it.
    """
    if isinstance(value, np.ndarray) or is_tensor(value):
        return to_numpy(value)
    if isinstance(value, list | tuple | range):
        return np.asarray(_lists(value, 0, {})[0])
    if isinstance(value, bool | int | float | complex | np.generic):
        return np.asarray(value)
    single = np.empty((), dtype=object)
    single[()] = value
    return single


def _lists(value: Any, depth: int, known: dict[int, tuple[Any, int]]) -> tuple[Any, int]:
    """(lists of numbers and arrays, bytes that an array of them takes).

    `np.asarray` alone would visit what they share again and again; `known` has what was visited.
    """
    if isinstance(value, np.ndarray | np.generic) or is_tensor(value):
        array = to_numpy(value)
        if array.dtype.kind not in _KINDS:
            raise DataError(f"has a list with an array of {array.dtype} where numbers are needed")
        return array, max(array.nbytes, _NUMBER)
    if value is None or isinstance(value, bool | int | float | complex):
        return value, _NUMBER
    if not isinstance(value, list | tuple | range):
        raise DataError(f"has a list with a {type(value).__name__} where numbers are needed")
    if depth == _MAX_DEPTH:
        raise DataError(f"has lists that are nested more than {_MAX_DEPTH} deep")
    if id(value) not in known:
        plain: Any = value
        if isinstance(value, range):  # whose `len` may overflow
            size = _NUMBER * max(0, -(-(value.stop - value.start) // value.step))
        else:
            parts = [_lists(item, depth + 1, known) for item in value]
            plain, size = [part for part, _ in parts], sum(size for _, size in parts) + _NUMBER
        if size > _MAX_LISTED:
            raise DataError(f"has lists of more than {_MAX_LISTED // _NUMBER} numbers; arrays are needed")
        known[id(value)] = plain, size
    return known[id(value)]
