"""Split a data set by episode: stratified, seeded, near-duplicates always on the same side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from guerdon.core.errors import DataError
from guerdon.core.types import BoolArray, IntArray


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
        group: int [E]; episodes with the same number stay together (`fingerprint.groups`).
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
