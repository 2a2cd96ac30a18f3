"""Reads small files that somebody else may have made: regular files of a bounded size, and JSON in them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from guerdon.core.errors import DataError
from guerdon.core.types import display_path

MAX_BYTES = 16 << 20
"""JSON of this size takes some 300 MB in memory at most."""


def read_small(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file; raises `FileNotFoundError` if there is none, `DataError` on all else."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would block
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"{display_path(path)}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{display_path(path)!r} is no file name: {error}") from error
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DataError(f"{display_path(path)}: cannot be read: it is no regular file")
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise DataError(f"{display_path(path)}: cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise DataError(f"{display_path(path)}: cannot be read: it has more than {max_bytes} bytes")
    return data


def parse_json(data: bytes | str, source: str) -> Any:
    """What `data` holds; a `DataError` that names `source` if that is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # ValueError: also wrong encodings and endless integers
        raise DataError(f"{source}: cannot be read as JSON: {error}") from error


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """What a JSON file holds; raises `FileNotFoundError` if there is none, `DataError` on all else."""
    return parse_json(read_small(path, max_bytes), display_path(path))
