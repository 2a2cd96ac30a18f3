"""Episodes as films, GIF or MP4: the frames, and under them what the reward model says of each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import BoolArray, FloatArray, UInt8Array

log = logging.getLogger("guerdon")

MIN_SIDE = 224
"""Frames are enlarged by a whole number until their shorter side has at least so many pixels."""
PANEL, MARGIN, STRIP = 72, 5, 6
"""Height of the panel under the frame, its margin, and the strip in it that shows the env's success."""
MAX_FPS = 50.0
"""GIFs count time in hundredths of a second, and viewers slow down what is faster than two of them."""
FORMATS = (".gif", ".mp4")
"""Of films, by the suffix of their file."""
CODECS = {"libx264": {"crf": "18", "preset": "medium"}, "libopenh264": {}, "mpeg4": {"qscale": "2"}}
"""Encoder -> options; the first that this build of PyAV has is taken. The first two write H.264, which
browsers play; not all of them play MPEG-4 Part 2."""
BACKGROUND, FAINT, CURVE = (24, 28, 34), (70, 80, 92), (106, 162, 255)
LIMIT, SUCCESS, CURSOR = (255, 107, 107), (63, 185, 80), (230, 233, 237)


def write_video(
    path: Path | str,
    frames: UInt8Array,
    values: FloatArray,
    threshold: float | None,
    env_success: BoolArray | None = None,
    fps: float = 10.0,
) -> Path:
    """Write an episode as an endless GIF, or as MP4 if `path` ends so, replacing an older one.

    Under the picture runs the learned probability, from 0 to 1, with the threshold as a dashed line; or,
    where there is no threshold, the learned reward from its lowest to its highest value, which are written
    there. The part that is still to come is faint. Where the environment says success there is a green bar
    at the bottom, and the picture has a green edge.

    Args:
        path: of the file, `.gif` or `.mp4` (needs PyAV); missing folders are made.
        frames: uint8 [T, H, W, 3] or [T, H, W, 1].
        values: float32 [T], success probabilities in [0, 1], or rewards; NaN where a frame was not scored.
        threshold: above which a frame fires; None: the values are rewards.
        env_success: bool [T]; None where it is not known.
        fps: frames per second, at most 50.

    Returns:
        The path of the file.
    """
    path = Path(path)
    _check(path, frames, values, env_success, fps)
    success = np.zeros(len(frames), np.bool_) if env_success is None else env_success
    pictures = _pictures(frames, values, threshold, success)
    make_directory(path.parent)
    if path.suffix == ".mp4":
        require_av("films in MP4")
        write_atomic(path, lambda file: _write_mp4(file, pictures, fps))
    else:
        write_atomic(path, lambda file: _write_gif(file, pictures, fps))
    return path


def require_av(purpose: str) -> Any:
    """The package `av`; an error that says how to install it where it is missing."""
    try:
        import av
    except ImportError as error:
        raise ConfigError(f"{purpose} need PyAV: pip install 'guerdon[video]'") from error
    return av


def picture_size(frames: UInt8Array) -> tuple[int, int]:
    """Height and width of the picture in a film of frames [T, H, W, C]; the panel is below it."""
    factor = _factor(frames)
    return factor * frames.shape[1], factor * frames.shape[2]


def _write_gif(file: BinaryIO, pictures: Iterator[UInt8Array], fps: float) -> None:
    images = (Image.fromarray(each).quantize(method=Image.Quantize.FASTOCTREE) for each in pictures)
    duration = 10 * round(100 / fps)
    next(images).save(file, format="GIF", save_all=True, append_images=images, duration=duration, loop=0)


def _write_mp4(file: BinaryIO, pictures: Iterator[UInt8Array], fps: float) -> None:
    av = require_av("films in MP4")
    codec = next((name for name in CODECS if name in av.codecs_available), None)
    if codec is None:
        raise ConfigError(f"this build of PyAV has none of {', '.join(CODECS)}: use runner.video_format=gif")
    if codec == "mpeg4":
        log.warning("this build of PyAV has no H.264: films are MPEG-4 Part 2, which not all browsers play")
    with av.open(file, "w", format="mp4") as container:
        stream: Any = None
        for picture in pictures:
            picture = np.pad(picture, [(0, side % 2) for side in picture.shape[:2]] + [(0, 0)], mode="edge")
            if stream is None:
                rate = Fraction(fps).limit_denominator(1000)
                stream = container.add_stream(codec, rate=rate, options=CODECS[codec])
                stream.height, stream.width, stream.pix_fmt = *picture.shape[:2], "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def _pictures(
    frames: UInt8Array, values: FloatArray, threshold: float | None, success: BoolArray
) -> Iterator[UInt8Array]:
    """The pictures of a film one after another, uint8 [H, W, 3]."""
    panel = _Panel(values, threshold, success, picture_size(frames)[1])
    factor = _factor(frames)
    for step, frame in enumerate(frames):
        large = frame.repeat(factor, axis=0).repeat(factor, axis=1)
        large = large if large.shape[-1] == 3 else large.repeat(3, axis=-1)
        if success[step]:  # a green edge
            inner = large[4:-4, 4:-4].copy()
            large[:] = SUCCESS
            large[4:-4, 4:-4] = inner
        yield np.concatenate([large, panel.at(step)])


def _check(path: Path, frames: UInt8Array, values: FloatArray, success: BoolArray | None, fps: float) -> None:
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path.name}: films end in {' or '.join(FORMATS)}")
    if frames.ndim != 4 or frames.dtype != np.uint8 or frames.shape[-1] not in (1, 3) or not frames.size:
        raise DataError(f"a video needs frames uint8 [T, H, W, 3], not {frames.dtype} {list(frames.shape)}")
    for name, given in (("values", values), ("env_success", success)):
        if given is not None and given.shape != (len(frames),):
            raise DataError(f"{name} must have shape [{len(frames)}], not {list(given.shape)}")
    if not 0.0 < fps <= MAX_FPS:
        raise ConfigError(f"fps must lie between 0 and {MAX_FPS:g}, not {fps!r}")


def _factor(frames: UInt8Array) -> int:
    """How many pixels of the film a pixel of a frame has in each direction."""
    return -(-MIN_SIDE // min(int(side) for side in frames.shape[1:3]))


class _Panel:
    """The curve under the picture, as it stands at each of T steps.

    Args:
        values: float32 [T]; NaN where a frame was not scored.
        threshold: of probabilities, which lie between 0 and 1; None: rewards, which lie anywhere.
        success: bool [T].
        width: in pixels.
    """

    def __init__(self, values: FloatArray, threshold: float | None, success: BoolArray, width: int) -> None:
        steps = len(values)
        self._columns = columns = np.arange(width)
        self._place = np.linspace(MARGIN, width - 1 - MARGIN, steps) if steps > 1 else np.array([width / 2])
        inside = (columns >= np.floor(self._place[0])) & (columns <= np.ceil(self._place[-1]))
        nearest = np.abs(columns[:, None] - self._place).argmin(axis=1)  # the step that a column belongs to
        rows = np.arange(PANEL)[:, None]

        ground = np.empty((PANEL, width, 3), np.uint8)
        ground[:] = BACKGROUND
        low, high = (0.0, 1.0) if threshold is not None else _span(values)
        if threshold is not None:
            dashes = inside & (columns // 4 % 2 == 0)
            ground[(rows == round(_row(np.array(threshold)).item())) & dashes] = LIMIT
        ground[(rows >= PANEL - STRIP) & (inside & success[nearest])] = SUCCESS

        curve = _curve_mask((values - low) / (high - low), self._place, columns, inside, rows)
        self._full, self._faint = ground.copy(), ground.copy()
        self._full[curve], self._faint[curve] = CURVE, FAINT
        if threshold is None:
            self._full, self._faint = (_written(each, low, high) for each in (self._full, self._faint))

    def at(self, step: int) -> UInt8Array:
        """The panel at a step, uint8 [PANEL, width, 3]."""
        past = self._columns <= self._place[step]
        panel = np.where(past[None, :, None], self._full, self._faint)
        panel[:, self._columns == np.round(self._place[step])] = CURSOR
        return panel


def _span(values: FloatArray) -> tuple[float, float]:
    """The lowest and the highest of rewards; never the same."""
    known = values[np.isfinite(values)].astype(np.float64)
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 1.0)
    return (low, high) if high - low > 1e-6 * max(1.0, abs(high)) else (low - 0.5, high + 0.5)


def _written(panel: UInt8Array, low: float, high: float) -> UInt8Array:
    """The panel of a reward with its name and range: without them it would be taken for a probability."""
    image = Image.fromarray(panel)
    draw = ImageDraw.Draw(image)
    draw.text((MARGIN, 1), f"reward, max {high:.3g}", fill=CURSOR)
    draw.text((MARGIN, PANEL - STRIP - MARGIN - 10), f"min {low:.3g}", fill=CURSOR)
    return np.asarray(image)


def _curve_mask(
    values: NDArray[np.floating],
    place: NDArray[np.float64],
    columns: NDArray[np.int64],
    inside: BoolArray,
    rows: NDArray[np.int64],
) -> BoolArray:
    """Pixels of the curve -> bool [PANEL, width]; columns next to a frame that was not scored stay empty."""
    known = np.isfinite(values)
    height = _row(np.where(known, values, 0.0))
    left, right = (np.interp(columns + shift, place, height) for shift in (-0.5, 0.5))
    whole = np.interp(columns, place, known.astype(np.float64)) > 1 - 1e-9
    top, bottom = np.minimum(left, right) - 0.8, np.maximum(left, right) + 0.8
    mask: BoolArray = (rows >= top) & (rows <= bottom) & inside & whole
    return mask


def _row(share: NDArray[np.floating]) -> NDArray[np.float64]:
    """Rows of the panel for shares of its height; 1 is at the top."""
    floor = PANEL - STRIP - MARGIN
    result: NDArray[np.float64] = floor - np.clip(share, 0.0, 1.0).astype(np.float64) * (floor - MARGIN)
    return result
