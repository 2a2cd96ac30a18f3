"""A sheet of frames: a few episodes of each kind, evenly spaced frames, labels as coloured borders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from guerdon.core.atomic import write_atomic
from guerdon.core.errors import DataError
from guerdon.core.types import Episode, UInt8Array, display_path
from guerdon.data.datasets.fingerprint import sampled_steps
from guerdon.data.formats import detect_format, get_format

POSITIVE, NEGATIVE, EMPTY = (46, 160, 67), (207, 34, 46), (255, 255, 255)
BORDER, ROWS_PER_KIND, TILE = 3, 3, 96


def write_preview(path: Path | str, target: Path | str, format: str | None = None) -> None:
    """Draw the first successes and failures of the data set at `path` to the PNG file `target`."""
    path, target = Path(path), Path(target)
    kind = detect_format(path) if format is None else get_format(format)
    shown: dict[bool, list[Episode]] = {True: [], False: []}
    for item in kind.read(path):
        if isinstance(item, Episode) and len(shown[item.success]) < ROWS_PER_KIND:
            shown[item.success].append(item)
        if all(len(episodes) == ROWS_PER_KIND for episodes in shown.values()):
            break
    episodes = [*shown[True], *shown[False]]
    if not episodes:
        raise DataError(f"{display_path(path)} has no usable episode to draw")
    sheet = Image.fromarray(np.concatenate([_row(episode) for episode in episodes], axis=0))
    write_atomic(target, lambda file: sheet.save(file, format="PNG"))


def _row(episode: Episode) -> UInt8Array:
    """All cameras of one episode, side by side over time -> uint8 [TILE, width, 3]."""
    steps = sampled_steps(episode.num_frames)
    tiles = [
        _tile(frames[step], bool(episode.labels[step] >= 0.5))
        for frames in list(episode.frames.values())[:1]
        for step in steps
    ]
    return np.concatenate(tiles, axis=1)


def _tile(frame: UInt8Array, positive: bool) -> UInt8Array:
    """One frame, scaled, with a border that tells its label."""
    picture = np.repeat(frame, 3, axis=-1) if frame.shape[-1] == 1 else frame
    inner = TILE - 2 * BORDER
    scaled = Image.fromarray(picture).resize((inner, inner), Image.Resampling.BILINEAR)
    tile = np.empty((TILE, TILE, 3), np.uint8)
    tile[:] = POSITIVE if positive else NEGATIVE
    tile[BORDER:-BORDER, BORDER:-BORDER] = np.asarray(scaled)
    return tile
