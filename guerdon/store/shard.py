"""One shard of the native store: which files it has, its journal while it grows, its index once sealed.

A shard is a directory with raw, append-only files, one per camera and per vector field, and either

- `journal.log` while a writer appends: one line per finished episode, written after its frames are synced,
  so that a line is the proof that its frames are on disk; or
- `index.parquet` once sealed: one row per frame, made from the journal, which is then removed.

Row `r` of the index is frame `r` of every camera file. Bytes behind the last row belong to an episode that
was never finished and are ignored.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from numpy.typing import NDArray

from guerdon.errors import DataError
from guerdon.types import Episode, FloatArray

JOURNAL = "journal.log"
INDEX = "index.parquet"
SCHEMA = "shard.json"
LOCK = "writer.lock"

VECTORS = ("actions", "intended", "states", "initial_state")
"""Vector fields of an episode, each a raw float32 file; `initial_state` has one row per episode."""
SCALARS: Mapping[str, Any] = {
    "env_rewards": np.float32,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "is_grasped": np.bool_,
    "at_rest": np.bool_,
}
"""Fields with one number per step; they live in the index."""


@dataclass(frozen=True, kw_only=True)
class ShardSchema:
    """What every episode of a shard has. A shard never mixes schemas."""

    cameras: Mapping[str, tuple[int, int, int]]
    """camera name -> (H, W, C)."""
    vectors: Mapping[str, int]
    """vector field -> its size."""
    scalars: tuple[str, ...]

    @classmethod
    def of(cls, episode: Episode) -> ShardSchema:
        """The schema that `episode` needs."""
        present = {name: getattr(episode, name) for name in VECTORS}
        return cls(
            cameras=dict(sorted(episode.camera_shapes.items())),
            vectors={name: int(value.shape[-1]) for name, value in present.items() if value is not None},
            scalars=tuple(name for name in SCALARS if getattr(episode, name) is not None),
        )

    def camera_file(self, camera: str) -> str:
        """File of a camera; numbered, since a camera's name need not be a good file name."""
        return f"frames-{list(self.cameras).index(camera):02d}.u8"

    def vector_file(self, name: str) -> str:
        """File of a vector field."""
        return f"{name}.f32"

    def to_dict(self) -> dict[str, Any]:
        """For `shard.json`."""
        return {
            "version": 1,
            "cameras": {name: list(shape) for name, shape in self.cameras.items()},
            "vectors": dict(self.vectors),
            "scalars": list(self.scalars),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShardSchema:
        """Read back `to_dict`; raises on anything else."""
        if data.get("version") != 1:
            raise DataError(
                f"shard version {data.get('version')!r} is not known to this Guerdon (it knows 1)"
            )
        cameras = {str(name): (int(s[0]), int(s[1]), int(s[2])) for name, s in data["cameras"].items()}
        return cls(
            cameras=cameras,
            vectors={str(name): int(size) for name, size in data["vectors"].items() if name in VECTORS},
            scalars=tuple(name for name in data["scalars"] if name in SCALARS),
        )


@dataclass(frozen=True, kw_only=True)
class EpisodeRecord:
    """What the journal knows of one finished episode."""

    num_frames: int
    success: bool
    complete: bool
    seed: int | None
    source: str
    split: str
    digest: bytes
    """16 bytes; a hash of all that the episode holds."""
    labels: FloatArray
    """float32 [T]."""
    scalars: Mapping[str, NDArray[Any]]
    """field -> [T]."""

    @classmethod
    def of(cls, episode: Episode, digest: bytes) -> EpisodeRecord:
        """The record of `episode`, whose hash is `digest`."""
        scalars = {name: getattr(episode, name) for name in SCALARS if getattr(episode, name) is not None}
        return cls(
            num_frames=episode.num_frames,
            success=bool(episode.success),
            complete=episode.complete,
            seed=episode.seed,
            source=episode.source,
            split=episode.split,
            digest=digest,
            labels=episode.labels,
            scalars=scalars,
        )

    def to_line(self) -> bytes:
        """One journal line: a checksum, a blank, JSON, a newline."""
        arrays = {"labels": self.labels, **self.scalars}
        body = {
            "num_frames": self.num_frames,
            "success": self.success,
            "complete": self.complete,
            "seed": self.seed,
            "source": self.source,
            "split": self.split,
            "digest": self.digest.hex(),
            "arrays": {name: base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()},
        }
        text = json.dumps(body).encode()
        return b"%08x %s\n" % (zlib.crc32(text), text)

    @classmethod
    def from_line(cls, line: bytes) -> EpisodeRecord:
        """Read back `to_line`; raises ValueError on a torn or altered line."""
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or int(checksum, 16) != zlib.crc32(text):
            raise ValueError("checksum does not fit")
        body = json.loads(text)
        arrays = {
            name: np.frombuffer(base64.b64decode(data), SCALARS.get(name, np.float32))
            for name, data in body.pop("arrays").items()
        }
        labels: FloatArray = arrays.pop("labels").astype(np.float32, copy=False)
        body["digest"] = bytes.fromhex(body["digest"])
        return cls(**body, labels=labels, scalars=arrays)


def episode_digest(episode: Episode) -> bytes:
    """Hash of an episode's content, the same wherever the episode is stored."""
    return episode_digests([episode])[0]


def episode_digests(episodes: Sequence[Episode]) -> list[bytes]:
    """The hash of each episode's content.

    XXH3 finds copies and damage, which is what the hash is for, and takes the writer thread a twelfth of the
    time of BLAKE2b, which while collecting was the largest cost of all. It is no proof against forgery.
    """
    digests = [_digest_of_numbers(episode) for episode in episodes]
    for digest, episode in zip(digests, episodes, strict=True):  # nothing else in this loop: it lets go of
        for _, images in sorted(episode.frames.items()):  # the interpreter lock, and should not hold it long
            digest.update(np.ascontiguousarray(images).data)
    return [digest.digest() for digest in digests]


def _digest_of_numbers(episode: Episode) -> Any:
    """The hash of everything but the frames, ready to go on with those."""
    named = {name: getattr(episode, name) for name in ("labels", *VECTORS, *SCALARS)}
    arrays = {name: array for name, array in named.items() if array is not None}
    shapes = [(name, array.shape) for name, array in (*arrays.items(), *sorted(episode.frames.items()))]
    facts = (bool(episode.success), bool(episode.complete), shapes)
    return xxhash.xxh3_128(b"".join([repr(facts).encode(), *(array.tobytes() for array in arrays.values())]))


def content_hash(digests: list[bytes]) -> str:
    """Hash of a data set: that of its episodes' hashes, whatever their order."""
    return str(xxhash.xxh3_128_hexdigest(b"".join(sorted(digests))))


def read_journal(path: Path) -> tuple[list[EpisodeRecord], str | None]:
    """All records up to the first line that does not check, and what is wrong behind them, if anything.

    A torn last line is what a killed writer leaves and is no fault.
    """
    records: list[EpisodeRecord] = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            records.append(EpisodeRecord.from_line(line))
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                return records, None
            return (
                records,
                f"line {number} of {len(lines)} is damaged ({error}); the episodes after it are lost",
            )
    return records, None


def index_table(records: list[EpisodeRecord], schema: ShardSchema) -> pa.Table:
    """The parquet index of a shard: one row per frame, episodes in order."""
    lengths = np.array([record.num_frames for record in records], np.int64)
    episode = np.repeat(np.arange(len(records), dtype=np.int32), lengths)
    columns: dict[str, Any] = {
        "episode": episode,
        "step": _steps(lengths),
        "label": _joined([record.labels for record in records], np.float32),
    }
    per_episode: dict[str, tuple[list[Any], pa.DataType]] = {
        "success": ([record.success for record in records], pa.bool_()),
        "complete": ([record.complete for record in records], pa.bool_()),
        "seed": ([record.seed for record in records], pa.int64()),
        "split": ([record.split for record in records], pa.string()),
        "source": ([record.source for record in records], pa.string()),
        "digest": ([record.digest for record in records], pa.binary(16)),
    }
    for name, (values, kind) in per_episode.items():
        columns[name] = pa.array(values, kind).take(pa.array(episode))
    for name in schema.scalars:
        columns[name] = _joined([record.scalars[name] for record in records], SCALARS[name])
    return pa.table(columns)


def write_index(table: pa.Table, file: BinaryIO) -> None:
    """Write the index small: run lengths and zstd make the constant columns almost free."""
    plain = [name for name in ("env_rewards",) if name in table.column_names]
    dictionary = [name for name in table.column_names if name not in plain]
    pq.write_table(table, file, compression="zstd", compression_level=9, use_dictionary=dictionary)


def load_index(shard: Path, schema: ShardSchema) -> tuple[pa.Table, str | None]:
    """The index of a shard, sealed or not, and what is wrong with it, if anything."""
    try:  # it outlives a seal that was cut short, and then it is the truth
        records, reason = read_journal(shard / JOURNAL)
        return index_table(records, schema), reason
    except FileNotFoundError:
        pass  # sealed, maybe at this moment: the index was there before the journal went
    if (shard / INDEX).exists():
        try:
            return pq.read_table(shard / INDEX), None
        except (pa.ArrowException, OSError) as error:
            return index_table([], schema), f"the index is damaged: {str(error).splitlines()[0]}"
    return index_table([], schema), None


def _steps(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """0, 1, ... within each episode."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return (np.arange(total) - np.repeat(ends - lengths, lengths)).astype(np.int32)


def _joined(parts: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
