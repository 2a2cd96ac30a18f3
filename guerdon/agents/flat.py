"""Small networks without overhead: all weights in one vector, gradients written out.

With small networks most of the time of an update goes into the overhead of many small operations. Here
several perceptrons of one shape are one batched product, and Adam is one kernel over one vector. Tests
compare the gradients with those of autograd, and Adam with torch's own.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from guerdon.config import NetworkConfig
from guerdon.core.adam import EPS, fused_adam

SWEEP_INTERVAL, NEGLIGIBLE = 100, 1e-30
"""Adam's moments below the second are set to zero every so many steps; 0.9 ** 100 * 1e-30 is no denormal."""
MAX_WORKSPACES = 4
"""For how many batch sizes a network keeps its intermediate arrays."""
Trace: TypeAlias = list[tuple[Tensor, tuple[Tensor, ...]]]
"""Of each layer: its input [E, B, in], and what its layer norm needs on the way back."""
NORM_EPS = 1e-5
"""Of layer norm, as torch has it."""


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

    def twin(self, *, share_arrays: bool = False) -> BatchedMLP:
        """The same networks with weights of their own.

        Args:
            share_arrays: compute in the same arrays, which then stay in the processor's cache; a pass of one
                ends the trace of the other.
        """
        twin = copy.copy(self)
        twin.flat, twin.gradient = self.flat.clone(), torch.zeros_like(self.gradient)
        twin._layers, twin._slots = twin._views(twin.flat), twin._views(twin.gradient)
        twin._workspace = self._workspace if share_arrays else {}
        return twin

    def shift_outputs(self, columns: slice, by: float) -> None:
        """Add to the last layer's bias."""
        self._layers[-1][1][..., columns] += by

    def _work(self, count: int) -> list[list[Tensor]]:
        """Arrays [E, B, width] of each hidden layer, kept: fresh memory costs much of what a pass does.

        They are: the values, the gradient before the activation; with layer norm also what it made, and a
        spare one. They are few, so that they stay in the processor's cache: layer norm has memory of its own
        for the gradient that it passes on, and then the layers share an array for theirs.
        """
        if count not in self._workspace:
            if len(self._workspace) >= MAX_WORKSPACES:
                self._workspace.clear()
            layers, shared = list[list[Tensor]](), dict[int, list[Tensor]]()
            for _, bias, *norm in self._layers[:-1]:
                values, gradient, normed, spare = (
                    bias.new_empty(len(bias), count, bias.shape[2]) for _ in range(4)
                )
                if norm:
                    gradient, spare = shared.setdefault(bias.shape[2], [gradient, spare])
                layers.append([values, gradient, normed, spare] if norm else [values, gradient])
            self._workspace[count] = layers
        return self._workspace[count]

    def __call__(self, inputs: Tensor) -> Tensor:
        """[B, in] -> [E, B, out]."""
        return self.forward(inputs)[0]

    def forward(self, inputs: Tensor) -> tuple[Tensor, Trace]:
        """[B, in], detached -> [E, B, out] and what `backward` needs, valid until the next forward pass."""
        values, trace = inputs.expand(self._num_networks, -1, -1), Trace()
        work = self._work(len(inputs))
        for (weight, bias, *norm), (after, _, *spare) in zip(self._layers[:-1], work, strict=True):
            kept = tuple[Tensor, ...]()
            if norm:
                normed = torch.baddbmm(bias, values, weight, out=spare[0])
                kept = (normed, _normalise(normed))
                torch.addcmul(norm[1], normed, norm[0], out=after)
            else:
                torch.baddbmm(bias, values, weight, out=after)
            trace.append((values, kept))
            values = after.relu_() if self._relu else after.tanh_()
        trace.append((values, ()))
        weight, bias = self._layers[-1]
        if weight.shape[2] > 1:
            return torch.baddbmm(bias, values, weight), trace
        # a row times a matrix takes a third of the time of the matrix times a column
        return torch.bmm(_as_rows(weight), values.mT).add_(bias).mT, trace

    def backward(
        self, trace: Trace, gradient: Tensor, *, weights: bool = True, inputs: slice | None = None
    ) -> Tensor:
        """Gradients from that of the outputs, [E, B, out].

        Args:
            trace: of the latest forward pass, of all rows or of the first ones.
            gradient: of the outputs, [E, B, out].
            weights: overwrite `self.gradient`.
            inputs: return the gradient of these columns of the inputs, [B, columns], summed over the
                networks; otherwise that of the first hidden layer.
        """
        work = self._work(gradient.shape[1])
        for number in range(len(self._layers) - 1, -1, -1):
            values, weight, slot = trace[number][0], self._layers[number][0], self._slots[number]
            single = weight.shape[2] == 1
            if weights:
                if single:  # see `forward`
                    torch.bmm(_as_rows(gradient), values, out=_as_rows(slot[0]))
                else:
                    torch.bmm(values.mT, gradient, out=slot[0])
                torch.sum(gradient, 1, keepdim=True, out=slot[1])
            if number == 0:
                break
            before, spare = work[number - 1][1], work[number - 1][-1]
            if single:
                torch.mul(gradient, _as_rows(weight), out=before)
            else:
                torch.bmm(gradient, weight.mT, out=before)
            if self._relu:
                torch.ops.aten.threshold_backward.grad_input(before, values, 0.0, grad_input=before)
            else:
                torch.ops.aten.tanh_backward.grad_input(before, values, grad_input=before)
            gradient = before
            if self._normed:
                gradient = self._through_norm(number - 1, trace[number - 1][1], gradient, spare, weights)
        if inputs is None:
            return gradient
        return torch.bmm(self._layers[0][0][:, inputs], gradient.mT).sum(0).mT

    def _through_norm(
        self, number: int, kept: tuple[Tensor, ...], gradient: Tensor, spare: Tensor, weights: bool
    ) -> Tensor:
        """The gradient before layer norm, [E, B, width]; overwrites `gradient` and `spare`."""
        normed, scale = kept
        if weights:
            torch.sum(torch.mul(gradient, normed, out=spare), 1, keepdim=True, out=self._slots[number][2])
            torch.sum(gradient, 1, keepdim=True, out=self._slots[number][3])
        # with respect to values of mean 0 and deviation 1; those before had another deviation
        before: Tensor = torch.ops.aten.native_layer_norm_backward(
            gradient.mul_(self._layers[number][2]),
            normed,
            normed.shape[-1:],
            torch.zeros_like(scale),
            torch.ones_like(scale),
            None,
            None,
            [True, False, False],
        )[0]
        return before.mul_(scale)


def _normalise(values: Tensor) -> Tensor:
    """Bring each row of [E, B, width] to mean 0 and deviation 1, in place; returns the factors [E, B, 1].

    As layer norm does; torch's own is not in place and takes twice as long on these sizes.
    """
    values.sub_(values.mean(-1, keepdim=True))
    length: Tensor = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    factors = length.square_().mul_(1.0 / values.shape[-1]).add_(NORM_EPS).rsqrt_()
    values.mul_(factors)
    return factors


def _as_rows(columns: Tensor) -> Tensor:
    """[E, N, 1] -> [E, 1, N]; a transposed view would be multiplied like columns, slowly."""
    return columns.view(len(columns), 1, -1)


def first_rows(trace: Trace, count: int) -> Trace:
    """A trace of the first rows of a batch."""
    return [(values[:, :count], tuple(each[:, :count] for each in kept)) for values, kept in trace]


class FlatAdam:
    """Adam (Kingma and Ba, 2015) for the vector of a network: torch's fused kernel without its wrapping.

    Moments of weights whose gradient stays zero (behind dead units) decay into denormal numbers within a
    thousand steps, on which a processor is ten times slower. They are set to zero long before.
    """

    def __init__(self, flat: Tensor, gradient: Tensor, lr: float, eps: float = EPS) -> None:
        self._flat, self._gradient, self.lr, self._eps = flat, gradient, lr, eps
        self._mean, self._square = torch.zeros_like(flat), torch.zeros_like(flat)
        self._steps = torch.zeros((), device=flat.device)

    def step(self, lr: float | None = None) -> None:
        """Follow the gradient, at the usual rate or another one."""
        if self._steps.item() % SWEEP_INTERVAL == 0:
            for moment in (self._mean, self._square):
                moment.masked_fill_(moment.abs() < NEGLIGIBLE, 0.0)
        fused_adam(
            [self._flat],
            [self._gradient],
            [self._mean],
            [self._square],
            [self._steps],
            lr=self.lr if lr is None else lr,
            eps=self._eps,
        )

    def forget(self) -> None:
        """Begin anew: what follows are gradients of another kind."""
        for moment in (self._mean, self._square, self._steps):
            moment.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Running moments and the number of steps."""
        return {"mean": self._mean, "square": self._square, "steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        self._mean.copy_(state["mean"])
        self._square.copy_(state["square"])
        self._steps.copy_(state["steps"])
