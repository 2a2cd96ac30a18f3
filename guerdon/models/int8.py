"""Scoring in int8: made once from training frames, accepted only if it decides as fp32 does, kept in a file.

Frames whose int8 logit is closer to the threshold than int8 is exact are judged once more in fp32. The file
belongs to the weights and to the threshold that it was verified with, and is refused for any other.
"""

from __future__ import annotations

import logging
import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from guerdon.errors import ConfigError, DataError
from guerdon.models import quantize
from guerdon.models.accelerate import Frames, FusedEncoder, Judgement, ModelScorer, Scorer
from guerdon.models.base import RewardModel
from guerdon.models.checkpoint import WEIGHTS_FILE, find_checkpoint
from guerdon.store.atomic import write_atomic
from guerdon.types import BoolArray, display_path

logger = logging.getLogger("guerdon")

MIN_AGREEMENT = 0.999
FILE_NAME = "int8.npz"
_BATCH = 256
_NEAREST = 64
_MAX_TWICE = 0.2
_NUMBERS = ("margin", "threshold_logit", "agreement", "judged_twice", "num_check_frames")


@dataclass(frozen=True, kw_only=True)
class Int8Model:
    """A quantised encoder with all that its verdicts depend on."""

    onnx: bytes
    margin: float
    """How far int8 is off near the threshold, in logits."""
    threshold_logit: float
    """The logit above which a frame counts as success."""
    agreement: float
    """Share of the held-out frames on which it decides as fp32 does."""
    judged_twice: float
    """Share of the held-out frames that it leaves to fp32."""
    num_check_frames: int
    weights: str
    """Fingerprint of the weights it was made from."""


def make_int8(
    model: RewardModel, calibration_frames: Frames, check_frames: Frames, threshold_logit: float
) -> Int8Model:
    """Quantise a fitted model; refused if it decides otherwise than fp32 on more than 0.1% of the frames.

    Args:
        model: left as it is.
        calibration_frames: 256 to 512 frames of the training set.
        check_frames: held-out frames.
        threshold_logit: the logit (before calibration) above which a frame counts as success.
    """
    images = model.images(calibration_frames)
    file = quantize.quantize(model.resnet, images.flatten(0, 1), *model.scale_shift())
    coarse, fine = coarse_scorer(model, file), ModelScorer(model, FusedEncoder(model, torch.device("cpu")))
    margin = _margin(fine, coarse, images, threshold_logit)
    scorer = TwoStepScorer(coarse, fine, threshold_logit=threshold_logit, margin=margin)
    agreement = verify_agreement(fine, scorer, check_frames, threshold_logit)
    twice = np.concatenate([scorer.near(coarse(batch)[0]) for batch in _batches(check_frames)])
    if agreement < MIN_AGREEMENT:
        raise DataError(
            f"int8 is refused: its decisions agree with fp32 on {agreement:.3%} of the {len(twice)} held-out "
            f"frames, and {MIN_AGREEMENT:.1%} is asked for. Use precision fp32, or quantise with more frames "
            f"of the kind that will be scored (there were {len(images)})."
        )
    if twice.mean() > _MAX_TWICE:
        logger.warning(
            "int8 is so inexact that %.0f%% of the held-out frames are judged again in fp32, which costs its "
            "speed: quantise with frames of the kind that will be scored, or use fp32",
            100 * twice.mean(),
        )
    return Int8Model(
        onnx=file,
        margin=margin,
        threshold_logit=threshold_logit,
        agreement=agreement,
        judged_twice=float(twice.mean()),
        num_check_frames=len(twice),
        weights=weights_fingerprint(model),
    )


def int8_scorer(model: RewardModel, int8: Int8Model) -> TwoStepScorer:
    """The scorer of an accepted int8 model."""
    fine = ModelScorer(model, FusedEncoder(model, torch.device("cpu")))
    coarse = coarse_scorer(model, int8.onnx)
    return TwoStepScorer(coarse, fine, threshold_logit=int8.threshold_logit, margin=int8.margin)


def coarse_scorer(model: RewardModel, onnx: bytes) -> ModelScorer:
    """int8 alone, without a second look at anything."""
    return ModelScorer(model, quantize.QuantizedEncoder(onnx, quantize.border_pixel(*model.scale_shift())))


class TwoStepScorer:
    """Judges all frames coarsely, and those near the threshold once more.

    Args:
        coarse: judges all frames.
        fine: judges those of which `coarse` says a logit within `margin` of the threshold.
        threshold_logit: the logit above which a frame counts as success.
        margin: in logits.
    """

    def __init__(
        self, coarse: ModelScorer, fine: ModelScorer, *, threshold_logit: float, margin: float
    ) -> None:
        self.coarse, self.fine = coarse, fine
        self.threshold_logit, self.margin = threshold_logit, margin

    def __call__(self, frames: Frames) -> Judgement:
        """See `Scorer`."""
        images = self.coarse.images(frames)
        logits, spread = self.coarse.judge(images)
        near = np.flatnonzero(self.near(logits))
        if len(near):
            logits[near], spread[near] = self.fine.judge(images[torch.from_numpy(near)])
        return logits, spread

    def near(self, logits: NDArray[np.float64]) -> BoolArray:
        """Whether the decision is left to `fine`, bool [N], by the coarse logits [N]."""
        return np.abs(logits - self.threshold_logit) <= self.margin


def verify_agreement(fp32: Scorer, int8: Scorer, frames: Frames, threshold_logit: float) -> float:
    """The share of `frames` that both scorers put on the same side of the threshold."""
    same = [
        (fp32(batch)[0] > threshold_logit) == (int8(batch)[0] > threshold_logit) for batch in _batches(frames)
    ]
    return float(np.concatenate(same).mean())


def _batches(frames: Frames) -> Iterator[Frames]:
    """All frames, at most 256 at a time."""
    counts = {len(images) for images in (frames.values() if isinstance(frames, Mapping) else [frames])}
    if len(counts) != 1 or 0 in counts:
        raise DataError(f"held-out frames must be equally many of each camera, and some: {sorted(counts)}")
    for start in range(0, counts.pop(), _BATCH):
        part = slice(start, start + _BATCH)
        yield {key: x[part] for key, x in frames.items()} if isinstance(frames, Mapping) else frames[part]


def _margin(fine: ModelScorer, coarse: ModelScorer, images: Tensor, threshold_logit: float) -> float:
    """How far int8 is off near the threshold: the largest error on the frames that are nearest to it.

    A model is sure of the frames that it was trained on. Blends of two of them are what it is unsure of.
    """
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    blends = images // 2 + images[order] // 2
    batches = [*torch.split(images, _BATCH), *torch.split(blends, _BATCH)]
    exact, rough = (
        np.concatenate([scorer.judge(batch)[0] for batch in batches]) for scorer in (fine, coarse)
    )
    nearest = np.argsort(np.abs(exact - threshold_logit))[:_NEAREST]
    return float(np.abs(exact - rough)[nearest].max())


# The file beside a checkpoint


def int8_path(checkpoint: Path | str) -> Path:
    """Where the int8 model of a checkpoint is kept."""
    file = find_checkpoint(Path(checkpoint))
    return file.with_name(FILE_NAME) if file.name == WEIGHTS_FILE else file.with_suffix("." + FILE_NAME)


def save_int8(path: Path, int8: Int8Model) -> None:
    """Write the file in one piece."""
    numbers = {name: getattr(int8, name) for name in _NUMBERS}
    content = {"onnx": np.frombuffer(int8.onnx, np.uint8), "weights": np.array(int8.weights), **numbers}
    write_atomic(path, lambda out: np.savez(out, format=quantize.FORMAT, **content))


def load_int8(path: Path, model: RewardModel, threshold_logit: float | None) -> Int8Model:
    """Read what `save_int8` wrote, and check that it belongs to these weights and this threshold.

    Args:
        path: from `int8_path`.
        model: as loaded from the checkpoint.
        threshold_logit: the threshold that will be used; None if no decision is taken.
    """
    shown = display_path(path)
    remedy = "make it with guerdon reward quantize, or use precision fp32"
    if not path.is_file():
        raise ConfigError(f"precision is int8, but {shown} does not exist: {remedy}")
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as content:
            version = int(content["format"])
            onnx, weights = content["onnx"].tobytes(), str(content["weights"])
            numbers = {name: content[name].item() for name in _NUMBERS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{shown} is damaged ({error}): {remedy}") from error
    int8 = Int8Model(onnx=onnx, weights=weights, **numbers)
    if version != quantize.FORMAT:
        raise DataError(
            f"{shown} has the format {version}, and this Guerdon makes {quantize.FORMAT}: {remedy}"
        )
    if weights != weights_fingerprint(model):
        raise DataError(f"{shown} was made from other weights than the checkpoint has: {remedy}")
    if threshold_logit is not None and not math.isclose(
        int8.threshold_logit, threshold_logit, rel_tol=1e-4, abs_tol=1e-4
    ):
        raise ConfigError(
            f"{shown} was verified for a threshold at logit {int8.threshold_logit:.4f}, and the one that is "
            f"asked for is at {threshold_logit:.4f}: {remedy}"
        )
    return int8


def weights_fingerprint(model: RewardModel) -> str:
    """Tells one set of weights from another."""
    about: tuple[Any, ...] = (model.model_type, model.config.normalize)
    if model.config.crop is not None:
        about = (*about, model.config.crop)
    digest = xxhash.xxh3_128(repr(about).encode())
    for name, value in model.state_dict().items():
        array = value.detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.data)
    return str(digest.hexdigest())
