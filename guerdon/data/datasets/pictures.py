"""Frames as picture files: a sheet of a few episodes, and what a model is shown in training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.errors import DataError
from guerdon.core.progress import progress
from guerdon.core.types import Episode, IntArray, UInt8Array, display_path
from guerdon.data.datasets.split import sampled_steps
from guerdon.data.formats import Format, find_format

if TYPE_CHECKING:  # with it comes torch, which a preview does without
    from guerdon.data.datasets.frames import RewardDataset

MAX_PICTURES = 500
POSITIVE, NEGATIVE = (46, 160, 67), (207, 34, 46)
BORDER, ROWS_PER_KIND, TILE = 3, 3, 96


def save_picture(path: Path, frame: UInt8Array) -> None:
    """Write one frame (uint8 [H, W, C]) as PNG."""
    picture = Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame)
    write_atomic(path, lambda file: picture.save(file, format="PNG"))


def write_preview(path: Path | str, target: Path | str, format: str | Format | None = None) -> None:
    """Write `preview` to the PNG file `target`."""
    picture = preview(path, format)
    write_atomic(Path(target), lambda file: picture.save(file, format="PNG"))


def preview(path: Path | str, format: str | Format | None = None) -> Image.Image:
    """A picture of the first successes and failures of the data set at `path`.

    A row is an episode: evenly spaced frames of its first camera, with their labels as coloured borders.
    """
    path = Path(path)
    kind = find_format(path, format)
    shown: dict[bool, list[Episode]] = {True: [], False: []}
    for item in kind.read(path):
        if isinstance(item, Episode) and len(shown[item.success]) < ROWS_PER_KIND:
            shown[item.success].append(item)
        if all(len(episodes) == ROWS_PER_KIND for episodes in shown.values()):
            break
    rows = []
    for episode in (*shown[True], *shown[False]):
        frames = next(iter(episode.frames.values()))
        steps = sampled_steps(episode.num_frames)
        tiles = [_tile(frames[step], bool(episode.labels[step] >= 0.5)) for step in steps]
        rows.append(np.concatenate(tiles, axis=1))
    if not rows:
        raise DataError(f"{display_path(path)} has no usable episode to draw")
    return Image.fromarray(np.concatenate(rows, axis=0))


def _tile(frame: UInt8Array, positive: bool) -> UInt8Array:
    """One frame, scaled to uint8 [TILE, TILE, 3], with a border that tells its label."""
    picture = np.repeat(frame, 3, axis=-1) if frame.shape[-1] == 1 else frame
    inner = TILE - 2 * BORDER
    tile = np.empty((TILE, TILE, 3), np.uint8)
    tile[:] = POSITIVE if positive else NEGATIVE
    scaled = Image.fromarray(picture).resize((inner, inner), Image.Resampling.BILINEAR)
    tile[BORDER:-BORDER, BORDER:-BORDER] = np.asarray(scaled)
    return tile


def save_positive_pictures(dataset: RewardDataset, folder: Path) -> int:
    """All positive frames as `{folder}_{trajectory}_frame{step:03d}.png` (`--visualize-positive`)."""
    store = dataset.store
    rows = np.flatnonzero(store.labels >= 0.5)
    sources = store.episode_column("source")
    make_directory(folder)
    camera = dataset.cameras[0]
    for row in progress(rows.tolist(), "drawing", unit="frame"):
        number = int(store.episode[row])
        place = Path(sources[number])
        name = f"{place.parent.name}_{place.stem}" if place.suffix else f"positive_{number:06d}"
        save_picture(folder / f"{name}_frame{int(store.step[row]):03d}.png", store.frames(camera, [row])[0])
    return len(rows)


def save_training_pictures(dataset: RewardDataset, folder: Path, rows: IntArray) -> int:
    """A sample of the training frames, in `success/` and `fail/` (`data.debug_save_dir`)."""
    store = dataset.store
    count = 0
    for name, wanted in (("success", True), ("fail", False)):
        of_kind = rows[(store.labels[rows] >= 0.5) == wanted]
        few = of_kind[np.linspace(0, len(of_kind) - 1, min(len(of_kind), MAX_PICTURES)).astype(np.int64)]
        make_directory(folder / name)
        for row in few.tolist():
            number, step = int(store.episode[row]), int(store.step[row])
            for camera in dataset.cameras:
                file = folder / name / f"episode{number:06d}_step{step:03d}_{camera.replace('/', '_')}.png"
                save_picture(file, store.frames(camera, [row])[0])
            count += 1
    return count
