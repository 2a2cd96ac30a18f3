"""Perceptrons whose weights are one vector: Adam, target updates and copies are one operation each.

`FlatAgent` is what the off-policy agents share: an encoder below such networks, copied and saved by name.
"""

from __future__ import annotations

import copy
import itertools
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guerdon.agents.agent import OffPolicyAgent
from guerdon.agents.networks import ObsEncoder
from guerdon.config import NetworkConfig
from guerdon.core.adam import EPS, fused_adam
from guerdon.core.batches import TrainBatch
from guerdon.core.errors import DataError

SWEEP_INTERVAL, NEGLIGIBLE = 100, 1e-30
"""Adam's moments below the second are set to zero every so many steps; 0.9 ** 100 * 1e-30 is no denormal."""

KEPT_BYTES = 31 << 20


class BatchedMLP:
    """E perceptrons of one shape, computed together.

    Attributes:
        flat: all weights, float32 [P]; autograd does not follow it.
        gradient: of the weights, float32 [P]; `backward` adds to it.
        leaves: the weights of each layer as autograd follows them.
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
        self._activation = torch.relu_ if cfg.activation == "relu" else torch.tanh_
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
        self.flat, self.gradient = flat, torch.zeros_like(flat)
        self._layers = self._views(flat)
        # what autograd follows: leaves that share their memory, and that of their gradients, with the vectors
        self._leaf_layers = self._views(flat.detach())
        self.leaves = list(itertools.chain.from_iterable(self._leaf_layers))
        gradients = itertools.chain.from_iterable(self._views(self.gradient))
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            leaf.requires_grad_(True).grad = gradient

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

    def shift_outputs(self, columns: slice, by: float) -> None:
        """Add to the last layer's bias."""
        self._layers[-1][1][..., columns] += by

    def __call__(self, inputs: Tensor, *, frozen: bool = False) -> Tensor:
        """[B, in] -> [E, B, out]; with `frozen`, gradients reach the inputs but not the weights."""
        *hidden, (weight, bias) = self._layers if frozen else self._leaf_layers
        values = inputs.expand(self._num_networks, -1, -1)
        for matrix, shift, *norm in hidden:
            values = torch.baddbmm(shift, values, matrix)
            if norm:
                values = torch.addcmul(norm[1], F.layer_norm(values, values.shape[-1:]), norm[0])
            values = self._activation(values)
        # products with a narrow matrix take two to five times as long as with its transpose
        if self._num_networks == 1:
            return F.linear(values[0], weight[0].T.contiguous(), bias[0, 0]).unsqueeze(0)
        if weight.shape[2] == 1:
            return (values * weight.mT).sum(-1, keepdim=True) + bias
        return torch.baddbmm(bias, values, weight)


class FlatAdam:
    """Adam (Kingma and Ba, 2015) for one vector.

    Moments of weights whose gradient stays zero (behind dead units) decay into denormal numbers within a
    thousand steps, on which a processor is ten times slower. They are set to zero long before.
    """

    def __init__(
        self,
        flat: Tensor,
        lr: float,
        eps: float = EPS,
        *,
        leaves: Sequence[Tensor] = (),
        gradient: Tensor | None = None,
    ) -> None:
        """Adam for the weights `flat`, [P].

        For `descend`, `leaves` are the same memory in order, as autograd follows it; `gradient` takes their
        gradients, None: a vector of its own.
        """
        self._flat, self.lr, self._eps, self._leaves = flat, lr, eps, leaves
        self._gradient = torch.zeros_like(flat) if gradient is None else gradient
        self._mean, self._square = torch.zeros_like(flat), torch.zeros_like(flat)
        self._steps = torch.zeros((), device=flat.device)
        # glibc gives memory back to the kernel if more lies free than twice the largest block that was ever
        # freed (up to 32 MiB): without such a block every update would ask for its memory again, page by page
        torch.empty(KEPT_BYTES, dtype=torch.uint8)

    def step(self, gradient: Tensor, lr: float | None = None) -> None:
        """Follow the gradient, at the usual rate or another one."""
        if self._steps.item() % SWEEP_INTERVAL == 0:
            for moment in (self._mean, self._square):
                moment.masked_fill_(moment.abs() < NEGLIGIBLE, 0.0)
        fused_adam(
            [self._flat],
            [gradient],
            [self._mean],
            [self._square],
            [self._steps],
            lr=self.lr if lr is None else lr,
            eps=self._eps,
        )

    @classmethod
    def of(cls, network: BatchedMLP, lr: float) -> FlatAdam:
        """For the weights of a network."""
        return cls(network.flat, lr, leaves=network.leaves, gradient=network.gradient)

    def descend(
        self, loss: Tensor, lr: float | None = None, *, max_norm: float | None = None, alone: bool = True
    ) -> None:
        """One step down the gradient of a loss.

        Args:
            loss: [].
            lr: of this step; None: the usual one.
            max_norm: a longer gradient is scaled down to it.
            alone: False: other leaves that the loss depends on get their gradients as well, in `grad`.
        """
        if alone:  # takes less time
            parts = torch.autograd.grad(loss, self._leaves)
            torch.cat([part.reshape(-1) for part in parts], out=self._gradient)
        else:
            self._gradient.zero_()
            loss.backward()  # type: ignore[no-untyped-call]
        if max_norm is not None:
            norm = torch.linalg.vector_norm(self._gradient)
            self._gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
        self.step(self._gradient, lr)

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


class FlatAgent(OffPolicyAgent):
    """An encoder of observations, networks over it, and what else learning changes."""

    encoder: ObsEncoder
    _encoder_adam: torch.optim.Adam | None
    """None without images: the encoder has no weights then."""

    @abstractmethod
    def _acting_networks(self) -> dict[str, BatchedMLP]:
        """Name -> what a copy needs to act."""

    @abstractmethod
    def _networks(self) -> dict[str, BatchedMLP]:
        """Name -> all networks."""

    def _stateful(self) -> dict[str, Any]:
        """Name -> what has a `state_dict` of its own."""
        adam = {} if self._encoder_adam is None else {"encoder_adam": self._encoder_adam}
        return {"encoder": self.encoder, **adam}

    @abstractmethod
    def _counters(self) -> dict[str, Any]:
        """Name -> generators' states, numbers."""

    @abstractmethod
    def _set_counters(self, state: Mapping[str, Any]) -> None:
        """The opposite of `_counters`."""

    def _make_encoder_adam(self, lr: float) -> torch.optim.Adam | None:
        weights = list(self.encoder.parameters())
        return torch.optim.Adam(weights, lr=lr, fused=True) if weights else None

    def _checked(self, batch: TrainBatch, prior_rows: int) -> TrainBatch:
        """A batch where the networks are, after a check of `prior_rows`."""
        if not 0 <= prior_rows <= len(batch):
            raise DataError(f"{prior_rows} demonstrations in a batch of {len(batch)}")
        return batch if self.device.type == "cpu" else batch.to(self.device)

    def _descend(self, adam: FlatAdam, loss: Tensor) -> None:
        """One step of a network and of the encoder below it."""
        if self._encoder_adam is None:
            adam.descend(loss)
            return
        self._encoder_adam.zero_grad()
        adam.descend(loss, alone=False)
        self._encoder_adam.step()

    def policy_state(self) -> dict[str, Any]:
        """What a copy needs to act as this one would now, as arrays of their own."""
        encoder = {name: part.cpu().numpy().copy() for name, part in self.encoder.state_dict().items()}
        flats = {name: each.flat.cpu().numpy().copy() for name, each in self._acting_networks().items()}
        return {**flats, "encoder": encoder}

    def load_policy(self, state: Mapping[str, Any]) -> None:
        """Act as the agent did when `policy_state` was taken; random numbers stay this one's own."""
        for name, each in self._acting_networks().items():
            each.flat.copy_(torch.tensor(state[name]))
        self.encoder.load_state_dict({name: torch.tensor(part) for name, part in state["encoder"].items()})

    def state_dict(self) -> dict[str, Any]:
        """Everything that later updates and actions depend on, as a copy."""
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._stateful().items()}
        state |= {name: network.flat for name, network in self._networks().items()}
        return copy.deepcopy({**state, **self._counters()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the same actions and updates follow."""
        title, wanted = type(self).__name__, {*self._stateful(), *self._networks(), *self._counters()}
        if state.keys() != wanted:
            raise DataError(f"a state of {title} has {sorted(wanted)}, not {sorted(state)}")
        state = copy.deepcopy(dict(state))
        for name, network in self._networks().items():
            if state[name].shape != network.flat.shape:
                raise DataError(f"the saved {name} of {title} are of another size than the settings ask for")
            network.flat.copy_(state[name])
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])
        self._set_counters(state)
