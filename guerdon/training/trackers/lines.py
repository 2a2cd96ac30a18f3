"""Lines of a file that another part of the run appends to, each taken once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from guerdon.monitoring.run_files import is_number
from guerdon.training.trackers.base import Row

MAX_READ = 4 << 20
"""Bytes that are read at a time."""


class GrowingLines:
    """Reads a file of lines that grows, and notices if it was cut and written anew.

    A resumed run drops the lines after its checkpoint and writes others in their place. Lines that are as
    they were before count as taken.
    """

    def __init__(self, path: Path, num_taken: int | None = None) -> None:
        """The first `num_taken` lines are taken already; None: all that are there."""
        self.path = path
        self._taken: list[int] = []
        """Checksums of the lines taken."""
        self._offset, self._file_id = 0, -1
        while (num_taken is None or len(self._taken) < num_taken) and (lines := self.read()):
            self.take(lines[: None if num_taken is None else num_taken - len(self._taken)])

    @property
    def num_taken(self) -> int:
        """How many lines have been taken."""
        return len(self._taken)

    def read(self) -> list[bytes]:
        """Whole lines that have not been taken, or some of them; they stay until they are."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())  # of this file; the path may name another one by now
            if status.st_ino != self._file_id or status.st_size < self._offset:
                self._file_id = status.st_ino
                self._keep_common(file)
            file.seek(self._offset)
            content = file.read(MAX_READ)
        return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)

    def take(self, lines: list[bytes]) -> None:
        """These are dealt with: the first of those that `read` gave."""
        self._taken += [xxhash.xxh64_intdigest(line) for line in lines]
        self._offset += sum(map(len, lines))

    def _keep_common(self, file: Any) -> None:
        """Those lines at the beginning of a new file that were taken before."""
        self._offset, count = 0, 0
        for line in file:
            known = count < len(self._taken) and self._taken[count] == xxhash.xxh64_intdigest(line)
            if not known:
                break
            count, self._offset = count + 1, self._offset + len(line)
        del self._taken[count:]


def row_of(line: bytes) -> Row | None:
    """A line of `metrics.jsonl`, with the numbers that it holds; None if it is none."""
    values = as_object(line)
    step = values.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    return step, {name: float(value) for name, value in values.items() if name != "step" and is_number(value)}


def as_object(line: bytes) -> Mapping[str, Any]:
    """The JSON object on a line; empty if it holds none."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
