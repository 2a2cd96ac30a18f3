"""Perceptrons whose weights are one vector: Adam, target updates and copies are one operation each."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guerdon.config import NetworkConfig
from guerdon.core.adam import EPS, fused_adam

SWEEP_INTERVAL, NEGLIGIBLE = 100, 1e-30
"""Adam's moments below the second are set to zero every so many steps; 0.9 ** 100 * 1e-30 is no denormal."""


class BatchedMLP:
    """E perceptrons of one shape, computed together.

    Attributes:
        flat: all weights, float32 [P]; autograd does not follow it.
        parameter: the same memory as a leaf of autograd.
    """

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
        self._activation = torch.relu if cfg.activation == "relu" else torch.tanh
        self._normed = cfg.layer_norm
        sizes = (size_in, *cfg.hidden, size_out)
        self._shapes: list[tuple[int, int, int]] = []
        for number, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
            vectors = 3 if cfg.layer_norm and number < len(cfg.hidden) else 1
            self._shapes += [(num_networks, fan_in, fan_out), *[(num_networks, 1, fan_out)] * vectors]
        self._num_networks = num_networks
        self._use(torch.zeros(sum(math.prod(shape) for shape in self._shapes), device=device))
        for number, (weight, _, *norm) in enumerate(self._layers):
            for each in weight:
                nn.init.orthogonal_(each, out_gain if number == len(cfg.hidden) else math.sqrt(2))
            if norm:
                norm[0].fill_(1.0)

    def _use(self, flat: Tensor) -> None:
        self.flat, self.parameter = flat, nn.Parameter(flat)
        self._layers = self._views(flat)

    def _views(self, flat: Tensor) -> list[list[Tensor]]:
        """Of each layer: weight [E, in, out], bias [E, 1, out], and of layer norm: scale, shift."""
        parts = torch.split(flat, [math.prod(shape) for shape in self._shapes])
        views = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        step = 4 if self._normed else 2
        return [views[start : start + step] for start in range(0, len(views), step)]

    def twin(self) -> BatchedMLP:
        """The same networks with weights of their own."""
        twin = copy.copy(self)
        twin._use(self.flat.clone())
        return twin

    @property
    def gradient(self) -> Tensor | None:
        """Of the weights, float32 [P], as autograd found it last."""
        return self.parameter.grad

    def shift_outputs(self, columns: slice, by: float) -> None:
        """Add to the last layer's bias."""
        self._layers[-1][1][..., columns] += by

    def __call__(self, inputs: Tensor, *, frozen: bool = False) -> Tensor:
        """[B, in] -> [E, B, out]; with `frozen`, gradients reach the inputs but not the weights."""
        follows = torch.is_grad_enabled() and not frozen
        values = inputs.expand(self._num_networks, -1, -1)
        *hidden, last = self._views(self.parameter) if follows else self._layers
        for weight, bias, *norm in hidden:
            values = torch.baddbmm(bias, values, weight)
            if norm:
                values = torch.addcmul(norm[1], F.layer_norm(values, values.shape[-1:]), norm[0])
            values = self._activation(values)
        return torch.baddbmm(last[1], values, last[0])


class FlatAdam:
    """Adam (Kingma and Ba, 2015) for one vector.

    Moments of weights whose gradient stays zero (behind dead units) decay into denormal numbers within a
    thousand steps, on which a processor is ten times slower. They are set to zero long before.
    """

    def __init__(self, parameter: Tensor, lr: float, eps: float = EPS) -> None:
        self._parameter, self.lr, self._eps = parameter, lr, eps
        self._mean, self._square = torch.zeros_like(parameter.data), torch.zeros_like(parameter.data)
        self._steps = torch.zeros((), device=parameter.device)

    def step(self, gradient: Tensor, lr: float | None = None) -> None:
        """Follow the gradient, at the usual rate or another one."""
        if self._steps.item() % SWEEP_INTERVAL == 0:
            for moment in (self._mean, self._square):
                moment.masked_fill_(moment.abs() < NEGLIGIBLE, 0.0)
        fused_adam(
            [self._parameter],
            [gradient],
            [self._mean],
            [self._square],
            [self._steps],
            lr=self.lr if lr is None else lr,
            eps=self._eps,
        )

    def descend(self, loss: Tensor, lr: float | None = None) -> None:
        """One step down the gradient of a loss, []; other leaves that it depends on get theirs as well."""
        if self._parameter.grad is not None:
            self._parameter.grad.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        assert self._parameter.grad is not None
        self.step(self._parameter.grad, lr)

    def forget(self) -> None:
        """Reset the moments: what follows are gradients of another kind."""
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
