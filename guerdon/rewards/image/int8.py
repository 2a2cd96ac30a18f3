"""Scoring in int8: made once from training frames, accepted only if it decides as fp32 does.

Frames whose int8 logit is closer to the threshold than int8 is exact are scored once more in fp32. It is kept
in a file (`int8_file.py`), and every scorer made of it is tried on the processor at hand before it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from guerdon.core.errors import DataError
from guerdon.core.types import BoolArray, UInt8Array
from guerdon.rewards.image import quantize
from guerdon.rewards.image.accelerate import Frames, ModelScorer, RawScores, Scorer, resnet_scorer
from guerdon.rewards.image.base import RewardModel

logger = logging.getLogger("guerdon")

MIN_AGREEMENT = 0.999
MAX_PROBES = 16
"""Frames that are kept to try a scorer on, if they fit into `PROBE_BYTES`; one is kept in any case."""
PROBE_BYTES = 4 << 20
_BATCH = 256
_NEAREST = 64
_MAX_TWICE = 0.2
_MAX_DRIFT = 0.25
"""Share of the margin that int8 may change by from one processor to another (root of the mean square). Other
rounding changed it by 0.07 of the margin, products that saturate by 0.54 (measured on a fit of Tabletop)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Int8Model:
    """What makes an int8 scorer of a model, with all that its scores depend on."""

    ranges: dict[str, quantize.Range]
    """The range of each activation, by the name of its step."""
    probes: UInt8Array
    """[n, K, H, W, c]: frames near the threshold, as the model wants them."""
    probe_logits: NDArray[np.float64]
    """[n]: what int8 said of them when it was verified."""
    processor: str
    """The kind of processor that it was verified on."""
    margin: float
    """How far int8 is off near the threshold, in logits."""
    threshold_logit: float
    """The logit above which a frame counts as success."""
    agreement: float
    """Share of the held-out frames on which it decides as fp32 does."""
    rescored: float
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
    ranges = quantize.activation_ranges(model.resnet, images.flatten(0, 1), *model.scale_shift())
    coarse, fine = coarse_scorer(model, ranges), resnet_scorer(model)
    nearest, exact = _nearest(fine, images, threshold_logit)
    rough = coarse.score(nearest)[0]
    margin = _margin(exact, rough)
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
            "int8 is so inexact that %.0f%% of the held-out frames are scored again in fp32, which costs its "
            "speed: quantise with frames of the kind that will be scored, or use fp32",
            100 * twice.mean(),
        )
    probes = nearest[: min(MAX_PROBES, max(1, PROBE_BYTES // nearest[0].nbytes))]
    return Int8Model(
        ranges=ranges,
        probes=probes.numpy(),
        probe_logits=rough[: len(probes)],
        processor=processor(),
        margin=margin,
        threshold_logit=threshold_logit,
        agreement=agreement,
        rescored=float(twice.mean()),
        num_check_frames=len(twice),
        weights=weights_fingerprint(model),
    )


def int8_scorer(model: RewardModel, int8: Int8Model) -> TwoStepScorer:
    """The scorer of an accepted int8 model; refused if it does not compute here what was verified."""
    coarse, fine = coarse_scorer(model, int8.ranges), resnet_scorer(model)
    change = coarse.score(torch.from_numpy(int8.probes))[0] - int8.probe_logits
    drift = float(np.sqrt(np.mean(change**2)))
    if not drift <= _MAX_DRIFT * int8.margin + 1e-3:
        raise DataError(
            f"int8 is refused on this processor ({processor()}): its logits are not those that were verified "
            f"on {int8.processor} (they differ by {drift:.3f}, and at most {_MAX_DRIFT * int8.margin:.3f} is "
            "allowed). Make it here with guerdon reward quantize, or use precision fp32"
        )
    return TwoStepScorer(coarse, fine, threshold_logit=int8.threshold_logit, margin=int8.margin)


def coarse_scorer(model: RewardModel, ranges: Mapping[str, quantize.Range]) -> ModelScorer:
    """int8 alone, without a second look at anything."""
    _, height, width = model.config.image_size
    scale, shift = model.scale_shift()
    graph = quantize.onnx_graph(model.resnet, (height, width), ranges, scale, shift)
    return ModelScorer(model, quantize.QuantizedEncoder(graph, quantize.border_pixel(scale, shift)))


def processor() -> str:
    """The kind of processor, as torch sees it: `AVX2`, `AVX512`, ..."""
    return str(torch.backends.cpu.get_cpu_capability())


class TwoStepScorer:
    """Scores all frames coarsely, and those near the threshold once more.

    Args:
        coarse: scores all frames.
        fine: scores those that `coarse` gives a logit within `margin` of the threshold.
        threshold_logit: the logit above which a frame counts as success.
        margin: in logits.
    """

    def __init__(
        self, coarse: ModelScorer, fine: ModelScorer, *, threshold_logit: float, margin: float
    ) -> None:
        self.coarse, self.fine = coarse, fine
        self.threshold_logit, self.margin = threshold_logit, margin

    def __call__(self, frames: Frames) -> RawScores:
        """See `Scorer`."""
        images = self.coarse.images(frames)
        logits, disagreement = self.coarse.score(images)
        near = np.flatnonzero(self.near(logits))
        if len(near):
            logits[near], disagreement[near] = self.fine.score(images[torch.from_numpy(near)])
        return logits, disagreement

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


def _nearest(fine: ModelScorer, images: Tensor, threshold_logit: float) -> tuple[Tensor, NDArray[np.float64]]:
    """The 64 frames nearest to the threshold, nearest first: uint8 [n, K, H, W, c] and their logits [n].

    A model is sure of the frames that it was trained on. Blends of two of them are what it is unsure of.
    """
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images = torch.cat([images, images // 2 + images[order] // 2])
    logits = np.concatenate([fine.score(batch)[0] for batch in torch.split(images, _BATCH)])
    nearest = np.argsort(np.abs(logits - threshold_logit))[:_NEAREST]
    return images[torch.from_numpy(nearest)], logits[nearest]


def _margin(exact: NDArray[np.float64], rough: NDArray[np.float64]) -> float:
    """How far int8 is off near the threshold: the largest error on the frames that are nearest to it."""
    return float(np.abs(exact - rough).max())


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
