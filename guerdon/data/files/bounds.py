"""How much a foreign file may ask for: values become arrays, and frames are returned, within bounds.

A pickle can name one object many times, so that a few bytes stand for any number of items. What is made of a
file is therefore counted before it is made, and compared with the file's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.images import is_tensor, to_numpy

_SPARE = 1 << 30  # bytes that a file may give beyond its own size, for one image can be named by many steps
_STEP = 64  # bytes; a step that is stored takes more
_SPARE_STEPS = 1000
_MAX_LISTED = 64 << 20  # bytes of an array that is made of lists
_NUMBER = 32  # bytes, for a number in a list
_MAX_DEPTH = 32
_KINDS = "biufc"


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
        return np.asarray(_Listed().plain(value, 0)[0])
    if isinstance(value, bool | int | float | complex | np.generic):
        return np.asarray(value)
    single = np.empty((), dtype=object)
    single[()] = value
    return single


class _Listed:
    """Makes nested lists ready for `np.asarray`, which would visit what they share again and again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}

    def plain(self, value: Any, depth: int) -> tuple[Any, int]:
        """(lists of numbers and arrays, bytes that an array of them takes)."""
        if isinstance(value, np.ndarray | np.generic) or is_tensor(value):
            array = to_numpy(value)
            if array.dtype.kind not in _KINDS:
                raise DataError(f"has a list with an array of {array.dtype} where numbers are needed")
            return array, max(array.nbytes, _NUMBER)
        if value is None or isinstance(value, bool | int | float | complex):
            return value, _NUMBER
        if isinstance(value, range):
            size = _NUMBER * max(0, -(-(value.stop - value.start) // value.step))
            _check_listed(size)
            return value, size
        if not isinstance(value, list | tuple):
            raise DataError(f"has a list with a {type(value).__name__} where numbers are needed")
        if depth == _MAX_DEPTH:
            raise DataError(f"has lists that are nested more than {_MAX_DEPTH} deep")
        if id(value) not in self._known:
            parts = [self.plain(item, depth + 1) for item in value]
            size = sum(part[1] for part in parts) + _NUMBER
            _check_listed(size)
            self._known[id(value)] = [part[0] for part in parts], size
        return self._known[id(value)]


def _check_listed(size: int) -> None:
    if size > _MAX_LISTED:
        raise DataError(f"has lists of more than {_MAX_LISTED // _NUMBER} numbers; arrays are needed")
