"""Read the native store: memory-mapped frames, one parquet index per shard, a manifest with a hash.

```
STORE/
  manifest.json               format, version, cameras, counts, content hash (of what is sealed)
  shards/s000000/             see guerdon.data.store.shard
    shard.json  index.parquet  frames-00.u8  actions.f32 ...
```
Reading changes nothing on disk. A shard that is still being written, or whose writer was killed, is read
from its journal: every finished episode is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from guerdon.core.errors import DataError
from guerdon.core.types import (
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
from guerdon.data.files.bounds import one_line, read_json
from guerdon.data.store import shard as layout
from guerdon.data.store.shard import EpisodeRecord, camera_sizes
from guerdon.data.store.shard_index import joined, load_index

FORMAT = "guerdon-store"
MANIFEST = "manifest.json"
SHARDS = "shards"


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the store at `path`, checked; raises if there is none or it is not ours."""
    place = display_path(path / MANIFEST)
    try:
        manifest = read_json(path / MANIFEST)
    except FileNotFoundError:
        raise DataError(f"{display_path(path)} is not a Guerdon store: it has no {MANIFEST}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{place} does not belong to a Guerdon store")
    if manifest.get("version") != 1:
        raise DataError(
            f"{display_path(path)} has store version {manifest.get('version')!r}; this Guerdon knows 1"
        )
    try:
        manifest["cameras"] = camera_sizes(manifest.get("cameras"))
    except DataError as error:
        raise DataError(f"{place} cannot be used: {error}") from error
    counts = [manifest.get("num_episodes", 0), manifest.get("num_frames", 0)]
    shards = manifest.get("shards", {})
    if not isinstance(shards, dict) or not all(isinstance(each, dict) for each in shards.values()):
        raise DataError(f"{place} cannot be used: its list of shards is damaged")
    counts += [each.get("num_episodes") for each in shards.values()]
    if not all(type(each) is int and each >= 0 for each in counts):
        raise DataError(f"{place} cannot be used: its counts are damaged")
    return manifest


def shard_dirs(path: Path) -> list[Path]:
    """All shards of a store, in the order of their numbers."""
    root = path / SHARDS
    try:
        return sorted(item for item in root.iterdir() if item.is_dir()) if root.is_dir() else []
    except (OSError, ValueError) as error:
        raise DataError(f"{display_path(root)} cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """An opened shard."""

    path: Path
    records: list[EpisodeRecord]
    """Of the episodes whose bytes are all there."""
    facts: dict[str, Any]
    """What the manifest has to say of it: `_facts_of_shard` of all episodes in its index."""
    cameras: dict[str, UInt8Array]
    vectors: dict[str, FloatArray]


def _facts_of_shard(records: Sequence[EpisodeRecord]) -> dict[str, Any]:
    """What a manifest remembers of a shard, so that its loss is noticed."""
    return {
        "num_episodes": len(records),
        "num_frames": sum(each.num_frames for each in records),
        "content_hash": layout.content_hash([each.digest for each in records]),
    }


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
        places = [self.path, *map(Path, more)]
        # Before the manifest, which knows the cameras before there are shards.
        shards = [shard_dirs(place) for place in places]
        manifests = [read_manifest(place) for place in places]
        self.manifest = manifests[0]
        self._chosen = cameras is not None
        self.faults: list[Fault] = []
        self.cameras: dict[str, tuple[int, int, int]] = {
            name: size
            for name, size in self.manifest["cameras"].items()
            if cameras is None or name in cameras
        }
        self._shards: list[_Shard] = []
        for place, items, manifest in zip(places, shards, manifests, strict=True):
            opened = {item.name: shard for item in items if (shard := self._open(item)) is not None}
            self._check_manifest(place, manifest, items, opened)
            self._shards += opened.values()
        self._records = [record for item in self._shards for record in item.records]
        lengths: IntArray = np.array([each.num_frames for each in self._records], np.int64)
        self.labels: FloatArray = joined([each.labels for each in self._records], np.float32)
        self.starts: IntArray = np.append(0, np.cumsum(lengths)).astype(np.int64)
        self.episode: IntArray = np.repeat(np.arange(len(lengths)), lengths)
        self.step: IntArray = np.arange(len(self.labels)) - np.repeat(self.starts[:-1], lengths)
        self.success: BoolArray = np.array([each.success for each in self._records], np.bool_)
        self.complete: BoolArray = np.array([each.complete for each in self._records], np.bool_)
        self._owner: IntArray = np.repeat(
            np.arange(len(self._shards)), [len(item.records) for item in self._shards]
        )
        self._first_frame: IntArray = np.array([each.first_frame for each in self._records], np.int64)

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

    def shard_facts(self) -> dict[str, dict[str, Any]]:
        """What the manifest of a store has to remember of each of its shards."""
        return {item.path.name: item.facts for item in self._shards}

    def _open(self, path: Path) -> _Shard | None:
        """Open one shard, with the episodes that are really there."""
        try:
            schema = layout.ShardSchema.from_dict(read_json(path / layout.SCHEMA))
        except FileNotFoundError:
            if any(item.suffix in (".u8", ".f32", ".parquet") for item in path.iterdir()):
                self._set_aside(path, f"{layout.SCHEMA} is lost: nothing tells what the other files hold")
            return None  # otherwise it is claimed by a writer that has written nothing yet
        except DataError as error:
            self._set_aside(path / layout.SCHEMA, f"unreadable: {error}")
            return None
        there = {
            name: size for name, size in schema.cameras.items() if not self._chosen or name in self.cameras
        }
        if there != self.cameras:
            self._set_aside(path, f"has the cameras {dict(schema.cameras)}, the store has {self.cameras}")
            return None
        try:
            records, problems = load_index(path, schema)
            for problem in problems:
                self._set_aside(path, problem)
            kept = self._without_lost_bytes(path, schema, records)
            cameras, vectors = (
                {
                    each.field: each.map(path, each.end(kept[-1]) if kept else 0)
                    for each in schema.files
                    if each.is_camera == is_camera and (not is_camera or each.field in self.cameras)
                }
                for is_camera in (True, False)
            )
            facts = _facts_of_shard(records)
            return _Shard(path=path, records=kept, facts=facts, cameras=cameras, vectors=vectors)
        except DataError as error:
            self._set_aside(path, str(error))
        except (OSError, ValueError) as error:  # a file that became shorter a moment ago, or cannot be opened
            self._set_aside(path, f"cannot be read: {error}")
        return None

    def _set_aside(self, path: Path, reason: str) -> None:
        self.faults.append(Fault(path=str(path), reason=one_line(reason, 300)))

    def _check_manifest(
        self, store: Path, manifest: Mapping[str, Any], listed: Sequence[Path], shards: Mapping[str, _Shard]
    ) -> None:
        """Compare what is there with what the manifest knows; there may be more, but not less."""
        for name, known in manifest.get("shards", {}).items():
            path, item = store / SHARDS / name, shards.get(name)
            there = {} if item is None else item.facts
            named = any(fault.path.startswith(str(path)) for fault in self.faults)
            new = path not in listed and path.is_dir()  # made after the shards were listed
            if item is None and (named or new):
                continue
            if there.get("num_episodes", 0) < known["num_episodes"]:
                lost = f"the manifest has {known['num_episodes']} episodes of it"
                what = "is lost" if item is None else f"has {there['num_episodes']} episodes"
                self._set_aside(path, f"{what}: {lost}")
            elif there["num_episodes"] == known["num_episodes"] and there != known:
                self._set_aside(path, "its index has other episodes than the manifest knows")
        found = sum(int(item.facts["num_episodes"]) for item in shards.values())
        if not manifest.get("shards") and found < manifest.get("num_episodes", 0):
            reason = (
                f"has {manifest['num_episodes']} episodes, {found} are there: a shard or its index is lost"
            )
            self._set_aside(store / MANIFEST, reason)

    def _without_lost_bytes(
        self, path: Path, schema: layout.ShardSchema, records: list[EpisodeRecord]
    ) -> list[EpisodeRecord]:
        """Set aside the episodes of a shard whose bytes are missing (a truncated file)."""
        kept = records
        for file in schema.files:
            there = (path / file.name).stat().st_size if (path / file.name).exists() else 0
            if records and file.end(records[-1]) * file.row_bytes > there:  # they lie in order
                lost = sum(file.end(each) * file.row_bytes > there for each in records)
                reason = (
                    f"is truncated: {there} bytes of {file.end(records[-1]) * file.row_bytes}; "
                    f"{lost} of {len(records)} episodes set aside"
                )
                self._set_aside(path / file.name, reason)
                kept = [each for each in kept if file.end(each) * file.row_bytes <= there]
        return kept

    def at_rest(self) -> BoolArray | None:
        """Whether the robot stood still in each frame, bool [F]; None if an episode does not tell."""
        if not self._records or any("at_rest" not in each.scalars for each in self._records):
            return None
        return joined([each.scalars["at_rest"] for each in self._records], np.bool_)

    def episode_column(self, name: str) -> list[Any]:
        """One value per episode: `success`, `complete`, `seed`, `split`, `source` or `digest`."""
        if name not in ("success", "complete", "seed", "split", "source", "digest"):
            raise KeyError(name)
        return [getattr(each, name) for each in self._records]

    def frames(self, camera: str, rows: ArrayLike) -> UInt8Array:
        """Frames of one camera at `rows` (int [N], any order) -> uint8 [N, H, W, C]."""
        if camera not in self.cameras:
            raise DataError(
                f"{display_path(self.path)} has no camera {camera!r}; it has {list(self.cameras)}"
            )
        wanted = np.asarray(rows, np.int64)
        if wanted.size and not (int(wanted.min()) >= 0 and int(wanted.max()) < self.num_frames):
            raise DataError(f"frame rows must lie in 0..{self.num_frames - 1}")
        result = np.empty((len(wanted), *self.cameras[camera]), np.uint8)
        number = self.episode[wanted]
        local, owner = self._first_frame[number] + self.step[wanted], self._owner[number]
        for shard in np.unique(owner):
            images = self._shards[shard].cameras[camera]
            mine = owner == shard
            if mine.all():
                np.take(images, local, axis=0, out=result, mode="clip")
            else:
                result[mine] = images[local[mine]]
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
        if not 0 <= number < self.num_episodes:
            raise DataError(f"{display_path(self.path)} has {self.num_episodes} episodes, no number {number}")
        record, item = self._records[number], self._shards[self._owner[number]]
        first = int(self._first_frame[number])
        rows = slice(first, first + record.num_frames)
        vectors: dict[str, Any] = {name: array[rows] for name, array in item.vectors.items()}
        if "initial_state" in vectors:
            vectors["initial_state"] = item.vectors["initial_state"][record.number]
        scalars: dict[str, Any] = dict(record.scalars)
        facts: dict[str, Any] = {
            name: getattr(record, name) for name in ("success", "complete", "seed", "split", "source")
        }
        return Episode(
            frames={name: images[rows] for name, images in item.cameras.items()},
            labels=self.labels[self.starts[number] : self.starts[number + 1]],
            **vectors,
            **scalars,
            **facts,
        )

    def __iter__(self) -> Iterator[Episode]:
        return (self.read_episode(number) for number in range(self.num_episodes))

    def __len__(self) -> int:
        return self.num_episodes
