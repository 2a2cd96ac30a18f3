"""Append to the native store. Many writers may append to one store: each owns a shard of its own.

An episode is written in this order: frames and vectors, sync, journal line, sync. A writer that is killed at
any point therefore loses at most the episode it was writing, and the next writer that opens the store turns
the journal it left behind into an index.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import guerdon
from guerdon.core import portable
from guerdon.core.atomic import clear_stale, fsync_directory, is_temporary, storage_error, write_atomic
from guerdon.core.errors import DataError, StorageError
from guerdon.core.types import Episode, display_path
from guerdon.data.files.bounds import read_json
from guerdon.data.formats.base import EpisodeWriter
from guerdon.data.store import shard as layout
from guerdon.data.store.episode_store import FORMAT, MANIFEST, SHARDS, EpisodeStore, read_manifest, shard_dirs
from guerdon.data.store.shard_index import index_table, read_journal, usable, write_index

log = logging.getLogger("guerdon")

STORE_LOCK = "store.lock"


class StoreWriter(EpisodeWriter):
    """Appends episodes to a native store; makes the store if there is none.

    All episodes of a store have the same cameras and image sizes; the first episode decides. Other fields
    (actions, states, ...) may differ from episode to episode.
    """

    def __init__(self, path: Path | str, *, max_shard_bytes: int = 4 << 30) -> None:
        """Open or make the store at `path`; a shard is sealed when its frames exceed `max_shard_bytes`."""
        self.path = Path(path)
        self._max_shard_bytes = max_shard_bytes
        self._shard: _OpenShard | None = None
        try:
            self._make_store()
            clear_stale(self.path, below=True)
            with _locked(self.path / STORE_LOCK):
                repair(self.path)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def _make_store(self) -> None:
        """Make the store unless it exists; another writer may be doing the same at this moment."""
        names = {item.name for item in self.path.iterdir()} if self.path.is_dir() else set()
        unknown = sorted(name for name in names - {STORE_LOCK, SHARDS} if not is_temporary(name))
        if unknown and not (self.path / MANIFEST).exists():
            raise StorageError(
                f"{display_path(self.path)} is neither empty nor a Guerdon store "
                f"(it holds {unknown[0]}); choose another directory"
            )
        (self.path / SHARDS).mkdir(parents=True, exist_ok=True)
        with _locked(self.path / STORE_LOCK):
            if not (self.path / MANIFEST).exists():
                _write_manifest(self.path, {"cameras": {}, "num_episodes": 0, "num_frames": 0})

    def check(self, episode: Episode) -> None:
        """Raise a `DataError` if the store could not be sealed with this episode in it."""
        layout.check_storable(episode)

    def add(self, episode: Episode) -> str:
        """Append one episode; returns `shard/number`."""
        return self.add_many([episode])[0]

    def add_many(self, episodes: Iterable[Episode]) -> list[str]:
        """Append several episodes with one sync for all of them; returns `shard/number` of each.

        If one of them cannot be kept (`check`), none is written.
        """
        episodes = list(episodes)
        for episode in episodes:
            self.check(episode)
        places: list[str] = []
        try:
            for schema, alike in groupby(episodes, layout.ShardSchema.of):
                for batch in self._portions(list(alike)):
                    places += self._add_batch(schema, batch)
        finally:
            if self._shard is not None:
                self._shard.commit()
        return places

    def _portions(self, episodes: list[Episode]) -> Iterator[list[Episode]]:
        """Parts of a list, none with more frames than a shard should hold."""
        start = size = 0
        for end, episode in enumerate(episodes):
            size += sum(images.nbytes for images in episode.frames.values())
            if size > self._max_shard_bytes and end > start:
                yield episodes[start:end]
                start, size = end, 0
        yield episodes[start:]

    def _add_batch(self, schema: layout.ShardSchema, episodes: list[Episode]) -> list[str]:
        """Write episodes of one schema; where not all fit on the disk, as many of them as do."""
        try:
            return self._shard_for(schema).write(episodes)
        except StorageError:
            if len(episodes) == 1:
                raise
            log.warning("writing %d episodes at once failed; trying them one by one", len(episodes))
            return [place for episode in episodes for place in self._add_batch(schema, [episode])]

    def _shard_for(self, schema: layout.ShardSchema) -> _OpenShard:
        if self._shard is not None and (
            self._shard.schema != schema or self._shard.frame_bytes >= self._max_shard_bytes
        ):
            self._seal()
        if self._shard is None:
            with _locked(self.path / STORE_LOCK):
                self._agree_on_cameras(schema)
                self._shard = _OpenShard.claim(self.path, schema)
        return self._shard

    def _agree_on_cameras(self, schema: layout.ShardSchema) -> None:
        """The first episode decides the store's cameras; all later ones must have the same."""
        manifest = read_manifest(self.path)
        if not manifest["cameras"]:
            _write_manifest(self.path, {**manifest, "cameras": schema.cameras})
        elif manifest["cameras"] != schema.cameras:
            raise DataError(
                f"the episode has the cameras {schema.cameras}, but the store {display_path(self.path)} "
                f"has {manifest['cameras']}"
            )

    def _seal(self) -> None:
        if self._shard is not None:
            shard, self._shard = self._shard, None
            try:
                shard.commit()
                seal(shard.path, shard.schema)
            finally:
                shard.release()  # also if it could not be sealed: then the next writer repairs it

    def close(self) -> None:
        """Seal the open shard and bring the manifest up to date. Safe to call twice."""
        try:
            with _locked(self.path / STORE_LOCK):
                self._seal()
                _refresh_manifest(self.path)
        except OSError as error:
            raise storage_error(self.path, error) from error


class _OpenShard:
    """A shard that this process appends to; `writer.lock` is held as long as it does."""

    def __init__(self, path: Path, schema: layout.ShardSchema, lock: int) -> None:
        self.path = path
        self.schema = schema
        self.frame_bytes = 0
        self._lock = lock
        self._num_frames = 0
        self._num_episodes = 0
        self._pending: list[layout.EpisodeRecord] = []
        self._journal_end = 0
        names = [*(each.name for each in schema.files), layout.JOURNAL]
        self._files = {name: _create(path / name) for name in names}
        fsync_directory(path)

    @classmethod
    def claim(cls, store: Path, schema: layout.ShardSchema) -> _OpenShard:
        """Make the next shard directory and lock it; the caller holds the store's lock."""
        numbers = [int(item.name[1:]) for item in shard_dirs(store) if item.name[1:].isdecimal()]
        path = store / SHARDS / f"s{max(numbers, default=-1) + 1:06d}"
        try:
            path.mkdir()
            lock = _create(path / layout.LOCK)
            portable.lock(lock)
            text = json.dumps(schema.to_dict(), indent=1).encode()
            write_atomic(path / layout.SCHEMA, lambda file: file.write(text))
            return cls(path, schema, lock)
        except OSError as error:
            raise storage_error(path, error) from error

    def write(self, episodes: list[Episode]) -> list[str]:
        """Write the bytes of episodes behind the last one, all or none; `commit` makes them count.

        Each file takes all episodes in one system call: every call lets go of the interpreter lock and takes
        it again, and it is these takings that slow down the stepping thread, not the bytes.
        """
        try:
            for file in self.schema.files:
                sources = (item.frames if file.is_camera else vars(item) for item in episodes)
                self._put(file, [source[file.field] for source in sources])
        except OSError as error:
            for file in self.schema.files:  # so that a full disk has room for the lines of the others
                with contextlib.suppress(OSError):
                    os.ftruncate(self._files[file.name], self._first_row(file) * file.row_bytes)
            raise storage_error(self.path, error, kept=self._num_episodes) from error
        first = self._num_episodes
        for episode, digest in zip(episodes, layout.episode_digests(episodes), strict=True):
            self._pending.append(
                layout.EpisodeRecord.of(episode, digest, self._num_frames, self._num_episodes)
            )
            self._num_frames += episode.num_frames
            self._num_episodes += 1
        self.frame_bytes += sum(images.nbytes for item in episodes for images in item.frames.values())
        return [f"{self.path.name}/{number:06d}" for number in range(first, self._num_episodes)]

    def _put(self, file: layout.ShardFile, arrays: list[NDArray[Any]]) -> None:
        if file.row_bytes:
            data = [np.ascontiguousarray(array).data.cast("B") for array in arrays]
            portable.write_at(self._files[file.name], data, self._first_row(file) * file.row_bytes)

    def _first_row(self, file: layout.ShardFile) -> int:
        return self._num_episodes if file.per_episode else self._num_frames

    def commit(self) -> None:
        """Sync the bytes, then the journal lines that vouch for them."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        lines = b"".join(record.to_line() for record in pending)
        try:
            for name, file in self._files.items():
                if name != layout.JOURNAL:
                    portable.sync_data(file)
            portable.write_at(self._files[layout.JOURNAL], [memoryview(lines)], self._journal_end)
            portable.sync_data(self._files[layout.JOURNAL])
        except OSError as error:
            self._num_episodes -= len(pending)
            self._num_frames -= sum(record.num_frames for record in pending)
            with contextlib.suppress(OSError):  # lines that are there but do not count must not be read later
                os.ftruncate(self._files[layout.JOURNAL], self._journal_end)
            raise storage_error(self.path, error, kept=self._num_episodes) from error
        self._journal_end += len(lines)

    def release(self) -> None:
        """Close all files and give up the lock."""
        for file in (*self._files.values(), self._lock):
            os.close(file)
        self._files = {}


def seal(shard: Path, schema: layout.ShardSchema) -> None:
    """Turn a shard's journal into its index. Repeating it after an interruption does no harm.

    Records that the index cannot hold are set aside: they are named in the index and stay in the journal,
    which is then kept as `journal.damaged`.
    """
    journal = shard / layout.JOURNAL
    records, problems = read_journal(journal)
    good, more = usable(records, schema)
    table = index_table(good, schema, problems := problems + more)
    write_atomic(shard / layout.INDEX, lambda file: write_index(table, file))
    if not problems:
        journal.unlink()
    else:
        for problem in problems:
            log.warning("%s: %s; the journal is kept as journal.damaged", display_path(journal), problem)
        journal.rename(shard / "journal.damaged")
    fsync_directory(shard)


def repair(store: Path) -> int:
    """Seal the shards whose writers are gone; the caller holds the store's lock. Returns how many."""
    sealed = 0
    for path in shard_dirs(store):
        if not (path / layout.JOURNAL).exists() or not (path / layout.SCHEMA).exists():
            continue
        lock = os.open(path / layout.LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not portable.lock(lock, wait=False):
                continue  # nobody can tell whether its writer is alive
            schema = layout.ShardSchema.from_dict(read_json(path / layout.SCHEMA))
            seal(path, schema)
            log.info("repaired %s, which a writer had left open", display_path(path))
            sealed += 1
        except BlockingIOError:
            pass  # its writer is alive
        except DataError as error:
            log.warning("%s cannot be repaired: %s", display_path(path), error)
        finally:
            os.close(lock)
    if sealed:
        _refresh_manifest(store)
    return sealed


def _refresh_manifest(store: Path) -> None:
    opened = EpisodeStore(store)
    shards = opened.shard_facts()
    for name, known in opened.manifest.get("shards", {}).items():  # what is lost stays on record
        if shards.get(name, {"num_episodes": 0})["num_episodes"] < known["num_episodes"]:
            shards[name] = known
    _write_manifest(
        store,
        {
            "cameras": opened.cameras,
            "num_episodes": opened.num_episodes,
            "num_frames": opened.num_frames,
            "content_hash": opened.content_hash,
            "shards": shards,
        },
    )


def _write_manifest(store: Path, values: dict[str, Any]) -> None:
    manifest = {**values, "format": FORMAT, "version": 1, "guerdon_version": guerdon.__version__}
    text = json.dumps(manifest, indent=1, sort_keys=True).encode()
    write_atomic(store / MANIFEST, lambda file: file.write(text))


def _create(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | portable.BINARY, 0o644)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; released by the kernel if this one dies."""
    file = _create(path)
    try:
        portable.lock(file)
        yield
    finally:
        portable.unlock(file)
        os.close(file)
