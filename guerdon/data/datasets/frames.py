"""`RewardDataset`: labelled frames to learn from, whatever format the episodes came in.

Foreign formats are copied to a native store once, a few episodes at a time; after that frames are read from
the memory map, and no process ever holds the whole set.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch.utils.data import Dataset

from guerdon.core.atomic import write_atomic
from guerdon.core.errors import DataError
from guerdon.core.images import stack_rows, to_unit_chw
from guerdon.core.types import (
    BoolArray,
    Episode,
    Fault,
    FrameBatch,
    IntArray,
    RewardLabels,
    UInt8Array,
    display_path,
)
from guerdon.data.datasets.split import grey_cells, groups, near_duplicates, sampled_steps, split_episodes
from guerdon.data.formats import detect_format
from guerdon.data.formats.npy_trajectory import read_directories
from guerdon.data.store import EpisodeStore
from guerdon.data.summary import convert, write_all

log = logging.getLogger("guerdon")


class RewardDataset(Dataset[tuple[Any, float]]):
    """Frames with labels. `batch` is the fast way; indexing one by one suits a torch `DataLoader`."""

    def __init__(
        self,
        store: EpisodeStore | Path | str,
        *,
        cameras: Sequence[str] | None = None,
        rows: IntArray | None = None,
        num_frames: int = 1,
    ) -> None:
        """Frames of `store`.

        Args:
            store: the episodes, or the path of a native store.
            cameras: which cameras to read, in this order; None: all.
            rows: int [N], which frames; None: all.
            num_frames: k; above 1, each frame comes as a stack with the k - 1 before it in its episode. They
                are gathered when they are asked for; before an episode's start its first frame is repeated.
        """
        store = EpisodeStore(store) if isinstance(store, str | Path) else store
        self.store, self.num_frames = store, num_frames
        named = (cameras,) if isinstance(cameras, str) else cameras
        self.cameras = tuple(store.cameras if named is None else named)
        missing = [name for name in self.cameras if name not in store.cameras]
        if missing:
            raise DataError(
                f"{display_path(store.path)} has no camera {missing[0]!r}; it has {list(store.cameras)}"
            )
        self.rows: IntArray = np.arange(store.num_frames) if rows is None else np.asarray(rows, np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, float]:
        """One frame, float32 [C, H, W] in [0, 1] (by camera if there are several), and its label.

        Stacks are [k, C, H, W].
        """
        row = self.rows[index : index + 1]
        images = {name: torch.from_numpy(to_unit_chw(self._frames(name, row)[0])) for name in self.cameras}
        label = float(self.store.labels[row[0]])
        return (images if len(images) > 1 else images[self.cameras[0]]), label

    def batch(self, indices: ArrayLike) -> FrameBatch:
        """Frames and labels at `indices` (int [n], positions in this data set).

        Frames are uint8 [n, H, W, C], or [n, k, H, W, C] with `num_frames` above 1.
        """
        rows = self.rows[np.asarray(indices, np.int64)]
        store = self.store
        labels = RewardLabels(labels=store.labels[rows], episode=store.episode[rows], step=store.step[rows])
        return FrameBatch(frames={name: self._frames(name, rows) for name in self.cameras}, labels=labels)

    def _frames(self, camera: str, rows: IntArray) -> UInt8Array:
        if self.num_frames == 1:
            return self.store.frames(camera, rows)
        stacks = stack_rows(rows, self.store.step[rows], self.num_frames)
        images = self.store.frames(camera, stacks.reshape(-1))
        return images.reshape(*stacks.shape, *images.shape[1:])


def open_store(
    path: str | None, positive_dir: str | None, negative_dir: str | None, cache: Path
) -> tuple[EpisodeStore, list[Fault]]:
    """The episodes at `path`, or in two directories of `.npy` trajectories, as a native store.

    Data that is in another format is copied to `cache` first, unless it is there already from the same files.
    What cannot be read is left out and named in the log.
    """
    store, faults = _opened(path, positive_dir, negative_dir, cache)
    for fault in faults:
        log.warning("not used: %s: %s", display_path(fault.path), fault.reason)
    return store, faults


def _opened(
    path: str | None, positive_dir: str | None, negative_dir: str | None, cache: Path
) -> tuple[EpisodeStore, list[Fault]]:
    if path is not None:
        source = Path(path)
        if detect_format(source).name == "native":
            store = EpisodeStore(source)
            return store, store.faults
        return _cached(
            _signature(source.rglob("*") if source.is_dir() else [source]),
            cache,
            lambda target: convert(source, target, "native"),
        )
    if positive_dir is None or negative_dir is None:
        raise DataError("no data: give fit.data.path, or fit.data.positive_dir and fit.data.negative_dir")
    places = [Path(positive_dir), Path(negative_dir)]
    for place in places:
        if not place.is_dir():
            raise DataError(f"{display_path(place)} is not a directory of .npy trajectories")
    files = [file for place in places for file in place.rglob("*.npy")]
    return _cached(
        _signature(files), cache, lambda target: write_all(read_directories(*places), target, "native")
    )


def _signature(files: Iterable[Path]) -> str:
    """Changes when a file is added, removed or altered."""
    facts = sorted((str(file), (s := file.stat()).st_size, s.st_mtime_ns) for file in files if file.is_file())
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _cached(signature: str, cache: Path, fill: Any) -> tuple[EpisodeStore, list[Fault]]:
    target, note = cache / signature, cache / f"{signature}.json"
    if note.exists():
        faults = [Fault(**item) for item in json.loads(note.read_text())]
        return EpisodeStore(target), faults
    if target.exists():  # a copy that was interrupted; a new one beside it is simpler than mending it
        target = cache / f"{signature}-{len(list(cache.iterdir()))}"
    cache.mkdir(parents=True, exist_ok=True)
    _, faults = fill(target)
    store = EpisodeStore(target)
    if target == cache / signature:
        text = json.dumps([{"path": fault.path, "reason": fault.reason} for fault in faults]).encode()
        write_atomic(note, lambda file: file.write(text))
    return store, faults


def describe(store: EpisodeStore) -> list[str]:
    """What RLinf's reward training lists: trajectories, frames and labels, for each kind of trajectory."""
    lines = []
    for name, wanted in (("positive", True), ("negative", False)):
        of_kind = store.success[store.episode] == wanted
        labels = store.labels[of_kind] >= 0.5
        lines.append(
            f"{name}: {int((store.success == wanted).sum())} trajectories, {len(labels)} frames "
            f"(label=1: {int(labels.sum())}, label=0: {int((~labels).sum())})"
        )
    return lines


def split_store(
    store: EpisodeStore, *, val_fraction: float, seed: int, camera: str, only_at_rest: bool = False
) -> dict[str, IntArray]:
    """Episode numbers of `train` and `val`; splits that all episodes declare are kept, others are made.

    Truncated episodes have labels like any other, so they go to `train`; they prove nothing about failures
    and are never in `val`.
    """
    whole = np.flatnonzero(store.complete)
    declared = np.array(store.episode_column("split"))
    if set(declared.tolist()) == {"train", "val"}:
        splits = {name: np.flatnonzero(declared == name) for name in ("train", "val")}
    else:
        lengths = np.diff(store.starts)
        rows = [store.starts[number] + sampled_steps(int(lengths[number])) for number in whole.tolist()]
        cells = [grey_cells(store.frames(camera, each)) for each in rows]
        group = groups(len(whole), near_duplicates(cells))
        fractions = {"train": 1.0 - val_fraction, "val": val_fraction}
        parts = split_episodes(store.success[whole], group, fractions=fractions, seed=seed)
        splits = {name: whole[episodes] for name, episodes in parts.items()}
        splits["train"] = np.sort(np.append(splits["train"], np.flatnonzero(~store.complete)))
    for name, episodes in splits.items():
        _check_split(store, name, episodes, only_at_rest)
    return splits


def _check_split(store: EpisodeStore, name: str, episodes: IntArray, only_at_rest: bool) -> None:
    labels = store.labels[rows_of(store, episodes, only_at_rest=only_at_rest)]
    if len(episodes) < 2:
        raise DataError(
            f"the {name} split has {len(episodes)} episode(s); at least 2 are needed: collect more data"
        )
    for kind, there in (("success", bool((labels >= 0.5).any())), ("failure", bool((labels < 0.5).any()))):
        if not there:
            raise DataError(
                f"the {name} split has no {kind} frame; a classifier needs both: collect more data"
            )


def rows_of(store: EpisodeStore, episodes: IntArray, *, only_at_rest: bool = False) -> IntArray:
    """All frame rows of `episodes`, in order; or those in which the robot stands still."""
    mask = np.zeros(store.num_episodes, np.bool_)
    mask[episodes] = True
    rows = np.flatnonzero(mask[store.episode])
    if only_at_rest:
        return rows[frames_at_rest(store)[rows]]
    check_store_shows_motion(store)
    return rows


def check_store_shows_motion(store: EpisodeStore) -> None:
    """`check_motion_is_seen` for some episodes of a store."""
    if store.at_rest() is not None and store.num_episodes:
        for number in np.unique(np.linspace(0, store.num_episodes - 1, 64, dtype=np.int64)).tolist():
            check_motion_is_seen(store.read_episode(number), store.path)


def check_motion_is_seen(episode: Episode, path: Path | str) -> None:
    """Refuse data of `collect.only_at_rest`, whose frames of a robot in motion show where it last stood.

    Where nothing ever changes it is the camera that does not look; the audit says so.
    """
    if episode.at_rest is None:
        return
    moving = 1 + np.flatnonzero(~episode.at_rest[1:])
    pictures = episode.frames.values()
    changes = any(bool((part != part[:1]).any()) for part in pictures)
    same = changes and all(np.array_equal(part[moving], part[moving - 1]) for part in pictures)
    if len(moving) >= 5 and same:
        raise DataError(
            f"{display_path(path)} was rendered only where the robot stands still (collect.only_at_rest), so "
            "that only models with reward.model.only_at_rest=true accept it: collect again without it"
        )


def frames_at_rest(store: EpisodeStore) -> BoolArray:
    """Whether the robot stands still in each frame, bool [F]."""
    flags = store.at_rest()
    if flags is None:
        raise DataError(
            f"{display_path(store.path)} does not tell where the robot stands still, which "
            "reward.model.only_at_rest needs: collect it from an environment whose info has is_robot_static"
        )
    return flags
