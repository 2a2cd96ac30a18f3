"""The index of a shard: which episodes it has and where they lie, from its journal or from its parquet file.

What cannot be used is set aside, episode by episode, and named in `problems`. Nothing that is read is
trusted: an index that is here has checked lengths and labels, and its episodes do not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import SPLITS, BoolArray, FloatArray, IntArray
from guerdon.data.files.bounds import one_line, read_small
from guerdon.data.store.shard import (
    DIGEST_BYTES,
    INDEX,
    JOURNAL,
    MAX_SIZE,
    SCALARS,
    EpisodeRecord,
    ShardFile,
    ShardSchema,
    bad_labels,
    text_problem,
)

SET_ASIDE = b"guerdon.set_aside"
"""In the metadata of an index: what was left out when it was made, as a JSON list of texts."""
_ROWS_AT_ONCE = 1 << 20  # rows are read without asking whether their frames are there
_MAX_JOURNAL = 4 << 30
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


@dataclass(frozen=True, kw_only=True)
class ShardIndex:
    """The episodes of a shard, E of them with F frames in all."""

    first_frame: IntArray
    """int64 [E]; the row of an episode's first frame in the shard's files."""
    number: IntArray
    """int64 [E]; its row in files that have one row per episode."""
    length: IntArray
    """int64 [E]; its frames."""
    success: BoolArray
    complete: BoolArray
    seed: list[int | None]
    split: list[str]
    source: list[str]
    digest: list[bytes]
    labels: FloatArray
    """float32 [F]."""
    scalars: Mapping[str, NDArray[Any]]
    """field -> [F]."""
    problems: list[str] = field(default_factory=list)
    """What could not be used, and why."""

    @classmethod
    def of(cls, records: Sequence[EpisodeRecord], schema: ShardSchema, problems: list[str]) -> ShardIndex:
        """The index that a journal stands for; `problems` are those of the journal itself."""
        good, problems = [], list(problems)
        end = count = 0
        for record in records:
            first = end if record.first_frame is None else record.first_frame
            number = count if record.number is None else record.number
            reason = record.problem(schema)
            if reason is None and (first < end or number < count):
                reason = "it lies where another one does"
            if reason is None:
                good.append(replace(record, first_frame=first, number=number))
            else:
                problems.append(f"episode {number} is set aside: {reason}")
            end, count = max(end, first + record.num_frames), max(count, number + 1)
        facts: dict[str, Any] = {
            name: [getattr(each, name) for each in good] for name in ("seed", "split", "source", "digest")
        }
        return cls(
            first_frame=np.array([each.first_frame for each in good], np.int64),
            number=np.array([each.number for each in good], np.int64),
            length=np.array([each.num_frames for each in good], np.int64),
            success=np.array([each.success for each in good], np.bool_),
            complete=np.array([each.complete for each in good], np.bool_),
            **facts,
            labels=joined([each.labels for each in good], np.float32),
            scalars={
                name: joined([each.scalars[name] for each in good], SCALARS[name]) for name in schema.scalars
            },
            problems=problems,
        )

    def __len__(self) -> int:
        return len(self.length)

    def ends(self, file: ShardFile) -> IntArray:
        """The first row of `file` behind each episode, int64 [E]."""
        return self.number + 1 if file.per_episode else self.first_frame + self.length

    def keep(self, good: BoolArray) -> ShardIndex:
        """Only the episodes of a mask (bool [E])."""
        if good.all():
            return self
        rows = np.repeat(good, self.length)
        changed: dict[str, Any] = {
            "labels": self.labels[rows],
            "scalars": {name: values[rows] for name, values in self.scalars.items()},
        }
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name not in ("labels", "scalars", "problems"):
                is_list = isinstance(value, list)
                changed[item.name] = [value[i] for i in np.flatnonzero(good)] if is_list else value[good]
        return replace(self, **changed)


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


def load_index(shard: Path, schema: ShardSchema) -> ShardIndex:
    """The index of a shard, sealed or not.

    Raises:
        DataError: nothing of it can be used.
    """
    try:  # the journal outlives an interrupted seal, and then it holds the truth
        records, problems = read_journal(shard / JOURNAL)
        return ShardIndex.of(records, schema, problems)
    except FileNotFoundError:
        pass  # sealed, maybe at this moment: the index was there before the journal went
    files = [(shard / each.name, each.row_bytes) for each in schema.camera_files]
    rows = max((file.stat().st_size // size for file, size in files if file.exists()), default=0)
    if (shard / INDEX).exists():
        try:
            return _from_table(*_read_table(shard / INDEX, schema, rows), schema)
        except DataError as error:
            raise DataError(f"the index is damaged: {error}") from error
        except Exception as error:  # hostile bytes can fail in any way
            raise DataError(f"the index is damaged: {one_line(error, 200)}") from error
    if rows:
        raise DataError(f"the index is lost: nothing tells what the {rows} frames belong to")
    return ShardIndex.of([], schema, [])  # claimed by a writer that has written nothing yet


def index_table(index: ShardIndex, schema: ShardSchema) -> pa.Table:
    """The parquet index of a shard: one row per frame, episodes in order."""
    owner = np.repeat(np.arange(len(index)), index.length)
    columns: dict[str, Any] = {
        "episode": np.repeat(index.number, index.length).astype(np.int32),
        "step": _steps(index.length).astype(np.int32),
        "label": index.labels,
    }
    for name in ("success", "complete", "seed", "split", "source", "digest"):
        columns[name] = pa.array(getattr(index, name), _COLUMNS[name]).take(pa.array(owner))
    columns |= {name: index.scalars[name] for name in schema.scalars}
    frame = np.repeat(index.first_frame, index.length) + _steps(index.length)
    if not np.array_equal(frame, np.arange(len(frame))):  # something before it was set aside
        columns["frame"] = frame
    table = pa.table(columns)
    return table.replace_schema_metadata({SET_ASIDE: json.dumps(index.problems)}) if index.problems else table


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
    return table, [] if noted is None else _texts(noted)


def _texts(noted: bytes) -> list[str]:
    try:
        return [one_line(each, 300) for each in json.loads(noted)]
    except (ValueError, TypeError, RecursionError):
        return ["the list of what was set aside is damaged"]


def _from_table(table: pa.Table, problems: list[str], schema: ShardSchema) -> ShardIndex:
    """The episodes of a table, which begin where the column `episode` changes."""
    episode, step = (_array(table, name, pa.int64()) for name in ("episode", "step"))
    starts = np.flatnonzero(np.diff(episode, prepend=episode[:1] - 1))
    length = np.diff(starts, append=len(episode))
    frame = _array(table, "frame", pa.int64()) if "frame" in table.column_names else np.arange(len(episode))
    index = ShardIndex(
        first_frame=frame[starts],
        number=episode[starts],
        length=length,
        success=_array(table, "success", pa.bool_())[starts],
        complete=_array(table, "complete", pa.bool_())[starts],
        seed=_column(table, "seed", pa.int64(), missing=True).take(pa.array(starts)).to_pylist(),
        split=_text_column(table, "split", starts),
        source=_text_column(table, "source", starts),
        digest=_column(table, "digest", pa.binary(DIGEST_BYTES)).take(pa.array(starts)).to_pylist(),
        labels=_array(table, "label", pa.float32()),
        scalars={name: _array(table, name, pa.from_numpy_dtype(SCALARS[name])) for name in schema.scalars},
        problems=problems,
    )
    steps = _steps(length)
    bad_rows = (step != steps) | bad_labels(index.labels)
    bad_rows |= frame != np.repeat(index.first_frame, length) + steps
    bad = np.logical_or.reduceat(bad_rows, starts) if len(starts) else np.zeros(0, np.bool_)
    bad |= (length > MAX_SIZE) | ~_in_order(index)
    bad |= np.array([each not in SPLITS for each in index.split], np.bool_)
    bad |= np.array([text_problem(each) is not None for each in index.source], np.bool_)
    if bad.any():
        first = int(index.number[np.flatnonzero(bad)[0]])
        reason = f"{int(bad.sum())} of {len(bad)} episodes are set aside, the first is {first}"
        problems.append(f"the index is damaged: {reason}")
    return index.keep(~bad)


def _in_order(index: ShardIndex) -> BoolArray:
    """Which episodes lie behind all that come before them, bool [E]."""
    places = (index.first_frame, index.number)
    good: BoolArray = np.ones(len(index), np.bool_)
    for start, end in zip(places, (index.first_frame + index.length, index.number + 1), strict=True):
        good &= (start >= 0) & (start < 2**62)
        before = np.maximum.accumulate(np.where(good, end, 0))
        good[1:] &= start[1:] >= before[:-1]
    return good


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


def _steps(lengths: IntArray) -> IntArray:
    """0, 1, ... within each episode."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) - np.repeat(ends - lengths, lengths)


def joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Arrays one behind the other, as `dtype`; there may be none."""
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
