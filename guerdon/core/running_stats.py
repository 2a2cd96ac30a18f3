"""Running mean and deviation: the one place that knows how two sets of numbers are taken together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Moments(NamedTuple):
    """Of a set of numbers; each part may be a float, or a tensor with one entry for each column."""

    count: Any
    mean: Any
    spread: Any
    """Sum of squared distances from the mean."""

    def merged(self, other: Moments) -> Moments:
        """Of both sets together, without looking at the numbers again (Chan et al., 1983)."""
        count = self.count + other.count
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * (other.count / count),
            self.spread + other.spread + delta * delta * (self.count * other.count / count),
        )


class Statistics(nn.Module):
    """Running mean and deviation of vectors; they change in `update` alone and are saved with the weights.

    With a `horizon` they follow the latest values, about so many; otherwise all count alike.
    """

    mean: Tensor
    spread: Tensor
    count: Tensor

    def __init__(self, shape: Sequence[int] = (), horizon: float = float("inf")) -> None:
        super().__init__()
        self.horizon = horizon
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("spread", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, values: Tensor) -> None:
        """Take values [N, *shape] into account."""
        values = values.detach().double().reshape(-1, *self.mean.shape)
        if not len(values):
            return
        mean = values.mean(0)
        fresh = Moments(float(len(values)), mean, (values - mean).square().sum(0))
        both = fresh if not self.count else Moments(self.count, self.mean, self.spread).merged(fresh)
        kept = min(float(both.count), self.horizon)
        self.count.fill_(kept)
        self.mean.copy_(both.mean)
        self.spread.copy_(both.spread * (kept / both.count))

    @property
    def deviation(self) -> Tensor:
        """float32 [*shape]; 1 before the first update and where nothing varies."""
        std = torch.sqrt(self.spread / self.count.clamp(min=1.0)).float()
        return torch.where(std > 1e-8, std, torch.ones_like(std))

    def normalized(self, values: Tensor, limit: float = 10.0) -> Tensor:
        """Centred and scaled, within +-limit; as they are before the first update."""
        if not self.count:
            return values
        return ((values - self.mean.float()) / self.deviation).clamp(-limit, limit)
