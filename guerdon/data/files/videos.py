"""Video files of others, opened with bounds: known containers only, no other file, no huge frames."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line

VIDEO_CONTAINERS = {
    **dict.fromkeys((".mp4", ".mov", ".m4v"), "mov"),
    **dict.fromkeys((".mkv", ".webm"), "matroska"),
    ".avi": "avi",
}
"""Suffix -> container. It is not guessed: a playlist that is called .mp4 could name other files to read."""
MAX_VIDEO_PIXELS = 4096 * 2304
"""Of a frame. A decoder may keep 17 of them, of six bytes a pixel at most."""


@contextmanager
def open_video(path: Path, extra: str = "video") -> Iterator[tuple[Any, Any]]:
    """The container of a video file and its first video stream; errors of the decoder name the file.

    Args:
        path: its suffix tells the container.
        extra: the extra of Guerdon to install where PyAV is missing.
    """
    try:
        import av
        from av.error import FFmpegError
    except ImportError as error:
        raise ConfigError(
            f"{display_path(path)} is a video; reading it needs PyAV: pip install 'guerdon[{extra}]'"
        ) from error
    container: Any = None
    shown = display_path(path)
    try:
        options = {"protocol_whitelist": "file"}
        container = av.open(str(path), format=VIDEO_CONTAINERS[path.suffix.lower()], options=options)
        if not container.streams.video:
            raise DataError("has no video stream")
        stream = container.streams.video[0]
        decoder = stream.codec_context
        if decoder is None:
            raise DataError("is in a codec that is not known")
        decoder.options = {"max_pixels": str(MAX_VIDEO_PIXELS)}  # checked before memory is taken
        check_pixels(decoder.width, decoder.height)
        yield container, stream
    except DataError as error:
        raise DataError(f"{shown}: {error}") from error
    except (FFmpegError, OSError, ValueError) as error:
        raise DataError(f"{shown} is not a readable video: {one_line(error)}") from error
    finally:
        if container is not None:
            container.close()


def check_pixels(width: int, height: int) -> None:
    """Refuse frames that are too large to decode."""
    if width * height > MAX_VIDEO_PIXELS:
        raise DataError(
            f"has frames of {width}x{height} pixels; at most {MAX_VIDEO_PIXELS} pixels (4096x2304) are read"
        )
