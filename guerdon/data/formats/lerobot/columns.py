"""A copy of a LeRobot data set with more columns, such as learned rewards; frames stay as they are."""

from __future__ import annotations

import json
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from guerdon.core.atomic import make_directory, storage_errors, write_atomic
from guerdon.core.errors import DataError
from guerdon.core.types import Fault, display_path
from guerdon.data.files.bounds import one_line, parse_json, read_json, read_small
from guerdon.data.formats.base import read_or_fault, to_fault
from guerdon.data.formats.lerobot import stats
from guerdon.data.formats.lerobot.meta import INFO, Meta, read_info, read_meta
from guerdon.data.formats.lerobot.rows import COUNTERS
from guerdon.data.formats.lerobot.tables import open_parquet

Columns = Mapping[str, Mapping[int, NDArray[Any]]]
"""Name -> episode_index -> one number for each row, [T]: float32, bool or int64."""
_TYPES = {"float32": pa.float32(), "bool": pa.bool_(), "int64": pa.int64()}
_KEPT = ("meta", "data", "videos")
_STATS, _EPISODES_STATS = Path("meta/stats.json"), Path("meta/episodes_stats.jsonl")
_MAX_STATS, _MAX_EPISODES_STATS = 64 << 20, 256 << 20
_BATCH = 32
_GROUP_BYTES = 64 << 20
"""A row group that unpacks to more is split."""


def check_copy(source: Path, target: Path) -> Meta:
    """What `add_columns` looks at before it copies anything: `meta/`, and that `target` does not exist."""
    meta = read_meta(source)
    if target.exists():
        raise DataError(f"{display_path(target)} exists already; write to a new folder")
    _read_stats(source / _STATS)
    _read_episodes_stats(source / _EPISODES_STATS)
    for path in dict.fromkeys(place.data for place in meta.episodes):
        found = read_or_fault(path, partial(pq.read_schema, path))
        if not isinstance(found, Fault):  # `add_columns` names it
            _metadata(found.metadata or {}, {}, f"{display_path(path)}: ")
    return meta


def add_columns(
    source: Path, target: Path, columns: Columns, *, finish: Callable[[Path], object] | None = None
) -> list[Fault]:
    """Copy the data set at `source` to `target` with `columns` beside or in the place of its own.

    Episodes that a column has nothing for hold NaN (float32), False or 0 in it. The copy is there whole or
    not at all. Data files that cannot be read are left out and returned as faults.

    Args:
        source: a data set of v2.x or v3.0.
        target: must not exist.
        columns: numbers of rows; number t belongs to the episode's row t, whatever its `frame_index` is.
        finish: may write more files; it gets the copy's folder before that has its name.
    """
    meta = check_copy(source, target)
    dtypes = {name: _checked(meta, name, values) for name, values in columns.items()}
    made = make_directory(target.parent) / f".{target.name}-{secrets.token_hex(4)}.tmp"
    faults = list(meta.faults)
    try:
        with storage_errors(target):
            for folder in (source / name for name in _KEPT if (source / name).is_dir()):
                shutil.copytree(folder, made / folder.name, ignore=_parquet_of_rows(source))
            for path in dict.fromkeys(place.data for place in meta.episodes):
                try:
                    file = open_parquet(path)
                except DataError as error:
                    faults.append(to_fault(path, error))
                    continue
                with file:
                    goal = made / path.relative_to(source)
                    make_directory(goal.parent)
                    try:
                        write_atomic(goal, partial(_rewrite, file, columns, dtypes))
                    except DataError as error:
                        raise DataError(f"{display_path(path)}: {error}") from error
            _describe(source, made, columns, dtypes)
            if finish is not None:
                finish(made)
            made.rename(target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return faults


def _checked(meta: Meta, name: str, values: Mapping[int, NDArray[Any]]) -> str:
    """The type of a column; raises unless it fits."""
    feature = meta.features.get(name)
    taken = name in (*COUNTERS, "timestamp") or (feature is not None and feature.is_camera)
    if taken or "/" in name or not name:
        raise DataError(f"a column cannot be called {name!r}")
    lengths = {place.index: place.length for place in meta.episodes}
    kinds = {str(each.dtype) for each in values.values()}
    if len(kinds) != 1 or not kinds <= _TYPES.keys():
        raise DataError(f"the column {name!r} is of {sorted(kinds)}; give one of {sorted(_TYPES)}")
    for index, each in values.items():
        if index in lengths and each.shape != (lengths[index],):
            raise DataError(
                f"the column {name!r} has the shape {list(each.shape)} in episode {index}, which has "
                f"{lengths[index]} rows"
            )
    return kinds.pop()


def _parquet_of_rows(source: Path) -> Any:
    """What `copytree` leaves out: files of rows, which are written anew, and hidden files."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        inside = Path(folder).relative_to(source).parts[:1] == ("data",)
        return [name for name in names if name.startswith(".") or (inside and name.endswith(".parquet"))]

    return ignored


def _rewrite(file: pq.ParquetFile, columns: Columns, dtypes: Mapping[str, str], target: BinaryIO) -> None:
    """All row groups, with the columns."""
    schema = file.schema_arrow
    if "episode_index" not in schema.names:
        raise DataError("has no column episode_index")
    for name, dtype in dtypes.items():
        at = schema.get_field_index(name)
        schema = schema.remove(at) if at >= 0 else schema
        schema = schema.append(pa.field(name, _TYPES[dtype]))
    schema = schema.with_metadata(_metadata(schema.metadata or {}, dtypes))
    rows_before: Counter[int] = Counter()
    with pq.ParquetWriter(target, schema, compression="snappy") as writer:
        for group in range(file.num_row_groups):
            for table in _tables(file, group):
                table = _with_columns(table, columns, dtypes, rows_before)
                writer.write_table(table.select(schema.names).cast(schema), row_group_size=len(table))
    for index, count in rows_before.items():
        lengths = {len(values[index]) for values in columns.values() if index in values}
        if lengths - {count}:
            raise DataError(f"has {count} rows of the episode {index}; meta/ tells of {lengths.pop()}")


def _tables(file: pq.ParquetFile, group: int) -> Iterator[pa.Table]:
    """The rows of a row group, in several parts if they are large."""
    batches: list[pa.RecordBatch] = []
    size = 0
    try:
        for batch in file.iter_batches(_BATCH, row_groups=[group], use_threads=False):
            batches.append(batch)
            size += batch.nbytes
            if size > _GROUP_BYTES:
                yield pa.Table.from_batches(batches)
                batches, size = [], 0
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot be read: {one_line(error)}") from error
    if batches:
        yield pa.Table.from_batches(batches)


def _with_columns(
    table: pa.Table, columns: Columns, dtypes: Mapping[str, str], rows_before: Counter[int]
) -> pa.Table:
    """Rows with the columns; `rows_before` counts the rows of each episode so far."""
    episodes = table.column("episode_index").to_numpy()
    rows = {index: np.flatnonzero(episodes == index) for index in np.unique(episodes).tolist()}
    for name, dtype in dtypes.items():
        made = np.full(len(table), np.nan if dtype == "float32" else 0, np.dtype(dtype))
        for index, here in rows.items():
            if index in columns[name]:
                values = columns[name][index][rows_before[index] :][: len(here)]
                made[here[: len(values)]] = values  # too few are told in the end
        table = table.drop_columns([name]) if name in table.column_names else table
        table = table.append_column(name, pa.array(made, _TYPES[dtype]))
    rows_before.update({index: len(here) for index, here in rows.items()})
    return table


def _metadata(
    known: Mapping[bytes, bytes], dtypes: Mapping[str, str], source: str = ""
) -> dict[bytes, bytes]:
    """That of a schema with the new columns in what Hugging Face's `datasets` reads."""
    made = {key: value for key, value in known.items() if key != b"pandas"}
    if b"huggingface" in made:
        about = parse_json(made[b"huggingface"], f"{source}its note for datasets")
        info = about.get("info") if isinstance(about, dict) else None
        if not isinstance(info, dict) or not isinstance(info.get("features"), dict):
            raise DataError(f"{source}its note for datasets tells no features")
        info["features"] |= {name: {"dtype": dtype, "_type": "Value"} for name, dtype in dtypes.items()}
        made[b"huggingface"] = json.dumps(about).encode()
    return made


def _read_stats(path: Path) -> dict[str, Any] | None:
    """`meta/stats.json`, if it is there."""
    try:
        known = read_json(path, _MAX_STATS)
    except FileNotFoundError:
        return None
    if not isinstance(known, dict):
        raise DataError(f"{display_path(path)}: holds no dict")
    return known


def _read_episodes_stats(path: Path) -> list[dict[str, Any]] | None:
    """The lines of `meta/episodes_stats.jsonl`, if it is there."""
    try:
        lines = read_small(path, _MAX_EPISODES_STATS).splitlines()
    except FileNotFoundError:
        return None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{display_path(path)}: line {number}")
        if not isinstance(row, dict) or type(row.get("episode_index")) is not int:
            raise DataError(f"{display_path(path)}: line {number} names no episode")
        if not isinstance(row.setdefault("stats", {}), dict):
            raise DataError(f"{display_path(path)}: line {number} has statistics that are no dict")
        rows.append(row)
    return rows


def _describe(source: Path, made: Path, columns: Columns, dtypes: Mapping[str, str]) -> None:
    """Features and statistics of the columns in `meta/`."""
    info = read_info(source)
    counters = {name: info["features"].pop(name) for name in COUNTERS if name in info["features"]}
    for name, dtype in dtypes.items():
        info["features"][name] = {"dtype": dtype, "shape": [1], "names": None}
    info["features"] |= counters
    write_atomic(made / INFO, json.dumps(info, indent=4))
    by_episode = {
        name: {index: stats.of_numbers(each[:, None]) for index, each in values.items()}
        for name, values in columns.items()
    }
    if (known := _read_stats(source / _STATS)) is not None:
        for name, parts in by_episode.items():
            known[name] = {key: value.tolist() for key, value in stats.merged(list(parts.values())).items()}
        write_atomic(made / _STATS, json.dumps(known, indent=1))
    for path in sorted((made / "meta" / "episodes").glob("*/*.parquet")):
        try:
            with open_parquet(path) as file:
                if "episode_index" in file.schema_arrow.names and file.metadata.num_rows:
                    write_atomic(path, partial(_write_with_stats, file, by_episode))
        except DataError:  # `read_meta` names what it cannot read
            continue
    if (rows := _read_episodes_stats(source / _EPISODES_STATS)) is not None:
        for row in rows:
            for name, parts in by_episode.items():
                if row["episode_index"] in parts:
                    each = parts[row["episode_index"]]
                    row["stats"][name] = {key: value.tolist() for key, value in each.items()}
        write_atomic(made / _EPISODES_STATS, "".join(json.dumps(row) + "\n" for row in rows))


def _with_stats(table: pa.Table, by_episode: Mapping[str, Mapping[int, stats.Stats]]) -> pa.Table:
    """Rows of `meta/episodes` with the statistics of the columns."""
    indices = table.column("episode_index").to_pylist()
    for name, parts in by_episode.items():
        for key in next(iter(parts.values()), {}):
            values = [parts[index][key].tolist() if index in parts else None for index in indices]
            column = f"stats/{name}/{key}"
            kind = pa.list_(pa.int64() if key == "count" else pa.float64())
            table = table.drop_columns([column]) if column in table.column_names else table
            table = table.append_column(column, pa.array(values, kind))
    return table


def _write_with_stats(
    file: pq.ParquetFile, by_episode: Mapping[str, Mapping[int, stats.Stats]], target: BinaryIO
) -> None:
    with ExitStack() as stack:
        writer = None
        for group in range(file.num_row_groups):
            for table in _tables(file, group):
                table = _with_stats(table, by_episode)
                if writer is None:
                    writer = stack.enter_context(pq.ParquetWriter(target, table.schema))
                writer.write_table(table)
