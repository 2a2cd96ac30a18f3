"""Perceptual hashes of episodes, to find those that are almost the same.

A frame is shrunk to 16x16 grey cells and compared with the data set's mean picture: a cell is brighter,
darker or alike. What all frames share (table, robot base, wall) thereby drops out, and two episodes are alike
only if what moves in them moves alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from guerdon.core.types import FloatArray, IntArray, UInt8Array

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
    rows, columns = (_cell_edges(size, cells) for size in values.shape[1:])
    sums = np.add.reduceat(np.add.reduceat(values, rows, axis=1), columns, axis=2)
    heights, widths = _widths(rows, values.shape[1]), _widths(columns, values.shape[2])
    means: FloatArray = (sums / (heights[:, None] * widths[None, :])).astype(np.float32)
    return means


def _cell_edges(size: int, cells: int) -> IntArray:
    return np.minimum((np.arange(cells) * size) // cells, size - 1).astype(np.int64)


def _widths(edges: IntArray, size: int) -> FloatArray:
    # reduceat sums one element where an edge repeats (images smaller than the cells)
    return np.maximum(np.diff(np.append(edges, size)), 1).astype(np.float32)


def fingerprints(cells: FloatArray) -> NDArray[np.uint64]:
    """float32 [E, FRAMES_PER_EPISODE, 16, 16] -> uint64 [E, FRAMES_PER_EPISODE, 8].

    Of the 512 bits of a frame one half says which cells are brighter than the mean picture, one half which
    are darker.
    """
    offset = cells - cells.mean(axis=(0, 1), keepdims=True)
    flat = offset.reshape(*offset.shape[:2], -1)
    packed = np.packbits(np.concatenate([flat > DEAD_ZONE, flat < -DEAD_ZONE], axis=-1), axis=-1)
    return np.ascontiguousarray(packed).view(np.uint64)


def near_duplicates(cells: FloatArray, max_distance: float = MAX_DISTANCE) -> list[tuple[int, int]]:
    """All pairs (a, b), a < b, of episodes that look almost the same.

    The hash of one frame is compared first, in blocks, then those of all frames; pairs that pass are
    confirmed on the grey cells themselves.

    Args:
        cells: float32 [E, FRAMES_PER_EPISODE, 16, 16], `grey_cells` at the `sampled_steps`.
        max_distance: see `MAX_DISTANCE`.
    """
    if len(cells) < 2:
        return []
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
