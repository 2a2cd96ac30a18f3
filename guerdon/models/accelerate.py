"""Scorers: a fitted model turned into a graph that does nothing but judge frames, and fast.

All of them replace the ResNet, which takes nearly all the time, and leave the pooling and the heads to torch
in float32. `int8` is only handed out if its decisions are those of `fp32`; see `make_scorer`.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from guerdon.errors import ConfigError, DataError
from guerdon.models import quantize
from guerdon.models.base import RewardModel, mean_logit
from guerdon.store.atomic import make_directory, write_atomic
from guerdon.types import BoolArray, UInt8Array, display_path

logger = logging.getLogger("guerdon")

Precision: TypeAlias = Literal["fp32", "bf16", "int8"]
Frames: TypeAlias = Mapping[str, UInt8Array] | UInt8Array
"""camera -> uint8 [N, H, W, C], or the images alone if the model has one camera."""
Judgement: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Logits of success float64 [N], and the members' disagreement float64 [N]."""

MIN_AGREEMENT = 0.999
_BATCH = 256
# Early layers work on large maps: few frames at a time stay in the cache. Late layers have large weights,
# which are laid out anew in each call: many frames at a time share that. Measured with one thread.
_EARLY_PIXELS = 1 << 18
_LATE_PIXELS = 1 << 20
_NEAREST = 64
_MAX_TWICE = 0.2


class Scorer(Protocol):
    """Judges frames, and changes nothing by it."""

    def __call__(self, frames: Frames) -> Judgement:
        """Frames -> logits as `RewardModel.forward` gives them in eval mode, and the disagreement."""


def make_scorer(
    model: RewardModel,
    precision: Precision = "fp32",
    *,
    device: str = "cpu",
    calibration_frames: Frames | None = None,
    check_frames: Frames | None = None,
    threshold_logit: float | None = None,
    cache: Path | None = None,
) -> Scorer:
    """A scorer of the wanted precision; `model` is left as it is and may be trained on.

    `int8` with a `threshold_logit` decides in two steps: frames whose int8 logit is closer to the threshold
    than int8 is exact are judged once more in fp32. With `check_frames` it is refused if its decisions
    differ from those of fp32 on more than 0.1% of them.

    Args:
        model: a fitted model.
        precision: `fp32` (fused and frozen), `bf16`, or `int8` (on the CPU alone).
        device: where to compute.
        calibration_frames: frames of the training set, 256 to 512 of them; `int8` needs them.
        check_frames: held-out frames, for `int8`.
        threshold_logit: the logit above which a frame counts as success, for `int8`.
        cache: a directory in which the quantised model is kept for the next time, for `int8`.
    """
    if precision == "int8":
        return _int8_scorer(model, device, calibration_frames, check_frames, threshold_logit, cache)
    encoder = FusedEncoder if precision == "fp32" else Bfloat16Encoder
    return ModelScorer(model, encoder(model, torch.device(device)), device)


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
        raise DataError(f"the check frames must be equally many of each camera, and some: {sorted(counts)}")
    for start in range(0, counts.pop(), _BATCH):
        part = slice(start, start + _BATCH)
        yield {key: x[part] for key, x in frames.items()} if isinstance(frames, Mapping) else frames[part]


class ModelScorer:
    """A model whose ResNet is replaced by a faster one, which takes uint8 images as they are.

    Args:
        model: is copied, but for its ResNet.
        encoder: uint8 [N, C, H, W] -> float32 [N, C', h, w], normalisation included.
        device: where the encoder computes.
    """

    def __init__(self, model: RewardModel, encoder: nn.Module, device: str = "cpu") -> None:
        # `deepcopy` takes what it finds in the memo for a finished copy: here, of the ResNet.
        self._model: RewardModel = copy.deepcopy(model, {id(model.resnet): encoder}).to(device).eval()
        self._device = device

    def __call__(self, frames: Frames) -> Judgement:
        """See `Scorer`."""
        return self.judge(self.images(frames))

    def images(self, frames: Frames) -> Tensor:
        """uint8 [N, K, H, W, C]: the frames as the model wants them."""
        return self._model.images(frames)

    @torch.no_grad()
    def judge(self, images: Tensor) -> Judgement:
        """uint8 [N, K, H, W, C] of the model's size -> logits and disagreement."""
        features = self._model.encode(images.to(self._device).permute(0, 1, 4, 2, 3))
        logits = self._model.head(features).double()
        spread = torch.sigmoid(logits).std(1, correction=0)
        return mean_logit(logits).cpu().numpy(), spread.cpu().numpy()


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


# Encoders that stand in for a ResNet: uint8 [N, C, H, W] -> float32 [N, C', h, w]


class _FromBytes(nn.Module):
    """Normalisation, then a ResNet."""

    def __init__(self, resnet: nn.Module, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.resnet = resnet
        self.scale, self.shift = scale.view(-1, 1, 1), shift.view(-1, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, C, H, W] -> feature maps."""
        pixels = images.contiguous().to(torch.float32)
        maps: Tensor = self.resnet(torch.addcmul(self.shift, pixels, self.scale))
        return maps


class FusedEncoder(nn.Module):
    """fp32 as frozen graphs, with batch norms folded in; on a CPU in the blocked layout of oneDNN."""

    def __init__(self, model: RewardModel, device: torch.device) -> None:
        super().__init__()
        channels, height, width = model.config.image_size
        resnet = copy.deepcopy(model.resnet).to(device).requires_grad_(False).eval()
        resnet.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        network = _FromBytes(resnet, *(values.to(device) for values in model.scale_shift()))
        example = torch.zeros(2, channels, height, width, dtype=torch.uint8, device=device)
        self._whole = _frozen(network, example)
        self._early_frames = max(1, _EARLY_PIXELS // (height * width))
        self._late_frames = max(1, _LATE_PIXELS // (height * width))
        self._in_parts = device.type == "cpu"
        if self._in_parts:
            late = nn.Sequential(resnet.layer3, resnet.layer4)
            resnet.layer3, resnet.layer4 = nn.Sequential(), nn.Sequential()
            self._early, self._late = _blocked(network, example), _blocked(late, network(example))

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, C, H, W] -> float32 [N, C', h, w]."""
        if not self._in_parts or len(images) == 1:  # for one frame, laying out weights anew does not pay
            whole: Tensor = self._whole(images)
            return whole
        maps = []
        for group in torch.split(images, self._late_frames):
            early = [self._early(part) for part in torch.split(group, self._early_frames)]
            maps.append(self._late(torch.cat(early)))
        return torch.cat(maps)


def _frozen(network: nn.Module, example: Tensor) -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and faster on a CPU than what replaces it
        traced = torch.jit.trace(network.eval(), example, check_trace=False)  # type: ignore[no-untyped-call]
        return torch.jit.freeze(traced)


def _blocked(network: nn.Module, example: Tensor) -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.optimize_for_inference(_frozen(network, example))


class Bfloat16Encoder(nn.Module):
    """A copy whose convolutions have bfloat16 weights; the norms compute in float32 inside."""

    def __init__(self, model: RewardModel, device: torch.device) -> None:
        super().__init__()
        self._resnet = copy.deepcopy(model.resnet).to(device).eval()
        for module in self._resnet.modules():
            if isinstance(module, nn.Conv2d):
                module.to(torch.bfloat16)
        self._scale, self._shift = (values.view(-1, 1, 1).to(device) for values in model.scale_shift())

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, C, H, W] -> float32 [N, C', h, w]."""
        pixels = images * self._scale + self._shift
        maps: Tensor = self._resnet(pixels.to(torch.bfloat16)).float()
        return maps


# int8


def _int8_scorer(
    model: RewardModel,
    device: str,
    calibration_frames: Frames | None,
    check_frames: Frames | None,
    threshold_logit: float | None,
    cache: Path | None,
) -> Scorer:
    if torch.device(device).type != "cpu":
        raise ConfigError(f"int8 scoring runs on the CPU alone, not on {device}: use precision bf16 or fp32")
    if calibration_frames is None:
        raise DataError("int8 scoring needs calibration_frames: 256 to 512 frames of the training set")
    if check_frames is not None and threshold_logit is None:
        raise DataError(
            "check_frames are of no use without the threshold_logit at which decisions are compared"
        )
    images = model.images(calibration_frames)
    scale, shift = model.scale_shift()
    path = None
    if cache is not None:
        checked = torch.empty(0) if check_frames is None else model.images(check_frames)
        path = cache / f"int8-{_key(model, images, checked, threshold_logit)}.npz"
    known = None if path is None else _read_cache(path)
    file = quantize.quantize(model.resnet, images.flatten(0, 1), scale, shift) if known is None else known[0]
    encoder = quantize.QuantizedEncoder(file, quantize.border_pixel(scale, shift))
    coarse, margin = ModelScorer(model, encoder), 0.0
    scorer: Scorer = coarse
    if threshold_logit is not None:
        fine = ModelScorer(model, FusedEncoder(model, torch.device(device)))
        margin = _margin(fine, coarse, images, threshold_logit) if known is None else known[1]
        scorer = TwoStepScorer(coarse, fine, threshold_logit=threshold_logit, margin=margin)
        if check_frames is not None and known is None:
            _accept(verify_agreement(fine, scorer, check_frames, threshold_logit), len(images))
            _warn_if_slow(scorer, check_frames)
    if path is not None and known is None:
        _write_cache(path, file, margin)
    return scorer


def _accept(agreement: float, num_calibration_frames: int) -> None:
    """Raise unless int8 decides as fp32 does."""
    if agreement < MIN_AGREEMENT:
        raise DataError(
            f"int8 is refused: its decisions agree with fp32 on {agreement:.3%} of the check frames, "
            f"and {MIN_AGREEMENT:.1%} is asked for. Use precision fp32, or calibrate with more frames of the "
            f"kind that will be scored (there were {num_calibration_frames})."
        )
    logger.info("int8 decides as fp32 does on %.3f%% of the check frames", 100 * agreement)


def _warn_if_slow(scorer: TwoStepScorer, frames: Frames) -> None:
    twice = np.concatenate([scorer.near(scorer.coarse(batch)[0]) for batch in _batches(frames)]).mean()
    logger.info("int8 leaves %.1f%% of the check frames to fp32", 100 * twice)
    if twice > _MAX_TWICE:
        logger.warning(
            "int8 is so inexact that %.0f%% of the check frames are judged again in fp32, which costs its "
            "speed: calibrate it with frames of the kind that will be scored, or use fp32",
            100 * twice,
        )


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


# The cache holds what was accepted; its key covers everything that the verdict depends on.


def _key(model: RewardModel, images: Tensor, checked: Tensor, threshold_logit: float | None) -> str:
    encoder = model.resnet
    facts = (quantize.FORMAT, model.model_type, model.config.normalize, encoder.same_padding, threshold_logit)
    digest = hashlib.sha256(repr(facts).encode())
    tensors = {**model.state_dict(), "calibration": images, "check": checked}
    for name, value in tensors.items():
        array = value.detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()[:32]


def _read_cache(path: Path) -> tuple[bytes, float] | None:
    """The quantised ResNet and the margin; None if they are not there or cannot be read."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as content:
            return content["onnx"].tobytes(), float(content["margin"])
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s is damaged and is made anew: %s", display_path(path), error)
        return None


def _write_cache(path: Path, file: bytes, margin: float) -> None:
    make_directory(path.parent)
    write_atomic(path, lambda out: np.savez(out, onnx=np.frombuffer(file, np.uint8), margin=margin))
