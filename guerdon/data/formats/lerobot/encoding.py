"""Frames -> videos: one for each episode and camera, joined without encoding them again."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from guerdon.core.errors import ConfigError, DataError, StorageError
from guerdon.core.types import UInt8Array
from guerdon.data.files.bounds import one_line

CODECS = ("libsvtav1", "libx264")
"""The first one that this build of PyAV has is used; the first is LeRobot's default."""
SETTINGS = {
    "libsvtav1": {"g": "2", "crf": "30", "preset": "12"},
    "libx264": {"g": "2", "crf": "23", "preset": "medium"},
}
PIXELS = "yuv420p"
MIN_SIDE = 64
"""Of a picture that SVT-AV1 takes; smaller ones go to the next codec."""


def check_frames(camera: str, shape: tuple[int, int, int]) -> None:
    """Raise if frames (H, W, C) cannot be written as a video: 4:2:0 needs even sides."""
    if shape[0] % 2 or shape[1] % 2:
        raise DataError(
            f"camera {camera!r} has frames of {shape[1]}x{shape[0]} pixels; a video needs even sides: "
            "write images instead (without --videos)"
        )


def codec_for(shape: tuple[int, int, int]) -> str:
    """The encoder for frames (H, W, C)."""
    try:
        import av
    except ImportError as error:
        raise ConfigError("writing videos needs PyAV: pip install 'guerdon[lerobot]'") from error
    small = min(shape[:2]) < MIN_SIDE
    for codec in CODECS:
        if codec in av.codecs_available and not (small and codec == CODECS[0]):
            return codec
    raise ConfigError(f"this build of PyAV has none of the encoders {', '.join(CODECS)}: write images")


def encode(frames: UInt8Array, fps: int) -> bytes:
    """An MP4 file with the frames uint8 [T, H, W, C], frame t at t / fps seconds."""
    import av

    codec = codec_for(frames.shape[1:])
    os.environ.setdefault("SVT_LOG", "1")  # errors alone; it writes to stderr by itself
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream(codec, rate=fps, options=SETTINGS[codec])
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = PIXELS
        for image in frames:
            rgb = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def join(parts: Sequence[tuple[Path, int]], fps: int, target: BinaryIO) -> None:
    """Write the videos of episodes, one after the other, as one MP4 file.

    Args:
        parts: (file, number of frames) of each; all have the same codec and size.
        fps: frame t of all is at t / fps seconds.
        target: where to write.
    """
    import av
    from av.error import FFmpegError

    try:
        with av.open(target, "w", format="mp4") as output:
            stream: Any = None
            before = 0
            for path, count in parts:
                with av.open(str(path), format="mov") as source:
                    video = source.streams.video[0]
                    if stream is None:
                        stream = output.add_stream_from_template(video, opaque=True)
                        stream.time_base = video.time_base
                    assert video.time_base is not None
                    shift = int(Fraction(before, fps) / video.time_base)
                    for packet in source.demux(video):
                        if packet.dts is None:
                            continue
                        packet.pts, packet.dts = (packet.pts or 0) + shift, packet.dts + shift
                        packet.stream = stream
                        output.mux(packet)
                before += count
    except FFmpegError as error:
        raise StorageError(
            f"the videos of {len(parts)} episodes cannot be joined: {one_line(error)}"
        ) from error


def facts(shape: tuple[int, int, int], fps: int) -> dict[str, Any]:
    """What `info.json` tells of a camera's videos."""
    codec = codec_for(shape)
    return {
        "video.height": shape[0],
        "video.width": shape[1],
        "video.codec": {"libsvtav1": "av1", "libx264": "h264"}[codec],
        "video.pix_fmt": PIXELS,
        "is_depth_map": False,
        "video.fps": fps,
        "video.channels": 3,
        "has_audio": False,
        "video.g": int(SETTINGS[codec]["g"]),
        "video.crf": int(SETTINGS[codec]["crf"]),
    }


def png(image: UInt8Array) -> bytes:
    """A picture uint8 [H, W, C] as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "PNG", compress_level=4)
    return file.getvalue()
