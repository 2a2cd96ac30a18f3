"""Pictures and videos that are scored without labels."""

from __future__ import annotations

import io
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from fuzz.engine import Target
from fuzz.episode import make_episode
from fuzz.structures import mutate_png
from guerdon.core.errors import GuerdonError
from guerdon.data.datasets.media import find_clips

_CAMERA = "camera_0"
_SIZE = 16
_BATCHES = 8
"""More are not read of an input: a long video takes its time, one batch after the other."""


def _video(container: str, codec: str, pixels: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = _SIZE, _SIZE, pixels
        for image in _images() * 2:
            frame = av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def _images() -> list[Image.Image]:
    frames = make_episode().frames[_CAMERA]
    return [Image.fromarray(frame).resize((_SIZE, _SIZE)) for frame in frames]


def _picture(kind: str) -> bytes:
    file = io.BytesIO()
    _images()[0].save(file, format=kind)
    return file.getvalue()


def _run(name: str, data: bytes, scratch: Path) -> int:
    """The frames, at times resized to those of a model; the bytes of one batch are in memory at a time."""
    (scratch / name).write_bytes(data)
    sizes = {_CAMERA: (8, 8, 3)} if len(data) % 2 else {}
    largest = 0
    try:
        for clip in find_clips(scratch / name, (_CAMERA,)):
            for batch in islice(clip.batches(sizes, 4), _BATCHES):
                frames = batch[_CAMERA]
                assert frames.ndim == 4 and frames.dtype.name == "uint8", (frames.shape, frames.dtype)
                largest = max(largest, frames.nbytes)
    except GuerdonError as error:
        assert name in str(error) and "\n" not in str(error), f"{error} names no file, or has several lines"
        raise
    return largest


TARGETS = {
    "media-png": Target(lambda _: [_picture("PNG"), _picture("JPEG")], partial(_run, "a.png"), mutate_png),
    "media-mp4": Target(
        lambda _: [_video("mp4", "mpeg4", "yuv420p"), _video("mp4", "libx264", "yuv420p")],
        partial(_run, "a.mp4"),
    ),
    "media-mkv": Target(
        lambda _: [_video("matroska", "ffv1", "yuv444p"), _video("matroska", "libx264", "yuv420p")],
        partial(_run, "a.mkv"),
    ),
    "media-avi": Target(
        lambda _: [_video("avi", "mjpeg", "yuvj420p"), _video("avi", "rawvideo", "rgb24")],
        partial(_run, "a.avi"),
    ),
}
