"""Native stores that somebody damaged or made up are answered with faults or one error, not a traceback."""

import json
import os
import shutil
import zlib
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from guerdon.core.errors import DataError
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.data.store import shard as layout
from guerdon.data.store.shard_index import _read_table
from guerdon.data.summary import convert, inspect, write_all
from tests.data.store.test_native_store import assert_same, make, write

UNSTORABLE = {"seed": {"seed": 2**63}, "text": {"source": "a\ud800b"}, "long": {"source": "x" * 5000}}


def line_of(record: dict) -> bytes:
    text = json.dumps(record).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def records_of(journal) -> list[dict]:
    return [json.loads(line[9:]) for line in journal.read_bytes().splitlines()]


def open_store(path, count=3):
    """A store whose writer died; returns the journal."""
    writer = StoreWriter(path)
    writer.add_many([make(seed) for seed in range(count)])
    writer._shard.release()
    return path / "shards" / "s000000" / "journal.log"


# What cannot be sealed is not accepted


@pytest.mark.parametrize("changes", UNSTORABLE.values(), ids=UNSTORABLE)
def test_what_cannot_be_sealed_is_refused_before_anything_is_written(tmp_path, changes):
    with StoreWriter(tmp_path / "store") as writer:
        writer.add(make(0))
        with pytest.raises(DataError, match="cannot be stored"):
            writer.add_many([make(1), replace(make(2), **changes)])
        writer.add(make(3))
    store = EpisodeStore(tmp_path / "store")
    assert store.episode_column("seed") == [0, 3]
    assert store.faults == []


def test_episodes_may_come_from_a_generator(tmp_path):
    with StoreWriter(tmp_path / "store") as writer:
        writer.add_many(make(seed) for seed in range(3))
    assert EpisodeStore(tmp_path / "store").episode_column("seed") == [0, 1, 2]


@pytest.mark.parametrize("changes", UNSTORABLE.values(), ids=UNSTORABLE)
def test_importing_sets_aside_what_cannot_be_stored_and_keeps_the_rest(tmp_path, changes):
    episodes = [make(0), replace(make(1), **changes), make(2)]
    written, faults = write_all(iter(episodes), tmp_path / "store", "native")
    assert written == 2
    assert len(faults) == 1 and "cannot be stored" in faults[0].reason
    assert EpisodeStore(tmp_path / "store").episode_column("seed") == [0, 2]


def test_a_file_with_a_latin_1_name_is_imported(tmp_path):
    write(tmp_path / "native", [make(0)])
    convert(tmp_path / "native", tmp_path / "npy", "npy-trajectory")
    (file,) = tmp_path.glob("npy/*/*.npy")
    file.rename(file.with_name(os.fsdecode(b"caf\xe9.npy")))
    assert inspect(tmp_path / "npy").num_episodes == 1
    assert convert(tmp_path / "npy", tmp_path / "back", "native") == (1, [])
    store = EpisodeStore(tmp_path / "back")
    assert (len(store), store.faults) == (1, [])
    assert store.episode_column("source")[0].endswith("caf\\xe9.npy")


def test_a_vector_without_entries_can_be_stored(tmp_path):
    episode = make(0, actions=np.zeros((5, 0), np.float32))
    write(tmp_path / "store", [episode])
    assert EpisodeStore(tmp_path / "store").read_episode(0).actions.shape == (5, 0)


# Stores that hold such a record already


BAD_VALUES = {
    "seed": 2**63,
    "source": "a\ud800b",
    "split": "tomorrow",
    "digest": "00",
    "success": 3,
    "complete": None,
    "arrays": {"labels": ""},
}


@pytest.mark.parametrize("key", BAD_VALUES)
def test_a_record_that_cannot_be_sealed_costs_only_its_own_episode(tmp_path, key, caplog):
    journal = open_store(tmp_path / "store")
    records = records_of(journal)
    records[1][key] = BAD_VALUES[key]
    for record in records:  # as older versions wrote them
        del record["first_frame"], record["number"]
    journal.write_bytes(b"".join(map(line_of, records)))
    for sealed in (False, True):
        if sealed:
            StoreWriter(tmp_path / "store").close()
            assert not journal.exists() and journal.with_name("journal.damaged").exists()
            assert "episode 1 is set aside" in caplog.text
        store = EpisodeStore(tmp_path / "store")
        assert store.episode_column("seed") == [0, 2]
        assert "episode 1 is set aside" in store.faults[0].reason and len(store.faults) == 1
        assert_same(store.read_episode(1), make(2))
        np.testing.assert_array_equal(
            store.frames("base_camera", [7, 2]),
            [make(2).frames["base_camera"][2], make(0).frames["base_camera"][2]],
        )


# What is lost is noticed


def test_a_lost_index_is_noticed(tmp_path):
    path = tmp_path / "store"
    write(path, [make(seed) for seed in range(4)], max_shard_bytes=1)
    (path / "shards" / "s000001" / "index.parquet").unlink()
    store = EpisodeStore(path)
    assert store.episode_column("seed") == [0, 2, 3]
    assert any("s000001" in fault.path and "index is lost" in fault.reason for fault in store.faults)


@pytest.mark.parametrize("older", [False, True])
def test_a_lost_shard_is_noticed_and_stays_so(tmp_path, older):
    path = tmp_path / "store"
    write(path, [make(seed) for seed in range(4)], max_shard_bytes=1)
    if older:  # manifests of older versions have the total alone
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["shards"]
        (path / "manifest.json").write_text(json.dumps(manifest))
    shutil.rmtree(path / "shards" / "s000001")
    (fault,) = EpisodeStore(path).faults
    assert "lost" in fault.reason
    if not older:
        write(path, [make(9)])  # the next writer does not forget it
        (fault,) = EpisodeStore(path).faults
        assert "s000001" in fault.path and "1 episodes" in fault.reason


def test_an_index_of_other_episodes_is_noticed(tmp_path):
    write(tmp_path / "a", [make(0)])
    write(tmp_path / "b", [make(1)])
    place = "shards/s000000/index.parquet"
    shutil.copy(tmp_path / "b" / place, tmp_path / "a" / place)
    (fault,) = EpisodeStore(tmp_path / "a").faults
    assert "other episodes than the manifest knows" in fault.reason


# Made-up content

HOSTILE_JSON = [
    b"[" * 100_000,
    b"\xff\xfe",
    b"null",
    b'{"format": "guerdon-store", "version": 1}',
    b'{"format": "guerdon-store", "version": 1, "cameras": []}',
    b'{"format": "guerdon-store", "version": 1, "cameras": {"a": 3}}',
    b'{"format": "guerdon-store", "version": 1, "cameras": {"a": [1e999, 1, 1]}}',
    b'{"format": "guerdon-store", "version": 1, "cameras": {"a": [8, 6]}}',
    b'{"format": "guerdon-store", "version": 1, "cameras": {"a": [-8, 6, 3]}}',
    b'{"format": "guerdon-store", "version": 1, "cameras": {"a": [999999999999999999, 9999999999999999, 3]}}',
    b'{"format": "guerdon-store", "version": 1, "cameras": {}, "num_episodes": "x"}',
    b'{"format": "guerdon-store", "version": 1, "cameras": {}, "shards": {"s000000": 1}}',
    b'{"version": 1, "cameras": {}, "vectors": {}, "scalars": []}',
    b'{"version": 1, "cameras": {"base_camera": [8, 6, 3]}, "vectors": {"actions": -1}, "scalars": []}',
    b'{"version": 1, "cameras": {"base_camera": [8, 6, 3]}, "vectors": [], "scalars": 3}',
]


@pytest.mark.parametrize("content", HOSTILE_JSON)
def test_made_up_manifests_and_schemas(tmp_path, content):
    write(tmp_path / "store", [make(0)])
    schema, manifest = (tmp_path / "store" / name for name in ("shards/s000000/shard.json", "manifest.json"))
    kept = manifest.read_bytes()
    manifest.write_bytes(content)
    try:
        assert EpisodeStore(tmp_path / "store").faults
    except DataError as error:
        assert "manifest.json" in str(error)
    manifest.write_bytes(kept)
    schema.write_bytes(content)
    assert "s000000" in EpisodeStore(tmp_path / "store").faults[0].path


def test_a_pipe_in_place_of_a_manifest_does_not_block(tmp_path):
    write(tmp_path / "store", [make(0)])
    (tmp_path / "store" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "store" / "manifest.json")
    with pytest.raises(DataError, match="no regular file"):
        EpisodeStore(tmp_path / "store")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_frames": -1},
        {"num_frames": 10**30},
        {"num_frames": True},
        {"num_frames": None},
        {"first_frame": 10**17},
        {"first_frame": 0},
        {"number": -3},
        {"number": 10**17},
        {"seed": [1]},
        {"source": None},
        {"digest": 5},
        {"arrays": 7},
        {"arrays": {"labels": "====="}},
        {"more": 1},
    ],
    ids=str,
)
def test_made_up_records(tmp_path, changes):
    journal = open_store(tmp_path / "store")
    records = records_of(journal)
    records[1].update(changes)
    journal.write_bytes(b"".join(map(line_of, records)))
    store = EpisodeStore(tmp_path / "store")
    assert store.episode_column("seed")[0] == 0
    assert store.faults
    assert all(episode.seed in (0, 2) for episode in store)
    if not {"first_frame", "number"} & changes.keys():
        assert len(store) == 2


def with_column(table, name, values):
    return table.set_column(table.column_names.index(name), name, values)


def moved(step, first_frame):
    """Places of frames, those of the first episode elsewhere: before the file, or up to the last number."""
    frame, count = np.arange(len(step)), int(np.flatnonzero(step == 0)[1])
    frame[:count] += first_frame if first_frame < 0 else first_frame - count
    return frame


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda t: t.drop_columns(["label"]), 0),
        (lambda t: with_column(t, "label", pa.array(["x"] * t.num_rows)), 0),
        (lambda t: with_column(t, "label", pa.array([7.0, *t["label"].to_pylist()[1:]], pa.float32())), 2),
        (lambda t: with_column(t, "step", pa.array([5] * t.num_rows)), 0),
        (lambda t: with_column(t, "step", pa.array([None] * t.num_rows, pa.int32())), 0),
        (lambda t: with_column(t, "episode", pa.array([2**40] * t.num_rows)), 0),
        (lambda t: with_column(t, "source", pa.array([b"\xff"] * t.num_rows)), 0),
        (lambda t: with_column(t, "source", pa.array(["x" * 10**6] * t.num_rows)), 0),
        (lambda t: t.append_column("frame", pa.array([2**62] * t.num_rows)), 0),
        (lambda t: pa.concat_tables([t] * 50), 3),
        (lambda t: with_column(t, "label", pa.array([float("nan")] * t.num_rows, pa.float32())), 0),
        (lambda t: with_column(t, "split", pa.array(["elsewhere"] * t.num_rows)), 0),
        (lambda t: with_column(t, "episode", pc.negate(pc.add(t["episode"], 1))), 0),
        (lambda t: t.append_column("frame", pa.array(moved(t["step"].to_numpy(), -1))), 2),
        (lambda t: t.append_column("frame", pa.array(moved(t["step"].to_numpy(), 2**63))), 0),
        (lambda t: t.slice(0, 0), 0),
    ],
)
def test_made_up_indices(tmp_path, change, left):
    path = tmp_path / "store"
    write(path, [make(seed) for seed in range(3)])
    file = path / "shards" / "s000000" / "index.parquet"
    pq.write_table(change(pq.read_table(file)), file)
    store = EpisodeStore(path)
    assert len(store) == left
    assert store.faults
    for episode in store:
        assert_same(episode, make(episode.seed))


def test_rows_for_which_there_can_be_no_frames_are_not_read(tmp_path):
    path = tmp_path / "store"
    write(path, [make(0)])
    file = path / "shards" / "s000000" / "index.parquet"
    row = pq.read_table(file).slice(0, 1)
    many = pa.table({name: pa.repeat(row[name][0], 1_500_000) for name in row.column_names})
    pq.write_table(many, file, compression="zstd")
    assert file.stat().st_size < 100_000
    assert _read_table(file, layout.ShardSchema.of(make(0)), rows=5)[0].num_rows <= 1 << 20
    store = EpisodeStore(path)
    assert len(store) == 0 and store.faults


def test_every_size_of_a_file_is_answered(tmp_path):
    path = tmp_path / "store"
    write(path, [make(seed, steps=2) for seed in range(2)])
    for file in sorted((path / "shards" / "s000000").glob("*.[uf]*")):
        content = file.read_bytes()
        for size in (0, 1, len(content) // 2, len(content) - 1):
            file.write_bytes(content[:size])
            store = EpisodeStore(path)
            assert len(store) < 2 and store.faults
            assert [assert_same(each, make(each.seed, steps=2)) for each in store] == [None] * len(store)
        file.write_bytes(content)
