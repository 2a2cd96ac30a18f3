"""Perceptrons with ReLU whose gradients are written out, in arrays that are kept.

In small networks the bookkeeping of autograd and fresh memory take a sixth (ICM) to a quarter (RND) of a
gradient step; what is left is nearly all matrix products. Tests compare with autograd.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class Arrays:
    """Arrays by name and shape, made when they are first asked for; what they hold is overwritten."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, int], Tensor] = {}

    def __call__(self, name: str, rows: int, width: int, like: Tensor) -> Tensor:
        """[rows, width]; those for other numbers of rows are given up."""
        found = self._kept.get((name, rows, width))
        if found is None or found.device != like.device:
            self._kept = {key: each for key, each in self._kept.items() if key[1] == rows}
            found = self._kept[name, rows, width] = like.new_empty(rows, width)
        return found


class Pass:
    """One use of a perceptron in a loss: forward, then backward. Another use of it is another pass."""

    def __init__(self, name: str, perceptron: nn.Sequential, arrays: Arrays) -> None:
        """Passes of different names may share arrays: for values each has its own, for gradients one."""
        self._name, self._arrays = name, arrays
        self._layers = [each for each in perceptron if isinstance(each, nn.Linear)]
        self._rows = 0
        self._weights: list[Tensor] = []
        self._biases: list[Tensor] = []
        self._values: list[Tensor] = []
        self._before: list[Tensor] = []

    def forward(self, inputs: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, in] -> [N, out], in `out` or valid until the next call."""
        if len(inputs) != self._rows or self._layers[0].weight.data_ptr() != self._weights[0].data_ptr():
            self._prepare(inputs)  # weights and arrays are looked up once, not in every step
        self._values[0] = inputs
        if out is not None:
            self._values[-1] = out
        for number, (values, made) in enumerate(pairwise(self._values)):
            torch.addmm(self._biases[number], values, self._weights[number].T, out=made)
            if number < len(self._before):
                made.relu_()
        return self._values[-1]

    def backward(self, gradient: Tensor, *, add: bool = False, inputs: Tensor | None = None) -> None:
        """Write the weights' gradients.

        Args:
            gradient: of the outputs, [N, out].
            add: to the gradients that are there, those of another pass.
            inputs: [N, columns]; the gradient of the first inputs is added to it.
        """
        for number in reversed(range(len(self._weights))):
            values, layer = self._values[number], self._layers[number]
            of_weight, of_bias = _gradient(layer.weight), _gradient(layer.bias)
            if add:
                of_weight.addmm_(gradient.T, values)
                of_bias.add_(gradient.sum(0))
            else:
                torch.mm(gradient.T, values, out=of_weight)
                torch.sum(gradient, 0, out=of_bias)
            if number:
                gradient = torch.mm(gradient, self._weights[number], out=self._before[number - 1])
                torch.ops.aten.threshold_backward.grad_input(gradient, values, 0.0, grad_input=gradient)
        if inputs is not None:
            inputs.addmm_(gradient, self._weights[0][:, : inputs.shape[1]])

    def _prepare(self, inputs: Tensor) -> None:
        self._rows = len(inputs)
        self._weights = [each.weight.detach() for each in self._layers]
        self._biases = [each.bias.detach() for each in self._layers]
        widths = [len(bias) for bias in self._biases]
        made = [self._array(f"{self._name} {number}", width) for number, width in enumerate(widths)]
        self._values = [inputs, *made]
        self._before = [
            self._array(f"gradient {number % 2}", each) for number, each in enumerate(widths[:-1])
        ]

    def _array(self, name: str, width: int) -> Tensor:
        return self._arrays(name, self._rows, width, self._weights[0])


def squares(errors: Tensor) -> Tensor:
    """The sum of squares of contiguous numbers, without memory for them."""
    flat = errors.view(-1)
    return torch.dot(flat, flat)


def _gradient(weight: Tensor) -> Tensor:
    """Where its gradient goes."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad
