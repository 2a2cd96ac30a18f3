"""Writers of the native store: several at once, killed, sealed while others read, and out of space."""

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from guerdon.core.atomic import locked_directory
from guerdon.core.errors import StorageError
from guerdon.data.store import EpisodeStore, StoreWriter, episode_store, shard_index
from guerdon.data.store.store_writer import _locked
from tests.data.store.test_native_store import assert_same, make, write

WRITER = textwrap.dedent(
    """
    import sys
    import time
    import numpy as np
    from guerdon.data.store import StoreWriter
    from guerdon.core.types import Episode

    path, first = sys.argv[1], int(sys.argv[2])
    writer = StoreWriter(path)
    for number in range(first, first + 10_000):
        frames = np.full((20, 32, 32, 3), number % 256, np.uint8)
        labels = np.zeros(20, np.float32)
        writer.add(Episode(frames={"base_camera": frames}, labels=labels, success=False, seed=number))
        print(number, flush=True)  # said only after the episode is safe
    time.sleep(600)  # stays alive, however slow the test is
    """
)


def start_writer(path: Path, first: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(path), str(first)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_killing_two_concurrent_writers_loses_no_finished_episode(tmp_path):
    path = tmp_path / "store"
    writers = [start_writer(path, 0), start_writer(path, 100_000)]
    said = [[int(writer.stdout.readline()) for _ in range(15)] for writer in writers]
    time.sleep(0.05)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
    for numbers, writer in zip(said, writers, strict=True):
        numbers += [int(line) for line in writer.communicate()[0].splitlines() if line]

    def check(store: EpisodeStore) -> None:
        assert store.faults == []
        seeds = store.episode_column("seed")
        assert len(seeds) == len(set(seeds))
        assert set(said[0] + said[1]) <= set(seeds)
        assert len(seeds) <= len(said[0]) + len(said[1]) + 2  # on disk, but killed before it was said
        for number, seed in enumerate(seeds):
            assert (store.read_episode(number).frames["base_camera"] == seed % 256).all()

    check(EpisodeStore(path))  # as the killed writers left it
    assert len(list(path.glob("shards/*/journal.log"))) == 2
    StoreWriter(path).close()  # re-opening repairs the index
    assert list(path.glob("shards/*/journal.log")) == []
    assert len(list(path.glob("shards/*/index.parquet"))) == 2
    check(EpisodeStore(path))
    store = EpisodeStore(path)
    assert store.manifest["num_episodes"] == len(store)
    assert store.manifest["content_hash"] == store.content_hash


def test_writers_that_make_one_store_at_the_same_moment_do_not_mind_each_other(tmp_path):
    def add_one(path: Path, number: int, start: threading.Barrier) -> None:
        start.wait()
        with StoreWriter(path) as writer:
            writer.add(make(number))

    for attempt in range(10):
        path, start = tmp_path / f"store-{attempt}", threading.Barrier(6)
        with ThreadPoolExecutor(6) as pool:
            for done in [pool.submit(add_one, path, number, start) for number in range(6)]:
                done.result()
        assert len(EpisodeStore(path)) == 6


def test_what_a_killed_maker_of_a_store_left_behind_is_not_in_the_way(tmp_path):
    (tmp_path / "store" / "shards").mkdir(parents=True)
    (tmp_path / "store" / ".123-abcdef.tmp").write_bytes(b"{")
    with StoreWriter(tmp_path / "store") as writer:
        writer.add(make(0))
    assert len(EpisodeStore(tmp_path / "store")) == 1


def test_repair_leaves_a_living_writer_alone(tmp_path):
    path = tmp_path / "store"
    alive = start_writer(path, 0)
    try:
        alive.stdout.readline()
        StoreWriter(path).close()
        assert len(list(path.glob("shards/*/journal.log"))) == 1
        said = [int(alive.stdout.readline()) for _ in range(3)]
        assert set(said) <= set(EpisodeStore(path).episode_column("seed"))
    finally:
        alive.kill()
        alive.communicate()


def test_an_interrupted_seal_is_repeated(tmp_path):
    writer = StoreWriter(tmp_path / "store")
    writer.add_many([make(0), make(1)])
    shard = tmp_path / "store" / "shards" / "s000000"
    (shard / "index.parquet").write_bytes(b"half an index")  # as if killed between index and journal
    assert len(EpisodeStore(tmp_path / "store")) == 2
    writer.close()
    store = EpisodeStore(tmp_path / "store")
    assert (len(store), store.faults) == (2, [])


def _write_until_full(path: str, limit: int, result: "multiprocessing.Queue[tuple[int, str]]") -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    writer = StoreWriter(path)
    added = 0
    try:
        while True:
            writer.add(make(added, steps=20))
            added += 1
    except StorageError as error:
        result.put((added, str(error)))


def test_a_failing_write_keeps_every_finished_episode(tmp_path):
    """A limit on file size stands in for a full disk: the write really fails, half-way through an episode."""
    context = multiprocessing.get_context("spawn")
    result = context.Queue()
    process = context.Process(target=_write_until_full, args=(str(tmp_path / "store"), 50_000, result))
    process.start()
    added, message = result.get(timeout=200)
    process.join()
    assert added >= 5
    assert "store" in message
    assert f"{added} " in message  # says how many are safe
    store = EpisodeStore(tmp_path / "store")
    assert len(store) == added
    assert_same(store.read_episode(added - 1), make(added - 1, steps=20))
    write(tmp_path / "store", [make(99)])  # and it goes on once there is room
    assert len(EpisodeStore(tmp_path / "store")) == added + 1


# What readers see while others write


def test_a_store_can_be_read_at_the_moment_when_it_is_sealed(tmp_path, monkeypatch):
    path = tmp_path / "store"
    writer = StoreWriter(path)
    writer.add_many([make(0), make(1)])
    real = shard_index.read_journal

    def too_late(journal):
        monkeypatch.setattr(shard_index, "read_journal", real)
        writer.close()  # the journal is there when it is looked for, and gone when it is opened
        return real(journal)

    monkeypatch.setattr(shard_index, "read_journal", too_late)
    store = EpisodeStore(path)
    assert (len(store), store.faults) == (2, [])
    assert not list(path.glob("shards/*/journal.log"))


def test_a_reader_that_comes_before_the_first_episode_finds_no_fault(tmp_path, monkeypatch):
    path = tmp_path / "store"
    StoreWriter(path).close()
    real = episode_store.read_manifest

    def and_then_an_episode(place):
        manifest = real(place)
        monkeypatch.setattr(episode_store, "read_manifest", real)
        write(path, [make(0)])
        return manifest

    monkeypatch.setattr(episode_store, "read_manifest", and_then_an_episode)
    assert EpisodeStore(path).faults == []
    assert len(EpisodeStore(path)) == 1


def test_readers_and_sealing_writers_at_the_same_time(tmp_path):
    """Shards of one episode each: sealing goes on all the time, and no reader ever stumbles."""
    path, over = tmp_path / "store", threading.Event()
    StoreWriter(path).close()

    def read() -> int:
        seen = 0
        while not over.is_set():
            store = EpisodeStore(path)
            assert store.faults == [] and len(store) >= seen
            seen = len(store)
        return seen

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            with StoreWriter(path, max_shard_bytes=1) as writer:
                for number in range(40):
                    writer.add(make(number))
        finally:
            over.set()
        assert all(reader.result() <= 40 for reader in readers)
    assert len(EpisodeStore(path)) == 40


# Faults of the disk and of other processes


def test_a_shard_that_could_not_be_sealed_is_repaired_by_the_next_writer(tmp_path, monkeypatch):
    writer = StoreWriter(tmp_path / "store")
    writer.add(make(0))

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as broken:
        broken.setattr("guerdon.data.store.store_writer.seal", full)
        with pytest.raises(StorageError, match="the disk is full"):
            writer.close()
    assert len(EpisodeStore(tmp_path / "store")) == 1
    StoreWriter(tmp_path / "store").close()  # the lock of the failed one is not in its way
    assert not list((tmp_path / "store").glob("shards/*/journal.log"))
    assert len(EpisodeStore(tmp_path / "store")) == 1


def test_a_shard_that_is_begun_while_it_is_opened_is_not_lost(tmp_path, monkeypatch):
    """The reader finds no journal; before it looks further the writer has made one, and frames."""
    writer, calls = StoreWriter(tmp_path / "store"), []
    writer.add(make(0))
    shard, later = tmp_path / "store" / "shards" / "s000000", tmp_path / "later"
    later.mkdir()
    kept = [path for path in shard.iterdir() if path.name not in ("shard.json", "writer.lock")]
    for path in kept:
        path.rename(later / path.name)

    def read_journal(path):
        calls.append(path)
        for item in kept:
            (later / item.name).rename(item)
        raise FileNotFoundError(path)

    with monkeypatch.context() as racing:
        racing.setattr("guerdon.data.store.shard_index.read_journal", read_journal)
        store = EpisodeStore(tmp_path / "store")
    assert len(calls) == 1 and store.faults == [] and len(store) == 0
    assert len(EpisodeStore(tmp_path / "store")) == 1
    (shard / "journal.log").unlink()
    assert "the index is lost" in EpisodeStore(tmp_path / "store").faults[0].reason


def test_lines_that_were_not_synced_do_not_count_later(tmp_path, monkeypatch):
    """The line of an episode is written, but the sync fails: the next episode takes its place."""
    writer, calls, real = StoreWriter(tmp_path / "store"), [], os.fdatasync
    writer.add(make(0))

    def fail_last(file):
        calls.append(file)
        if len(calls) == 6:  # two cameras, three vectors, the journal
            raise OSError(errno.EIO, "input/output error")
        real(file)

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdatasync", fail_last)
        with pytest.raises(StorageError, match="the 1 episodes before it are safe"):
            writer.add_many([make(1, steps=3), make(2, steps=4)])
    assert len(EpisodeStore(tmp_path / "store")) == 1
    writer.add(make(3, steps=3, source="test-1"))  # a line as long as the first of the lost ones
    writer.close()
    store = EpisodeStore(tmp_path / "store")
    assert store.episode_column("seed") == [0, 3] and store.faults == []
    assert_same(store.read_episode(1), make(3, steps=3, source="test-1"))


def test_a_shard_that_nobody_can_read_does_not_keep_writers_out(tmp_path, caplog):
    writer = StoreWriter(tmp_path / "store")
    writer.add(make(0))
    writer._shard.release()  # as if its process had died
    (tmp_path / "store" / "shards" / "s000000" / "shard.json").write_text("{half")
    write(tmp_path / "store", [make(1)])
    assert "s000000 cannot be repaired" in caplog.text and "shard.json" in caplog.text
    store = EpisodeStore(tmp_path / "store")
    assert store.episode_column("seed") == [1] and len(store.faults) == 1


@pytest.mark.parametrize("lock", [lambda path: _locked(path / "lock"), locked_directory])
def test_a_process_that_is_forked_under_a_lock_does_not_keep_it(tmp_path, lock):
    with lock(tmp_path):
        child = os.fork()
        if child == 0:
            signal.pause()  # has inherited the open file
            os._exit(0)
    try:
        place = tmp_path / "lock" if (tmp_path / "lock").exists() else tmp_path
        file = os.open(place, os.O_RDONLY)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is held
        os.close(file)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
