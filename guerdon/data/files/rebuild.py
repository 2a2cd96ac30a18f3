"""What a pickle may name: checked stand-ins for the functions that rebuild arrays and containers.

Not one of the original functions is called with arguments from a file. numpy's own ones trust their input: a
dtype whose flags were altered turns bytes into object pointers. Those for tensors are in `torch_files.py`.
"""

from __future__ import annotations

import math
import re
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.data.files.bounds import one_line

_DTYPE = re.compile(r"[<>|=]?(b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|O8?|[SU]\d{1,7})")
_FOREIGN_ORDER: Literal["<", ">"] = ">" if sys.byteorder == "little" else "<"
_MAX_AXES = 64  # numpy's own limit
_MAX_EMPTY_AXIS = 1 << 16
_MAX_PARTS = 16  # of a key that is a tuple
_MAX_ODD_MEMBERS = 1000  # of a set
_HASH_MODULUS = sys.hash_info.modulus  # integers below it have different hashes
_PLAIN_KEYS = (str, int, float, bytes, complex, type(None), np.generic)


@dataclass(frozen=True, slots=True)
class Allowed:
    """A function that a pickle may call. Frozen, so that a file cannot change what is behind the name."""

    name: str
    call: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Token:
    """A name that a pickle may pass as an argument; it cannot be called and has no behaviour."""

    name: str
    value: Any = None


def check_keys(items: Any) -> int:
    """Raise unless all items may be dict keys or set members: scalars, or short flat tuples of scalars.

    Hashing a deeply nested tuple recurses in C and can crash the interpreter.

    Returns:
        How many are neither text nor ordinary integers. Those can be chosen so that their hashes are all the
        same; the time for a dict then grows with the square of their number.
    """
    odd = 0
    for item in items:
        if type(item) in (str, bytes):
            continue
        parts = item if type(item) is tuple else (item,)
        if len(parts) > _MAX_PARTS or not all(isinstance(part, _PLAIN_KEYS) for part in parts):
            raise DataError(f"has a key of type {type(item).__name__}; only scalars are allowed")
        odd += not (type(item) is int and -_HASH_MODULUS < item < _HASH_MODULUS)
    return odd


def check_sizes(what: str, sizes: Any) -> tuple[int, ...]:
    """A list of sizes from a file as a tuple; raises if it is something else, or no shape of an array.

    An array without elements takes no bytes of a file, however long its other axes are: those are bounded.
    """
    fits = isinstance(sizes, tuple | list) and len(sizes) <= _MAX_AXES
    if not fits or not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
        raise DataError(f"{what} is not a list of sizes: {one_line(sizes)}")
    if 0 in sizes and max(sizes) > _MAX_EMPTY_AXIS:
        raise DataError(f"{what} is {one_line(sizes)}: long, and without an element")
    return tuple(sizes)


# numpy


def _dtype(spec: Any, align: Any = False, copy: Any = True) -> np.dtype[Any]:
    if type(spec) is not str or not _DTYPE.fullmatch(spec):
        raise DataError(f"has an array of the element type {one_line(spec)!r}, which is not supported")
    return np.dtype(spec, copy=True)  # always a new object: set_state must not change numpy's own


def set_state(target: NDArray[Any] | np.dtype[Any], state: Any) -> None:
    """Give a new array its shape and content, or a new dtype its byte order."""
    if isinstance(target, np.dtype):
        _set_dtype_state(target, state)
    else:
        _set_array_state(target, state)


def _set_dtype_state(dtype: np.dtype[Any], state: Any) -> None:
    if type(state) is not tuple or len(state) < 8 or state[1] not in ("<", ">", "|", "="):
        raise DataError("has a damaged array element type")
    if any(part is not None for part in state[2:5]):
        raise DataError("has an array of a structured element type, which is not supported")
    if state[1] == _FOREIGN_ORDER:
        swapped: Any = dtype.newbyteorder(_FOREIGN_ORDER).__reduce__()
        dtype.__setstate__(swapped[2])  # type: ignore[attr-defined]


def _set_array_state(array: NDArray[Any], state: Any) -> None:
    if array.shape != (0,) or not array.flags.owndata:
        raise DataError("sets the content of an array twice")
    if type(state) is not tuple or len(state) != 5 or not isinstance(state[2], np.dtype):
        raise DataError("has a damaged array")
    shape, dtype, raw = check_sizes("an array's shape", state[1]), state[2], state[4]
    count = math.prod(shape)
    if not dtype.itemsize:
        raise DataError("has an array whose elements have no size")
    if dtype.hasobject:
        fits = type(raw) is list and len(raw) == count
    else:
        fits = type(raw) is bytes and len(raw) == count * dtype.itemsize
    if not fits:
        raise DataError(f"has an array of shape {list(shape)} whose data has another size")
    checked: Any = (1, shape, dtype, bool(state[3]), raw)
    array.__setstate__(checked)


def _reconstruct(kind: Any, shape: Any, code: Any) -> NDArray[Any]:
    if kind is not _NDARRAY or shape != (0,):
        raise DataError("starts an array that is not empty; numpy writes no such thing")
    return np.ndarray((0,), np.int8)


def _frombuffer(buffer: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    shape = check_sizes("an array's shape", shape)
    if not isinstance(buffer, bytes | bytearray) or not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise DataError("has a damaged array")
    if not dtype.itemsize:
        raise DataError("has an array whose elements have no size")
    if len(buffer) != math.prod(shape) * dtype.itemsize or order not in ("C", "F"):
        raise DataError(f"has an array of shape {list(shape)} whose data has another size")
    if not buffer:
        return np.empty(shape, dtype)
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


def _scalar(dtype: Any, raw: Any = b"") -> Any:
    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(raw) is not bytes:
        raise DataError("has a damaged number")
    if len(raw) != dtype.itemsize:
        raise DataError("has a number whose data has another size")
    return np.frombuffer(raw, dtype=dtype)[0] if raw else dtype.type()


# Builtin containers and scalars


def _empty(make: Callable[[], Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if args:
            raise DataError(f"makes {make.__name__} out of something else")
        return make()

    return call


def _bytearray(data: Any = b"", *_: Any) -> bytearray:
    if not isinstance(data, bytes | bytearray):  # a number would be a request for that much memory
        raise DataError(f"makes a bytearray out of a {type(data).__name__}")
    return bytearray(data)


def _of_members(make: Callable[..., Any]) -> Callable[..., Any]:
    def call(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple):  # a range would be a request for that much memory
            raise DataError(f"makes a set out of a {type(items).__name__}")
        if check_keys(items) > _MAX_ODD_MEMBERS:
            raise DataError(f"makes a set of more than {_MAX_ODD_MEMBERS} numbers or tuples")
        return make(items)

    return call


def _of_numbers(make: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if not all(type(arg) in (int, float, type(None)) for arg in args):
            raise DataError(f"makes a {make.__name__} out of something that is not a number")
        return make(*args)

    return call


def _encode(text: Any, encoding: Any = "") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise DataError(f"asks for the text encoding {one_line(encoding)!r}; only latin1 is allowed")
    return text.encode("latin1")


_NDARRAY = Token("numpy.ndarray")


def _make_table() -> dict[tuple[str, str], Allowed | Token]:
    calls: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "dtype"): _dtype,
        ("_codecs", "encode"): _encode,
        ("collections", "OrderedDict"): _empty(OrderedDict),
    }
    for core in ("numpy.core", "numpy._core"):
        calls[f"{core}.multiarray", "_reconstruct"] = _reconstruct
        calls[f"{core}.multiarray", "scalar"] = _scalar
        calls[f"{core}.numeric", "_frombuffer"] = _frombuffer
    for builtins in ("builtins", "__builtin__"):
        calls[builtins, "bytes"] = _empty(bytes)
        calls[builtins, "bytearray"] = _bytearray
        calls[builtins, "set"] = _of_members(set)
        calls[builtins, "frozenset"] = _of_members(frozenset)
        calls[builtins, "complex"] = _of_numbers(complex)
        calls[builtins, "slice"] = _of_numbers(slice)
        calls[builtins, "range"] = calls[builtins, "xrange"] = _of_numbers(range)
    table: dict[tuple[str, str], Allowed | Token] = {
        key: Allowed(".".join(key), call) for key, call in calls.items()
    }
    table["numpy", "ndarray"] = _NDARRAY
    return table


PLAIN = _make_table()
"""(module, name) -> what a pickle without tensors gets for it."""
