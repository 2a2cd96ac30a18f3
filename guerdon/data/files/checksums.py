"""Checkpoints are read only if their checksums fit.

Files of `torch.save` and `np.savez` are zip archives, in which every member has a checksum. Neither library
compares it on reading a part in place; here all of them are compared before anything is used. Our safetensors
files carry one for all tensors and their contract in their metadata.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from guerdon.core.errors import DataError
from guerdon.core.types import display_path
from guerdon.data.files import safe_pickle

logger = logging.getLogger("guerdon")

_PIECE = 1 << 20
_MAX_ITEMS = 1_000_000
"""In a checkpoint; a list that is referred to twice counts twice."""


def check_archive(path: Path) -> bool:
    """Compare all checksums of a zip archive; whether it has any (other files have none).

    Raises:
        DataError: one of them does not fit, or the archive is damaged.
    """
    with safe_pickle.named(path), path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return False
        with zipfile.ZipFile(file) as archive:
            for member in _stored(archive, path):
                with archive.open(member) as content:
                    while content.read(_PIECE):
                        pass
    return True


def _stored(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    """The members of an archive that holds no more bytes than the file has."""
    members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise DataError("is a compressed archive, which is not read")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise DataError("is damaged: its members are larger than the file")
    return members


def load_torch(path: Path) -> Any:
    """What `torch.save` wrote, if its checksums fit; `safe_pickle` reads it, and runs nothing."""
    if not check_archive(path):
        logger.info("%s carries no checksums: damage in it would go unnoticed", display_path(path))
    content = safe_pickle.load_torch(path)
    _check_plain(content, display_path(path))
    return content


def _check_plain(content: Any, source: str) -> None:
    """Refuse containers that refer to each other so often that copying them would not end."""
    try:
        few = _count_items(content, {}) <= _MAX_ITEMS
    except RecursionError:
        few = False
    if not few:
        raise DataError(f"{source}: has more than {_MAX_ITEMS} items, is nested too deep or refers to itself")


def _count_items(item: Any, known: dict[int, int]) -> int:
    if not isinstance(item, dict | list | tuple | set | frozenset):
        return 1
    if id(item) not in known:
        parts = item.values() if isinstance(item, dict) else item
        known[id(item)] = 1 + sum(_count_items(part, known) for part in parts)
    return known[id(item)]


def load_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays that `np.savez` wrote, if their checksums fit."""
    with safe_pickle.named(path), zipfile.ZipFile(path) as archive:
        members = _stored(archive, path)
        return {
            each.filename.removesuffix(".npy"): safe_pickle.read_member(archive, each) for each in members
        }


def tensors_checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    """Of names, types, shapes and numbers of all tensors, and of a text that belongs to them."""
    digest = xxhash.xxh3_128(text.encode("utf-8", "surrogatepass"))
    for name, value in sorted(tensors.items()):
        digest.update(repr((name, str(value.dtype), tuple(value.shape))).encode("utf-8", "surrogatepass"))
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())
