"""A pickle machine that can build plain data and do nothing else.

Python's own unpickler imports and calls whatever a file names, lets a file set attributes of what it finds
(BUILD), and takes memory for a size before it looks whether the bytes are there. This machine reads the same
opcodes (protocol 2 and later), but
- a name is looked up in a table of allowed functions and tokens and nowhere else; nothing is imported;
- only those functions are called, and each checks its arguments (`guerdon.data.files.rebuild`);
- BUILD fills new numpy arrays and dtypes with a checked state and touches nothing else;
- every size is compared with the bytes that are left before they are taken;
- what objects take is counted, for a byte in the file can stand for two hundred in memory; and so is what the
  functions copy, for one object can be given to them any number of times.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from guerdon.core.errors import DataError, UnsafeDataError
from guerdon.data.files.bounds import one_line
from guerdon.data.files.rebuild import Allowed, check_keys, set_state

Names: TypeAlias = Mapping[tuple[str, str], Any]

_MAX_LINE = 1024  # of a module or function name
_ROOT_STATE = "_metadata"  # the one attribute that torch sets on the OrderedDict of a state dict
_MAX_ARGUMENTS = 16
_MAX_INTEGER = 1024  # bytes
_SIZED = (bytes, bytearray, str, list, tuple, dict)
_TOO_MANY = "holds more objects than fit into memory, or than a file of its size may hold"
_ODD_KEY = 2000  # units; see `check_keys`


@dataclass
class Work:
    """What may still be done for one file, by all pickles that it consists of."""

    units: int
    """Of 64 bytes or a microsecond, roughly; see `_UNITS`."""
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
            raise DataError(_TOO_MANY)

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
    """Reads one pickle from `data` at `position`; afterwards `position` is the first byte behind it.

    Messages of its errors do not name the file; the caller adds that.
    """

    def __init__(
        self,
        data: memoryview,
        names: Names,
        *,
        position: int = 0,
        work: Work,
        resolve_storage: Callable[[Any], Any] | None = None,
    ) -> None:
        self.data = data
        self.position = position
        self._names = names
        self._work = work
        self._resolve_storage = resolve_storage
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The object that the pickle holds."""
        data, size, stop, work = self.data, len(self.data), pickle.STOP[0], self._work
        while self.position < size:
            opcode = data[self.position]
            self.position += 1
            if opcode == stop:
                return self._stack.pop()
            handler = _HANDLERS.get(opcode)
            if handler is None:
                raise DataError(f"uses the pickle opcode {_opcode_name(opcode)}, which is not supported")
            work.units -= _UNITS[opcode]
            if work.units < 0:
                raise DataError(_TOO_MANY)
            handler(self)
        raise EOFError

    # Reading bytes

    def _take(self, count: int) -> memoryview:
        end = self.position + count
        if count < 0 or end > len(self.data):
            raise EOFError
        chunk = self.data[self.position : end]
        self.position = end
        return chunk

    def _byte(self) -> int:
        position = self.position
        if position >= len(self.data):
            raise EOFError
        self.position = position + 1
        return self.data[position]

    def _count(self, width: int) -> int:
        return self._byte() if width == 1 else int.from_bytes(self._take(width), "little")

    def _integer(self, width: int) -> int:
        if width > _MAX_INTEGER:
            raise DataError(f"has an integer of {width} bytes")
        return _signed(self._take(width))

    def _line(self) -> str:
        chunk = bytes(self.data[self.position : self.position + _MAX_LINE])
        length = chunk.find(b"\n")
        if length < 0:
            raise EOFError
        self.position += length + 1
        return str(chunk[:length], "utf-8")

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

    def _global(self) -> None:
        module = self._line()
        self._find(module, self._line())

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

    def _instance(self) -> None:
        self._global()  # names the class if it is a foreign one
        self._refuse()

    def _refuse(self) -> None:
        raise UnsafeDataError("asks for an object of a class or of the extension registry; nothing was run")

    def _persistent(self) -> None:
        if self._resolve_storage is None:
            raise UnsafeDataError("refers to an object outside the file; nothing was run")
        self._stack.append(self._resolve_storage(self._stack.pop()))

    # Containers

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

    def _add_items(self) -> None:
        items = self._checked(self._pop_mark())
        self._top(set).update(items)

    def _tuple_of(self, count: int) -> None:
        if len(self._stack) < count:
            raise DataError("builds a tuple from nothing")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._pop_mark()

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def _get(self, index: int) -> None:
        if index not in self._memo:
            raise DataError("refers to an object that it did not define")
        self._stack.append(self._memo[index])


def _opcode_name(opcode: int) -> str:
    return next((info.name for info in pickletools.opcodes if info.code == chr(opcode)), f"0x{opcode:02x}")


_Handler: TypeAlias = Callable[[PickleMachine], Any]


def _push(make: Callable[[PickleMachine], Any]) -> _Handler:
    def push(machine: PickleMachine) -> None:
        value = make(machine)  # first, since it may take items from the stack or change the stack
        machine._stack.append(value)

    return push


def _text(width: int) -> _Handler:
    return _push(lambda m: str(m._take(m._count(width)), "utf-8", "surrogatepass"))


def _bytes(width: int) -> _Handler:
    return _push(lambda m: bytes(m._take(m._count(width))))


def _signed(data: memoryview) -> int:
    return int.from_bytes(data, "little", signed=True)


_HANDLERS: dict[int, _Handler] = {
    code[0]: handler
    for code, handler in {
        pickle.PROTO: lambda m: m._take(1),
        pickle.FRAME: lambda m: m._take(8),  # the frame itself follows in line
        pickle.NONE: _push(lambda m: None),
        pickle.NEWTRUE: _push(lambda m: True),
        pickle.NEWFALSE: _push(lambda m: False),
        pickle.BININT: _push(lambda m: _signed(m._take(4))),
        pickle.BININT1: _push(PickleMachine._byte),
        pickle.BININT2: _push(lambda m: m._count(2)),
        pickle.LONG1: _push(lambda m: _signed(m._take(m._byte()))),
        pickle.LONG4: _push(lambda m: m._integer(_signed(m._take(4)))),
        pickle.BINFLOAT: _push(lambda m: struct.unpack(">d", m._take(8))[0]),
        pickle.SHORT_BINUNICODE: _text(1),
        pickle.BINUNICODE: _text(4),
        pickle.BINUNICODE8: _text(8),
        pickle.SHORT_BINBYTES: _bytes(1),
        pickle.BINBYTES: _bytes(4),
        pickle.BINBYTES8: _bytes(8),
        pickle.BYTEARRAY8: _push(lambda m: bytearray(m._take(m._count(8)))),
        pickle.EMPTY_TUPLE: _push(lambda m: ()),
        pickle.EMPTY_LIST: _push(lambda m: []),
        pickle.EMPTY_DICT: _push(lambda m: {}),
        pickle.EMPTY_SET: _push(lambda m: set()),
        pickle.MARK: PickleMachine._mark,
        pickle.TUPLE: _push(lambda m: tuple(m._pop_mark())),
        pickle.TUPLE1: lambda m: m._tuple_of(1),
        pickle.TUPLE2: lambda m: m._tuple_of(2),
        pickle.TUPLE3: lambda m: m._tuple_of(3),
        pickle.FROZENSET: _push(lambda m: frozenset(m._checked(m._pop_mark()))),
        pickle.APPEND: lambda m: m._extend([m._stack.pop()]),
        pickle.APPENDS: lambda m: m._extend(m._pop_mark()),
        pickle.SETITEM: lambda m: m._set_items([m._stack.pop(-2), m._stack.pop()]),
        pickle.SETITEMS: lambda m: m._set_items(m._pop_mark()),
        pickle.ADDITEMS: PickleMachine._add_items,
        pickle.POP: PickleMachine._pop,
        pickle.POP_MARK: PickleMachine._pop_mark,
        pickle.DUP: _push(lambda m: m._stack[-1]),
        pickle.MEMOIZE: PickleMachine._memoize,
        pickle.BINPUT: lambda m: m._put(m._byte()),
        pickle.LONG_BINPUT: lambda m: m._put(m._count(4)),
        pickle.BINGET: lambda m: m._get(m._byte()),
        pickle.LONG_BINGET: lambda m: m._get(m._count(4)),
        pickle.GLOBAL: PickleMachine._global,
        pickle.STACK_GLOBAL: lambda m: m._find(m._stack.pop(-2), m._stack.pop()),
        pickle.INST: PickleMachine._instance,
        pickle.REDUCE: PickleMachine._reduce,
        pickle.BUILD: PickleMachine._build,
        **dict.fromkeys((pickle.OBJ, pickle.NEWOBJ, pickle.NEWOBJ_EX), PickleMachine._refuse),
        **dict.fromkeys((pickle.EXT1, pickle.EXT2, pickle.EXT4), PickleMachine._refuse),
        pickle.BINPERSID: PickleMachine._persistent,
    }.items()
}

_HEAVY = {
    **dict.fromkeys(
        (pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.BYTEARRAY8, pickle.ADDITEMS, pickle.MARK), 2
    ),
    **dict.fromkeys((pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT), 2),
    **dict.fromkeys((pickle.FROZENSET, pickle.SETITEM, pickle.SETITEMS, pickle.BUILD), 4),
    **dict.fromkeys((pickle.EMPTY_SET, pickle.REDUCE), 8),
}
_UNITS = [_HEAVY.get(bytes([code]), 1) for code in range(256)]
"""What an opcode may add to memory, in units of 64 bytes."""
