"""`native`: Guerdon's own store, as a format among the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from guerdon.core.errors import DataError
from guerdon.core.types import Episode, Fault
from guerdon.data.files.bounds import read_json
from guerdon.data.formats.base import EpisodeWriter, Format
from guerdon.data.store.episode_store import FORMAT, MANIFEST, EpisodeStore


class Native(Format):
    """A directory with `manifest.json` and shards of memory-mapped frames; carries every field."""

    name: ClassVar[str] = "native"
    looks_for: ClassVar[str] = "manifest.json of a Guerdon store"

    def detect(self, path: Path) -> bool:
        """Whether there is a manifest of ours, of whatever version."""
        try:
            manifest = read_json(path / MANIFEST)
        except (OSError, DataError):
            return False
        return isinstance(manifest, dict) and manifest.get("format") == FORMAT

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """All episodes, then all faults."""
        store = EpisodeStore(path)
        yield from store
        yield from store.faults

    def count(self, path: Path) -> tuple[int, int]:
        """From the index, without a look at the frames."""
        if not self.detect(path):
            return 0, 0
        store = EpisodeStore(path)
        return int((store.success & store.complete).sum()), int((~store.success & store.complete).sum())

    def writer(self, path: Path) -> EpisodeWriter:
        """A `StoreWriter`."""
        from guerdon.data.store.store_writer import StoreWriter  # which imports `formats.base`

        return StoreWriter(path)
