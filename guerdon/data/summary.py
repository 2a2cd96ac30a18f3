"""Look at a data set in any format, and copy it to any other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from guerdon.core.errors import DataError
from guerdon.core.progress import progress
from guerdon.core.types import BoolArray, DataSummary, Episode, Fault, display_path
from guerdon.data.formats import Format, find_format, get_format
from guerdon.data.formats.native import Native
from guerdon.data.store.episode_store import EpisodeStore

Cameras: TypeAlias = Mapping[str, tuple[int, int, int]]
WRITE_BATCH, WRITE_BYTES = 32, 256 << 20
"""Episodes and bytes of frames that are written, and safe on disk, at a time."""


def inspect(path: Path | str, format: str | Format | None = None) -> DataSummary:
    """What is at `path`; the format is detected unless given. Reads everything once, changes nothing.

    Frames of formats that tell their facts apart from them (`lerobot`) are not decoded.
    """
    path = Path(path)
    kind = find_format(path, format)
    if isinstance(kind, Native):
        store = EpisodeStore(path)
        return _summary(
            path,
            kind.name,
            cameras=store.cameras,
            faults=store.faults,
            success=store.success,
            complete=store.complete,
            num_frames=store.num_frames,
            num_positive_frames=int((store.labels >= 0.5).sum()),
            content_hash=store.content_hash,
        )
    by_cameras: dict[tuple[tuple[str, tuple[int, int, int]], ...], list[tuple[Any, ...]]] = {}
    faults: list[Fault] = []
    for item in progress(kind.facts(path), "reading", unit="episode"):
        if isinstance(item, Fault):
            faults.append(item)
        else:
            facts = (item.source, item.success, item.complete, item.num_frames, item.num_positive_frames)
            by_cameras.setdefault(tuple(sorted(item.camera_shapes.items())), []).append(facts)
    most = max(by_cameras, key=lambda key: len(by_cameras[key]), default=())
    for key, episodes in by_cameras.items():
        if key != most:
            reason = mismatch(dict(key), dict(most))
            faults += [Fault(path=source, reason=reason) for source, *_ in episodes]
    columns = list(zip(*by_cameras.get(most, ()), strict=True)) or [()] * 5
    return _summary(
        path,
        kind.name,
        cameras=dict(most),
        faults=faults,
        success=np.array(columns[1], np.bool_),
        complete=np.array(columns[2], np.bool_),
        num_frames=sum(columns[3]),
        num_positive_frames=sum(columns[4]),
    )


def _summary(
    path: Path, format: str, *, faults: list[Fault], success: BoolArray, complete: BoolArray, **known: Any
) -> DataSummary:
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    return DataSummary(
        path=str(path),
        format=format,
        num_episodes=len(success),
        num_success_episodes=int((success & complete).sum()),
        num_failure_episodes=int((~success & complete).sum()),
        num_incomplete_episodes=int((~complete).sum()),
        faults=tuple(faults),
        bytes=sum(item.stat().st_size for item in files),
        **known,
    )


def mismatch(have: Cameras, want: Cameras) -> str:
    """Why an episode with the cameras `have` does not fit among those with `want`."""
    missing = sorted(want.keys() - have.keys())
    if missing:
        return f"has no camera {missing[0]!r}; most episodes have {sorted(want)}"
    extra = sorted(have.keys() - want.keys())
    if extra:
        return f"has a camera {extra[0]!r} that most episodes lack"
    name = next(name for name in want if have[name] != want[name])
    sizes = ["x".join(map(str, shape[name])) for shape in (have, want)]
    return f"camera {name!r} has images of {sizes[0]}, most episodes have {sizes[1]}"


def usable(
    items: Iterable[Episode | Fault], cameras: Cameras | None, faults: list[Fault]
) -> Iterator[Episode]:
    """The episodes that have just `cameras` (None: those of the first); all else is added to `faults`."""
    for item in items:
        if isinstance(item, Fault):
            faults.append(item)
            continue
        cameras = item.camera_shapes if cameras is None else cameras
        if item.camera_shapes != dict(cameras):
            faults.append(Fault(path=item.source, reason=mismatch(item.camera_shapes, cameras)))
        else:
            yield item


def convert(
    source: Path | str,
    target: Path | str,
    to: str | Format,
    format: str | Format | None = None,
    *,
    resume: bool = False,
) -> tuple[int, list[Fault]]:
    """Copy the data set at `source` to `target` in the format `to`; returns episodes written and faults.

    Where episodes differ in cameras or image sizes, those that most of them have are copied and the others
    are named as faults. `target` may hold data of that format already: it is added to, never overwritten.

    Args:
        source: of any format.
        target: the folder or file to write.
        to: the format of the target.
        format: of the source; None detects it.
        resume: go on with a copy that was interrupted: leave out the episodes that `target` has already.
    """
    source, target = Path(source), Path(target)
    if source.resolve() == target.resolve():
        raise DataError(f"source and target are the same: {display_path(source)}")
    kind = find_format(source, format)
    done = copied_sources(target, kind, to) if resume else frozenset()
    summary = inspect(source, kind)
    if summary.num_episodes == 0:
        first = f"; {summary.faults[0].path}: {summary.faults[0].reason}" if summary.faults else ""
        raise DataError(f"{display_path(source)} has no usable episode{first}")
    is_named = kind.names_episodes and isinstance(
        get_format(to), Native
    )  # also at first: to be resumed later
    items = kind.read_except(source, done) if is_named else kind.read(source)
    return write_all(items, target, to, summary.cameras, None if done else summary.num_episodes)


def copied_sources(target: Path, kind: Format, to: str | Format) -> frozenset[str]:
    """The sources of the episodes that a copy has already."""
    if not kind.names_episodes or not isinstance(get_format(to), Native):
        raise DataError(
            f"a copy from {kind.name} to {get_format(to).name} cannot be resumed: episodes are told apart "
            "from lerobot to native only; copy to a new place"
        )
    if not target.exists():
        return frozenset()
    return frozenset(EpisodeStore(target).episode_column("source"))


def write_all(
    items: Iterable[Episode | Fault],
    target: Path,
    to: str | Format,
    cameras: Cameras | None = None,
    total: int | None = None,
) -> tuple[int, list[Fault]]:
    """Write `items` to `target`, a few at a time; returns how many episodes were written, and the faults.

    Without `cameras` the first episode decides which cameras the others must have.
    """
    faults: list[Fault] = []
    written = size = 0
    batch: list[Episode] = []
    with get_format(to).writer(target) as writer:
        for episode in progress(usable(items, cameras, faults), "writing", total=total, unit="episode"):
            try:
                writer.check(episode)
            except DataError as error:  # costs this episode and no other
                faults.append(Fault(path=display_path(episode.source), reason=str(error)))
                continue
            batch.append(episode)
            size += sum(images.nbytes for images in episode.frames.values())
            if len(batch) == WRITE_BATCH or size >= WRITE_BYTES:
                written += len(writer.add_many(batch))
                batch.clear()
                size = 0
        written += len(writer.add_many(batch))
    return written, faults
