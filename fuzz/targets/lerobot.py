"""Data sets of LeRobot: one file of a small data set that is whole otherwise."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from fuzz.engine import Target
from fuzz.episode import make_episode
from fuzz.mutations import mutate_bytes
from fuzz.structures import change_json, mutate_json, or_bytes
from guerdon.core.types import Episode, Fault
from guerdon.data.formats import get_format
from guerdon.data.formats.lerobot.labels import read_outcomes

_INFO = "meta/info.json"
_META = "meta/episodes/chunk-000/file-000.parquet"
_DATA = "data/chunk-000/file-000.parquet"
_FOOTER = 8


def _seeds(name: str, scratch: Path) -> list[bytes]:
    """One file of a data set that Guerdon writes; the others lie beside the inputs."""
    root = scratch / "data"
    shutil.rmtree(root, ignore_errors=True)
    with get_format("lerobot").writer(root) as writer:
        writer.add_many([make_episode(), make_episode()])
    for path in (root / _META, root / _DATA):  # without statistics, which nobody reads
        table = pq.read_table(path)
        plain = table.select([column for column in table.column_names if not column.startswith("stats/")])
        pq.write_table(plain.replace_schema_metadata(), path, store_schema=False)
    data = (root / name).read_bytes()
    _read(name, data, scratch)
    return [data]


def _read(name: str, data: bytes, scratch: Path) -> int:
    """Read the data set with the input in the place of a file, and look at it without frames."""
    root = scratch / "data"
    (root / name).write_bytes(data)
    reader = get_format("lerobot")
    list(reader.facts(root))
    largest = 0
    for item in reader.read(root):
        if isinstance(item, Fault):
            item.reason.encode()
            continue
        assert isinstance(item, Episode)
        largest = max(largest, sum(images.nbytes for images in item.frames.values()))
    return largest


@or_bytes
def _mutate_parquet(data: bytes, rng: random.Random) -> bytes:
    """Mostly the footer, which tells what is where; at times the pages, and the footer stays."""
    size = int.from_bytes(data[-_FOOTER:-4], "little")
    start = max(4, len(data) - _FOOTER - size)
    if rng.random() < 0.6:
        footer = mutate_bytes(data[start:-_FOOTER], rng)
        return data[:start] + footer + len(footer).to_bytes(4, "little") + data[-4:]
    pages = bytearray(data[4:start])
    for _ in range(rng.randint(1, 4)):
        if pages:
            pages[rng.randrange(len(pages))] = rng.randrange(256)
    return data[:4] + bytes(pages) + data[start:]


def _outcomes(data: bytes, scratch: Path) -> None:
    for name in ("outcomes.json", "outcomes.csv"):
        (scratch / name).write_bytes(data)
    try:
        read_outcomes(scratch / "outcomes.csv")
    finally:
        read_outcomes(scratch / "outcomes.json")


@or_bytes
def _mutate_outcomes(data: bytes, rng: random.Random) -> bytes:
    return json.dumps(change_json(json.loads(data), rng)).encode()


def _target(name: str, mutate: Callable[[bytes, random.Random], bytes]) -> Target:
    return Target(partial(_seeds, name), partial(_read, name), mutate)


TARGETS = {
    "lerobot-info": _target(_INFO, mutate_json),
    "lerobot-episodes": _target(_META, _mutate_parquet),
    "lerobot-rows": _target(_DATA, _mutate_parquet),
    "lerobot-outcomes": Target(
        lambda scratch: [b'[{"episode_index": 0, "success": true}]', b'{"0": true, "3": false}'],
        _outcomes,
        _mutate_outcomes,
    ),
}
