"""Split a data set by episode: stratified, seeded, near-duplicates always on the same side.

Near-duplicates are found by perceptual hashes. A frame is shrunk to 16x16 grey cells and compared with the
data set's mean picture: a cell is brighter, darker or alike. What all frames share (table, robot base, wall)
thereby drops out, and two episodes are alike only if what moves in them moves alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from guerdon.core.errors import DataError
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array

CELLS = 16
FRAMES_PER_EPISODE = 8
DEAD_ZONE = 3.0
"""Grey levels within which a cell counts as alike; above the noise of a camera, below a moving object."""
MAX_DISTANCE = 32.0
"""Mean number of differing bits per frame (of 512) up to which two episodes are compared closely. Generous,
since a cell near the edge of the dead zone flips with the noise of a camera."""
MAX_CELL_CHANGE = 12.0
"""Grey levels by which no cell of near-duplicates differs; a bright object that moved a little exceeds it."""


def sampled_steps(num_frames: int) -> IntArray:
    """Which steps of an episode are looked at: evenly spread, the first and the last among them."""
    return np.rint(np.linspace(0, num_frames - 1, FRAMES_PER_EPISODE)).astype(np.int64)


def grey_cells(frames: UInt8Array) -> FloatArray:
    """uint8 [N, H, W, C] -> float32 [N, 16, 16], the mean grey of each cell."""
    grey = frames[..., 0].astype(np.float32)
    for channel in range(1, frames.shape[-1]):  # `mean` over so short an axis takes ten times as long
        grey += frames[..., channel]
    grey /= frames.shape[-1]
    return cell_means(grey, CELLS)


def cell_means(values: FloatArray, cells: int) -> FloatArray:
    """float32 [N, H, W] -> float32 [N, cells, cells], the mean of each cell."""
    sizes = values.shape[1:]
    edges = [np.minimum((np.arange(cells) * size) // cells, size - 1).astype(np.int64) for size in sizes]
    sums = np.add.reduceat(np.add.reduceat(values, edges[0], axis=1), edges[1], axis=2)
    # reduceat sums one element where an edge repeats (images smaller than the cells)
    heights, widths = (
        np.maximum(np.diff(np.append(edge, size)), 1).astype(np.float32)
        for edge, size in zip(edges, sizes, strict=True)
    )
    means: FloatArray = (sums / (heights[:, None] * widths[None, :])).astype(np.float32)
    return means


def episode_cells(frames: UInt8Array) -> FloatArray:
    """An episode's frames of one camera, uint8 [T, H, W, C] -> their `grey_cells` at the `sampled_steps`."""
    return grey_cells(frames[sampled_steps(len(frames))])


def fingerprints(cells: FloatArray) -> NDArray[np.uint64]:
    """float32 [E, FRAMES_PER_EPISODE, 16, 16] -> uint64 [E, FRAMES_PER_EPISODE, 8].

    Of the 512 bits of a frame one half says which cells are brighter than the mean picture, one half which
    are darker.
    """
    offset = cells - cells.mean(axis=(0, 1), keepdims=True)
    flat = offset.reshape(*offset.shape[:2], -1)
    packed = np.packbits(np.concatenate([flat > DEAD_ZONE, flat < -DEAD_ZONE], axis=-1), axis=-1)
    return np.ascontiguousarray(packed).view(np.uint64)


def near_duplicates(
    cells: FloatArray | Sequence[FloatArray], max_distance: float = MAX_DISTANCE
) -> list[tuple[int, int]]:
    """All pairs (a, b), a < b, of episodes that look almost the same.

    The hash of one frame is compared first, in blocks, then those of all frames; pairs that pass are
    confirmed on the grey cells themselves.

    Args:
        cells: float32 [E, FRAMES_PER_EPISODE, 16, 16], the `episode_cells` of each.
        max_distance: see `MAX_DISTANCE`.
    """
    if len(cells) < 2:
        return []
    cells = np.asarray(cells)
    prints = fingerprints(cells)
    middle = prints[:, FRAMES_PER_EPISODE // 2]
    pairs: list[tuple[int, int]] = []
    for start in range(0, len(prints), 256):
        block = middle[start : start + 256]
        distance = np.bitwise_count(block[:, None] ^ middle[None, :]).sum(axis=-1, dtype=np.int64)
        left, right = np.nonzero(distance <= 3 * max_distance)
        left = left + start
        keep = left < right
        left, right = left[keep], right[keep]
        bits = np.bitwise_count(prints[left] ^ prints[right]).sum(axis=(1, 2), dtype=np.int64)
        close = bits <= max_distance * FRAMES_PER_EPISODE
        left, right = left[close], right[close]
        alike = np.abs(cells[left] - cells[right]).max(axis=(1, 2, 3), initial=0.0) <= MAX_CELL_CHANGE
        pairs += list(zip(left[alike].tolist(), right[alike].tolist(), strict=True))
    return pairs


def groups(count: int, pairs: Sequence[tuple[int, int]]) -> IntArray:
    """Join pairs to groups: int64 [count], the smallest member of each one's group."""
    parent = list(range(count))

    def root(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for left, right in pairs:
        low, high = sorted((root(left), root(right)))
        parent[high] = low
    return np.array([root(item) for item in range(count)], np.int64)


def split_episodes(
    success: BoolArray,
    group: IntArray,
    *,
    fractions: Mapping[str, float],
    seed: int = 0,
) -> dict[str, IntArray]:
    """Divide episodes among splits.

    Whole groups are assigned, successes and failures apart, so that each split gets its share of both. Every
    split gets at least one group of each kind if there are enough.

    Args:
        success: bool [E].
        group: int [E]; episodes with the same number stay together (`groups`).
        fractions: split name -> share; the shares add up to 1.
        seed: the same seed gives the same split of the same episodes.

    Returns:
        split name -> sorted episode numbers.
    """
    if abs(sum(fractions.values()) - 1.0) > 1e-6 or min(fractions.values()) < 0:
        raise DataError(f"split fractions must be positive and add up to 1, not {dict(fractions)}")
    if len(success) != len(group):
        raise DataError(f"{len(success)} success flags, but {len(group)} group numbers")
    rng = np.random.default_rng(seed)
    members: dict[int, list[int]] = {}
    for episode, number in enumerate(group.tolist()):
        members.setdefault(number, []).append(episode)
    chosen: dict[str, list[int]] = {name: [] for name in fractions}
    for wanted in (True, False):  # a group counts as a success if any of its episodes is one
        stratum = [items for items in members.values() if bool(success[items].any()) is wanted]
        order = rng.permutation(len(stratum))
        _deal([stratum[index] for index in order], fractions, chosen)
    return {name: np.array(sorted(episodes), np.int64) for name, episodes in chosen.items()}


def _deal(stratum: Sequence[list[int]], fractions: Mapping[str, float], chosen: dict[str, list[int]]) -> None:
    """Give each group to the split that is furthest behind its share; small shares are served first."""
    total = sum(len(items) for items in stratum)
    given = dict.fromkeys(fractions, 0)
    names = sorted((name for name, share in fractions.items() if share > 0), key=lambda name: fractions[name])
    for number, items in enumerate(stratum):
        if number < len(names) <= len(stratum):
            name = names[number]
        else:
            name = max(names, key=lambda name: fractions[name] * total - given[name])
        chosen[name] += items
        given[name] += len(items)
