"""Whether a camera shows anything of what success is about.

What can be said for sure is that nothing moves in its pictures, whatever happens. Beyond that, a small
classifier on small pictures is tried on episodes that it was not fitted to. Chance is no proof there: on hard
views, such as Tabletop's with random light and colours and without its lamp, it fails where a reward model
does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.data.datasets.split import cell_means
from guerdon.data.store import EpisodeStore

CELLS = 8
FRAMES_PER_LABEL = 8
"""Frames of an episode that are looked at, of those with and of those without success."""
MIN_EPISODES = 6
"""Fewer episodes with success, or fewer without it throughout, allow no statement about what moves ..."""
MIN_PROBED = 40
"""... and fewer than that none about what a classifier can tell."""
SAME = 1.5
"""Grey levels that no cell deviates by where nothing moves; a robot in view moves some by 40 and more."""
CHANCE = 0.55
"""Up to this area under the curve a classifier counts as no better than chance."""
_FOLDS, _RIDGE, _MAX_EPISODES = 4, 1.0, 400


@dataclass(frozen=True, kw_only=True)
class View:
    """What one camera shows."""

    blind: bool
    """Nothing moves in its pictures, with success or without."""
    auc: float | None
    """Of a quick classifier on held-out episodes; None if there are too few to say."""


def probe_steps(labels: FloatArray) -> IntArray:
    """Which frames of an episode are looked at: some with success, some without, evenly spread, int [n]."""
    chosen = []
    for rows in (np.flatnonzero(labels < 0.5), np.flatnonzero(labels >= 0.5)):
        count = min(len(rows), FRAMES_PER_LABEL)
        chosen.append(rows[np.rint(np.linspace(0, len(rows) - 1, count)).astype(np.int64)])
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def small_pictures(frames: UInt8Array) -> FloatArray:
    """uint8 [n, H, W, C] -> float32 [n, C * 64], the mean colour of each of 8x8 cells."""
    cells = [cell_means(frames[..., each].astype(np.float32), CELLS) for each in range(frames.shape[-1])]
    return np.concatenate([each.reshape(len(frames), -1) for each in cells], axis=1)


def probe(pictures: list[FloatArray], labels: list[BoolArray]) -> View | None:
    """What a camera shows of success.

    Args:
        pictures: float32 [n, D] of each episode, `small_pictures` at its `probe_steps`.
        labels: bool [n] of each episode.

    Returns:
        None if there are too few episodes to say anything.
    """
    pictures, labels = pictures[:_MAX_EPISODES], labels[:_MAX_EPISODES]
    good = sum(bool(each.any()) for each in labels)
    few = min(good, len(labels) - good)
    if few < MIN_EPISODES:
        return None
    # Light and colours may differ between episodes: where there are several frames of one, what counts is how
    # they change.
    several = any(len(each) > 1 for each in pictures)
    everything = np.concatenate([each - each[:1] if several else each for each in pictures])
    blind = float(everything.std(axis=0).max()) < SAME
    return View(blind=blind, auc=None if blind or few < MIN_PROBED else _auc(pictures, labels))


def probe_store(store: EpisodeStore, camera: str) -> View | None:
    """`probe` of one camera of a data set."""
    pictures: list[FloatArray] = []
    labels: list[BoolArray] = []
    chosen = np.linspace(0, store.num_episodes - 1, min(store.num_episodes, _MAX_EPISODES))
    for number in np.rint(chosen).astype(np.int64).tolist():
        rows = np.arange(store.starts[number], store.starts[number + 1])
        rows = rows[probe_steps(store.labels[rows])]
        pictures.append(small_pictures(store.frames(camera, rows)))
        labels.append(store.labels[rows] >= 0.5)
    return probe(pictures, labels)


def blind_camera_message(camera: str) -> str:
    """What to say of a camera in whose pictures nothing moves."""
    return (
        f"frames of success and of failure cannot be told apart by camera {camera!r}: its pictures stay the "
        "same whatever happens. Does it show the robot and the goal? `guerdon data inspect DATA --preview "
        "sheet.png` shows what it sees"
    )


def _auc(pictures: list[FloatArray], labels: list[BoolArray]) -> float | None:
    """Mean area under the curve on episodes that were held out in turn."""
    inputs = [np.concatenate([each, each - each[:1]], axis=1).astype(np.float64) for each in pictures]
    order = np.argsort([not each.any() for each in labels], kind="stable")  # both kinds in every fold
    fold = np.empty(len(labels), np.int64)
    fold[order] = np.arange(len(labels)) % _FOLDS
    areas: list[float] = []
    for number in range(_FOLDS):
        known, new = (
            (np.concatenate([inputs[i] for i in chosen]), np.concatenate([labels[i] for i in chosen]))
            for chosen in (np.flatnonzero(fold != number), np.flatnonzero(fold == number))
        )
        if not new[1].all():
            areas.append(_fit_and_score(*known, *new))
    return float(np.mean(areas)) if areas else None


def _fit_and_score(
    x: NDArray[np.float64], y: BoolArray, unseen: NDArray[np.float64], truth: BoolArray
) -> float:
    """Ridge regression of the label on some frames, area under the curve on others."""
    mean = x.mean(axis=0)
    scale = 1.0 / np.maximum(x.std(axis=0), 1.0)  # less than a grey level is noise, and is not blown up
    weight = np.where(y, 0.5 / y.mean(), 0.5 / max(1.0 - y.mean(), 1e-9)) / len(y)
    inputs = (x - mean) * scale
    gram = (inputs * weight[:, None]).T @ inputs
    gram[np.diag_indices_from(gram)] += _RIDGE
    slopes = np.linalg.solve(gram, (inputs * weight[:, None]).T @ (2.0 * y - 1.0))
    scores = np.round(((unseen - mean) * scale) @ slopes, 9)
    good, bad = scores[truth], np.sort(scores[~truth])
    below, upto = np.searchsorted(bad, good, "left"), np.searchsorted(bad, good, "right")
    return float((below + upto).mean() / (2 * len(bad)))
