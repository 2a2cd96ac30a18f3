"""Fast scoring: a fitted model as a frozen graph that does nothing but judge frames."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from guerdon.errors import ConfigError
from guerdon.models.base import RewardModel, mean_logit
from guerdon.types import UInt8Array


class Scorer(Protocol):
    """Judges frames."""

    def __call__(
        self, frames: Mapping[str, UInt8Array] | Any
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Frames [N, H, W, C] by camera -> logits of success [N], disagreement of the members [N]."""


class _Network(nn.Module):
    """From preprocessed pixels to the members' logits."""

    def __init__(self, model: RewardModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, K, C, H, W] -> [N, M]."""
        logits: Tensor = self.model.head(self.model.encode(pixels))
        return logits


class TorchScorer:
    """fp32 as a traced, frozen graph with its batch norms folded into the convolutions; bf16 by autocast."""

    def __init__(self, model: RewardModel, *, bf16: bool, device: str) -> None:
        self._model = copy.deepcopy(model).to(device).eval()
        self._bf16, self._device = bf16, torch.device(device)
        network = _Network(self._model).eval()
        channels, height, width = model.config.image_size
        example = torch.zeros(2, len(model.config.image_keys), channels, height, width, device=device)
        self._network: Any = network
        if not bf16:
            with torch.no_grad():
                traced = torch.jit.trace(network, example, check_trace=False)  # type: ignore[no-untyped-call]
                self._network = torch.jit.optimize_for_inference(torch.jit.freeze(traced))

    def __call__(
        self, frames: Mapping[str, UInt8Array] | Any
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """See `Scorer`."""
        with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            logits = self._network(self._model.preprocess(frames)).float()
            spread = torch.sigmoid(logits).std(dim=1, correction=0)
            return mean_logit(logits).double().cpu().numpy(), spread.double().cpu().numpy()


def make_scorer(
    model: RewardModel, precision: Literal["fp32", "bf16", "int8"] = "fp32", *, device: str = "cpu"
) -> Scorer:
    """A scorer of the wanted precision; `model` itself is left as it is."""
    if precision == "int8":
        raise ConfigError("int8 scoring is not part of this version yet; use reward.model.precision=fp32")
    return TorchScorer(model, bf16=precision == "bf16", device=device)
