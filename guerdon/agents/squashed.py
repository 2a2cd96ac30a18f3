"""Gaussians squashed into [-1, 1] by tanh: draws, their densities, and the slopes of what follows from them.

The gradients are written out, as everywhere in `SAC`; tests compare them with autograd.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
_LOG_2, _HALF_LOG_2PI = math.log(2.0), 0.5 * math.log(2.0 * math.pi)


@dataclass(slots=True)
class Drawn:
    """Actions that a policy drew, and what their slopes need; B rows."""

    actions: Tensor
    """In [-1, 1]; [B, A]."""
    log_density: Tensor
    """Of the actions; [B]."""
    mean: Tensor
    """Before squashing; [B, A]."""
    moved: Tensor
    """How far noise moved them from the mean, before squashing; [B, A]."""
    limited: Tensor
    """bool [B, A]; whether the deviation is held at a limit."""

    def halves(self) -> tuple[Drawn, Drawn]:
        """The first and the second half of the rows, not copied."""
        parts = [getattr(self, name).chunk(2) for name in self.__slots__]
        return Drawn(*(part[0] for part in parts)), Drawn(*(part[1] for part in parts))

    def slopes(self, alpha: float, value_slopes: Tensor) -> tuple[Tensor, Tensor]:
        """Of the mean over rows of `alpha * log_density - value`, in the mean and log deviation, [B, A] each.

        Args:
            alpha: weight of the log density.
            value_slopes: gradient of each row's value in its actions, [B, A].
        """
        actions, count = self.actions, len(self.actions)
        # d log density / d before = 2 tanh(before); d tanh(before) / d before = 1 - tanh(before)^2
        flatter = torch.addcmul(value_slopes, value_slopes, actions.square(), value=-1.0)
        by_mean = flatter.sub_(actions, alpha=2.0 * alpha).mul_(-1.0 / count)
        return by_mean, (by_mean * self.moved).sub_(alpha / count).masked_fill_(self.limited, 0.0)


def limits(outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a policy's outputs [B, 2A]: mean, log deviation within its limits, and as it was; [B, A] each."""
    mean, log_std = outputs.chunk(2, dim=-1)
    return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX), log_std


def draw(outputs: Tensor, generator: torch.Generator) -> Drawn:
    """Draw an action for each row of a policy's outputs, [B, 2A]."""
    mean, log_std, asked = limits(outputs)
    noise = torch.randn(mean.shape, generator=generator, device=mean.device)
    moved = noise * log_std.exp()
    before = mean + moved
    # log N(before) - log |d tanh|, with log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u))
    constant = noise.square_().mul_(-0.5).sub_(_HALF_LOG_2PI + 2.0 * _LOG_2)
    log_density = constant.sub_(log_std).add_(F.softplus(-2.0 * before).add_(before), alpha=2.0)
    return Drawn(before.tanh_(), log_density.sum(-1), mean, moved, asked != log_std)


def imitation(mean: Tensor, unit_actions: Tensor) -> tuple[float, Tensor]:
    """Mean square error of tanh(mean) against actions, [N, A] each, and its gradient in the mean."""
    squashed = torch.tanh(mean)
    errors = squashed - unit_actions
    slope = errors * (1.0 - squashed.square()) * (2.0 / errors.numel())
    return errors.square().mean().item(), slope
