"""A copy of a data set of LeRobot v3.0 with further columns; videos are copied as they are."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from guerdon.core.atomic import NameTakenError, make_directory, storage_errors, write_atomic
from guerdon.core.errors import DataError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line
from guerdon.data.formats.lerobot import stats
from guerdon.data.formats.lerobot.labels import RECORDED
from guerdon.data.formats.lerobot.meta import INFO, MAX_EPISODES, Meta, read_info
from guerdon.data.formats.lerobot.tables import joined, open_parquet, read_columns

Columns: TypeAlias = Mapping[str, Mapping[int, NDArray[Any]]]
"""Feature -> episode -> values [T], float32 or bool."""
COUNTERS = ("index", "episode_index", "frame_index")
_STATS = "meta/stats.json"
_TYPES = {"float32": pa.float32(), "bool": pa.bool_()}


def add_columns(meta: Meta, target: Path, columns: Columns, extra: str | None = None) -> pa.Table:
    """Copy a data set and add columns; the copy is whole or absent.

    Args:
        meta: of the data set; of v3.0 and without faults.
        target: a new folder.
        columns: a value for each row of every episode. A column of that name that is there already is kept
            as `recorded.NAME`, unless an earlier copy kept one: then it was added, and is replaced.
        extra: a column whose values are also returned.

    Returns:
        The counters of all rows in the order of the files, and `extra`.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise NameTakenError(f"{display_path(target)} exists already: give a new folder")
    make_directory(target.parent)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    with storage_errors(target):
        try:
            shutil.copytree(meta.root, part, ignore=shutil.ignore_patterns(".guerdon-staging", ".cache"))
            rows = _Copy(meta, part, columns).write(extra)
            if target.exists():
                target.rmdir()
            part.rename(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return rows


class _Copy:
    """A copy of all files, in which those with rows or features are written anew."""

    def __init__(self, meta: Meta, root: Path, columns: Columns) -> None:
        self.meta, self.root, self.columns = meta, root, columns
        kept = {name: RECORDED + name for name in columns if name in meta.features}
        self.renamed = {name: new for name, new in kept.items() if new not in meta.features}
        self.dropped = set(kept) - set(self.renamed)
        self.kinds = {name: str(next(iter(values.values())).dtype) for name, values in columns.items()}

    def write(self, extra: str | None) -> pa.Table:
        parts = []
        for path in sorted({place.data for place in self.meta.episodes}):
            try:
                parts.append(self._data_file(path, self.root / path.relative_to(self.meta.root), extra))
            except DataError as error:
                raise DataError(f"{display_path(path)}: {error}") from error
        self._episode_files()
        self._info()
        return pa.concat_tables(parts)

    def _data_file(self, source: Path, target: Path, extra: str | None) -> pa.Table:
        """Write a file of rows with the same row groups; returns its counters."""
        counters: list[pa.Table] = []
        done: dict[int, int] = {}
        with open_parquet(source) as file:
            schema = self._schema(file.schema_arrow)
            absent = [name for name in COUNTERS if name not in file.schema_arrow.names]
            if absent:
                raise DataError(f"has no column {absent[0]!r}")

            def write(stream: Any) -> None:
                with pq.ParquetWriter(stream, schema, compression="snappy") as writer:
                    for group in range(file.num_row_groups):
                        table = joined(file, [group], file.schema_arrow.names, source.stat().st_size)
                        made = self._with_columns(table, schema, done)
                        writer.write_table(made, row_group_size=max(len(made), 1))
                        counters.append(made.select([*COUNTERS, *([extra] if extra else [])]))

            write_atomic(target, write)
        for place in self.meta.episodes:
            if place.data == source and done.get(place.index) != place.length:
                found = done.get(place.index, 0)
                raise DataError(f"has {found} rows of episode {place.index}; meta/ tells of {place.length}")
        return pa.concat_tables(counters)

    def _with_columns(self, table: pa.Table, schema: pa.Schema, done: dict[int, int]) -> pa.Table:
        """Rows with the new columns; `done` counts the rows of each episode."""
        episodes = table.column("episode_index").to_numpy().astype(np.int64)
        made: dict[str, Any] = {
            self.renamed.get(name, name): table.column(name)
            for name in table.column_names
            if name not in self.dropped
        }
        places = np.empty(len(episodes), np.int64)
        for number in dict.fromkeys(episodes.tolist()):
            mine = np.flatnonzero(episodes == number)
            first = done.get(number, 0)
            places[mine] = np.arange(first, first + len(mine))
            done[number] = first + len(mine)
        for name, values in self.columns.items():
            column = np.empty(len(episodes), self.kinds[name])
            for number in dict.fromkeys(episodes.tolist()):
                mine, known = episodes == number, values.get(number)
                if known is None or done[number] > len(known):
                    raise DataError(f"has rows of episode {number} that meta/ does not tell of")
                column[mine] = known[places[mine]]
            made[name] = pa.array(column)
        return pa.table([made[name] for name in schema.names], schema=schema)

    def _schema(self, schema: pa.Schema) -> pa.Schema:
        """Of a file of rows, with what Hugging Face's `datasets` wants to know."""
        fields = [
            field.with_name(self.renamed.get(field.name, field.name))
            for field in schema
            if field.name not in self.dropped
        ]
        fields += [pa.field(name, _TYPES[kind]) for name, kind in self.kinds.items()]
        metadata = dict(schema.metadata or {})
        try:
            told = json.loads(metadata[b"huggingface"])
            known = self._named(told["info"]["features"])
        except (KeyError, ValueError, TypeError, AttributeError):
            return pa.schema(fields, metadata)
        told["info"]["features"] = known | {
            name: {"dtype": kind, "_type": "Value"} for name, kind in self.kinds.items()
        }
        return pa.schema(fields, metadata | {b"huggingface": json.dumps(told).encode()})

    def _named(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """Features under their new names, without those that are replaced."""
        return {
            self.renamed.get(name, name): about
            for name, about in features.items()
            if name not in self.dropped
        }

    def _episode_files(self) -> None:
        """`meta/episodes`: the statistics of the new columns of each episode."""
        for path in sorted((self.root / "meta" / "episodes").rglob("*.parquet")):
            table = read_columns(path, lambda name: True, MAX_EPISODES)
            numbers = table.column("episode_index").to_pylist()
            made: dict[str, Any] = {}
            for name in table.column_names:
                feature = name.split("/")[1] if name.startswith("stats/") else None
                if feature in self.dropped:
                    continue
                if feature in self.renamed:
                    made[name.replace(f"/{feature}/", f"/{self.renamed[feature]}/", 1)] = table.column(name)
                else:
                    made[name] = table.column(name)
            for name, values in self.columns.items():
                each = [stats.of_numbers(values[number].reshape(-1, 1)) for number in numbers]
                for kind in each[0] if each else ():
                    made[f"stats/{name}/{kind}"] = pa.array([one[kind].tolist() for one in each])
            new = pa.table(made, metadata=_without_pandas(table.schema.metadata))
            write_atomic(path, lambda stream, new=new: pq.write_table(new, stream, compression="snappy"))

    def _info(self) -> None:
        info = read_info(self.root)
        info["features"] = self._named(info["features"]) | {
            name: {"dtype": kind, "shape": [1], "names": None} for name, kind in self.kinds.items()
        }
        file = self.root / _STATS
        if file.exists():
            try:
                told = self._named(json.loads(file.read_text(encoding="utf-8")))
            except (ValueError, AttributeError) as error:
                raise DataError(f"{display_path(file)}: is damaged: {one_line(error)}") from error
            for name, values in self.columns.items():
                parts = [stats.of_numbers(each.reshape(-1, 1)) for each in values.values()]
                told[name] = {kind: value.tolist() for kind, value in stats.merged(parts).items()}
            write_atomic(file, json.dumps(told, indent=4))
        write_atomic(self.root / INFO, json.dumps(info, indent=4))


def _without_pandas(metadata: Mapping[bytes, bytes] | None) -> dict[bytes, bytes]:
    """Pandas' own note names the columns that were there before."""
    return {key: value for key, value in (metadata or {}).items() if key != b"pandas"}
