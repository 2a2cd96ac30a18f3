"""Parts of the reward models' networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from guerdon.errors import DataError
from guerdon.moments import Moments

BLOCK = 512
"""Rows that are scored at a time."""


class RewardNetwork(nn.Module):
    """A network with two public methods: `forward` is pure, `learn` returns the loss of a batch."""

    def learn(self, *data: Any) -> Tensor:
        """The loss, a tensor without axes; whoever calls it takes the gradient step."""
        raise NotImplementedError


def perceptron(sizes: Sequence[int], activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers of these sizes with `activation` between them; orthogonal weights, zero biases."""
    layers: list[nn.Module] = []
    for size_in, size_out in pairwise(sizes):
        linear = nn.Linear(size_in, size_out)
        nn.init.orthogonal_(linear.weight, 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


def action_features(actions: Tensor, action_size: int, discrete: bool) -> Tensor:
    """Actions as vectors: discrete ones one-hot; [N] or [N, A] -> float32 [N, action_size]."""
    if not discrete:
        if actions.shape[-1] != action_size or not actions.is_floating_point():
            raise DataError(
                f"actions of shape {list(actions.shape)} and type {actions.dtype} do not fit a reward model "
                f"for real-valued actions of size {action_size}"
            )
        return actions.float()
    if actions.is_floating_point():
        raise DataError("the reward model is for discrete actions, these are real numbers")
    if len(actions) and not 0 <= int(actions.min()) <= int(actions.max()) < action_size:
        raise DataError(f"discrete actions must lie in 0 to {action_size - 1}, found {int(actions.max())}")
    return functional.one_hot(actions, action_size).float()


def in_blocks(network: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What `network` makes of independent rows [N, ...], as many at a time as caches hold.

    Large batches at once take twice as long: their hidden layers are new memory each time.
    """
    if len(inputs[0]) <= BLOCK:
        return network(*inputs)
    pieces = zip(*(torch.split(each, BLOCK) for each in inputs), strict=True)
    return torch.cat([network(*each) for each in pieces])


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
