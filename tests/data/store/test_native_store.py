"""The native store: what goes in comes out, whatever the number of shards, writers and interruptions."""

import json
import os

import numpy as np
import pyarrow.parquet as pq
import pytest

from guerdon.core.errors import DataError, StorageError
from guerdon.core.types import Episode
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.data.summary import inspect


def make(seed=0, steps=5, success=None, size=(8, 6), **changes):
    rng = np.random.default_rng(seed)
    labels = (rng.random(steps) > 0.5).astype(np.float32)
    values = {
        "frames": {
            "base_camera": rng.integers(0, 256, (steps, *size, 3), dtype=np.uint8),
            "wrist/camera é": rng.integers(0, 256, (steps, 4, 4, 1), dtype=np.uint8),
        },
        "labels": labels,
        "success": bool(labels.any()) if success is None else success,
        "actions": rng.random((steps, 4), np.float32),
        "intended": rng.random((steps, 4), np.float32),
        "states": rng.random((steps, 7), np.float32),
        "initial_state": rng.random(7, np.float32),
        "env_rewards": rng.random(steps, np.float32),
        "terminated": rng.random(steps) > 0.5,
        "truncated": rng.random(steps) > 0.5,
        "is_grasped": rng.random(steps) > 0.5,
        "seed": seed,
        "source": f"test-{seed}",
        "split": "train",
    }
    return Episode(**{**values, **changes})


def assert_same(left: Episode, right: Episode) -> None:
    assert left.frames.keys() == right.frames.keys()
    for name in left.frames:
        np.testing.assert_array_equal(left.frames[name], right.frames[name])
    for name in ("labels", "actions", "intended", "states", "initial_state", "env_rewards"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
    for name in ("terminated", "truncated", "is_grasped"):
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
    for name in ("success", "seed", "source", "split", "complete"):
        assert getattr(left, name) == getattr(right, name), name


def write(path, episodes, **options):
    with StoreWriter(path, **options) as writer:
        writer.add_many(list(episodes))


def test_episodes_come_back_exactly(tmp_path):
    episodes = [make(seed, steps=3 + seed) for seed in range(6)]
    write(tmp_path / "store", episodes)
    store = EpisodeStore(tmp_path / "store")
    assert (len(store), store.num_frames, store.faults) == (6, sum(e.num_frames for e in episodes), [])
    for left, right in zip(store, episodes, strict=True):
        assert_same(left, right)


def test_random_batches_have_the_right_frames_and_labels(tmp_path):
    episodes = [make(seed, steps=4) for seed in range(10)]
    write(tmp_path / "store", episodes, max_shard_bytes=1000)
    assert len(list((tmp_path / "store" / "shards").iterdir())) > 3
    store = EpisodeStore(tmp_path / "store")
    rows = np.random.default_rng(1).integers(0, store.num_frames, 300)
    batch = store.batch(rows)
    for name in store.cameras:
        everything = np.concatenate([episode.frames[name] for episode in episodes])
        np.testing.assert_array_equal(batch.frames[name], everything[rows])
    np.testing.assert_array_equal(batch.labels.labels, np.concatenate([e.labels for e in episodes])[rows])
    np.testing.assert_array_equal(batch.labels.episode, rows // 4)
    np.testing.assert_array_equal(batch.labels.step, rows % 4)


def test_frames_are_mapped_not_loaded(tmp_path):
    write(tmp_path / "store", [make()])
    frames = EpisodeStore(tmp_path / "store").read_episode(0).frames["base_camera"]
    assert not frames.flags.owndata
    assert not frames.flags.writeable


def test_the_index_is_plain_parquet(tmp_path):
    write(tmp_path / "store", [make(0, steps=2), make(1, steps=3, success=False)])
    table = pq.read_table(tmp_path / "store" / "shards" / "s000000" / "index.parquet").to_pydict()
    assert table["episode"] == [0, 0, 1, 1, 1]
    assert table["step"] == [0, 1, 0, 1, 2]
    assert table["source"] == ["test-0"] * 2 + ["test-1"] * 3
    assert table["seed"] == [0] * 2 + [1] * 3
    assert table["split"] == ["train"] * 5
    assert table["success"][2:] == [False] * 3
    assert {"label", "complete", "digest"} <= table.keys()


def test_episodes_with_other_fields_go_to_another_shard(tmp_path):
    plain = make(1, actions=None, states=None, initial_state=None, env_rewards=None, is_grasped=None)
    write(tmp_path / "store", [make(0), plain, make(2)])
    store = EpisodeStore(tmp_path / "store")
    assert_same(store.read_episode(0), make(0))
    assert store.read_episode(1).actions is None
    assert store.read_episode(1).env_rewards is None
    assert_same(store.read_episode(2), make(2))


def test_the_hash_depends_on_the_content_and_on_nothing_else(tmp_path):
    episodes = [make(seed) for seed in range(4)]
    write(tmp_path / "a", episodes)
    write(tmp_path / "b", reversed(episodes), max_shard_bytes=100)
    write(tmp_path / "c", [*episodes[:3], make(3, success=not episodes[3].success)])
    hashes = [inspect(tmp_path / name).content_hash for name in "abc"]
    assert hashes[0] == hashes[1] != hashes[2]
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["content_hash"] == hashes[0]


def test_a_second_writer_appends(tmp_path):
    write(tmp_path / "store", [make(0)])
    write(tmp_path / "store", [make(1)])
    store = EpisodeStore(tmp_path / "store")
    assert_same(store.read_episode(0), make(0))
    assert_same(store.read_episode(1), make(1))
    assert store.manifest["num_episodes"] == 2


def test_other_cameras_are_refused_and_the_store_stays_whole(tmp_path):
    write(tmp_path / "store", [make(0)])
    with (
        pytest.raises(DataError, match=r"cameras .* but the store"),
        StoreWriter(tmp_path / "store") as writer,
    ):
        writer.add(make(1, size=(9, 9)))
    assert len(EpisodeStore(tmp_path / "store")) == 1


def test_a_directory_with_other_things_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match="neither empty nor a Guerdon store"):
        StoreWriter(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == ["notes.txt"]


def test_a_path_below_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        StoreWriter(tmp_path / "file" / "store")


def test_reading_does_not_wait_for_the_writer(tmp_path):
    writer = StoreWriter(tmp_path / "store")
    writer.add_many([make(0), make(1)])
    store = EpisodeStore(tmp_path / "store")
    assert_same(store.read_episode(1), make(1))
    writer.add(make(2))
    assert len(EpisodeStore(tmp_path / "store")) == 3
    writer.close()


def test_a_truncated_camera_file_is_named_and_the_rest_is_used(tmp_path):
    write(tmp_path / "store", [make(seed, steps=5) for seed in range(4)])
    file = tmp_path / "store" / "shards" / "s000000" / "frames-00.u8"
    os.truncate(file, 12 * 8 * 6 * 3)
    store = EpisodeStore(tmp_path / "store")
    assert len(store) == 2
    assert_same(store.read_episode(1), make(1))
    assert len(store.faults) == 1
    assert "frames-00.u8" in store.faults[0].path
    assert "2 of 4 episodes set aside" in store.faults[0].reason


@pytest.mark.parametrize("content", [b"", b"garbage", b"PAR1" * 8])
def test_a_damaged_index_is_named(tmp_path, content):
    write(tmp_path / "store", [make(0)], max_shard_bytes=1)
    write(tmp_path / "store", [make(1)])
    (tmp_path / "store" / "shards" / "s000000" / "index.parquet").write_bytes(content)
    store = EpisodeStore(tmp_path / "store")
    assert len(store) == 1
    assert_same(store.read_episode(0), make(1))
    assert "index is damaged" in store.faults[0].reason


@pytest.mark.parametrize(
    ("manifest", "message"),
    [("{", "cannot be read"), ('{"format": "x"}', "does not belong"), ("[]", "does not belong")],
)
def test_a_damaged_manifest_is_a_clear_error(tmp_path, manifest, message):
    write(tmp_path / "store", [make(0)])
    (tmp_path / "store" / "manifest.json").write_text(manifest)
    with pytest.raises(DataError, match=message):
        EpisodeStore(tmp_path / "store")


def test_a_store_from_the_future_is_refused(tmp_path):
    write(tmp_path / "store", [make(0)])
    manifest = tmp_path / "store" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 9'))
    with pytest.raises(DataError, match="version 9"):
        inspect(tmp_path / "store")


def test_a_torn_journal_line_costs_only_its_own_episode(tmp_path):
    writer = StoreWriter(tmp_path / "store")
    writer.add_many([make(seed) for seed in range(3)])
    journal = tmp_path / "store" / "shards" / "s000000" / "journal.log"
    journal.write_bytes(journal.read_bytes()[:-20])
    store = EpisodeStore(tmp_path / "store")
    assert (len(store), store.faults) == (2, [])
    assert_same(store.read_episode(1), make(1))


def test_a_damaged_journal_line_is_reported_and_costs_only_its_own_episode(tmp_path):
    writer = StoreWriter(tmp_path / "store")
    writer.add_many([make(seed) for seed in range(3)])
    journal = tmp_path / "store" / "shards" / "s000000" / "journal.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(lines[0] + lines[1].replace(b"test-1", b"test-9") + lines[2])
    store = EpisodeStore(tmp_path / "store")
    assert store.episode_column("seed") == [0, 2]
    assert_same(store.read_episode(1), make(2))
    assert "line 2 of 3 is damaged" in store.faults[0].reason
