"""The films of a run, read again: where they are, their pictures, and the values beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageSequence

from guerdon.core.errors import DataError
from guerdon.core.types import UInt8Array, display_path
from guerdon.data.datasets.media import video_frames
from guerdon.data.files.bounds import one_line, read_json
from guerdon.data.files.videos import MAX_VIDEO_PIXELS
from guerdon.monitoring.video import FORMATS

MAX_VALUES_BYTES = 64 << 20
"""Of the values beside a film."""
MAX_FILM_FRAMES = 100_000


def film_files(folder: Path) -> list[Path]:
    """The films in a run's folder, in the order of their names."""
    found = (folder / "videos").glob("*")
    return sorted(path for path in found if path.suffix in FORMATS and path.is_file())


def film_values(film: Path) -> dict[str, Any] | None:
    """What a run wrote beside a film of it; None where there is nothing."""
    file = film.with_suffix(".json")
    try:
        about = read_json(file, MAX_VALUES_BYTES)
    except FileNotFoundError:
        return None
    if not isinstance(about, dict):
        raise DataError(f"{display_path(file)} must hold an object, not {one_line(about)}")
    return about


def film_frames(file: Path, size: tuple[int, int] | None, count: int | None) -> Iterator[UInt8Array]:
    """The pictures of a film, uint8 [H, W, 3], one at a time.

    Args:
        file: `.gif` or `.mp4`.
        size: height and width of the part to give: the picture without the panel under it; None gives all.
        count: how many there must be; None takes what is there.
    """
    pictures = _gif_frames(file) if file.suffix == ".gif" else (each for _, each in video_frames(file))
    found = 0
    for picture in pictures:
        found += 1
        if found > (MAX_FILM_FRAMES if count is None else count):
            break
        yield picture if size is None else picture[: size[0], : size[1]]
    if found > MAX_FILM_FRAMES or (count is not None and found != count):
        raise DataError(f"{display_path(file)} has {found} frames or more, not {count or MAX_FILM_FRAMES}")


def _gif_frames(file: Path) -> Iterator[UInt8Array]:
    try:
        with Image.open(file, formats=["GIF"]) as image:
            if image.width * image.height > MAX_VIDEO_PIXELS:
                raise DataError(f"has frames of {image.width}x{image.height} pixels, more than are read")
            for frame in ImageSequence.Iterator(image):
                yield np.asarray(frame.convert("RGB"))
    except DataError as error:
        raise DataError(f"{display_path(file)} {error}") from error
    except Exception as error:  # decoders of damaged pictures fail in many ways
        raise DataError(f"{display_path(file)} is not a readable film: {one_line(error)}") from error
