"""A pickle machine that can build plain data and do nothing else.

Python's own unpickler imports and calls whatever a file names, lets a file set attributes of what it finds
(BUILD), and takes memory for a size before it looks whether the bytes are there. This machine executes the
opcodes that `pickletools.genops` reads (protocol 2 and later), but
- a name is looked up in a table of allowed functions and tokens and nowhere else; nothing is imported;
- only those functions are called, and each checks its arguments (`guerdon.data.files.rebuild`);
- BUILD fills new numpy arrays and dtypes with a checked state and touches nothing else;
- what objects take is counted, for a byte in the file can stand for two hundred in memory; and so is what the
  functions copy, for one object can be given to them any number of times.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import IO, Any, TypeAlias

import numpy as np

from guerdon.core.errors import DataError, UnsafeDataError
from guerdon.data.files.bounds import one_line
from guerdon.data.files.rebuild import Allowed, check_keys, set_state

Names: TypeAlias = Mapping[tuple[str, str], Any]

_ROOT_STATE = "_metadata"  # the one attribute that torch sets on the OrderedDict of a state dict
_MAX_ARGUMENTS = 16
_MAX_INTEGER = 1024  # bytes
_SIZED = (bytes, bytearray, str, list, tuple, dict)
_ODD_KEY = 2000  # units; see `check_keys`


@dataclass
class Work:
    """What may still be done for one file, by all pickles that it consists of."""

    units: int
    """Of 64 bytes or a microsecond, roughly; see `_HANDLERS`."""
    copies: int
    """Bytes and items that functions are given, which they may copy."""

    @classmethod
    def for_file(cls, size: int, memory: int) -> Work:
        """For a file of `size` bytes: some seconds and half a GiB in a small one, in a large one more."""
        return cls(min(memory // 64, (8 << 20) + size // 8), 4 * size + (64 << 10))

    def take(self, units: int) -> None:
        """Before objects are made."""
        self.units -= units
        if self.units < 0:
            raise DataError("holds more objects than fit into memory, or than a file of its size may hold")

    def take_copies(self, arguments: tuple[Any, ...]) -> None:
        """Before a function is given these; legitimate ones stand in the file once."""
        if len(arguments) > _MAX_ARGUMENTS:
            raise DataError(f"calls a function with {len(arguments)} arguments")
        for each in arguments:
            self.copies -= len(each) if isinstance(each, _SIZED) else 0
            if type(each) is tuple and len(each) <= _MAX_ARGUMENTS:  # an array's state
                self.copies -= sum(len(part) for part in each if isinstance(part, _SIZED))
        if self.copies < 0:
            raise DataError("makes many copies of the same data")


class PickleMachine:
    """Reads one pickle from a file; afterwards the file stands behind it.

    `BytesIO` and `mmap` are fit for hostile content: they take no memory for bytes that are not there.
    Messages of its errors do not name the file; the caller adds that.
    """

    def __init__(
        self,
        file: IO[bytes],
        names: Names,
        *,
        work: Work,
        resolve_storage: Callable[[Any], Any] | None = None,
    ) -> None:
        self._file = file
        self._names = names
        self._work = work
        self._resolve_storage = resolve_storage
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The object that the pickle holds."""
        for name, argument in self._opcodes():
            if name == "STOP":
                break
            if name not in _HANDLERS:
                raise DataError(f"uses the pickle opcode {name}, which is not supported")
            units, handler = _HANDLERS[name]
            self._work.take(units)
            handler(self, argument)
        return self._stack.pop()

    def _opcodes(self) -> Iterator[tuple[str, Any]]:
        """(name, argument) of each, up to STOP."""
        file = SimpleNamespace(read=self._file.read, readline=self._file.readline)  # `tell` costs time
        try:
            for opcode, argument, _ in pickletools.genops(file):  # type: ignore[arg-type]
                yield opcode.name, argument
        except ValueError as error:
            raise DataError(f"is truncated or damaged: {one_line(error)}") from error

    # Names and calls

    def _find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise DataError("names a global that is not text")
        found = self._names.get((module, name))
        if found is None:
            raise UnsafeDataError(
                f"asks for {one_line(module)}.{one_line(name)}, which is not plain data; nothing was run"
            )
        self._stack.append(found)

    def _global(self, module_and_name: str) -> None:
        module, _, name = module_and_name.partition(" ")
        self._find(module, name)

    def _reduce(self) -> None:
        arguments = self._stack.pop()
        function = self._stack[-1]
        if type(function) is not Allowed or type(arguments) is not tuple:
            raise UnsafeDataError(f"asks to call a {type(function).__name__}; nothing was run")
        self._work.take_copies(arguments)
        self._stack[-1] = function.call(*arguments)

    def _build(self) -> None:
        state = self._stack.pop()
        target = self._stack[-1]
        if isinstance(state, tuple | dict):
            self._work.take_copies(state if isinstance(state, tuple) else (state,))
        if isinstance(target, np.ndarray | np.dtype):
            set_state(target, state)
        elif type(target) is OrderedDict and type(state) is dict and set(state) <= {_ROOT_STATE}:
            pass  # torch's bookkeeping of module versions; no reader needs it
        else:
            raise UnsafeDataError(f"asks to set the state of a {type(target).__name__}; nothing was run")

    def _instance(self, module_and_name: str) -> None:
        self._global(module_and_name)  # names the class if it is a foreign one
        self._refuse()

    def _refuse(self) -> None:
        raise UnsafeDataError("asks for an object of a class or of the extension registry; nothing was run")

    def _persistent(self) -> None:
        if self._resolve_storage is None:
            raise UnsafeDataError("refers to an object outside the file; nothing was run")
        self._stack.append(self._resolve_storage(self._stack.pop()))

    # Values and containers

    def _integer(self, value: int) -> None:
        if value.bit_length() >= 8 * _MAX_INTEGER:
            raise DataError(f"has an integer of {value.bit_length() // 8 + 1} bytes")
        self._stack.append(value)

    def _checked(self, keys: list[Any]) -> list[Any]:
        """The same keys, if they may be those of a dict or set."""
        self._work.take(_ODD_KEY * check_keys(keys))
        return keys

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        items = self._stack
        self._stack = self._outer.pop()
        return items

    def _top(self, kind: type) -> Any:
        target = self._stack[-1]
        if not isinstance(target, kind):
            raise DataError(f"adds items to a {type(target).__name__}")
        return target

    def _extend(self, items: list[Any]) -> None:
        self._top(list).extend(items)

    def _set_items(self, items: list[Any]) -> None:
        self._top(dict).update(zip(self._checked(items[::2]), items[1::2], strict=True))

    def _add_items(self, items: list[Any]) -> None:
        self._top(set).update(self._checked(items))

    def _tuple_of(self, count: int) -> None:
        if len(self._stack) < count:
            raise DataError("builds a tuple from nothing")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _push_made(self, make: Callable[[list[Any]], Any]) -> None:
        made = make(self._pop_mark())  # first, since it changes the stack
        self._stack.append(made)

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise DataError("refers to an object that it did not define")
        self._stack.append(self._memo[index])


_Handler: TypeAlias = Callable[[PickleMachine, Any], Any]


def _each(opcodes: str, units: int, handler: _Handler) -> dict[str, tuple[int, _Handler]]:
    return dict.fromkeys(opcodes.split(), (units, handler))


_HANDLERS: dict[str, tuple[int, _Handler]] = {
    **_each("PROTO FRAME", 1, lambda m, arg: None),  # the frame itself follows in line
    **_each("NONE", 1, lambda m, arg: m._stack.append(None)),
    **_each("NEWTRUE", 1, lambda m, arg: m._stack.append(True)),
    **_each("NEWFALSE", 1, lambda m, arg: m._stack.append(False)),
    **_each("BININT BININT1 BININT2 LONG1 BINFLOAT", 1, lambda m, arg: m._stack.append(arg)),
    **_each("SHORT_BINUNICODE BINUNICODE BINUNICODE8", 1, lambda m, arg: m._stack.append(arg)),
    **_each("SHORT_BINBYTES BINBYTES BINBYTES8", 1, lambda m, arg: m._stack.append(arg)),
    **_each("BYTEARRAY8", 2, lambda m, arg: m._stack.append(arg)),
    **_each("LONG4", 1, PickleMachine._integer),
    **_each("EMPTY_TUPLE", 1, lambda m, arg: m._stack.append(())),
    **_each("EMPTY_LIST", 2, lambda m, arg: m._stack.append([])),
    **_each("EMPTY_DICT", 2, lambda m, arg: m._stack.append({})),
    **_each("EMPTY_SET", 8, lambda m, arg: m._stack.append(set())),
    **_each("MARK", 2, lambda m, arg: m._mark()),
    **_each("TUPLE", 1, lambda m, arg: m._push_made(tuple)),
    **_each("TUPLE1", 1, lambda m, arg: m._tuple_of(1)),
    **_each("TUPLE2", 1, lambda m, arg: m._tuple_of(2)),
    **_each("TUPLE3", 1, lambda m, arg: m._tuple_of(3)),
    **_each("FROZENSET", 4, lambda m, arg: m._push_made(lambda items: frozenset(m._checked(items)))),
    **_each("APPEND", 1, lambda m, arg: m._extend([m._stack.pop()])),
    **_each("APPENDS", 1, lambda m, arg: m._extend(m._pop_mark())),
    **_each("SETITEM", 4, lambda m, arg: m._set_items([m._stack.pop(-2), m._stack.pop()])),
    **_each("SETITEMS", 4, lambda m, arg: m._set_items(m._pop_mark())),
    **_each("ADDITEMS", 2, lambda m, arg: m._add_items(m._pop_mark())),
    **_each("POP", 1, lambda m, arg: m._pop()),
    **_each("POP_MARK", 1, lambda m, arg: m._pop_mark()),
    **_each("DUP", 1, lambda m, arg: m._stack.append(m._stack[-1])),
    **_each("MEMOIZE", 2, lambda m, arg: m._put(len(m._memo))),
    **_each("BINPUT LONG_BINPUT", 2, PickleMachine._put),
    **_each("BINGET LONG_BINGET", 1, PickleMachine._get),
    **_each("GLOBAL", 1, PickleMachine._global),
    **_each("STACK_GLOBAL", 1, lambda m, arg: m._find(m._stack.pop(-2), m._stack.pop())),
    **_each("REDUCE", 8, lambda m, arg: m._reduce()),
    **_each("BUILD", 4, lambda m, arg: m._build()),
    **_each("INST", 1, PickleMachine._instance),
    **_each("OBJ NEWOBJ NEWOBJ_EX EXT1 EXT2 EXT4", 1, lambda m, arg: m._refuse()),
    **_each("BINPERSID", 1, lambda m, arg: m._persistent()),
}
"""Opcode -> (what it may add to memory, in units of 64 bytes; what to do with its argument)."""
