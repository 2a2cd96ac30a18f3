"""Labelled frames for learning: batches, splits, statistics, copies of foreign formats."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from guerdon.core.errors import DataError
from guerdon.data.datasets.frames import describe, open_store, rows_of, split_store
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.data.summary import convert
from guerdon.datasets import RewardDataset
from tests.fit.synthetic import episode, write_store


@pytest.fixture
def store(tmp_path):
    return EpisodeStore(write_store(tmp_path / "data", count=20, cameras=("base_camera", "wrist_camera")))


def test_a_data_loader_can_read_it(store):
    dataset = RewardDataset(store, cameras=["base_camera"], rows=np.arange(5, 25))
    images, labels = next(iter(DataLoader(dataset, batch_size=20)))
    assert (images.shape, images.dtype) == ((20, 3, 32, 32), torch.float32)
    assert 0 <= images.min() <= images.max() <= 1
    np.testing.assert_array_equal(labels.numpy(), store.labels[5:25])
    expected = store.frames("base_camera", np.arange(5, 25)).transpose(0, 3, 1, 2) / np.float32(255)
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)


def test_several_cameras_come_by_name(store):
    images, label = RewardDataset(store)[3]
    assert set(images) == {"base_camera", "wrist_camera"}
    assert label in (0.0, 1.0)


def test_batches_have_the_cameras_asked_for(store):
    batch = RewardDataset(store, cameras=["wrist_camera"], rows=np.array([7, 100, 3])).batch([2, 0])
    assert set(batch.frames) == {"wrist_camera"}
    np.testing.assert_array_equal(batch.frames["wrist_camera"], store.frames("wrist_camera", [3, 7]))
    np.testing.assert_array_equal(batch.labels.step, [3, 7])


def test_a_missing_camera_is_named(store):
    with pytest.raises(DataError, match=r"no camera 'front'"):
        RewardDataset(store, cameras=["front"])


def test_the_statistics_of_the_documents(store):
    assert describe(store) == [
        "positive: 10 trajectories, 120 frames (label=1: 60, label=0: 60)",
        "negative: 10 trajectories, 120 frames (label=1: 0, label=0: 120)",
    ]


def test_splits_are_by_episode_and_have_both_kinds(store):
    splits = split_store(store, val_fraction=0.2, seed=0, camera="base_camera")
    assert sorted(np.concatenate(list(splits.values())).tolist()) == list(range(20))
    assert len(splits["val"]) == 4
    assert store.success[splits["val"]].sum() == 2
    assert not set(rows_of(store, splits["train"])) & set(rows_of(store, splits["val"]))


def test_declared_splits_are_kept(tmp_path):
    with StoreWriter(tmp_path / "data") as writer:
        for seed in range(12):
            plain = episode(seed, seed % 2 == 0)
            declared = {"split": "val" if seed >= 8 else "train"}
            writer.add(type(plain)(**{**plain.__dict__, **declared}))
    splits = split_store(EpisodeStore(tmp_path / "data"), val_fraction=0.5, seed=0, camera="base_camera")
    assert splits["val"].tolist() == [8, 9, 10, 11]


def test_unfinished_episodes_are_never_held_out(tmp_path):
    with StoreWriter(tmp_path / "data") as writer:
        for seed in range(12):
            plain = episode(seed, seed % 2 == 0)
            writer.add(type(plain)(**{**plain.__dict__, "complete": seed not in (3, 7)}))
    for seed in range(4):
        splits = split_store(
            EpisodeStore(tmp_path / "data"), val_fraction=0.4, seed=seed, camera="base_camera"
        )
        assert {3, 7} <= set(splits["train"].tolist())


def test_foreign_data_is_copied_and_its_faults_are_told_each_time(store, tmp_path):
    convert(store.path, tmp_path / "npy", "npy-trajectory")
    (tmp_path / "npy" / "positive" / "000003.npy").write_bytes(b"broken")
    for _ in range(2):
        copy, faults = open_store(str(tmp_path / "npy"), None, None, tmp_path / "cache")
        assert len(copy) == 19
        assert [fault.path.endswith("000003.npy") for fault in faults] == [True]
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 1


def test_a_copy_that_was_cut_short_is_not_used(store, tmp_path):
    convert(store.path, tmp_path / "npy", "npy-trajectory")
    copy, _ = open_store(str(tmp_path / "npy"), None, None, tmp_path / "cache")
    next((tmp_path / "cache").glob("*.json")).unlink()  # as if killed before the note was written
    again, _ = open_store(str(tmp_path / "npy"), None, None, tmp_path / "cache")
    assert again.path != copy.path
    assert again.content_hash == copy.content_hash
