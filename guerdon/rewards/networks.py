"""Parts of the reward models' networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from guerdon.errors import DataError

BLOCK = 512
"""Rows that are scored at a time."""


class RewardNetwork(nn.Module):
    """A network with two public methods: `forward` is pure, `learn` returns the loss of a batch."""

    def learn(self, *data: Any) -> Tensor:
        """The loss, a tensor without axes; whoever calls it takes the gradient step."""
        raise NotImplementedError


class Distillation(RewardNetwork):
    """A fixed random network, and one that learns to say the same."""

    def __init__(self, sizes: Sequence[int], activation: type[nn.Module]) -> None:
        super().__init__()
        self.target = perceptron(sizes, activation).requires_grad_(False)
        self.predictor = perceptron(sizes, activation)

    def forward(self, features: Tensor) -> Tensor:
        """[N, F] -> squared errors, mean over the outputs, float32 [N]: low where it has learned."""
        errors: Tensor = (self.predictor(features) - self.target(features)).square().mean(1)
        return errors

    def learn(self, features: Tensor) -> Tensor:
        """The mean error."""
        return functional.mse_loss(self.predictor(features), self.target(features))


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
