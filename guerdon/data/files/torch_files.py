"""Reads the two layouts of `torch.save` (a zip archive, and the older stream of pickles) as plain data.

`torch.load(weights_only=True)` would import nothing either, but it ran foreign code before torch 2.6, and it
takes memory for the sizes that a file claims. Here a storage is as large as the bytes that are there, and a
tensor cannot claim to be larger than its storage.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.data.files.rebuild import PLAIN, Allowed, Token, check_sizes
from guerdon.data.files.unpickler import Names, PickleMachine, Work

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # of a zip entry: signature, ..., length of the name, of the extra
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}


def _tensor(
    storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any = False, *_: Any
) -> torch.Tensor:
    """A view of `storage`, a flat tensor; refuses to reach beyond it or to repeat its elements."""
    size, stride = check_sizes("a tensor's size", size), check_sizes("a tensor's stride", stride)
    if not isinstance(storage, torch.Tensor) or storage.ndim != 1 or type(offset) is not int:
        raise DataError("has a damaged tensor")
    if len(size) != len(stride) or math.prod(size) > storage.numel():
        raise DataError(f"has a tensor of size {list(size)} with {storage.numel()} stored elements")
    tensor = torch.as_strided(storage, size, stride, offset)  # checks the bounds
    return tensor.requires_grad_() if requires_grad is True and tensor.is_floating_point() else tensor


def _parameter(data: Any, requires_grad: Any = True, *_: Any) -> torch.nn.Parameter:
    if not isinstance(data, torch.Tensor):
        raise DataError("has a damaged parameter")
    return torch.nn.Parameter(data.detach(), requires_grad=requires_grad is True)


def _size(sizes: Any = ()) -> torch.Size:
    return torch.Size(check_sizes("a torch.Size", sizes))


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or not (index is None or type(index) is int):
        raise DataError("has a damaged device")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _make_table() -> dict[tuple[str, str], Allowed | Token | torch.dtype]:
    calls: dict[tuple[str, str], Callable[..., Any]] = {
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch", "Size"): _size,
        ("torch", "device"): _device,
    }
    table: dict[tuple[str, str], Allowed | Token | torch.dtype] = {
        **PLAIN,
        **{key: Allowed(".".join(key), call) for key, call in calls.items()},
    }
    for name, dtype in _STORAGES.items():
        table["torch", name] = Token(f"torch.{name}", dtype)
        table["torch.storage", name] = Token(f"torch.storage.{name}", dtype)
    table |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return table


ALLOWED = _make_table()
"""(module, name) -> what a pickle gets for it; anything that is not in here is refused."""


def _storage_id(pid: Any) -> tuple[torch.dtype, str, int]:
    """(element type, key, number of elements) of a reference to a storage."""
    fits = type(pid) is tuple and len(pid) in (5, 6) and pid[0] == "storage" and isinstance(pid[1], Token)
    if not fits or not isinstance(pid[1].value, torch.dtype) or type(pid[2]) is not str:
        raise DataError("refers to something that is not a tensor's storage")
    if type(pid[4]) is not int or pid[4] < 0 or (len(pid) == 6 and pid[5] is not None):
        raise DataError("refers to a damaged tensor storage")
    return pid[1].value, pid[2], pid[4]


def _as_storage(raw: NDArray[np.uint8], dtype: torch.dtype) -> torch.Tensor:
    """Bytes as a flat tensor that shares their memory."""
    if raw.size == 0:
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(raw).view(dtype)


def read_zip(path: Path, *, work: Work) -> Any:
    """The object in a zip archive of `torch.save`; tensors are mapped from the file, copied on write."""
    mapped = np.memmap(path, dtype=np.uint8, mode="c").view(np.ndarray)
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: info for info in archive.infolist()}
    if any(info.compress_type != zipfile.ZIP_STORED for info in entries.values()):
        raise DataError("is a compressed archive; torch.save writes none")
    pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise DataError("is a zip archive, but not one of torch.save")
    root = pickles[0].removesuffix("data.pkl")

    def content(name: str) -> NDArray[np.uint8]:
        if name not in entries:
            raise DataError(f"lacks the archive entry {name}")
        return _entry_content(mapped, entries[name])

    def resolve(pid: Any) -> torch.Tensor:
        dtype, key, count = _storage_id(pid)
        raw, size = content(f"{root}data/{key}"), count * dtype.itemsize
        if raw.size < size:
            raise DataError(f"has a tensor storage of {raw.size} bytes instead of {size}")
        return _as_storage(raw[:size], dtype)

    if f"{root}byteorder" in entries and content(f"{root}byteorder").tobytes() != b"little":
        raise DataError("was written on a big-endian machine, which is not supported")
    file = io.BytesIO(content(pickles[0]).data)
    return PickleMachine(file, ALLOWED, work=work, resolve_storage=resolve).run()


def _entry_content(mapped: NDArray[np.uint8], info: zipfile.ZipInfo) -> NDArray[np.uint8]:
    header = mapped[info.header_offset : info.header_offset + _LOCAL_HEADER.size].tobytes()
    signature, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if signature != b"PK\x03\x04" or start + info.file_size > mapped.size:
        raise DataError("is a damaged zip archive")
    return mapped[start : start + info.file_size]


def read_stream(file: IO[bytes], size: int, *, work: Work) -> Any:
    """The object in torch's older layout: five pickles, then the storages that they refer to.

    `file` has `size` bytes and stands at its beginning.
    """
    storages: dict[str, NDArray[np.uint8]] = {}
    taken = 0

    def resolve(pid: Any) -> torch.Tensor:
        nonlocal taken
        dtype, key, count = _storage_id(pid)
        if key not in storages:
            taken += count * dtype.itemsize
            if taken > size:
                raise DataError("claims more tensor data than the file holds")
            storages[key] = np.empty(count * dtype.itemsize, np.uint8)
        return _as_storage(storages[key], dtype)

    def read() -> Any:
        return PickleMachine(file, table, work=work).run()

    table = names(work)
    is_pickle = file.read(1) == pickle.PROTO
    file.seek(0)
    if not is_pickle or read() != LEGACY_MAGIC or read() != _LEGACY_VERSION:
        raise DataError("is not a file of torch.save")
    read()  # sizes of C types on the machine that wrote the file
    result = PickleMachine(file, table, work=work, resolve_storage=resolve).run()
    keys = read()
    if type(keys) is not list or not all(type(key) is str for key in keys) or set(keys) != set(storages):
        raise DataError("has a damaged list of tensor storages")
    for key in keys:
        file.read(8)  # the number of elements, which the reference to the storage gave already
        raw = file.read(storages[key].size)
        if len(raw) < storages[key].size:
            raise EOFError
        storages[key][:] = np.frombuffer(raw, np.uint8)
    return result


def names(work: Work) -> Names:
    """The allow-list together with the storages that a plain pickle of a tensor carries as bytes."""

    def storage_from_bytes(raw: Any) -> Any:
        if type(raw) is not bytes:
            raise DataError("has a damaged tensor storage")
        return read_stream(io.BytesIO(raw), len(raw), work=work)

    key = ("torch.storage", "_load_from_bytes")
    return {**ALLOWED, key: Allowed(".".join(key), storage_from_bytes)}
