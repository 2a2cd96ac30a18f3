"""Native stores, and ManiSkill's HDF5 files.

A target puts the input in place of one file of a folder that is whole otherwise, and reads the folder.
"""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import zlib
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fuzz.engine import Target
from fuzz.episode import STEPS, make_episode
from fuzz.mutations import NUMBERS, mutate_bytes
from fuzz.structures import change_json, mutate_json, or_bytes
from guerdon.core.types import Episode, Fault
from guerdon.data.formats import h5_process
from guerdon.data.formats.maniskill_h5 import ManiSkillH5
from guerdon.data.store import EpisodeStore, StoreWriter

_SHARD = "shards/s000000"


# Native stores


@or_bytes
def _mutate_journal(data: bytes, rng: random.Random) -> bytes:
    """Change records and give them a checksum that fits, or change the bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    lines = data.splitlines(keepends=True)
    place = rng.randrange(len(lines))
    record = json.loads(lines[place][9:])
    if rng.random() < 0.3:
        name = rng.choice(list(record["arrays"]))
        raw = mutate_bytes(base64.b64decode(record["arrays"][name]), rng)
        record["arrays"][name] = base64.b64encode(raw).decode()
    else:
        record = change_json(record, rng)
    text = json.dumps(record).encode()
    lines[place] = b"%08x %s\n" % (zlib.crc32(text), text)
    return b"".join(lines)


def _store(scratch: Path, name: str, sealed: bool = True) -> list[bytes]:
    path = scratch / "store"
    writer = StoreWriter(path)
    writer.add_many([make_episode(seed=seed) for seed in range(3)])
    if sealed:
        writer.close()
    return [(path / name).read_bytes()]


def _read_store(data: bytes, scratch: Path, name: str) -> int:
    (scratch / "store" / name).write_bytes(data)
    store = EpisodeStore(scratch / "store")
    size = 0
    for episode in store:
        size += sum(int(images.sum()) * 0 + images.nbytes for images in episode.frames.values())
    store.batch(np.arange(store.num_frames))
    for column in ("seed", "split", "source", "digest", "success", "complete"):
        store.episode_column(column)
    store.at_rest()
    json.dumps([fault.reason for fault in store.faults]).encode()
    return size


@lru_cache(maxsize=64)
def _table(data: bytes) -> Any:
    return pq.read_table(io.BytesIO(data))


@or_bytes
def _mutate_index(data: bytes, rng: random.Random) -> bytes:
    """Change a column and write the table anew, or change the bytes."""
    if rng.random() < 0.5:
        return mutate_bytes(data, rng)
    table = _table(data)
    name = rng.choice([*table.column_names, "frame"])
    count = table.num_rows
    column: Any = rng.choice(
        (
            pa.array([rng.choice((*NUMBERS[:-1], -1, None)) for _ in range(count)], pa.int64()),
            pa.array([rng.choice((0, 1, 2, -1)) for _ in range(count)], pa.int32()),
            pa.array([rng.choice((0.0, 1.0, 7.0, float("nan"), None)) for _ in range(count)], pa.float64()),
            pa.array([rng.choice(("", "x" * 5000, "train", None)) for _ in range(count)], pa.string()),
            pa.array([rng.randbytes(rng.choice((0, 16, 16, 17))) for _ in range(count)], pa.binary()),
            pa.array([[1]] * count),
            pa.nulls(count),
        )
    )
    if name in table.column_names:
        place = table.column_names.index(name)
        table = table.remove_column(place) if rng.random() < 0.1 else table.set_column(place, name, column)
    else:
        table = table.append_column(name, column)
    if rng.random() < 0.2:
        table = (
            pa.concat_tables([table] * rng.choice((1, 2, 40))) if rng.random() < 0.9 else table.slice(0, 0)
        )
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd")
    return file.getvalue()


def _sizes(scratch: Path) -> list[bytes]:
    _store(scratch, "manifest.json")
    files = sorted((scratch / "store" / _SHARD).glob("*.[uf]*"))
    return [b"".join(struct.pack("<I", file.stat().st_size) for file in files)]


def _read_sizes(data: bytes, scratch: Path) -> int:
    """The input has the sizes to which the files of a shard are cut."""
    files = sorted((scratch / "store" / _SHARD).glob("*.[uf]*"))
    for number, file in enumerate(files):
        (size,) = struct.unpack("<I", data[number * 4 :][:4].ljust(4, b"\0"))
        with file.open("r+b") as opened:
            opened.truncate(size % 2000)
    return _read_store((scratch / "store" / "manifest.json").read_bytes(), scratch, "manifest.json")


# HDF5


def _h5(scratch: Path) -> list[bytes]:
    rng = np.random.default_rng(0)
    made = []
    for libver in ("earliest", "latest"):
        path = scratch / f"{libver}.h5"
        with h5py.File(path, "w", libver=libver) as file:
            for number in range(2):
                group = file.create_group(f"traj_{number}")
                group["actions"] = rng.random((STEPS, 4), np.float32)
                group["success"] = group["truncated"] = np.array([False, True])
                frames = rng.integers(0, 255, (STEPS + 1, 4, 4, 3), np.uint8)
                group.create_dataset("obs/sensor_data/base_camera/rgb", data=frames, compression="gzip")
                group["obs/agent/qpos"] = rng.random((STEPS + 1, 3), np.float32)
        made.append(path.read_bytes())
    h5_process.IDLE_SECONDS = 3600.0
    _read_h5(made[0], scratch)  # starts the process that reads, now and not while an input is run
    return made


def _read_h5(data: bytes, scratch: Path) -> int:
    (scratch / "input.h5").write_bytes(data)
    return _read_all(scratch / "input.h5")


def _h5_json(scratch: Path) -> list[bytes]:
    (scratch / "input.h5").write_bytes(_h5(scratch)[0])
    about = {"episode_id": 0, "episode_seed": 3, "control_mode": "pd_joint_pos", "success": True}
    return [json.dumps({"env_info": {}, "episodes": [about, {**about, "episode_id": 1}]}).encode()]


def _read_h5_json(data: bytes, scratch: Path) -> int:
    (scratch / "input.json").write_bytes(data)
    return _read_all(scratch / "input.h5")


def _read_all(path: Path) -> int:
    items = list(ManiSkillH5().read(path))
    assert items, "neither an episode nor a fault"
    for item in items:
        if isinstance(item, Fault):
            item.reason.encode()
    return sum(
        images.nbytes for item in items if isinstance(item, Episode) for images in item.frames.values()
    )


def _of_store(name: str, mutate: Callable[[bytes, random.Random], bytes], *, sealed: bool = True) -> Target:
    return Target(
        seeds=partial(_store, name=name, sealed=sealed), run=partial(_read_store, name=name), mutate=mutate
    )


TARGETS: dict[str, Target] = {
    "store-manifest": _of_store("manifest.json", mutate_json),
    "store-schema": _of_store(f"{_SHARD}/shard.json", mutate_json),
    "store-journal": _of_store(f"{_SHARD}/journal.log", _mutate_journal, sealed=False),
    "store-index": _of_store(f"{_SHARD}/index.parquet", _mutate_index),
    "store-sizes": Target(_sizes, _read_sizes),
    "maniskill-h5": Target(_h5, _read_h5),
    "maniskill-h5-json": Target(_h5_json, _read_h5_json, mutate_json),
}
