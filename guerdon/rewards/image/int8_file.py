"""The file of an int8 model, beside its checkpoint: read without trust in what it says.

It holds numbers and a few frames, no graph: what a hostile file can bring about is a refusal. It belongs to
the weights and to the threshold that it was verified with.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.core.atomic import write_atomic
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import IntArray, display_path
from guerdon.data.datasets.frames import RewardDataset
from guerdon.data.files.checksums import load_npz
from guerdon.rewards.image import quantize
from guerdon.rewards.image.base import RewardModel
from guerdon.rewards.image.checkpoint import WEIGHTS_FILE, check_own, find_checkpoint, load_checkpoint
from guerdon.rewards.image.int8 import MAX_PROBES, PROBE_BYTES, Int8Model, make_int8, weights_fingerprint
from guerdon.rewards.image.steps import resnet_steps

log = logging.getLogger("guerdon")

FILE_NAME = "int8.npz"
CALIBRATION_FRAMES = 512
CHECK_FRAMES = 4096
_REMEDY = "make it with guerdon reward quantize, or use precision fp32"
_FLOATS = {
    "margin": "margin",
    "threshold_logit": "threshold_logit",
    "agreement": "agreement",
    "rescored": "judged_twice",
}
"""Field of `Int8Model` -> name in the file."""
_TEXTS = ("weights", "processor")
_MAX_TEXT = 64
_MOST = 1e6
"""No logit and no activation of a network that works is larger."""
_OTHER_BYTES = 1 << 20
"""What a file may have beside its probes."""


def quantize_checkpoint(
    checkpoint: Path,
    dataset: RewardDataset,
    train_rows: IntArray,
    check_rows: IntArray,
    *,
    threshold: float | None = None,
    seed: int = 0,
) -> Int8Model:
    """Make and keep the int8 model of a checkpoint; raises, and writes nothing, if it is refused.

    Args:
        checkpoint: the file is written beside it.
        dataset: frames that show the model's cameras.
        train_rows: int [n], frames to find the ranges of activations on; at most 512 are taken.
        check_rows: int [m], held-out frames to compare decisions on; at most 4,096 are taken.
        threshold: the probability above which a frame counts as success; None takes the checkpoint's own,
            or 0.5 if it has none.
        seed: decides which frames are taken.
    """
    check_own(checkpoint, "an int8 version")
    model, contract, _ = load_checkpoint(checkpoint)
    if threshold is None:
        threshold = 0.5 if contract.threshold is None else contract.threshold
    rng = np.random.default_rng(seed)
    ranges, held_out = (
        dataset.batch(np.sort(rng.permutation(rows)[:count])).frames
        for rows, count in ((train_rows, CALIBRATION_FRAMES), (check_rows, CHECK_FRAMES))
    )
    contract.check_frames(ranges)
    int8 = make_int8(model, ranges, held_out, contract.calibration_map.logit_at(threshold))
    path = int8_path(checkpoint)
    save_int8(path, int8)
    log.info(
        "int8 decides as fp32 does on %.3f%% of %d held-out frames and leaves %.1f%% of them to fp32: %s",
        100 * int8.agreement,
        int8.num_check_frames,
        100 * int8.rescored,
        display_path(path),
    )
    return int8


def int8_path(checkpoint: Path | str) -> Path:
    """Where the int8 model of a checkpoint is kept."""
    file = find_checkpoint(Path(checkpoint))
    return file.with_name(FILE_NAME) if file.name == WEIGHTS_FILE else file.with_suffix("." + FILE_NAME)


def save_int8(path: Path, int8: Int8Model) -> None:
    """Write the file in one piece."""
    arrays: dict[str, Any] = {
        "format": np.int64(quantize.FORMAT),
        "num_check_frames": np.int64(int8.num_check_frames),
        "ranges": np.array(list(int8.ranges.values()), np.float64),
        "probes": int8.probes,
        "probe_logits": int8.probe_logits,
        **{key: np.float64(getattr(int8, name)) for name, key in _FLOATS.items()},
        **{name: np.array(getattr(int8, name)[:_MAX_TEXT]) for name in _TEXTS},
    }
    write_atomic(path, lambda out: np.savez(out, allow_pickle=False, **arrays))


def load_int8(path: Path, model: RewardModel, threshold_logit: float | None) -> Int8Model:
    """Read what `save_int8` wrote, and check that it belongs to these weights and this threshold.

    Args:
        path: from `int8_path`.
        model: as loaded from the checkpoint.
        threshold_logit: the threshold that will be used; None if no decision is taken.
    """
    shown = display_path(path)
    if not path.is_file():
        raise ConfigError(f"precision is int8, but {shown} does not exist: {_REMEDY}")
    try:
        most = _most_bytes(model)
        if path.stat().st_size > most:
            raise DataError(f"{path.stat().st_size} bytes, where {most} are enough")
        arrays = load_npz(path)
        version = int(_array(arrays, "format", "<i8"))
        int8 = _checked(arrays, model) if version == quantize.FORMAT else None
    except (DataError, OSError) as error:
        raise DataError(f"{shown} is damaged ({error}): {_REMEDY}") from error
    if int8 is None:
        raise DataError(
            f"{shown} has the format {version}, and this Guerdon makes {quantize.FORMAT}: {_REMEDY}"
        )
    if int8.weights != weights_fingerprint(model):
        raise DataError(f"{shown} was made from other weights than the checkpoint has: {_REMEDY}")
    if threshold_logit is not None and not math.isclose(
        int8.threshold_logit, threshold_logit, rel_tol=1e-4, abs_tol=1e-4
    ):
        raise ConfigError(
            f"{shown} was verified for a threshold at logit {int8.threshold_logit:.4f}, and the one that is "
            f"asked for is at {threshold_logit:.4f}: {_REMEDY}"
        )
    return int8


def _checked(arrays: Mapping[str, NDArray[Any]], model: RewardModel) -> Int8Model:
    """The content of a file, each array of the one kind and shape that it can have."""
    probes, probe_logits = _array(arrays, "probes", "|u1", 5), _array(arrays, "probe_logits", "<f8", 1)
    count = len(probes)
    if (
        probes.shape[1:] != _probe_shape(model)
        or not 1 <= count <= MAX_PROBES
        or probe_logits.shape != (count,)
    ):
        raise DataError(f"probes of shape {probes.shape} do not fit the model")
    names = [step.output for step in resnet_steps(model.resnet, model.config.image_size[1:])]
    ranges = _array(arrays, "ranges", "<f8", 2)
    if ranges.shape != (len(names), 2):
        raise DataError(f"ranges of shape {ranges.shape} instead of {(len(names), 2)}")
    low, high = ranges.T
    floats: dict[str, Any] = {name: float(_array(arrays, key, "<f8")) for name, key in _FLOATS.items()}
    num_check_frames = int(_array(arrays, "num_check_frames", "<i8"))
    possible = (
        np.abs([*floats.values(), *probe_logits, *ranges.flat]).max() <= _MOST  # no NaN is
        and (low <= 0).all()
        and (high > 1e-12).all()
        and floats["margin"] >= 0
        and all(0 <= floats[name] <= 1 for name in ("agreement", "rescored"))
        and num_check_frames >= 1
    )
    if not possible:
        raise DataError("its numbers are not possible")
    texts: dict[str, Any] = {name: _text(arrays, name) for name in _TEXTS}
    return Int8Model(
        ranges=dict(zip(names, map(tuple, ranges.tolist()), strict=True)),
        probes=probes,
        probe_logits=probe_logits,
        num_check_frames=num_check_frames,
        **floats,
        **texts,
    )


def _array(arrays: Mapping[str, NDArray[Any]], name: str, kind: str, ndim: int = 0) -> NDArray[Any]:
    array = arrays.get(name)
    if array is None or not array.dtype.str.startswith(kind) or array.ndim != ndim:
        raise DataError(f"{name} is missing, or no array of {kind} with {ndim} axes")
    return np.ascontiguousarray(array).reshape(array.shape)


def _text(arrays: Mapping[str, NDArray[Any]], name: str) -> str:
    text = _array(arrays, name, "<U")
    codes = np.frombuffer(text.tobytes(), "<u4")  # numpy makes no string of numbers that are no characters
    if not ((codes >= 32) & (codes < 127)).all():
        raise DataError(f"{name} is not plain text")
    return str(text)


def _probe_shape(model: RewardModel) -> tuple[int, int, int, int]:
    """(K, H, W, c) of one frame as the model wants it."""
    _, height, width = model.config.image_size
    return len(model.config.image_keys), height, width, model.num_channels


def _most_bytes(model: RewardModel) -> int:
    one = math.prod(_probe_shape(model))
    return max(one, min(MAX_PROBES * one, PROBE_BYTES)) + _OTHER_BYTES
