"""Gaussians squashed into [-1, 1] by tanh: draws and their densities."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
_LOG_2, _HALF_LOG_2PI = math.log(2.0), 0.5 * math.log(2.0 * math.pi)


class Drawn(NamedTuple):
    """Actions that a policy drew; B rows."""

    actions: Tensor
    """In [-1, 1]; [B, A]."""
    log_density: Tensor
    """Of the actions; [B]."""
    mean: Tensor
    """Before squashing; [B, A]."""


def limits(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Of a policy's outputs [B, 2A]: mean and log deviation within its limits; [B, A] each."""
    mean, log_std = outputs.chunk(2, dim=-1)
    return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)


def draw(outputs: Tensor, generator: torch.Generator) -> Drawn:
    """Draw an action for each row of a policy's outputs, [B, 2A]."""
    mean, log_std = limits(outputs)
    noise = torch.randn(mean.shape, generator=generator, device=mean.device)
    before = torch.addcmul(mean, noise, log_std.exp())
    # log N(before) - log |d tanh|, with log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u))
    constant = noise.square().mul_(-0.5).sub_(_HALF_LOG_2PI + 2.0 * _LOG_2)
    log_density = constant - log_std + 2.0 * (F.softplus(-2.0 * before) + before)
    return Drawn(torch.tanh(before), log_density.sum(-1), mean)
