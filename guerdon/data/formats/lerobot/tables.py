"""Rows of parquet files, a few at a time and with bounds.

A few bytes of parquet can stand for any number of rows and values. Rows are therefore counted before they are
read, and read in small batches. What a page of a file unpacks to is Arrow's to bound: 2 GiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import IntArray
from guerdon.data.files.bounds import one_line
from guerdon.data.store.shard import MAX_TEXT

FOOTER = b"PAR1"
_ROW_BYTES = 4
"""A row of LeRobot takes more: its number in the data set alone is different in each."""
_SPARE_ROWS = 1000
_BATCH = 1024
_SPARE_BYTES = 512 << 20
_SPARE_VALUES = 4 << 20
"""Of a small file that is read as plain values, which take some 40 bytes each."""
_SPARE_TEXT = 64 << 20


def open_parquet(path: Path, texts: Sequence[str] = ()) -> pq.ParquetFile:
    """A parquet file whose end is there; equal values of the columns `texts` are held once."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - len(FOOTER)))
            end = file.read(len(FOOTER))
    except FileNotFoundError:
        raise DataError("does not exist") from None
    if size == 0:
        raise DataError("is empty")
    if end != FOOTER:
        raise DataError("has no footer: its recording was cut off before the file was closed")
    try:
        opened = pq.ParquetFile(path, memory_map=False, read_dictionary=list(texts))
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"is no readable parquet file: {one_line(error)}") from error
    if opened.metadata.num_rows > size // _ROW_BYTES + _SPARE_ROWS:
        raise DataError(f"has {opened.metadata.num_rows} rows in {size} bytes: it repeats the same ones")
    return opened


def read_rows(path: Path, wanted: Callable[[pa.Field], bool], most: int) -> list[dict[str, Any]]:
    """Some columns, of numbers, texts or lists of numbers, of a small file of at most `most` rows."""
    with open_parquet(path) as file:
        if file.metadata.num_rows > most:
            raise DataError(f"has {file.metadata.num_rows} rows; at most {most} are read")
        fields = [field for field in file.schema_arrow if wanted(field)]
    size, names = path.stat().st_size, [field.name for field in fields]
    if not names:
        raise DataError("has none of the columns that are needed")
    texts = [field.name for field in fields if is_text(field.type)]
    with open_parquet(path, texts) as file:
        groups = range(file.num_row_groups)
        _check_values(file, groups, names, size // 2 + _SPARE_VALUES)
        if (
            sum(each.total_uncompressed_size for each in _chunks(file, groups, texts))
            > 4 * size + _SPARE_TEXT
        ):
            raise DataError(f"has more than {_SPARE_TEXT >> 20} MiB of texts in {size} bytes")
        table = file.read(names, use_threads=False)
    columns = [_plain_values(table.column(name), name) for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _plain_values(column: pa.ChunkedArray, name: str) -> list[Any]:
    """A column as plain values; equal texts are one."""
    if not pa.types.is_dictionary(column.type):
        values: list[Any] = column.to_pylist()
        return values
    found: list[Any] = []
    for chunk in column.chunks:
        lengths = pa.compute.utf8_length(chunk.dictionary)
        if (pa.compute.max(lengths).as_py() or 0) > MAX_TEXT:
            raise DataError(f"has a text of more than {MAX_TEXT} characters in {name}")
        texts = chunk.dictionary.to_pylist()
        found += [None if at is None else texts[at] for at in chunk.indices.to_pylist()]
    return found


def _check_values(file: pq.ParquetFile, row_groups: Iterable[int], names: Sequence[str], most: int) -> None:
    """Raise if columns hold more than `most` values, by what the file tells of itself."""
    count = sum(column.num_values for column in _chunks(file, row_groups, names))
    if count > most:
        raise DataError(f"has {count} numbers, more than its size allows for: it repeats the same ones")


def _chunks(file: pq.ParquetFile, row_groups: Iterable[int], names: Sequence[str]) -> Iterator[Any]:
    """What a file tells of the pieces of columns."""
    starts = tuple(f"{name}." for name in names)
    for group in map(file.metadata.row_group, row_groups):
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema in names or column.path_in_schema.startswith(starts):
                yield column


def _joined(file: pq.ParquetFile, row_groups: list[int], names: Sequence[str], size: int) -> pa.Table:
    """Columns of numbers or of lists of numbers."""
    for field in map(file.schema_arrow.field, names):
        if not is_numbers(field.type):
            raise DataError(f"{field.name} holds {one_line(str(field.type))}; expected numbers")
    room = _SPARE_BYTES + 4 * size
    _check_values(file, row_groups, names, room // 8)
    batches: list[pa.RecordBatch] = []
    for batch in file.iter_batches(_BATCH, row_groups=row_groups, columns=list(names), use_threads=False):
        room -= batch.nbytes
        if room < 0:
            raise DataError(f"has more than {_SPARE_BYTES >> 20} MiB of numbers in {size} bytes")
        batches.append(batch)
    schema = pa.schema([file.schema_arrow.field(name) for name in names])
    return pa.Table.from_batches(batches, schema if not batches else None)


class DataFile:
    """A file of rows, of one episode or many; the numbers of one row group are kept for the next episode."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_parquet(path)
        self._size = path.stat().st_size
        counts = [self._file.metadata.row_group(group).num_rows for group in range(self._file.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.names = set(self._file.schema_arrow.names)
        self._kept: tuple[int, tuple[str, ...], pa.Table] | None = None
        self._spans = self._find_spans()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _find_spans(self) -> dict[int, tuple[int, int] | None]:
        """Episode -> (first row, number of rows); None if its rows are not in one piece."""
        if "episode_index" not in self.names:
            raise DataError("has no column episode_index")
        groups = list(range(self._file.num_row_groups))
        column = _joined(self._file, groups, ["episode_index"], self._size).column("episode_index")
        numbers = numbers_of(column, 1, "episode_index").reshape(-1)
        if not len(numbers):
            return {}
        edges: IntArray = np.concatenate(
            [[0], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1, [len(numbers)]]
        )
        spans: dict[int, tuple[int, int] | None] = {}
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            number = int(numbers[start])
            spans[number] = None if number in spans else (start, stop - start)
        return spans

    def span(self, episode: int, length: int) -> tuple[int, int]:
        """(first row, number of rows) of an episode."""
        span = self._spans.get(episode, (0, 0))
        if span is None:
            raise DataError("has the rows of the episode in several pieces")
        if span[1] != length:
            raise DataError(f"has {span[1]} rows of the episode; meta/ tells of {length}")
        return span

    def numbers(self, span: tuple[int, int], names: Sequence[str]) -> pa.Table:
        """Columns of the rows of a span."""
        missing = [name for name in names if name not in self.names]
        if missing:
            raise DataError(f"has no column {missing[0]!r}")
        parts = []
        for group, start, stop in self._groups(span):
            parts.append(self._group(group, tuple(names)).slice(start, stop - start))
        return pa.concat_tables(parts)

    def cells(self, rows: IntArray, name: str, at_a_time: int = 8) -> Iterator[Any]:
        """The values of a column of large cells in `rows`, which grow; each row group is read once."""
        if name not in self.names:
            raise DataError(f"has no column {name!r}")
        places = np.searchsorted(self._starts, rows, side="right") - 1
        for group in np.unique(places).tolist():
            wanted, at = rows[places == group] - self._starts[group], 0
            for batch in self._file.iter_batches(
                at_a_time, row_groups=[group], columns=[name], use_threads=False
            ):
                first, last = np.searchsorted(wanted, [at, at + len(batch)])
                for row in (wanted[first:last] - at).tolist():
                    yield batch.column(0)[row].as_py()
                at += len(batch)
                if last == len(wanted):
                    break

    def _groups(self, span: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
        """(row group, first row in it, row after the last in it)."""
        first, end = span[0], span[0] + span[1]
        begin = int(np.searchsorted(self._starts, first, side="right")) - 1
        for group in range(begin, len(self._starts) - 1):
            low, high = int(self._starts[group]), int(self._starts[group + 1])
            if low >= end:
                return
            yield group, max(first, low) - low, min(end, high) - low

    def _group(self, group: int, names: tuple[str, ...]) -> pa.Table:
        if self._kept is None or self._kept[:2] != (group, names):
            self._kept = None  # two are never in memory
            self._kept = group, names, _joined(self._file, [group], names, self._size)
        return self._kept[2]


def numbers_of(column: pa.ChunkedArray, width: int, name: str) -> NDArray[Any]:
    """A column of numbers, or of lists of `width` numbers, as [T, width]; it has no gaps."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    rows = len(array)
    while not _is_plain(array.type):
        if array.null_count or not _is_list(array.type):
            raise DataError(f"{name} holds {array.type} with {array.null_count} gaps; expected numbers")
        array = array.flatten()
    if array.null_count:
        raise DataError(f"{name} has {array.null_count} gaps")
    if len(array) != rows * width:
        raise DataError(f"{name} has {len(array)} numbers in {rows} rows; expected {width} in each")
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(rows, width)


def is_numbers(kind: pa.DataType) -> bool:
    """Whether a column holds numbers, or lists of them."""
    while _is_list(kind):
        kind = kind.value_type
    return _is_plain(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds texts, also as numbers of a list of them."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_plain(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_list(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_fixed_size_list, pa.types.is_large_list)
    return any(is_kind(kind) for is_kind in kinds)
