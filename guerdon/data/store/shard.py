"""One shard of the native store: which files it has, and what its journal says of each episode.

A shard is a directory with raw, append-only files, one per camera and per vector field, and either

- `journal.log` while a writer appends: one line per finished episode, written after its frames are synced,
  so that a line is the proof that its frames are on disk; or
- `index.parquet` once sealed: one row per frame, made from the journal, which is then removed.

Journal and index say where in the files an episode lies (`shard_index.py` reads both). Bytes that
belong to none were written for an episode that was never finished, or that was set aside, and are ignored.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import SPLITS, Episode, FloatArray

JOURNAL = "journal.log"
INDEX = "index.parquet"
SCHEMA = "shard.json"
LOCK = "writer.lock"

VECTORS = ("actions", "intended", "states", "initial_state")
"""Vector fields of an episode, each a raw float32 file."""
SCALARS: Mapping[str, Any] = {
    "env_rewards": np.float32,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "is_grasped": np.bool_,
    "at_rest": np.bool_,
}
"""Fields with one number per step; they live in the index."""
DIGEST_BYTES = 16
MAX_SIZE = 1 << 20
"""Of an image's sides, of a vector and of an episode's frames."""
MAX_TEXT = 4096
"""Characters of a source or of a camera's name."""


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """A raw file with the rows of one camera or vector field."""

    field: str
    name: str
    dtype: Any
    shape: tuple[int, ...]
    """Of a row."""

    @property
    def is_camera(self) -> bool:
        """Whether it has images, and not vectors."""
        return self.dtype is np.uint8

    @property
    def per_episode(self) -> bool:
        """Whether there is one row for each episode, and not one for each frame."""
        return self.field == "initial_state" and not self.is_camera

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; a vector may be empty."""
        return math.prod(self.shape) * int(np.dtype(self.dtype).itemsize)

    def end(self, record: EpisodeRecord) -> int:
        """The first row behind an episode, whose place is known."""
        assert record.number is not None and record.first_frame is not None
        return record.number + 1 if self.per_episode else record.first_frame + record.num_frames

    def map(self, shard: Path, num_rows: int) -> NDArray[Any]:
        """Map rows read-only; bytes behind them are left alone."""
        shape = (num_rows, *self.shape)
        if 0 in shape:
            return np.zeros(shape, self.dtype)
        return np.asarray(np.memmap(shard / self.name, self.dtype, mode="r", shape=shape))


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

    @property
    def files(self) -> list[ShardFile]:
        """One for each camera, numbered, since a camera's name need not be a good file name; then vectors."""
        cameras = [
            ShardFile(field=camera, name=f"frames-{number:02d}.u8", dtype=np.uint8, shape=size)
            for number, (camera, size) in enumerate(self.cameras.items())
        ]
        return cameras + [
            ShardFile(field=name, name=f"{name}.f32", dtype=np.float32, shape=(size,))
            for name, size in self.vectors.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """For `shard.json`."""
        return {"version": 1, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Any) -> ShardSchema:
        """Read back `to_dict`; a `DataError` on anything else."""
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != 1:
            raise DataError(f"shard version {version!r} is not known to this Guerdon (it knows 1)")
        vectors, scalars = data.get("vectors"), data.get("scalars")
        if not isinstance(vectors, Mapping) or not all(map(_is_size, vectors.values())):
            raise DataError("the sizes of the vector fields are damaged")
        if not isinstance(scalars, list) or not all(isinstance(name, str) for name in scalars):
            raise DataError("the list of scalar fields is damaged")
        cameras = camera_sizes(data.get("cameras"))
        if not cameras:
            raise DataError("has no camera")
        return cls(
            cameras=cameras,
            vectors={name: int(size) for name, size in vectors.items() if name in VECTORS},
            scalars=tuple(name for name in SCALARS if name in scalars),
        )


def camera_sizes(value: Any) -> dict[str, tuple[int, int, int]]:
    """Camera name -> (H, W, C), as a manifest or a schema has them; a `DataError` on anything else."""
    if not isinstance(value, Mapping):
        raise DataError("the cameras are damaged")
    for name, size in value.items():
        if not isinstance(size, list | tuple) or len(size) != 3 or not all(map(_is_size, size)) or 0 in size:
            raise DataError(f"the size of the camera {name!r} is damaged; expected [H, W, C]")
    return {name: (size[0], size[1], size[2]) for name, size in value.items()}


def _is_size(value: Any) -> bool:
    """Whether it is an integer that no product of three makes overflow."""
    return type(value) is int and 0 <= value <= MAX_SIZE


def text_problem(text: Any) -> str | None:
    """Why a text cannot be kept, if it cannot: parquet holds UTF-8 alone."""
    if not isinstance(text, str):
        return f"is a {type(text).__name__}, not a text"
    if len(text) > MAX_TEXT:
        return f"has {len(text)} characters; at most {MAX_TEXT} are kept"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{text!a} cannot be written as UTF-8"
    return None


def check_storable(episode: Episode) -> None:
    """Raise a `DataError` if a shard could not be sealed with this episode in it."""
    problem = _facts_problem(episode.num_frames, episode.seed, episode.source)
    sizes = [*(size for shape in episode.camera_shapes.values() for size in shape)]
    sizes += [each.shape[-1] for name in VECTORS if (each := getattr(episode, name)) is not None]
    for name in episode.frames:
        if problem is None and (wrong := text_problem(name)):
            problem = f"the name of a camera {wrong}"
    if problem is None and not all(_is_size(int(size)) for size in sizes):
        problem = f"an image or vector is larger than {MAX_SIZE}"
    if problem:
        place = episode.source.encode("ascii", "backslashreplace").decode()[:200]
        raise DataError(f"the episode {place!r} cannot be stored: {problem}")


def _facts_problem(num_frames: Any, seed: Any, source: Any) -> str | None:
    """Why an episode of these facts cannot be kept, if it cannot."""
    if not _is_size(num_frames) or num_frames == 0:
        return f"it has {num_frames} frames; an episode has 1 to {MAX_SIZE}"
    if seed is not None and not (
        isinstance(seed, int | np.integer) and not isinstance(seed, bool) and -(2**63) <= seed < 2**63
    ):
        return f"its seed {str(seed)[:40]} is no integer of 64 bits"
    wrong = text_problem(source)
    return f"its source {wrong}" if wrong else None


class EpisodeRecord(NamedTuple):
    """What the journal knows of one finished episode; a tuple, since opening a store makes thousands."""

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
    first_frame: int | None = None
    """The row of its first frame in the shard's files; None (older versions): behind the last."""
    number: int | None = None
    """How many episodes were written to the shard before it."""

    @classmethod
    def of(
        cls, episode: Episode, digest: bytes, first_frame: int | None = None, number: int | None = None
    ) -> EpisodeRecord:
        """The record of `episode`, whose hash is `digest`, and its place in the shard."""
        scalars = {name: getattr(episode, name) for name in SCALARS if getattr(episode, name) is not None}
        return cls(
            num_frames=episode.num_frames,
            success=bool(episode.success),
            complete=bool(episode.complete),
            seed=None if episode.seed is None else int(episode.seed),
            source=episode.source,
            split=episode.split,
            digest=digest,
            labels=episode.labels,
            scalars=scalars,
            first_frame=first_frame,
            number=number,
        )

    def problem(self, schema: ShardSchema) -> str | None:
        """Why the episode cannot be kept in the index of a shard, if it cannot."""
        if problem := _facts_problem(self.num_frames, self.seed, self.source):
            return problem
        if self.split not in SPLITS:
            return f"its split is {str(self.split)[:40]!r}"
        if len(self.digest) != DIGEST_BYTES:
            return "its hash is damaged"
        flags: tuple[Any, ...] = (self.success, self.complete)
        if not all(type(each) is bool for each in flags):
            return "its flags are damaged"
        for name in ("labels", *schema.scalars):
            values = self.labels if name == "labels" else self.scalars.get(name)
            if values is None or len(values) != self.num_frames:
                return f"it has {0 if values is None else len(values)} {name} for {self.num_frames} frames"
        in_range = self.labels.min() >= 0.0 and self.labels.max() <= 1.0  # false for NaN, too
        return None if in_range else "its labels do not lie in [0, 1]"

    def to_line(self) -> bytes:
        """One journal line: a checksum, a blank, JSON, a newline."""
        arrays = {"labels": self.labels, **self.scalars}
        facts = ("num_frames", "success", "complete", "seed", "source", "split")
        body = {
            **{name: getattr(self, name) for name in facts},
            "digest": self.digest.hex(),
            "arrays": {name: base64.b64encode(array.tobytes()).decode() for name, array in arrays.items()},
            "first_frame": self.first_frame,
            "number": self.number,
        }
        text = json.dumps(body).encode()
        return b"%08x %s\n" % (zlib.crc32(text), text)

    @classmethod
    def from_line(cls, line: bytes) -> EpisodeRecord:
        """Read back `to_line`; raises ValueError on a torn or altered line.

        The values need not make sense: `problem` looks at them. Those that say where the episode lies do.
        """
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or int(checksum, 16) != zlib.crc32(text):
            raise ValueError("checksum does not fit")
        try:
            body = json.loads(text)
            packed = body.pop("arrays")
            arrays = {
                name: np.frombuffer(base64.b64decode(packed[name]), SCALARS.get(name, np.float32))
                for name in ("labels", *SCALARS)
                if name in packed
            }
            labels: FloatArray = arrays.pop("labels").astype(np.float32, copy=False)
            body["digest"] = bytes.fromhex(body["digest"])
            record = cls(**body, labels=labels, scalars=arrays)
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"it is no record of an episode: {error}") from error
        place = (record.first_frame, record.number)
        known = (record.num_frames,) if place == (None, None) else (record.num_frames, *place)
        if not all(type(each) is int and 0 <= each < 2**62 for each in known):
            raise ValueError("it does not tell where the episode lies")
        return record


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
