"""Splits are by episode, stratified, seeded, and keep near-duplicates together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guerdon.core.errors import DataError
from guerdon.data.datasets.split import grey_cells, groups, near_duplicates, sampled_steps, split_episodes

SHARES = {"train": 0.7, "val": 0.2, "test": 0.1}


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(0, 5), st.data())
def test_every_episode_is_in_one_split_and_groups_stay_whole(success, seed, data):
    group = np.array(data.draw(st.lists(st.integers(0, 20), min_size=len(success), max_size=len(success))))
    splits = split_episodes(np.array(success), group, fractions=SHARES, seed=seed)
    everything = np.concatenate(list(splits.values()))
    assert sorted(everything.tolist()) == list(range(len(success)))
    for number in set(group.tolist()):
        members = set(np.flatnonzero(group == number).tolist())
        assert sum(bool(members & set(episodes.tolist())) for episodes in splits.values()) == 1


def test_both_kinds_are_in_every_split():
    success = np.arange(200) < 40
    splits = split_episodes(success, np.arange(200), fractions=SHARES, seed=1)
    assert {name: len(episodes) for name, episodes in splits.items()} == {"train": 140, "val": 40, "test": 20}
    assert {name: int(success[e].sum()) for name, e in splits.items()} == {"train": 28, "val": 8, "test": 4}


def test_even_a_few_episodes_reach_every_split():
    success = np.array([True] * 3 + [False] * 3)
    splits = split_episodes(success, np.arange(6), fractions=SHARES)
    assert all(success[episodes].any() and (~success[episodes]).any() for episodes in splits.values())


def test_the_seed_decides():
    success, group = np.arange(50) < 25, np.arange(50)
    first, again, other = (
        split_episodes(success, group, fractions=SHARES, seed=seed)["val"].tolist() for seed in (3, 3, 4)
    )
    assert first == again != other


@pytest.mark.parametrize("fractions", [{"train": 0.5}, {"train": 1.5, "val": -0.5}])
def test_wrong_shares_are_refused(fractions):
    with pytest.raises(DataError, match="add up to 1"):
        split_episodes(np.array([True]), np.array([0]), fractions=fractions)


def scene(rng, steps=20, size=48):
    """A bright square that wanders over a fixed textured background."""
    background = np.random.default_rng(7).integers(60, 120, (size, size, 3), dtype=np.uint8)
    frames = np.repeat(background[None], steps, axis=0)
    place = rng.uniform(5, size - 15, 2)
    for step in range(steps):
        place = np.clip(place + rng.normal(0, 2, 2), 0, size - 10)
        row, column = place.astype(int)
        frames[step, row : row + 9, column : column + 9] = 250
    return frames


def cells_of(episodes):
    return np.stack([grey_cells(frames[sampled_steps(len(frames))]) for frames in episodes])


def test_copies_are_found_and_different_episodes_are_not():
    rng = np.random.default_rng(0)
    episodes = [scene(rng) for _ in range(40)]
    noisy = np.clip(episodes[3].astype(int) + rng.integers(-3, 4, episodes[3].shape), 0, 255).astype(np.uint8)
    episodes += [episodes[5].copy(), noisy]
    pairs = near_duplicates(cells_of(episodes))
    assert pairs == [(3, 41), (5, 40)]
    group = groups(42, pairs)
    assert group[41] == 3
    assert group[40] == 5
    assert len(set(group.tolist())) == 40


def test_images_smaller_than_the_cells():
    frames = np.random.default_rng(0).integers(0, 256, (3, 5, 9, 1), dtype=np.uint8)
    cells = grey_cells(frames)
    assert cells.shape == (3, 16, 16)
    assert np.isfinite(cells).all()


def test_cells_are_means():
    frames = np.zeros((1, 32, 64, 3), np.uint8)
    frames[0, :2, :4] = 200
    cells = grey_cells(frames)
    assert cells[0, 0, 0] == 200
    assert cells.sum() == 200
