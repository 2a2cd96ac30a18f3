"""The file of an int8 model (`int8.npz`): raw damage, and archives that are sound but for one member."""

from __future__ import annotations

import random
import zipfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from fuzz.engine import Target
from fuzz.structures import zip_members, zipped
from guerdon.models import BinaryRewardClassifier, RewardModel
from guerdon.rewards.image.accelerate import ModelScorer
from guerdon.rewards.image.int8 import coarse_scorer, make_int8
from guerdon.rewards.image.int8_file import FILE_NAME, load_int8, save_int8
from guerdon.rewards.image.quantize import Range

_THRESHOLD = 5.0  # far from all logits of random weights, so that int8 is accepted
_SIZE = 16
_TYPES = (b"<i8", b"<f8", b"|u1", b"<U4", b"<U99", b"|O", b">f8", b"<f4", b"|V8", b"<c16", b"<U999999999")
_SHAPES = (
    b"()",
    b"(0,)",
    b"(-1,)",
    b"(1000000000, 0)",
    b"(99999999999,)",
    b"(1, 2)",
    b"((((((",
    b"{}",
    b"(1.5,)",
)
_VALUES = (0, 1, -1, 2**31, 2**63 - 1, 0x7FF0000000000000, 0x7FF8000000000000, 0xFFF0000000000000)


@lru_cache(maxsize=1)
def _model() -> RewardModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BinaryRewardClassifier(width=2, image_size=(3, _SIZE, _SIZE)).eval()


def _seeds(folder: Path) -> list[bytes]:
    frames = np.random.default_rng(0).integers(0, 256, (16, _SIZE, _SIZE, 3), dtype=np.uint8)
    file = folder / FILE_NAME
    save_int8(file, make_int8(_model(), frames, frames, _THRESHOLD))
    return [file.read_bytes()]


def _run(data: bytes, folder: Path) -> None:
    file = folder / FILE_NAME
    file.write_bytes(data)
    int8 = load_int8(file, _model(), None)
    logits, _ = _scorer(tuple(int8.ranges.items())).score(torch.from_numpy(int8.probes))
    assert np.isfinite(logits).all()


@lru_cache(maxsize=8)
def _scorer(ranges: tuple[tuple[str, Range], ...]) -> ModelScorer:
    """Most inputs that are accepted have the ranges of the valid file; making a scorer takes long."""
    return coarse_scorer(_model(), dict(ranges))


def _mutate(data: bytes, rng: random.Random) -> bytes:
    """Change one member, or the archive around it; all checksums are right again afterwards."""
    members = dict(zip_members(data))
    if not members or rng.random() < 0.3:
        return _flipped(data, rng)
    name = rng.choice(sorted(members))
    members[name] = _member(members[name], rng)
    choice = rng.random()
    if choice < 0.05:
        del members[name]
    elif choice < 0.1:
        members[name] = members[rng.choice(sorted(members))]
    elif choice < 0.13:
        members |= {f"{number}.npy": b"" for number in range(rng.choice((1, 100, 3000)))}
    kind = rng.choice((zipfile.ZIP_STORED,) * 8 + (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    return zipped(members, kind)


def _member(content: bytes, rng: random.Random) -> bytes:
    """One array with another type, shape or value."""
    kind = rng.randrange(4)
    if kind == 0:
        start, end = content.find(b"'descr': '") + 10, content.find(b"', 'fortran")
        return content[:start] + rng.choice(_TYPES) + content[end:]
    if kind == 1:
        start, end = content.find(b"'shape': ") + 9, content.find(b", }")
        return content[:start] + rng.choice(_SHAPES) + content[end:]
    if kind == 2:
        value = (rng.choice(_VALUES) % 2**64).to_bytes(8, "little")
        start = max(len(content) - 8 * rng.randrange(1, 4), 0)
        return content[:start] + value + content[start + 8 :]
    return _flipped(content, rng)


def _flipped(data: bytes, rng: random.Random) -> bytes:
    """A cut, an insertion, or a few bytes changed."""
    if not data:
        return rng.randbytes(8)
    place = rng.randrange(len(data))
    kind = rng.randrange(4)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + rng.randbytes(rng.randrange(1, 9)) + data[place:]
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        # The directory at the end is where most of an archive's meaning is.
        back = (
            rng.randrange(1, min(len(changed), 2048) + 1)
            if rng.random() < 0.5
            else rng.randrange(len(changed)) + 1
        )
        changed[-back] = rng.randrange(256)
    return bytes(changed)


TARGETS = {"int8": Target(seeds=_seeds, run=_run, mutate=_mutate)}
