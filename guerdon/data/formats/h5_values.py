"""Values of an HDF5 file, read as data alone: nothing that is kept elsewhere, and nothing that is too large.

For the process that reads such files (`h5_process`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.data.files.bounds import one_line
from guerdon.data.formats import h5_process
from guerdon.data.formats.base import head_of

MAX_NUMBERS = 64 << 20
"""Bytes of a data set that holds no frames."""
_MAGIC = b"\x89HDF\r\n\x1a\n"
_MAX_DEPTH = 8
_MAX_LEAVES = 1000


def is_hdf5(path: Path) -> bool:
    """Whether a file's name and first bytes are those of HDF5."""
    return path.suffix.lower() in (".h5", ".hdf5") and head_of(path, len(_MAGIC)) == _MAGIC


def data_sets(group: Any, depth: int = 1, seen: set[Any] | None = None) -> Iterator[tuple[str, Any]]:
    """All data sets below a group by their paths, in its order; one that is linked twice is an error."""
    import h5py

    seen = set() if seen is None else seen
    for name in group:
        found = member(group, name)
        place = h5py.h5o.get_info(found.id).addr
        if place in seen or len(seen) >= _MAX_LEAVES or depth > _MAX_DEPTH:
            raise DataError(f"{one_line(name)!r} is linked twice, or there are too many groups")
        seen.add(place)
        if is_group(found):
            yield from ((f"{name}/{rest}", data) for rest, data in data_sets(found, depth + 1, seen))
        else:
            yield name, found


def is_group(found: Any) -> bool:
    """Whether a member is a group, and no data set."""
    return hasattr(found, "keys")


def member(group: Any, name: str) -> Any:
    """A member of a group that is stored right there."""
    import h5py

    if name not in group:
        raise DataError(f"has no {name!r}; it has {one_line(sorted(group))}")
    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise DataError(f"{name!r} is a link to somewhere else, which is not followed")
    return group[name]


def array_of(group: Any, name: str) -> NDArray[Any]:
    """The numbers of a data set of a group."""
    return checked(member(group, name), name)


def checked(data: Any, name: str, max_bytes: int = MAX_NUMBERS) -> NDArray[Any]:
    """The numbers of a data set that is kept in this file, was written, and is not too large."""
    if is_group(data):
        raise DataError(f"{name!r} is a group, not a data set")
    if data.external or data.is_virtual:
        raise DataError(f"{name!r} is kept in another file, which is not read")
    if data.dtype.kind not in "biuf":
        raise DataError(f"{name!r} holds {data.dtype}, not numbers")
    size = math.prod(data.shape) * data.dtype.itemsize
    if size > max_bytes:
        raise DataError(f"{name!r} has {size} bytes; at most {max_bytes} are read")
    if size and not _is_written(data, size):
        raise DataError(f"{name!r} has {size} bytes that were never written")
    if max_bytes > MAX_NUMBERS:
        h5_process.limit_memory(2 * size)
    array: NDArray[Any] = data[()]
    return array


def _is_written(data: Any, size: int) -> bool:
    """Whether the file holds all of a data set, and not a promise of zeros."""
    if data.chunks is not None:
        wanted = math.prod(-(-side // chunk) for side, chunk in zip(data.shape, data.chunks, strict=True))
        return bool(data.id.get_num_chunks() >= wanted)
    return bool(data.id.get_storage_size() >= size)


def after_reset(array: NDArray[Any], count: int) -> NDArray[Any]:
    """What followed each action, of an array with one entry more than actions."""
    if len(array) != count + 1:
        raise DataError(f"has {len(array)} observations for {count} actions; expected one more than actions")
    return array[1:]
