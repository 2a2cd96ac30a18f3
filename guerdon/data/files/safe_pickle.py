"""Reads pickles, object `.npy` files and `.pt` files of strangers as plain data; no code in them is run.

Numpy arrays and scalars, torch tensors and builtin containers are read; a file that asks for anything else
is refused with an `UnsafeDataError` that names it. Damage of any kind gives a `DataError` of one line that
names the file. Sizes are checked before memory is taken.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError, UnsafeDataError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import memory_budget, one_line
from guerdon.data.files.rebuild import check_sizes
from guerdon.data.files.unpickler import Names, PickleMachine, Work

_MAP_FROM = 64 << 20  # larger files are memory-mapped instead of read
_NPZ_RATIO, _NPZ_SPARE = 64, 64 << 20  # bytes that an archive may unpack to, for each of its own, and beside


def load(source: Path | str | BinaryIO, *, max_bytes: int | None = None, more: Names | None = None) -> Any:
    """Read one pickle.

    Args:
        source: a path, or a file that is open for reading.
        max_bytes: files beyond this size are refused; by default half of the available memory.
        more: names that it may use beside the usual ones.
    """
    if isinstance(source, Path | str):
        with named(source), _open(source, max_bytes) as (file, size):
            return _run(file, size, more)
    with named(getattr(source, "name", "<stream>")):
        limit = memory_budget() if max_bytes is None else max_bytes
        raw = source.read(limit + 1)
        _check_size(len(raw), limit)
        return _run(BytesIO(raw), len(raw), more)


def loads(data: bytes, *, name: str = "<bytes>") -> Any:
    """Read one pickle from memory; `name` stands for the file in messages."""
    with named(name):
        _check_size(len(data), None)
        return _run(BytesIO(data), len(data))


def load_npy(path: Path | str) -> NDArray[Any]:
    """Read a `.npy` file; plain arrays are memory-mapped and read-only, object arrays are built safely."""
    with named(path), Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(size, None)
        shape, fortran, dtype = _npy_header(file, size)
        if dtype.hasobject:
            start = file.tell()
            with _open(path, None) as (data, _):
                data.seek(start)
                content = _run(data, size - start)
            if not isinstance(content, np.ndarray) or content.size != math.prod(shape):
                raise DataError("holds something else than the array that its header promises")
            return content.reshape(shape)
        count = math.prod(shape) * dtype.itemsize
        if count == 0:
            return np.empty(shape, dtype)
        raw = np.memmap(path, dtype=np.uint8, mode="r", offset=file.tell(), shape=(count,))
        return np.ndarray(shape, dtype, buffer=raw, order="F" if fortran else "C")


def load_npz(path: Path | str, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Read those of the arrays `names` that a `.npz` file has; object arrays are refused."""
    arrays: dict[str, NDArray[Any]] = {}
    with named(path), zipfile.ZipFile(path) as archive:
        room = min(memory_budget(), _NPZ_RATIO * Path(path).stat().st_size + _NPZ_SPARE)
        for info in archive.infolist():
            name = info.filename.removesuffix(".npy")
            if name not in names or name in arrays:
                continue
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise DataError(f"is compressed by a method that numpy does not use ({info.compress_type})")
            room -= info.file_size
            if room < 0:
                raise DataError(f"unpacks to more than {_NPZ_RATIO} times its size, or than fits into memory")
            arrays[name] = read_member(archive, info)
    return arrays


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """An array of numbers or text, read in place: a replay buffer may fill half of the memory."""
    with archive.open(member) as file:
        shape, fortran, dtype = _npy_header(file, member.file_size)
        if dtype.hasobject:
            raise DataError(f"{member.filename} holds Python objects and is no array of numbers")
        array = np.empty(shape, dtype, order="F" if fortran else "C")
        if array.nbytes != member.file_size - file.tell():
            raise DataError(f"is damaged: {member.filename} is no array of {list(shape)} numbers")
        view = memoryview(array.reshape(-1, order="A").view(np.uint8) if array.nbytes else b"")  # type: ignore[arg-type]
        while view:
            got = cast("BufferedIOBase", file).readinto(view)
            if not got:
                raise DataError(f"is damaged: {member.filename} is truncated")
            view = view[got:]
        file.read()  # at the end the checksum is compared
        return array


def load_torch(path: Path | str) -> Any:
    """Read what `torch.save` wrote, to the CPU; tensors of the usual (zip) layout are memory-mapped."""
    from guerdon.data.files import torch_files

    with named(path):
        with Path(path).open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
            size = os.fstat(file.fileno()).st_size
        if is_zip:
            return torch_files.read_zip(Path(path), work=_work_for(size))
        with _open(path, None) as (data, _):
            return torch_files.read_stream(data, size, work=_work_for(size))


def _run(file: IO[bytes], size: int, more: Names | None = None) -> Any:
    """The object in a pickle of `size` bytes that begins where `file` stands."""
    from guerdon.data.files import torch_files  # and with it torch, which only pickles need

    work = _work_for(size)
    is_pickle = file.read(1) == pickle.PROTO
    file.seek(-1, os.SEEK_CUR)
    try:
        return PickleMachine(file, {**torch_files.names(work), **(more or {})}, work=work).run()
    except UnsafeDataError:
        raise
    except Exception as error:
        if is_pickle:
            raise
        # Without its first byte anything may look like opcodes for a while.
        raise DataError("is not a pickle of protocol 2 or later") from error


def _work_for(size: int) -> Work:
    return Work.for_file(size, memory_budget())


def _check_size(size: int, max_bytes: int | None) -> None:
    if size == 0:
        raise DataError("is empty")
    if max_bytes is not None and size > max_bytes:
        raise DataError(f"has {size} bytes or more; at most {max_bytes} are read")


@contextmanager
def _open(path: Path | str, max_bytes: int | None) -> Iterator[tuple[IO[bytes], int]]:
    """(the content of a file, read or (large files) memory-mapped; its size)."""
    with Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(size, memory_budget() if max_bytes is None else max_bytes)
        if size < _MAP_FROM:
            yield BytesIO(file.read()), size
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            yield cast("IO[bytes]", mapped), size


def _npy_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether it is in Fortran's order, element type) of an array in a file of `size` bytes."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    elif version == (2, 0):
        shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
    else:
        raise DataError(f"is a .npy file of version {version[0]}.{version[1]}, which is not supported")
    shape = check_sizes("its shape", shape)
    if dtype.kind not in "biufcSUO" or not dtype.itemsize:
        raise DataError(f"holds the element type {one_line(str(dtype))}, which is not supported")
    promised, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if not dtype.hasobject and promised > there:
        raise DataError(f"is truncated: its header promises {promised} bytes of data, it has {there}")
    return shape, fortran, dtype


@contextmanager
def named(source: Path | str) -> Iterator[None]:
    """Turn whatever damaged input sets off into one line that names the file."""
    name = display_path(source)
    try:
        yield
    except DataError as error:
        if str(error).startswith(f"{name}: "):  # by a reader within this one
            raise
        raise type(error)(f"{name}: {error}") from error
    except FileNotFoundError:
        raise DataError(f"{name}: does not exist") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {error.strerror or one_line(error)}") from error
    except EOFError:
        raise DataError(f"{name}: is truncated: the data ends in the middle of an object") from None
    except MemoryError:
        raise DataError(f"{name}: does not fit into memory") from None
    except Exception as error:  # hostile bytes can fail in any way; none of them may end a run
        detail = one_line(error) or type(error).__name__
        raise DataError(f"{name}: is damaged or not of this kind: {detail}") from error
