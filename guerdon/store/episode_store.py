"""Read the native store: memory-mapped frames, one parquet index per shard, a manifest with a hash.

```
STORE/
  manifest.json               format, version, cameras, counts, content hash (of what is sealed)
  shards/s000000/             see guerdon.store.shard
    shard.json  index.parquet  frames-00.u8  actions.f32 ...
```
Reading changes nothing on disk. A shard that is still being written, or whose writer was killed, is read
from its journal: every finished episode is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from guerdon.errors import DataError
from guerdon.store import shard as layout
from guerdon.types import (
    BoolArray,
    Episode,
    Fault,
    FloatArray,
    FrameBatch,
    IntArray,
    RewardLabels,
    UInt8Array,
    display_path,
)

FORMAT = "guerdon-store"
MANIFEST = "manifest.json"
SHARDS = "shards"


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the store at `path`; raises if there is none or it is not ours."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        raise DataError(f"{display_path(path)} is not a Guerdon store: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{display_path(path / MANIFEST)} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{display_path(path / MANIFEST)} does not belong to a Guerdon store")
    if manifest.get("version") != 1:
        raise DataError(
            f"{display_path(path)} has store version {manifest.get('version')!r}; this Guerdon knows 1"
        )
    return manifest


def shard_dirs(path: Path) -> list[Path]:
    """All shards of a store, in the order of their numbers."""
    root = path / SHARDS
    return sorted(item for item in root.iterdir() if item.is_dir()) if root.is_dir() else []


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """An opened shard: its maps hold rows `first_row` to `first_row + num_frames` of the store."""

    path: Path
    schema: layout.ShardSchema
    first_row: int
    first_episode: int
    cameras: dict[str, UInt8Array]
    vectors: dict[str, FloatArray]


def _map(path: Path, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map `shape` elements read-only; bytes behind them are left alone."""
    if shape[0] == 0:
        return np.zeros(shape, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r", shape=shape))


class EpisodeStore:
    """A native store, opened for reading.

    Attributes:
        cameras: camera name -> (H, W, C).
        labels: float32 [F], one per frame of the whole store.
        episode: int64 [F], the episode that a frame belongs to.
        step: int64 [F], its step within that episode.
        starts: int64 [E + 1]; episode e has the frames `starts[e]` to `starts[e + 1]`.
        faults: what could not be used, and why.
    """

    def __init__(self, path: Path | str, *more: Path | str, cameras: Sequence[str] | None = None) -> None:
        """Open a store, or several as one.

        Args:
            path: of the store.
            more: of further stores, whose episodes come after those of the first.
            cameras: which cameras to read, where the stores do not all have the same; None: all.
        """
        self.path = Path(path)
        # Before the manifest, which knows the cameras before there are shards.
        shards = [item for place in (self.path, *map(Path, more)) for item in shard_dirs(place)]
        self.manifest = read_manifest(self.path)
        self._chosen = cameras is not None
        self.faults: list[Fault] = []
        self._shards: list[_Shard] = []
        self._end_row = self._end_episode = 0
        self.cameras: dict[str, tuple[int, int, int]] = {
            name: (shape[0], shape[1], shape[2])
            for name, shape in self.manifest["cameras"].items()
            if cameras is None or name in cameras
        }
        tables = [table for item in shards if (table := self._open(item)) is not None]
        self._table = pa.concat_tables(tables, promote_options="default") if tables else None
        self.labels: FloatArray = self._column("label", np.float32)
        self.step: IntArray = self._column("step", np.int64)
        first = np.flatnonzero(self.step == 0)
        self.starts: IntArray = np.append(first, len(self.step)).astype(np.int64)
        self.episode: IntArray = np.repeat(np.arange(len(first)), np.diff(self.starts))
        self.success: BoolArray = self._column("success", np.bool_)[first]
        self.complete: BoolArray = self._column("complete", np.bool_)[first]
        self._first_rows: IntArray = np.array([item.first_row for item in self._shards], np.int64)

    @property
    def num_frames(self) -> int:
        """F."""
        return len(self.labels)

    @property
    def num_episodes(self) -> int:
        """E."""
        return len(self.starts) - 1

    @property
    def content_hash(self) -> str:
        """Hash of all episodes, sealed or not; independent of their order and of the shards."""
        return layout.content_hash(self.episode_column("digest"))

    def _open(self, path: Path) -> pa.Table | None:
        """Open one shard and return its index, cut to the rows that are really there."""
        schema_file = path / layout.SCHEMA
        if not schema_file.exists():
            return None  # claimed by a writer that has written nothing yet
        try:
            schema = layout.ShardSchema.from_dict(json.loads(schema_file.read_text()))
        except (OSError, ValueError, KeyError, TypeError, DataError) as error:
            self.faults.append(Fault(path=str(schema_file), reason=f"unreadable: {error}"))
            return None
        there = {
            name: size for name, size in schema.cameras.items() if not self._chosen or name in self.cameras
        }
        if there != self.cameras:
            reason = f"has the cameras {dict(schema.cameras)}, the store has {self.cameras}"
            self.faults.append(Fault(path=str(path), reason=reason))
            return None
        table, reason_or_none = layout.load_index(path, schema)
        if reason_or_none:
            self.faults.append(Fault(path=str(path), reason=reason_or_none))
        table = self._cut(path, schema, table)
        frames, episodes = table.num_rows, _count_episodes(table)
        self._shards.append(
            _Shard(
                path=path,
                schema=schema,
                first_row=self._end_row,
                first_episode=self._end_episode,
                cameras={
                    name: _map(path / schema.camera_file(name), np.uint8, (frames, *shape))
                    for name, shape in self.cameras.items()
                },
                vectors={
                    name: _map(
                        path / schema.vector_file(name),
                        np.float32,
                        (episodes if name == "initial_state" else frames, size),
                    )
                    for name, size in schema.vectors.items()
                },
            )
        )
        self._end_row += frames
        self._end_episode += episodes
        return table

    def _cut(self, path: Path, schema: layout.ShardSchema, table: pa.Table) -> pa.Table:
        """Set aside the episodes at the end of a shard whose bytes are missing (a truncated file)."""
        starts = np.flatnonzero(np.asarray(table.column("step")) == 0)
        ends = np.append(starts[1:], table.num_rows)
        keep = len(starts)
        files = [(schema.camera_file(n), int(np.prod(s)), ends) for n, s in schema.cameras.items()]
        for name, size in schema.vectors.items():
            rows = np.arange(1, len(starts) + 1) if name == "initial_state" else ends
            files.append((schema.vector_file(name), size * 4, rows))
        for file, row_bytes, rows in files:
            there = (path / file).stat().st_size if (path / file).exists() else 0
            whole = int(np.searchsorted(rows, there // row_bytes, side="right"))
            if whole < len(starts):
                reason = (
                    f"is cut off: {there} bytes of {int(rows[-1]) * row_bytes}; "
                    f"{len(starts) - whole} of {len(starts)} episodes set aside"
                )
                self.faults.append(Fault(path=str(path / file), reason=reason))
                keep = min(keep, whole)
        return table.slice(0, int(ends[keep - 1]) if keep else 0)

    def _column(self, name: str, dtype: Any) -> NDArray[Any]:
        if self._table is None:
            return np.zeros(0, dtype)
        values: NDArray[Any] = self._table.column(name).to_numpy()
        return values.astype(dtype, copy=False)

    def at_rest(self) -> BoolArray | None:
        """Whether the robot stood still in each frame, bool [F]; None if an episode does not tell."""
        if self._table is None or "at_rest" not in self._table.column_names:
            return None
        column = self._table.column("at_rest")
        return None if column.null_count else column.to_numpy().astype(np.bool_)

    def episode_column(self, name: str) -> list[Any]:
        """One value per episode: `success`, `complete`, `seed`, `split`, `source` or `digest`."""
        if self._table is None:
            return []
        values: list[Any] = self._table.column(name).take(pa.array(self.starts[:-1])).to_pylist()
        return values

    def frames(self, camera: str, rows: ArrayLike, out: UInt8Array | None = None) -> UInt8Array:
        """Frames of one camera at `rows` (int [N], any order) -> uint8 [N, H, W, C]."""
        if camera not in self.cameras:
            raise DataError(
                f"{display_path(self.path)} has no camera {camera!r}; it has {list(self.cameras)}"
            )
        wanted = np.asarray(rows, np.int64)
        if wanted.size and not (int(wanted.min()) >= 0 and int(wanted.max()) < self.num_frames):
            raise DataError(f"frame rows must lie in 0..{self.num_frames - 1}")
        result = np.empty((len(wanted), *self.cameras[camera]), np.uint8) if out is None else out
        owner = np.searchsorted(self._first_rows, wanted, side="right") - 1
        for number in np.unique(owner):
            item = self._shards[number]
            mine = owner == number
            if mine.all():
                np.take(item.cameras[camera], wanted - item.first_row, axis=0, out=result, mode="clip")
            else:
                result[mine] = item.cameras[camera][wanted[mine] - item.first_row]
        return result

    def batch(self, rows: ArrayLike) -> FrameBatch:
        """All cameras and the labels at `rows` (int [N])."""
        wanted = np.asarray(rows, np.int64)
        labels = RewardLabels(
            labels=self.labels[wanted], episode=self.episode[wanted], step=self.step[wanted]
        )
        return FrameBatch(frames={name: self.frames(name, wanted) for name in self.cameras}, labels=labels)

    def read_episode(self, number: int) -> Episode:
        """Episode `number`; its frames are views of the map, not copies."""
        if not 0 <= number < self.num_episodes or self._table is None:
            raise DataError(f"{display_path(self.path)} has {self.num_episodes} episodes, no number {number}")
        start, end = int(self.starts[number]), int(self.starts[number + 1])
        item = self._shards[int(np.searchsorted(self._first_rows, start, side="right")) - 1]
        local = slice(start - item.first_row, end - item.first_row)
        vectors: dict[str, Any] = {name: array[local] for name, array in item.vectors.items()}
        if "initial_state" in vectors:
            vectors["initial_state"] = item.vectors["initial_state"][number - item.first_episode]
        part = self._table.slice(start, end - start)
        scalars: dict[str, Any] = {
            name: part.column(name).to_numpy().astype(layout.SCALARS[name], copy=False)
            for name in item.schema.scalars
        }
        values = {name: part.column(name)[0].as_py() for name in ("seed", "split", "source")}
        return Episode(
            frames={name: images[local] for name, images in item.cameras.items()},
            labels=self.labels[start:end],
            success=bool(self.success[number]),
            complete=bool(self.complete[number]),
            **vectors,
            **scalars,
            **values,
        )

    def __iter__(self) -> Iterator[Episode]:
        return (self.read_episode(number) for number in range(self.num_episodes))

    def __len__(self) -> int:
        return self.num_episodes


def _count_episodes(table: pa.Table) -> int:
    return int(np.count_nonzero(np.asarray(table.column("step")) == 0))
