"""Small networks without overhead: all weights in one vector, gradients written out.

With small networks most of the time of an update goes into the overhead of many small operations. Here
several perceptrons of one shape are one batched product, and Adam is one kernel over one vector. Tests
compare the gradients with those of autograd, and Adam with torch's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from guerdon.config import NetworkConfig

SWEEP_INTERVAL, NEGLIGIBLE = 100, 1e-30
"""Adam's moments below the second are set to zero every so many steps; 0.9 ** 100 * 1e-30 is no denormal."""
MAX_WORKSPACES = 4
"""For how many batch sizes a network keeps its intermediate arrays."""
Trace: TypeAlias = list[tuple[Tensor, tuple[Tensor, ...]]]
"""Of each layer: its input [E, B, in], and what its layer norm needs on the way back."""


class BatchedMLP:
    """E perceptrons of one shape, computed together; weights and gradients are one vector each."""

    def __init__(
        self,
        num_networks: int,
        size_in: int,
        size_out: int,
        cfg: NetworkConfig,
        *,
        out_gain: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Orthogonal weights, drawn from the global generator, which the caller seeds."""
        self._relu, self._normed = cfg.activation == "relu", cfg.layer_norm
        sizes = (size_in, *cfg.hidden, size_out)
        self._shapes: list[tuple[int, int, int]] = []
        for number, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            vectors = 3 if cfg.layer_norm and number < len(cfg.hidden) else 1
            self._shapes += [(num_networks, fan_in, fan_out), *[(num_networks, 1, fan_out)] * vectors]
        self.flat = torch.zeros(sum(math.prod(shape) for shape in self._shapes), device=device)
        self.gradient = torch.zeros_like(self.flat)
        self._num_networks = num_networks
        self._workspace: dict[int, list[list[Tensor]]] = {}
        self._layers, self._slots = self._views(self.flat), self._views(self.gradient)
        for number, (weight, _, *norm) in enumerate(self._layers):
            for each in weight:
                nn.init.orthogonal_(each, out_gain if number == len(cfg.hidden) else math.sqrt(2))
            if norm:
                norm[0].fill_(1.0)

    def _views(self, flat: Tensor) -> list[list[Tensor]]:
        """Of each layer: weight [E, in, out], bias [E, 1, out], and of layer norm: scale, shift."""
        parts = torch.split(flat, [math.prod(shape) for shape in self._shapes])
        views = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        step = 4 if self._normed else 2
        return [views[start : start + step] for start in range(0, len(views), step)]

    def _work(self, count: int) -> list[list[Tensor]]:
        """Arrays [E, B, width] of each hidden layer, kept: fresh memory costs much of what a pass does."""
        if count not in self._workspace:
            if len(self._workspace) >= MAX_WORKSPACES:
                self._workspace.clear()
            self._workspace[count] = [
                [bias.new_empty(len(bias), count, bias.shape[2]) for _ in range(4 if self._normed else 2)]
                for _, bias, *_ in self._layers[:-1]
            ]
        return self._workspace[count]

    def __call__(self, inputs: Tensor) -> Tensor:
        """[B, in] -> [E, B, out]."""
        return self.forward(inputs)[0]

    def forward(self, inputs: Tensor) -> tuple[Tensor, Trace]:
        """[B, in], detached -> [E, B, out] and what `backward` needs, valid until the next forward pass."""
        values, trace = inputs.expand(self._num_networks, -1, -1), Trace()
        work = self._work(len(inputs))
        for (weight, bias, *norm), (linear, _, *spare) in zip(self._layers[:-1], work, strict=True):
            torch.baddbmm(bias, values, weight, out=linear)
            after, kept = linear, tuple[Tensor, ...]()
            if norm:
                normed, after = spare
                mean, scale = (linear.new_empty(*linear.shape[:2], 1) for _ in range(2))
                torch.ops.aten.native_layer_norm.out(
                    linear, linear.shape[-1:], None, None, 1e-5, out0=normed, out1=mean, out2=scale
                )
                kept = (linear, normed, mean, scale)
                torch.addcmul(norm[1], normed, norm[0], out=after)
            trace.append((values, kept))
            values = after.relu_() if self._relu else after.tanh_()
        trace.append((values, ()))
        weight, bias = self._layers[-1]
        return torch.baddbmm(bias, values, weight), trace

    def backward(
        self, trace: Trace, gradient: Tensor, *, weights: bool = True, inputs: bool = False
    ) -> Tensor:
        """Gradients from that of the outputs, [E, B, out].

        Args:
            trace: of the latest forward pass.
            gradient: of the outputs, [E, B, out].
            weights: overwrite `self.gradient`.
            inputs: return the gradient of the inputs, [B, in]; otherwise that of the first hidden layer.
        """
        work = self._work(gradient.shape[1])
        for number in range(len(self._layers) - 1, -1, -1):
            values = trace[number][0]
            slot = self._slots[number]
            if weights:
                torch.bmm(values.transpose(1, 2), gradient, out=slot[0])
                torch.sum(gradient, 1, keepdim=True, out=slot[1])
            if number == 0:
                break
            before = work[number - 1][1]
            torch.bmm(gradient, self._layers[number][0].transpose(1, 2), out=before)
            if self._relu:
                torch.ops.aten.threshold_backward.grad_input(before, values, 0.0, grad_input=before)
            else:
                torch.ops.aten.tanh_backward.grad_input(before, values, grad_input=before)
            gradient = before
            if self._normed:
                gradient = self._through_norm(number - 1, trace[number - 1][1], gradient, weights)
        return torch.bmm(gradient, self._layers[0][0].transpose(1, 2)).sum(0) if inputs else gradient

    def _through_norm(self, number: int, kept: tuple[Tensor, ...], gradient: Tensor, weights: bool) -> Tensor:
        linear, normed, mean, scale = kept
        if weights:
            torch.sum(gradient * normed, 1, keepdim=True, out=self._slots[number][2])
            torch.sum(gradient, 1, keepdim=True, out=self._slots[number][3])
        before: Tensor = torch.ops.aten.native_layer_norm_backward(
            gradient * self._layers[number][2],
            linear,
            linear.shape[-1:],
            mean,
            scale,
            None,
            None,
            [True, False, False],
        )[0]
        return before


class FlatAdam:
    """Adam (Kingma and Ba, 2015) for the vector of a network: torch's fused kernel without its wrapping.

    Moments of weights whose gradient stays zero (behind dead units) decay into denormal numbers within a
    thousand steps, on which a processor is ten times slower. They are set to zero long before.
    """

    def __init__(self, flat: Tensor, gradient: Tensor, lr: float, eps: float = 1e-8) -> None:
        self._flat, self._gradient, self.lr, self._eps = flat, gradient, lr, eps
        self._mean, self._square = torch.zeros_like(flat), torch.zeros_like(flat)
        self._steps = torch.zeros((), device=flat.device)

    def step(self) -> None:
        """Follow the gradient."""
        if self._steps.item() % SWEEP_INTERVAL == 0:
            for moment in (self._mean, self._square):
                moment.masked_fill_(moment.abs() < NEGLIGIBLE, 0.0)
        self._steps += 1
        torch._fused_adam_(
            [self._flat],
            [self._gradient],
            [self._mean],
            [self._square],
            [],
            [self._steps],
            lr=self.lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self._eps,
            amsgrad=False,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Running moments and the number of steps."""
        return {"mean": self._mean, "square": self._square, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])
        self._steps.copy_(state["steps"])
