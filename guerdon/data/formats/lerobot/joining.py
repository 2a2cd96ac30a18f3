"""Staged episodes -> the files of a data set: one group of episodes after another.

A group fills one parquet file and one video for each camera. Its files are written first, then `meta/`, and
`info.json` last. If that is interrupted, the staged episodes are still there, and the next attempt replaces
what was written of the group. `info.json` keeps the tokens of its last group, so that none is joined twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from guerdon.core.atomic import make_directory, write_atomic
from guerdon.data.formats.lerobot import encoding, stats
from guerdon.data.formats.lerobot.meta import INFO, OWN, OWN_TYPES, VERSION, read_info
from guerdon.data.formats.lerobot.rows import schema_of
from guerdon.data.formats.lerobot.settings import WriteSettings

CHUNK = 1000
FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH = f"data/{FILE}.parquet"
VIDEO_PATH = f"videos/{{video_key}}/{FILE}.mp4"
EPISODES_PATH = f"meta/episodes/{FILE}.parquet"
_MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Staged:
    """An episode in a folder of its own."""

    folder: Path
    rows: Path
    videos: Mapping[str, Path]
    """By feature."""
    facts: Mapping[str, Any]

    @property
    def length(self) -> int:
        """Rows."""
        return int(self.facts["length"])

    def sizes(self) -> dict[str, int]:
        """Bytes in the file of rows and in that of each camera."""
        return {name: path.stat().st_size for name, path in {"": self.rows, **self.videos}.items()}


class Joiner:
    """Adds groups of staged episodes to a data set; the caller keeps other processes out."""

    def __init__(self, root: Path, features: Mapping[str, Any], settings: WriteSettings, reward: str) -> None:
        self.root, self.features, self.settings, self.reward = root, features, settings, reward

    def groups(self, staged: Sequence[Staged]) -> Iterator[tuple[list[Staged], bool]]:
        """(episodes whose files stay below the limits, whether another one would not fit)."""
        limits = {"": self.settings.data_files_mb * _MB}
        group: list[Staged] = []
        sums: dict[str, int] = {}
        for each in staged:
            sizes = each.sizes()
            after = {name: sums.get(name, 0) + size for name, size in sizes.items()}
            limit = self.settings.video_files_mb * _MB
            if group and any(size > limits.get(name, limit) for name, size in after.items()):
                yield group, True
                group, after = [], sizes
            group.append(each)
            sums = after
        if group:
            yield group, False

    def join(self, group: Sequence[Staged]) -> None:
        """Write the files of a group, then all of `meta/` that it changes."""
        info = self._info()
        known = set(info[OWN]["joined"])
        group = [each for each in group if each.facts["token"] not in known]
        if not group:
            return
        tasks = self._tasks()
        numbers = [tasks.setdefault(each.facts["task"], len(tasks)) for each in group]
        index: int = info[OWN]["groups"]
        place = {"chunk_index": index // CHUNK, "file_index": index % CHUNK}
        self._write(DATA_PATH.format(**place), partial(self._write_rows, group, numbers, info))
        for name, about in self.features.items():
            if about["dtype"] == "video":
                parts = [(each.videos[name], each.length) for each in group]
                path = VIDEO_PATH.format(video_key=name, **place)
                self._write(path, partial(encoding.join, parts, self.settings.fps))
        table = self._episode_rows(group, info, place)
        self._write(EPISODES_PATH.format(**place), lambda file: pq.write_table(table, file))
        task_table = _task_table(tasks)
        self._write("meta/tasks.parquet", lambda file: pq.write_table(task_table, file))
        self._write("meta/stats.json", json.dumps(self._stats(group, info), indent=1).encode())
        info["total_episodes"] += len(group)
        info["total_frames"] += sum(each.length for each in group)
        info["total_tasks"] = len(tasks)
        info["splits"] = {"train": f"0:{info['total_episodes']}"}
        info[OWN] |= {"groups": index + 1, "joined": [each.facts["token"] for each in group]}
        self._write(INFO, json.dumps(info, indent=4).encode())

    def _write(self, name: str, content: Any) -> None:
        path = self.root / name
        make_directory(path.parent)
        write_atomic(path, content)

    def _info(self) -> dict[str, Any]:
        """That of the data set, or of a new one."""
        if (self.root / INFO).exists():
            return read_info(self.root)
        return {
            "codebase_version": VERSION,
            "robot_type": self.settings.robot_type,
            "total_episodes": 0,
            "total_frames": 0,
            "total_tasks": 0,
            "chunks_size": CHUNK,
            "data_files_size_in_mb": self.settings.data_files_mb,
            "video_files_size_in_mb": self.settings.video_files_mb,
            "fps": self.settings.fps,
            "splits": {},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self.settings.videos else None,
            "features": self.features,
            OWN: {"label_at": "row", "reward": self.reward, "groups": 0, "joined": []},
        }

    def _tasks(self) -> dict[str, int]:
        path = self.root / "meta/tasks.parquet"
        if not path.exists():
            return {}
        table = pq.read_table(path)
        names, numbers = table.column("task").to_pylist(), table.column("task_index").to_pylist()
        return dict(zip(names, numbers, strict=True))

    def _write_rows(
        self, group: Sequence[Staged], tasks: Sequence[int], info: Mapping[str, Any], file: BinaryIO
    ) -> None:
        """A row group for each episode, with the counters that depend on the episodes before."""
        schema = schema_of(self.features)
        row = info["total_frames"]
        with pq.ParquetWriter(file, schema, compression="snappy") as writer:
            for number, each in enumerate(group):
                table, count = pq.read_table(each.rows), each.length
                counters = {
                    "index": np.arange(row, row + count),
                    "episode_index": np.full(count, info["total_episodes"] + number),
                    "task_index": np.full(count, tasks[number]),
                }
                for name, values in counters.items():
                    at = table.schema.get_field_index(name)
                    table = table.set_column(at, name, pa.array(values, pa.int64()))
                writer.write_table(table.cast(schema), row_group_size=count)
                row += count

    def _episode_rows(
        self, group: Sequence[Staged], info: Mapping[str, Any], place: Mapping[str, int]
    ) -> pa.Table:
        """The rows of `meta/episodes` for a group."""
        lengths = np.array([each.length for each in group])
        before = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        count = len(group)
        columns: dict[str, pa.Array] = {
            "episode_index": pa.array(info["total_episodes"] + np.arange(count), pa.int64()),
            "tasks": pa.array([[each.facts["task"]] for each in group], pa.list_(pa.string())),
            "length": pa.array(lengths, pa.int64()),
        }

        def at_place(prefix: str) -> None:
            for key, value in place.items():
                columns[f"{prefix}/{key}"] = pa.array([value] * count, pa.int64())

        at_place("data")
        columns["dataset_from_index"] = pa.array(info["total_frames"] + before, pa.int64())
        columns["dataset_to_index"] = pa.array(info["total_frames"] + before + lengths, pa.int64())
        for name in (name for name, about in self.features.items() if about["dtype"] == "video"):
            at_place(f"videos/{name}")
            fps = self.settings.fps
            columns[f"videos/{name}/from_timestamp"] = pa.array(before / fps, pa.float64())
            columns[f"videos/{name}/to_timestamp"] = pa.array((before + lengths) / fps, pa.float64())
        for feature, statistics in group[0].facts["stats"].items():
            for name in statistics:
                values = [each.facts["stats"][feature][name] for each in group]
                columns[f"stats/{feature}/{name}"] = pa.array(values)
        at_place("meta/episodes")
        for name, kind in OWN_TYPES.items():
            columns[f"{OWN}/{name}"] = pa.array([each.facts["own"][name] for each in group], kind)
        return pa.table(columns)

    def _stats(self, group: Sequence[Staged], info: Mapping[str, Any]) -> dict[str, Any]:
        """Of all episodes: those of the data set so far, merged with those of a group."""
        parts = [each.facts["stats"] for each in group]
        if info["total_episodes"]:
            parts.insert(0, json.loads((self.root / "meta/stats.json").read_text()))
        made = {}
        for name in group[0].facts["stats"]:
            merged = stats.merged([part[name] for part in parts])
            made[name] = {key: value.tolist() for key, value in merged.items()}
        return made


def _task_table(tasks: Mapping[str, int]) -> pa.Table:
    """As pandas writes a frame with the column `task_index` and the tasks as its index."""
    about = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    index = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"}
    note = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [about | {"metadata": None}, index | {"metadata": None}],
        "pandas_version": "2.0.0",
    }
    columns = {
        "task_index": pa.array(tasks.values(), pa.int64()),
        "task": pa.array(tasks.keys(), pa.string()),
    }
    return pa.table(columns).replace_schema_metadata({"pandas": json.dumps(note)})
