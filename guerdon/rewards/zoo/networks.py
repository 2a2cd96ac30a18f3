"""Parts of the reward models' networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from guerdon.core.adam import BETAS, EPS, fused_adam
from guerdon.core.errors import DataError

BLOCK = 512
"""Rows that are scored at a time."""


class RewardNetwork(nn.Module):
    """A network: `forward` is pure, `learn` is the loss of a batch, `gradients` follows from it."""

    def learn(self, *data: Any) -> Tensor:
        """The loss, a tensor without axes; whoever calls it takes the gradient step."""
        raise NotImplementedError(f"{type(self).__name__} does not learn: it has no method `learn`")

    def gradients(self, *data: Any) -> Tensor:
        """The same loss, detached, and its gradients in the weights' `grad`."""
        for weight in self.parameters():
            weight.grad = None
        loss = self.learn(*data)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class Distillation(RewardNetwork):
    """A fixed random network, and one that learns to say the same."""

    def __init__(self, sizes: Sequence[int], activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.target = perceptron(sizes, activation).requires_grad_(False)
        self.predictor = perceptron(sizes, activation)

    def forward(self, features: Tensor) -> Tensor:
        """[N, F] -> squared errors, mean over the outputs, float32 [N]: low where it has learned."""
        predicted, wanted = self.predictor(features), self.target(features)
        return functional.mse_loss(predicted, wanted, reduction="none").mean(1)

    def learn(self, features: Tensor) -> Tensor:
        """The mean error."""
        return functional.mse_loss(self.predictor(features), self.target(features))


def relu() -> nn.Module:
    """ReLU that overwrites what a layer made: nothing else looks at it."""
    return nn.ReLU(inplace=True)


def perceptron(sizes: Sequence[int], activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Linear layers of these sizes with `activation` between them; orthogonal weights, zero biases."""
    layers: list[nn.Module] = []
    for size_in, size_out in pairwise(sizes):
        linear = nn.Linear(size_in, size_out)
        nn.init.orthogonal_(linear.weight, 2**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


class Adam(torch.optim.Adam):
    """Adam that takes its steps by torch's kernel alone: for small networks all around it takes longer."""

    def __init__(self, weights: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(weights, lr, betas=BETAS, eps=EPS, fused=True)

    def fused_step(self) -> None:
        """One step along the gradients that are there."""
        group = self.param_groups[0]
        moved = [weight for weight in group["params"] if weight.grad is not None]
        if any(weight not in self.state for weight in moved):
            self.step()  # the first one of a weight makes its moments too
            return
        states = [self.state[weight] for weight in moved]
        fused_adam(
            moved,
            [weight.grad for weight in moved],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state["step"] for state in states],
            lr=group["lr"],
        )


def check_actions(actions: Tensor, action_size: int, discrete: bool) -> None:
    """Raise if actions, [*L] or [*L, A], do not fit the environment."""
    if not discrete and (actions.shape[-1] != action_size or not actions.is_floating_point()):
        raise DataError(
            f"actions of shape {list(actions.shape)} and type {actions.dtype} do not fit a reward model "
            f"for real-valued actions of size {action_size}"
        )
    if discrete and actions.is_floating_point():
        raise DataError("the reward model is for discrete actions, these are real numbers")
    low, high = map(int, torch.aminmax(actions)) if discrete and actions.numel() else (0, 0)
    if not 0 <= low <= high < action_size:
        raise DataError(f"discrete actions must lie in 0 to {action_size - 1}, found {low} to {high}")


def in_blocks(network: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """What `network` makes of independent rows [N, ...], as many at a time as caches hold.

    Large batches at once take twice as long: their hidden layers are new memory each time.
    """
    if len(inputs[0]) <= BLOCK:
        return network(*inputs)
    pieces = zip(*(torch.split(each, BLOCK) for each in inputs), strict=True)
    return torch.cat([network(*each) for each in pieces])
