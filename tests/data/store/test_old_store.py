"""Stores of earlier versions are still read, added to and repaired.

`old_store/` was written by commit c51cd02: two sealed shards, and a third whose writer was killed.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from guerdon.core.types import Episode
from guerdon.data.formats import detect_format
from guerdon.data.store import EpisodeStore, StoreWriter

OLD_STORE = Path(__file__).parent / "old_store"
CONTENT_HASH = "0e573fb76823abfffbbdd334123442a0"


def expected(number: int) -> Episode:
    """The episode that the old version was given; number 3 has frames and labels only."""
    rng = np.random.default_rng(number)
    steps = 3 + number
    labels = np.zeros(steps, np.float32)
    labels[-1] = number % 2
    more = {}
    if number != 3:
        more = {
            "actions": rng.random((steps, 2), np.float32),
            "intended": rng.random((steps, 2), np.float32),
            "states": rng.random((steps, 3), np.float32),
            "initial_state": rng.random(3, np.float32),
            "env_rewards": rng.random(steps, np.float32),
            "terminated": np.arange(steps) == steps - 1,
            "truncated": np.zeros(steps, np.bool_),
            "is_grasped": rng.random(steps) < 0.5,
            "at_rest": rng.random(steps) < 0.5,
            "seed": 100 + number,
            "split": "train" if number else "val",
        }
    frames = {
        "base_camera": rng.integers(0, 256, (steps, 6, 8, 3), np.uint8),
        "wrist/ä": rng.integers(0, 256, (steps, 4, 4, 1), np.uint8),
    }
    return Episode(
        frames=frames,
        labels=labels,
        success=bool(number % 2),
        source=f"old/{number}",
        complete=number != 2,
        **more,
    )


def assert_same(left: Episode, right: Episode) -> None:
    assert left.frames.keys() == right.frames.keys()
    for name, images in left.frames.items():
        np.testing.assert_array_equal(images, right.frames[name])
    arrays = ("labels", "actions", "intended", "states", "initial_state", "env_rewards")
    for name in (*arrays, "terminated", "truncated", "is_grasped", "at_rest"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.dtype == theirs.dtype, name
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
    for name in ("success", "seed", "source", "split", "complete"):
        assert getattr(left, name) == getattr(right, name), name


@pytest.fixture
def old_store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD_STORE, tmp_path / "store"))


def test_a_store_of_an_earlier_version_is_read(old_store):
    store = EpisodeStore(old_store)
    assert detect_format(old_store).name == "native"
    assert (store.num_episodes, store.faults, store.content_hash) == (6, [], CONTENT_HASH)
    for number, episode in enumerate(store):
        assert_same(episode, expected(number))


def test_an_earlier_journal_is_sealed_and_the_store_grows(old_store):
    with StoreWriter(old_store) as writer:
        assert not (old_store / "shards/s000002/journal.log").exists()
        assert EpisodeStore(old_store).content_hash == CONTENT_HASH
        writer.add(expected(6))
    store = EpisodeStore(old_store)
    assert (store.num_episodes, store.faults) == (7, [])
    for number, episode in enumerate(store):
        assert_same(episode, expected(number))


def test_episodes_hash_as_they_did(tmp_path, old_store):
    with StoreWriter(tmp_path / "new") as writer:
        writer.add_many([expected(number) for number in range(6)])
    assert EpisodeStore(tmp_path / "new").content_hash == CONTENT_HASH
