"""Episodes as GIFs: the frames, and under them what the reward model says of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import BoolArray, FloatArray, UInt8Array

MIN_SIDE = 224
"""Frames are enlarged by a whole number until their shorter side has at least so many pixels."""
PANEL, MARGIN, STRIP = 72, 5, 6
"""Height of the panel under the frame, its margin, and the strip in it that shows the env's success."""
MAX_FPS = 50.0
"""GIFs count time in hundredths of a second, and viewers slow down what is faster than two of them."""
BACKGROUND, FAINT, CURVE = (24, 28, 34), (70, 80, 92), (106, 162, 255)
LIMIT, SUCCESS, CURSOR = (255, 107, 107), (63, 185, 80), (230, 233, 237)


def write_video(
    path: Path | str,
    frames: UInt8Array,
    prob_success: FloatArray,
    threshold: float,
    env_success: BoolArray | None = None,
    fps: float = 10.0,
) -> Path:
    """Write an episode as an endless GIF, replacing an older one; returns its path.

    Under the picture runs the learned probability, from 0 to 1, with the threshold as a dashed line. The part
    that is still to come is faint. Where the environment says success there is a green bar at the bottom, and
    the picture has a green edge.

    Args:
        path: of the file; missing folders are made.
        frames: uint8 [T, H, W, 3] or [T, H, W, 1].
        prob_success: float32 [T] in [0, 1]; NaN where a frame was not scored.
        threshold: above which a frame fires.
        env_success: bool [T]; None where it is not known.
        fps: frames per second, at most 50.
    """
    path = Path(path)
    _check(frames, prob_success, env_success, fps)
    success = np.zeros(len(frames), np.bool_) if env_success is None else env_success
    pictures = _enlarge(frames)
    pictures = np.concatenate(
        [_edge(pictures, success), _panels(prob_success, threshold, success, pictures.shape[2])], axis=1
    )
    images = [Image.fromarray(picture).quantize(method=Image.Quantize.FASTOCTREE) for picture in pictures]
    duration = 10 * round(100 / fps)
    make_directory(path.parent)
    write_atomic(
        path,
        lambda file: images[0].save(
            file, format="GIF", save_all=True, append_images=images[1:], duration=duration, loop=0
        ),
    )
    return path


def _check(frames: UInt8Array, prob: FloatArray, success: BoolArray | None, fps: float) -> None:
    if frames.ndim != 4 or frames.dtype != np.uint8 or frames.shape[-1] not in (1, 3) or not frames.size:
        raise DataError(f"a video needs frames uint8 [T, H, W, 3], not {frames.dtype} {list(frames.shape)}")
    for name, values in (("prob_success", prob), ("env_success", success)):
        if values is not None and values.shape != (len(frames),):
            raise DataError(f"{name} must have shape [{len(frames)}], not {list(values.shape)}")
    if not 0.0 < fps <= MAX_FPS:
        raise ConfigError(f"fps must lie between 0 and {MAX_FPS:g}, not {fps!r}")


def _enlarge(frames: UInt8Array) -> UInt8Array:
    """[T, H, W, C] -> [T, kH, kW, 3] with square pixels."""
    factor = -(-MIN_SIDE // min(frames.shape[1:3]))
    large = frames.repeat(factor, axis=1).repeat(factor, axis=2)
    return large if large.shape[-1] == 3 else large.repeat(3, axis=-1)


def _edge(pictures: UInt8Array, success: BoolArray) -> UInt8Array:
    """The pictures [T, H, W, 3] with a green edge where `success` (bool [T]) holds."""
    edge = np.ones(pictures.shape[1:3], np.bool_)
    edge[4:-4, 4:-4] = False
    marked = (success[:, None, None] & edge)[..., None]
    return np.where(marked, np.array(SUCCESS, np.uint8), pictures)


def _panels(prob: FloatArray, threshold: float, success: BoolArray, width: int) -> UInt8Array:
    """The curve as it stands at each of T steps -> uint8 [T, PANEL, width, 3]."""
    steps = len(prob)
    columns = np.arange(width)
    place = np.linspace(MARGIN, width - 1 - MARGIN, steps) if steps > 1 else np.array([width / 2])
    inside = (columns >= np.floor(place[0])) & (columns <= np.ceil(place[-1]))
    nearest = np.abs(columns[:, None] - place).argmin(axis=1)  # the step that a column belongs to
    rows = np.arange(PANEL)[:, None]

    ground = np.empty((PANEL, width, 3), np.uint8)
    ground[:] = BACKGROUND
    dashes = inside & (columns // 4 % 2 == 0)
    ground[(rows == round(_row(np.array(threshold)).item())) & dashes] = LIMIT
    ground[(rows >= PANEL - STRIP) & (inside & success[nearest])] = SUCCESS

    curve = _curve_mask(prob, place, columns, inside, rows)
    full, faint = ground.copy(), ground.copy()
    full[curve], faint[curve] = CURVE, FAINT
    past = columns <= place[:, None]  # [T, W]
    panels = np.where(past[:, None, :, None], full, faint)
    cursor = columns == np.round(place)[:, None]
    panels[np.broadcast_to(cursor[:, None, :], panels.shape[:3])] = CURSOR
    return panels


def _curve_mask(
    prob: FloatArray,
    place: NDArray[np.float64],
    columns: NDArray[np.int64],
    inside: BoolArray,
    rows: NDArray[np.int64],
) -> BoolArray:
    """Pixels of the curve -> bool [PANEL, width]; columns next to a frame that was not scored stay empty."""
    known = np.isfinite(prob)
    height = _row(np.where(known, prob, 0.0))
    left, right = (np.interp(columns + shift, place, height) for shift in (-0.5, 0.5))
    whole = np.interp(columns, place, known.astype(np.float64)) > 1 - 1e-9
    top, bottom = np.minimum(left, right) - 0.8, np.maximum(left, right) + 0.8
    mask: BoolArray = (rows >= top) & (rows <= bottom) & inside & whole
    return mask


def _row(prob: NDArray[np.floating]) -> NDArray[np.float64]:
    """Rows of the panel for probabilities; 1 is at the top."""
    floor = PANEL - STRIP - MARGIN
    result: NDArray[np.float64] = floor - np.clip(prob, 0.0, 1.0).astype(np.float64) * (floor - MARGIN)
    return result
