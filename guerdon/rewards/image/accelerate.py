"""Scorers: a fitted model turned into a graph that does nothing but score frames, and fast.

All of them replace the ResNet, which takes nearly all the time, and leave the pooling and the heads to torch
in float32. Scorers in int8 are in `int8.py`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from guerdon.core.types import UInt8Array
from guerdon.rewards.image.base import RewardModel, mean_logit
from guerdon.rewards.image.encoders import ResNet
from guerdon.rewards.image.steps import FoldedSteps, resnet_steps

Frames: TypeAlias = Mapping[str, UInt8Array] | UInt8Array
"""camera -> uint8 [N, H, W, C] (or stacks [N, k, H, W, C]), or the images alone if there is one camera."""
RawScores: TypeAlias = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Logits of success float64 [N], and the members' disagreement float64 [N]."""

# Early layers work on large maps: few frames at a time stay in the cache. Late layers have large weights,
# which are laid out again in each call: many frames at a time share that. Measured with one thread.
_EARLY_PIXELS = 1 << 18
_LATE_PIXELS = 1 << 20


class Scorer(Protocol):
    """Scores frames, and changes nothing by it."""

    def __call__(self, frames: Frames) -> RawScores:
        """Frames -> logits as `RewardModel.forward` gives them in eval mode, and the disagreement."""


def make_scorer(
    model: RewardModel, precision: Literal["fp32", "bf16"] = "fp32", *, device: str = "cpu"
) -> ModelScorer | PlainScorer:
    """A scorer of the wanted precision; `model` is left as it is and may be trained on.

    A ResNet in `fp32` is fused (see `FusedEncoder`). For int8 see `guerdon.rewards.image.int8`.
    """
    if not model.is_fusable:
        return PlainScorer(model, precision, device)
    return resnet_scorer(model, precision, device=device)


def resnet_scorer(
    model: RewardModel, precision: Literal["fp32", "bf16"] = "fp32", *, device: str = "cpu"
) -> ModelScorer:
    """As `make_scorer`, for models with a ResNet of ours; an error for others."""
    make_encoder = FusedEncoder if precision == "fp32" else _bfloat16_encoder
    return ModelScorer(model, make_encoder(model, torch.device(device)), device)


class ModelScorer:
    """A model whose ResNet is replaced by a faster one, which takes uint8 images as they are.

    Args:
        model: is copied, but for its ResNet.
        encoder: uint8 [N, c, H, W] -> float32 [N, C', h, w], normalisation included.
        device: where the encoder computes.
    """

    def __init__(self, model: RewardModel, encoder: nn.Module, device: str = "cpu") -> None:
        # `deepcopy` takes what it finds in the memo for a finished copy: here, of the ResNet.
        self._model: RewardModel = copy.deepcopy(model, {id(model.resnet): encoder}).to(device).eval()
        self._device = device

    def __call__(self, frames: Frames) -> RawScores:
        """See `Scorer`."""
        return self.score(self.images(frames))

    def images(self, frames: Frames) -> Tensor:
        """uint8 [N, K, H, W, c]: the frames as the model wants them."""
        return self._model.images(frames)

    @torch.no_grad()
    def score(self, images: Tensor) -> RawScores:
        """uint8 [N, K, H, W, c] of the model's size -> logits and disagreement."""
        features = self._model.encode(images.to(self._device).permute(0, 1, 4, 2, 3))
        logits = self._model.head(features).double()
        disagreement = torch.sigmoid(logits).std(1, correction=0)
        return mean_logit(logits).cpu().numpy(), disagreement.cpu().numpy()


class PlainScorer:
    """A copy of a model that scores as it is: for encoders that nothing stands in for.

    Args:
        model: is copied.
        precision: `bf16` computes the encoder's products in bfloat16.
        device: where to compute.
    """

    def __init__(self, model: RewardModel, precision: Literal["fp32", "bf16"], device: str) -> None:
        self._model: RewardModel = copy.deepcopy(model).to(device).requires_grad_(False).eval()
        self._device, self._bfloat16 = torch.device(device), precision == "bf16"

    @torch.no_grad()
    def __call__(self, frames: Frames) -> RawScores:
        """See `Scorer`."""
        pixels = self._model.preprocess(frames)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
            features = self._model.encode(pixels)
        logits = self._model.head(features.float()).double()
        disagreement = torch.sigmoid(logits).std(1, correction=0)
        return mean_logit(logits).cpu().numpy(), disagreement.cpu().numpy()


# Encoders that stand in for a ResNet: uint8 [N, c, H, W] -> float32 [N, C', h, w]


class _FromBytes(nn.Module):
    """Normalisation, then a ResNet that computes in `dtype`."""

    def __init__(
        self, resnet: nn.Module, scale: Tensor, shift: Tensor, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.resnet, self.dtype = resnet, dtype
        self.scale, self.shift = scale.view(-1, 1, 1), shift.view(-1, 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, c, H, W] -> feature maps."""
        pixels = images.contiguous().to(torch.float32)
        maps: Tensor = self.resnet(torch.addcmul(self.shift, pixels, self.scale).to(self.dtype))
        return maps.float()


def _bfloat16_encoder(model: RewardModel, device: torch.device) -> _FromBytes:
    """A copy whose convolutions have bfloat16 weights; the norms compute in float32 inside."""
    resnet = copy.deepcopy(model.resnet).to(device).eval()
    for module in resnet.modules():
        if isinstance(module, nn.Conv2d):
            module.to(torch.bfloat16)
    scale, shift = (values.to(device) for values in model.scale_shift())
    return _FromBytes(resnet, scale, shift, torch.bfloat16)


class FusedEncoder(nn.Module):
    """fp32 with batch norms folded in: `FoldedSteps` on AVX2, else frozen graphs.

    On a CPU these are in the blocked layout of oneDNN. Which of the two is faster was measured on both kinds
    of processor (docs/tutorials/fit.md).
    """

    def __init__(self, model: RewardModel, device: torch.device) -> None:
        super().__init__()
        size = height, width = model.config.image_size[1:]
        resnet = copy.deepcopy(model.resnet).to(device).requires_grad_(False).eval()
        scale, shift = (values.to(device) for values in model.scale_shift())
        network = _FromBytes(resnet, scale, shift)
        self._early_frames = max(1, _EARLY_PIXELS // (height * width))
        self._late_frames = max(1, _LATE_PIXELS // (height * width))
        self._in_parts = device.type == "cpu"
        self._whole: Callable[[Tensor], Tensor] = network
        self._early: Callable[[Tensor], Tensor]
        self._late: Callable[[Tensor], Tensor]
        if self._in_parts and uses_folded_steps(resnet):
            steps = resnet_steps(resnet, size)
            first = next(i for i, step in enumerate(steps) if step.output.startswith("layer3"))
            self._early = _FromBytes(FoldedSteps(steps[:first]), scale, shift)
            self._late = FoldedSteps(steps[first:])
            return
        resnet.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        example = torch.zeros(2, model.num_channels, *size, dtype=torch.uint8, device=device)
        self._whole = _frozen(network, example)
        if self._in_parts:
            late = nn.Sequential(resnet.layer3, resnet.layer4)
            resnet.layer3, resnet.layer4 = nn.Sequential(), nn.Sequential()
            self._early, self._late = _blocked(network, example), _blocked(late, network(example))

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, c, H, W] -> float32 [N, C', h, w]."""
        if not self._in_parts or len(images) == 1:  # for one frame, laying out weights again does not pay
            return self._whole(images)
        maps = []
        for group in torch.split(images, self._late_frames):
            early = [self._early(part) for part in torch.split(group, self._early_frames)]
            maps.append(self._late(torch.cat(early)))
        return torch.cat(maps)


def uses_folded_steps(resnet: ResNet) -> bool:
    """Whether `FoldedSteps` are faster for it than frozen graphs on the processor at hand."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2" and resnet.norm == "batch"


def _frozen(network: nn.Module, example: Tensor) -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and faster on a CPU than what replaces it
        traced = torch.jit.trace(network.eval(), example, check_trace=False)  # type: ignore[no-untyped-call]
        return torch.jit.freeze(traced)


def _blocked(network: nn.Module, example: Tensor) -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.optimize_for_inference(_frozen(network, example))
