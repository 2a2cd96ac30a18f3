"""imitation's trajectories: Arrow files as Hugging Face's `datasets` writes them, and the older `.npz`.

A file may come from anywhere. Arrow trusts the offsets and lengths in it unless it is told to check them, and
some of its types stand for any number of values without a byte; so only nested lists of numbers are read, and
those after a full check. Nothing is mapped: a file that shrinks while it is read is no danger.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from guerdon.core.errors import DataError
from guerdon.data.files import safe_pickle
from guerdon.data.files.bounds import memory_budget

Row: TypeAlias = Mapping[str, Any]
"""`obs` [T + 1, ...], `acts` [T, ...], `terminal`, and `rews` [T] if they were kept."""

_COLUMNS = ("obs", "acts", "rews", "terminal")
_FILE_MAGIC = b"ARROW1\0\0"
_MAX_DEPTH = 8
_HEADER, _BATCH_DATA, _COMPRESSION = 2, 1, 3  # fields of Message, DictionaryBatch and RecordBatch


def arrow_rows(path: Path) -> Iterator[Row]:
    """The trajectories of one Arrow file; `infos` are not looked at."""
    size = path.stat().st_size
    if size > memory_budget():
        raise DataError(f"has {size} bytes, more than fit into memory")
    data = path.read_bytes()
    if data.startswith(_FILE_MAGIC):  # the layout of files is that of streams, with an index at the end
        data = data[len(_FILE_MAGIC) :]
    for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(data)):
        if message.type in ("record batch", "dictionary") and _is_compressed(message):
            raise DataError("is compressed; write it without, as datasets does")
    table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
    table = table.select([name for name in _COLUMNS if name in table.column_names])
    for name, kind in zip(table.column_names, table.schema.types, strict=True):
        if not _is_listed_numbers(kind):
            raise DataError(f"has the column {name!r} of type {kind}; lists of numbers are needed")
    table.validate(full=True)
    for batch in table.to_batches():
        for row in range(batch.num_rows):
            yield from batch.slice(row, 1).to_pylist()


def _is_listed_numbers(kind: Any) -> bool:
    """Numbers, or lists of them; a list of fixed size has at least one."""
    for _ in range(_MAX_DEPTH):
        fixed = pa.types.is_fixed_size_list(kind) and kind.list_size > 0
        if not (fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            break
        kind = kind.value_type
    return any(check(kind) for check in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def _is_compressed(message: Any) -> bool:
    """Whether a batch's header says that its buffers are compressed; few bytes could then stand for many."""
    data = message.metadata.to_pybytes()
    table = _follow(data, 0)
    found = _field(data, table, _HEADER)
    if found is not None and message.type == "dictionary":
        found = _field(data, _follow(data, found), _BATCH_DATA)
    if found is None:
        raise DataError("has a batch without a header")
    return _field(data, _follow(data, found), _COMPRESSION) is not None


def _follow(data: bytes, position: int) -> int:
    """Where an offset of a flatbuffer leads to."""
    (offset,) = struct.unpack_from("<I", data, position)
    return position + int(offset)


def _field(data: bytes, table: int, number: int) -> int | None:
    """Where a field of a table of a flatbuffer stands; None if it is not there."""
    (back,) = struct.unpack_from("<i", data, table)
    listed = table - back
    if listed < 0:
        raise DataError("has a damaged header")
    (size,) = struct.unpack_from("<H", data, listed)
    if 4 + 2 * number >= size:
        return None
    (offset,) = struct.unpack_from("<H", data, listed + 4 + 2 * number)
    return table + offset if offset else None


def npz_rows(path: Path) -> Iterator[Row]:
    """The trajectories of the older file: all in a row, `indices` say where the actions are cut."""
    data = safe_pickle.load_npz(path, ("obs", "acts", "indices", "terminal", "rews"))
    missing = [name for name in ("obs", "acts", "indices", "terminal") if name not in data]
    if missing:
        raise DataError(f"holds no trajectories of imitation: no {missing[0]!r}")
    if not all(array.ndim and array.dtype.kind in "biuf" for array in data.values()):
        raise DataError("holds something else than arrays of numbers")
    obs, acts, terminal, rews = data["obs"], data["acts"], data["terminal"], data.get("rews")
    cuts, count = data["indices"].astype(np.int64), len(acts)
    edges = np.concatenate(([0], cuts, [count])) if cuts.ndim == 1 else np.zeros(0)
    if not len(edges) or not (np.diff(edges) > 0).all():
        raise DataError(f"has `indices` that do not cut its {count} actions into trajectories")
    number = len(edges) - 1
    if len(obs) != count + number or terminal.shape != (number,) or (rews is not None and len(rews) != count):
        raise DataError(f"has parts of different lengths for {number} trajectories of {count} actions")
    for each, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        yield {
            "obs": obs[start + each : stop + each + 1],
            "acts": acts[start:stop],
            "rews": None if rews is None else rews[start:stop],
            "terminal": bool(terminal[each]),
        }
