"""A copy of a LeRobot data set with more columns, such as learned rewards; frames stay as they are."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
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
from guerdon.data.formats.base import to_fault
from guerdon.data.formats.lerobot import stats
from guerdon.data.formats.lerobot.meta import INFO, Meta, read_info, read_meta
from guerdon.data.formats.lerobot.rows import COUNTERS
from guerdon.data.formats.lerobot.tables import open_parquet

Columns = Mapping[str, Mapping[int, NDArray[Any]]]
"""Name -> episode_index -> one number for each row, [T]: float32, bool or int64."""
_TYPES = {"float32": pa.float32(), "bool": pa.bool_(), "int64": pa.int64()}
_KEPT = ("meta", "data", "videos")


def add_columns(source: Path, target: Path, columns: Columns) -> list[Fault]:
    """Copy the data set at `source` to `target` with `columns` beside or in the place of its own.

    Episodes that a column has nothing for hold NaN (float32), False or 0 in it. The copy is there whole or
    not at all. Data files that cannot be read are left out and returned as faults.

    Args:
        source: a data set of v2.x or v3.0.
        target: must not exist.
        columns: numbers of rows; row t belongs to the frame that row t holds.
    """
    meta = read_meta(source)
    if target.exists():
        raise DataError(f"{display_path(target)} exists already; write to a new folder")
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
                    write_atomic(goal, partial(_rewrite, file, columns, dtypes))
            _describe(source, made, columns, dtypes)
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
    for name, dtype in dtypes.items():
        at = schema.get_field_index(name)
        schema = schema.remove(at) if at >= 0 else schema
        schema = schema.append(pa.field(name, _TYPES[dtype]))
    schema = schema.with_metadata(_metadata(schema.metadata or {}, dtypes))
    with pq.ParquetWriter(target, schema, compression="snappy") as writer:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            episodes = table.column("episode_index").to_numpy()
            steps = table.column("frame_index").to_numpy()
            for name, dtype in dtypes.items():
                values = np.full(len(table), np.nan if dtype == "float32" else 0, np.dtype(dtype))
                for index in np.unique(episodes).tolist():
                    if index in columns[name]:
                        here = episodes == index
                        values[here] = columns[name][index][steps[here]]
                table = table.drop_columns([name]) if name in table.column_names else table
                table = table.append_column(name, pa.array(values, _TYPES[dtype]))
            writer.write_table(table.select(schema.names).cast(schema), row_group_size=max(1, len(table)))


def _metadata(known: Mapping[bytes, bytes], dtypes: Mapping[str, str]) -> dict[bytes, bytes]:
    """That of a schema with the new columns in what Hugging Face's `datasets` reads."""
    made = {key: value for key, value in known.items() if key != b"pandas"}
    if b"huggingface" in made:
        about = json.loads(made[b"huggingface"])
        about["info"]["features"] |= {
            name: {"dtype": dtype, "_type": "Value"} for name, dtype in dtypes.items()
        }
        made[b"huggingface"] = json.dumps(about).encode()
    return made


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
    whole = made / "meta" / "stats.json"
    if whole.exists():
        known = json.loads(whole.read_text())
        for name, parts in by_episode.items():
            known[name] = {key: value.tolist() for key, value in stats.merged(list(parts.values())).items()}
        write_atomic(whole, json.dumps(known, indent=1))
    for path in sorted((made / "meta" / "episodes").glob("*/*.parquet")):
        try:
            table = pq.read_table(path)
        except pa.ArrowException:  # `read_meta` has named it
            continue
        write_atomic(path, partial(_write_table, _with_stats(table, by_episode)))
    lines = made / "meta" / "episodes_stats.jsonl"
    if lines.exists():
        rows = [json.loads(line) for line in lines.read_text().splitlines() if line.strip()]
        for row in rows:
            for name, parts in by_episode.items():
                if row["episode_index"] in parts:
                    each = parts[row["episode_index"]]
                    row["stats"][name] = {key: value.tolist() for key, value in each.items()}
        write_atomic(lines, "".join(json.dumps(row) + "\n" for row in rows))


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


def _write_table(table: pa.Table, file: BinaryIO) -> None:
    pq.write_table(table, file)
