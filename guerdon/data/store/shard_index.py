"""The index of a shard: which episodes it has and where they lie, from its journal or from its parquet file.

What cannot be used is set aside, episode by episode, and named. Nothing that is read is trusted: records that
come from here have checked lengths and labels, and do not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import SPLITS, IntArray
from guerdon.data.files.bounds import one_line, read_small
from guerdon.data.store.shard import (
    DIGEST_BYTES,
    INDEX,
    JOURNAL,
    MAX_SIZE,
    SCALARS,
    EpisodeRecord,
    ShardSchema,
    text_problem,
)

SET_ASIDE = b"guerdon.set_aside"
"""In the metadata of an index: what was left out when it was made, as a JSON list of texts."""
_ROWS_AT_ONCE = 1 << 20  # rows are read without asking whether their frames are there
_MAX_JOURNAL = 4 << 30
_MAX_PLACE = 1 << 62
_COLUMNS: Mapping[str, pa.DataType] = {
    "episode": pa.int64(),
    "step": pa.int64(),
    "label": pa.float32(),
    "success": pa.bool_(),
    "complete": pa.bool_(),
    "seed": pa.int64(),
    "split": pa.string(),
    "source": pa.string(),
    "digest": pa.binary(DIGEST_BYTES),
}
_TEXTS = ("split", "source")


def usable(records: Sequence[EpisodeRecord], schema: ShardSchema) -> tuple[list[EpisodeRecord], list[str]]:
    """(those that can be kept and do not overlap, why the others cannot); older ones get their place."""
    good: list[EpisodeRecord] = []
    problems: list[str] = []
    end = count = 0
    for record in records:
        first = end if record.first_frame is None else record.first_frame
        number = count if record.number is None else record.number
        reason = record.problem(schema)
        if reason is None and not (end <= first < _MAX_PLACE and count <= number < _MAX_PLACE):
            reason = "it lies where another one does"
        if reason is None:
            known = record.first_frame is not None
            good.append(record if known else record._replace(first_frame=first, number=number))
        else:
            problems.append(f"episode {number} is set aside: {reason}")
        end, count = max(end, first + record.num_frames), max(count, number + 1)
    return good, problems


def read_journal(path: Path) -> tuple[list[EpisodeRecord], list[str]]:
    """All records whose lines check, and what is wrong with the others.

    A torn last line is what a killed writer leaves and is no fault.
    """
    records: list[EpisodeRecord] = []
    problems: list[str] = []
    lines = read_small(path, _MAX_JOURNAL).splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            record = EpisodeRecord.from_line(line)
        except ValueError as error:
            if number < len(lines):
                problems.append(f"line {number} of {len(lines)} is damaged ({one_line(error, 100)})")
            continue
        if problems and record.first_frame is None:  # written by an older version: each lies behind the last
            problems[-1] += "; the episodes after it are lost"
            break
        records.append(record)
    return records, problems


def load_index(shard: Path, schema: ShardSchema) -> tuple[list[EpisodeRecord], list[str]]:
    """(the episodes of a shard in order, what could not be used and why), sealed or not.

    Raises:
        DataError: nothing of it can be used.
    """
    rows_before = _num_rows(shard, schema)  # a journal is there before its first frame
    try:  # the journal outlives an interrupted seal, and then it holds the truth
        records, problems = read_journal(shard / JOURNAL)
        good, more = usable(records, schema)
        return good, problems + more
    except FileNotFoundError:
        pass  # sealed, maybe at this moment: the index was there before the journal went
    if (shard / INDEX).exists():
        try:
            table, problems = _read_table(shard / INDEX, schema, _num_rows(shard, schema))
            records, all_good = _records(table, schema)
            good, more = (records, []) if all_good else usable(records, schema)
            if more:
                aside = f"{len(more)} of {len(records)} episodes are set aside; {more[0]}"
                problems.append(f"the index is damaged: {aside}")
            return good, problems
        except DataError as error:
            raise DataError(f"the index is damaged: {error}") from error
        except Exception as error:  # hostile bytes can fail in any way
            raise DataError(f"the index is damaged: {one_line(error, 200)}") from error
    if rows_before:
        raise DataError(f"the index is lost: nothing tells what the {rows_before} frames belong to")
    return [], []  # claimed by a writer that had written nothing yet


def _num_rows(shard: Path, schema: ShardSchema) -> int:
    """How many frames the longest camera file of a shard has room for."""
    files = [(shard / each.name, each.row_bytes) for each in schema.files if each.is_camera]
    return max((file.stat().st_size // size for file, size in files if file.exists()), default=0)


def index_table(
    records: Sequence[EpisodeRecord], schema: ShardSchema, problems: Sequence[str] = ()
) -> pa.Table:
    """The parquet index of a shard: one row per frame, episodes in order; with what was left out of it."""
    length = np.array([each.num_frames for each in records], np.int64)
    owner = pa.array(np.repeat(np.arange(len(records)), length))
    number, first = (
        np.array([getattr(each, name) for each in records], np.int64) for name in ("number", "first_frame")
    )
    steps = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    columns: dict[str, Any] = {
        "episode": np.repeat(number, length).astype(np.int32),
        "step": steps.astype(np.int32),
        "label": joined([each.labels for each in records], np.float32),
    }
    for name in ("success", "complete", "seed", "split", "source", "digest"):
        columns[name] = pa.array([getattr(each, name) for each in records], _COLUMNS[name]).take(owner)
    for name in schema.scalars:
        columns[name] = joined([each.scalars[name] for each in records], SCALARS[name])
    frame = np.repeat(first, length) + steps
    if not np.array_equal(frame, np.arange(len(frame))):  # something before it was set aside
        columns["frame"] = frame
    table = pa.table(columns)
    return table.replace_schema_metadata({SET_ASIDE: json.dumps(list(problems))}) if problems else table


def write_index(table: pa.Table, file: BinaryIO) -> None:
    """Write the index small: run lengths and zstd make the constant columns almost free."""
    plain = [name for name in ("env_rewards",) if name in table.column_names]
    dictionary = [name for name in table.column_names if name not in plain]
    pq.write_table(table, file, compression="zstd", compression_level=9, use_dictionary=dictionary)


def _read_table(path: Path, schema: ShardSchema, rows: int) -> tuple[pa.Table, list[str]]:
    """The columns of an index, as far as there can be frames for them, and what it says was set aside."""
    wanted = [*_COLUMNS, *schema.scalars]
    # Texts stay as small numbers: one long text, repeated in every row, would fill the memory.
    with pq.ParquetFile(path, read_dictionary=list(_TEXTS), memory_map=False) as file:
        names = file.schema_arrow.names
        missing = [name for name in wanted if name not in names]
        if missing:
            raise DataError(f"it lacks the column {missing[0]!r}")
        if "frame" in names:
            wanted.append("frame")
        batches, count, limit = [], 0, max(rows, _ROWS_AT_ONCE)
        for batch in file.iter_batches(batch_size=1 << 16, columns=wanted):
            batches.append(batch)
            count += batch.num_rows
            if count >= limit:
                break
        table = pa.Table.from_batches(batches, batches[0].schema if batches else None).slice(0, limit)
        noted = (file.schema_arrow.metadata or {}).get(SET_ASIDE)
    try:
        return table, [one_line(each, 300) for each in json.loads(noted or b"[]")]
    except (ValueError, TypeError, RecursionError):
        return table, ["the list of what was set aside is damaged"]


def _records(table: pa.Table, schema: ShardSchema) -> tuple[list[EpisodeRecord], bool]:
    """The episodes of a table, which begin where the column `episode` changes; whether all are good.

    They are if the columns are, which is a tenth of the work of looking at each record (`usable`).
    """
    episode, step = (_array(table, name, pa.int64()) for name in ("episode", "step"))
    starts = np.flatnonzero(np.diff(episode, prepend=episode[:1] - 1))
    if not len(starts):
        return [], True
    length = np.diff(starts, append=len(episode))
    steps = np.arange(len(episode)) - np.repeat(starts, length)
    frame = _array(table, "frame", pa.int64()) if "frame" in table.column_names else np.arange(len(episode))
    broken_rows = (step != steps) | (frame != np.repeat(frame[starts], length) + steps)
    labels = _array(table, "label", pa.float32())
    # An episode whose rows are not in order has no labels that can be assigned, and is refused.
    ends = np.where(np.logical_or.reduceat(broken_rows, starts), starts, starts + length)
    scalars = {name: _array(table, name, pa.from_numpy_dtype(SCALARS[name])) for name in schema.scalars}
    spans = list(zip(starts.tolist(), ends.tolist(), strict=True))
    split, source = (_text_column(table, name, starts) for name in ("split", "source"))
    records = map(
        EpisodeRecord,
        length.tolist(),
        _array(table, "success", pa.bool_())[starts].tolist(),
        _array(table, "complete", pa.bool_())[starts].tolist(),
        _column(table, "seed", pa.int64(), missing=True).take(pa.array(starts)).to_pylist(),
        source,
        split,
        _column(table, "digest", pa.binary(DIGEST_BYTES)).take(pa.array(starts)).to_pylist(),
        [labels[start:end] for start, end in spans],
        [{name: values[start:end] for name, values in scalars.items()} for start, end in spans],
        frame[starts].tolist(),
        episode[starts].tolist(),
    )
    all_good = (
        not broken_rows.any()
        and bool(labels.min() >= 0.0 and labels.max() <= 1.0)  # false for NaN, too
        and int(length.max()) <= MAX_SIZE
        and _ascend(frame[starts], frame[starts] + length)
        and _ascend(episode[starts], episode[starts] + 1)
        and set(split) <= set(SPLITS)
        and not any(map(text_problem, set(source)))
    )
    return list(records), all_good


def _ascend(begins: IntArray, ends: IntArray) -> bool:
    """Whether each begins where the last one ended or behind it."""
    within = begins.min() >= 0 and begins.max() < _MAX_PLACE  # so that no end overflowed
    return bool(within and (begins[1:] >= ends[:-1]).all())


def _column(table: pa.Table, name: str, kind: pa.DataType, *, missing: bool = False) -> pa.ChunkedArray:
    """A column of one type."""
    column = table.column(name).cast(kind)
    if column.null_count and not missing:
        raise DataError(f"the column {name!r} has missing values")
    return column


def _array(table: pa.Table, name: str, kind: pa.DataType) -> NDArray[Any]:
    values: NDArray[Any] = _column(table, name, kind).to_numpy()
    return values


def _text_column(table: pa.Table, name: str, starts: IntArray) -> list[str]:
    """The text of each episode; equal ones are one object."""
    column = table.column(name)
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.string()).dictionary_encode()
    column = column.unify_dictionaries().combine_chunks()
    if column.null_count or not pa.types.is_string(column.type.value_type):
        raise DataError(f"the column {name!r} has values that are no text")
    column.validate(full=True)
    if not len(column):
        return []
    known = column.dictionary.to_pylist()
    return [known[number] for number in column.indices.take(pa.array(starts)).to_pylist()]


def joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Arrays one behind the other, as `dtype`; there may be none."""
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
