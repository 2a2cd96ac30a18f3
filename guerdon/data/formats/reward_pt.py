"""`reward-pt`: `train.pt` and `val.pt` (also `test.pt`), each `{"images", "labels", "metadata"}`.

`images` is a list of uint8 tensors [H, W, C] (read: also [C, H, W], or one tensor), `labels` a list of 0 and
1. Which frames belong to one episode is kept in `metadata["episode_ids"]` and `["step_ids"]`. A foreign file
lacks them, and its frames were shuffled: they become one pseudo-episode for each file and label, so that
nobody who splits by episode can put frames of one real episode on both sides.

Kept beside: further cameras (`metadata["extra_images"]`), labels between 0 and 1, and success, seed, source,
split and completeness of each episode. Lost in writing: actions, states, rewards and flags.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from guerdon.core.atomic import clear_stale, locked_directory, make_directory, write_atomic
from guerdon.core.errors import DataError
from guerdon.core.images import is_tensor
from guerdon.core.types import Episode, Fault, FloatArray, IntArray, Split, display_path, is_positive
from guerdon.data.files.bounds import Allowance
from guerdon.data.files.safe_pickle import load_torch
from guerdon.data.formats import values
from guerdon.data.formats.base import Format, SpooledWriter, existing, read_or_fault

FILES: dict[str, Split] = {"train.pt": "train", "val.pt": "val", "test.pt": "test"}


@dataclass(frozen=True, kw_only=True)
class _Payload:
    """A file after its first checks."""

    images: Mapping[str, Sequence[Any]]
    """camera -> N images."""
    labels: FloatArray
    """float32 [N]."""
    episode_ids: IntArray
    """int64 [N]."""
    step_ids: IntArray
    """int64 [N]."""
    episodes: Mapping[int, Mapping[str, Any]]
    """episode id -> what is known about it."""
    metadata: Mapping[str, Any]
    room: Allowance


def _load(path: Path) -> _Payload:
    record = load_torch(path)
    images, metadata = values.require(record, "images"), record.get("metadata") or {}
    if not (isinstance(images, list | tuple) or is_tensor(images)) or not isinstance(metadata, Mapping):
        raise DataError("'images' is not a list of tensors, or 'metadata' not a dict")
    count = len(images)
    if count == 0:
        raise DataError("has no frames")
    room = Allowance.of(path)
    room.take_steps(count)
    exact = metadata.get("label_values")
    labels = values.to_labels(values.require(record, "labels") if exact is None else exact, count)
    more = metadata.get("extra_images") or {}
    views = {
        values.main_camera(metadata): images,
        **{values.camera_name(name): each for name, each in more.items()},
    }
    room.take_steps(count * len(more))
    for camera, each in views.items():
        if len(each) != count:
            raise DataError(f"missing camera key: {camera!r} has {len(each)} of {count} frames")

    def ids(key: str, otherwise: IntArray) -> IntArray:
        given = metadata.get(key)
        return otherwise if given is None else values.to_row(given, count, key).astype(np.int64)

    return _Payload(
        images=views,
        labels=labels,
        episode_ids=ids("episode_ids", (labels >= 0.5).astype(np.int64)),
        step_ids=ids("step_ids", np.arange(count)),
        episodes=metadata.get("episodes") or {},
        metadata=metadata,
        room=room,
    )


def _rows_by_episode(payload: _Payload) -> Iterator[tuple[int, IntArray]]:
    """(episode id, its rows in the order of steps), in the order of ids."""
    order = np.lexsort((payload.step_ids, payload.episode_ids))
    ids, first = np.unique(payload.episode_ids[order], return_index=True)
    yield from zip(ids.tolist(), np.split(order, first[1:]), strict=True)


def _read_episode(payload: _Payload, episode_id: int, rows: IntArray, path: Path) -> Episode:
    known = payload.episodes.get(episode_id, {"split": FILES.get(path.name, "")})
    labels = payload.labels[rows]
    return Episode(
        frames={
            camera: values.stack_images([images[int(row)] for row in rows], camera, payload.room)
            for camera, images in payload.images.items()
        },
        labels=labels,
        success=is_positive(labels, bool(known.get("success", False))),
        **values.extras_from(known, path),
    )


def _load_to_extend(path: Path) -> _Payload | None:
    """What is in a file already; None if it is not there."""
    if not path.exists():
        return None
    payload = read_or_fault(path, partial(_load, path))
    if isinstance(payload, Fault):
        raise DataError(f"cannot add to {payload.path}: {payload.reason}")
    return payload


class RewardPtWriter(SpooledWriter):
    """Writes the files when it is closed; what is in them already is kept, and the new episodes follow.

    Unlike with other writers an episode is in memory alone until then: a killed process loses all of them,
    and so does a disk that is full when the writer is closed.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        make_directory(path)
        clear_stale(path)
        self._waiting: dict[str, list[Episode]] = {}
        for name in FILES:
            _load_to_extend(path / name)  # raises now, and not in the end, if it cannot be added to

    def add(self, episode: Episode) -> str:
        """Keep one episode; it is on disk after `close`."""
        self._reserve(episode)
        file = f"{episode.split or 'train'}.pt"
        waiting = self._waiting.setdefault(file, [])
        if waiting and list(waiting[0].frames) != list(episode.frames):
            raise DataError(
                f"cannot write {display_path(self.path / file)}: an episode has the cameras "
                f"{list(episode.frames)}, others have {list(waiting[0].frames)}"
            )
        frames = {camera: np.array(images) for camera, images in episode.frames.items()}
        waiting.append(replace(episode, frames=frames, labels=np.array(episode.labels)))
        return f"{self.path / file}#{len(waiting) - 1}"

    def close(self) -> None:
        """Write the files."""
        import torch

        for name in list(self._waiting):
            path = self.path / name
            with locked_directory(self.path):  # another writer may have added to the file meanwhile
                content = _content(_load_to_extend(path), self._waiting[name], path)
                write_atomic(path, partial(torch.save, content))
            del self._waiting[name]
        self._free()


def _content(before: _Payload | None, added: Sequence[Episode], path: Path) -> dict[str, Any]:
    """What a file holds: the frames that are there, then those of the new episodes."""
    import torch

    cameras = list(added[0].frames)
    images: dict[str, list[Any]] = {camera: [] for camera in cameras}
    labels: list[float] = []
    episode_ids: list[int] = []
    step_ids: list[int] = []
    episodes: dict[int, dict[str, Any]] = {}
    if before is not None:
        if list(before.images) != cameras:
            there = list(before.images)
            raise DataError(f"cannot add to {display_path(path)}: it has the cameras {there}, not {cameras}")
        images = {camera: list(before.images[camera]) for camera in cameras}
        labels, step_ids = before.labels.tolist(), before.step_ids.tolist()
        episode_ids = before.episode_ids.tolist()
        episodes = {number: dict(known) for number, known in before.episodes.items()}
    first = max(episode_ids, default=-1) + 1
    for number, episode in enumerate(added, start=first):
        for camera, frames in episode.frames.items():
            images[camera] += list(torch.from_numpy(frames))
        labels += episode.labels.tolist()
        episode_ids += [number] * episode.num_frames
        step_ids += range(episode.num_frames)
        episodes[number] = {"success": episode.success, **values.extras_of(episode)}
    metadata = {
        **(before.metadata if before is not None else {}),
        "camera_names": cameras,
        "extra_images": {camera: images[camera] for camera in cameras[1:]},
        "episode_ids": episode_ids,
        "step_ids": step_ids,
        "episodes": episodes,
    }
    if any(label not in (0.0, 1.0) for label in labels):
        metadata["label_values"] = labels
    return {
        "images": images[cameras[0]],
        "labels": [int(label >= 0.5) for label in labels],
        "metadata": metadata,
    }


class RewardPt(Format):
    """A directory with `train.pt` and `val.pt`, or one of them."""

    name: ClassVar[str] = "reward-pt"
    looks_for: ClassVar[str] = "train.pt and val.pt"

    def detect(self, path: Path) -> bool:
        """Whether there is one of the files, or the file is an archive of `torch.save`."""
        if path.is_dir():
            return bool(_files(path))
        return path.name in FILES or (path.suffix == ".pt" and zipfile.is_zipfile(path))

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """`train.pt` first; in each the episodes in the order of their ids."""
        for file in _files(existing(path)):
            payload = read_or_fault(file, partial(_load, file))
            if isinstance(payload, Fault):
                yield payload
                continue
            for episode_id, rows in _rows_by_episode(payload):
                make = partial(_read_episode, payload, episode_id, rows, file)
                yield read_or_fault(file, make, f"episode {episode_id}")

    def writer(self, path: Path) -> RewardPtWriter:
        """Append to the files in the directory `path`."""
        return RewardPtWriter(Path(path))


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [path / name for name in FILES if (path / name).is_file()]
