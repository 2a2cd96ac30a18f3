"""Policies with a value function: Gaussian for continuous actions, categorical for discrete ones.

The formulas of the distributions, and the gradients of the perceptrons, are written out. The networks are
small, so that time goes into the number of operations and not into arithmetic; distribution objects, module
calls and a tape for every layer would double it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from guerdon.agents.networks import STATE, Obs, ObsEncoder, ObsSpec, mlp
from guerdon.config import NetworkConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.running_stats import Statistics

Heads: TypeAlias = tuple[Tensor, ...]
"""What decides a distribution: (mean [N, A], log_std [A]) or (logits [N, K],)."""
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
Share: TypeAlias = tuple[int, int, int]
"""(start, stop, total): these rows of a batch of `total`, whose other rows are drawn elsewhere."""


def _drawn(draw: Callable[[tuple[int, ...]], Tensor], shape: tuple[int, ...], share: Share | None) -> Tensor:
    """Random numbers of `shape`. With a share, those of the whole batch are drawn and its rows are taken, so
    that what a row gets, and how far the generator moves, does not depend on how the batch is divided.
    """  # noqa: D205
    if share is None:
        return draw(shape)
    start, stop, total = share
    return draw((total, *shape[1:]))[start:stop]


class Gaussian:
    """Independent normal distributions; actions are clipped to the bounds only on their way out."""

    def __init__(self, space: gym.spaces.Box) -> None:
        if len(space.shape) != 1 or not np.issubdtype(space.dtype, np.floating):
            raise ConfigError(f"continuous actions must be vectors of floats, not {space}")
        self.size = space.shape[0]
        self._low, self._high, self._dtype = space.low, space.high, space.dtype

    def sample(
        self, heads: Heads, generator: torch.Generator, share: Share | None = None
    ) -> tuple[Tensor, Tensor]:
        """Actions [N, A] drawn with the generator's (CPU) randomness, and their log-probabilities [N]."""
        mean, log_std = heads
        noise = _drawn(lambda shape: torch.randn(shape, generator=generator), mean.shape, share)
        noise = noise.to(mean.device)
        log_probs = noise.square().sum(-1).mul_(-0.5) - (log_std.sum() + self.size * _HALF_LOG_2PI)
        return torch.addcmul(mean, noise, log_std.exp()), log_probs

    def mode(self, heads: Heads) -> Tensor:
        """The means."""
        return heads[0]

    def evaluate(self, heads: Heads, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of `actions` [N], and the mean entropy of the batch []."""
        mean, log_std = heads
        spread = log_std.sum() + self.size * _HALF_LOG_2PI
        scaled = (actions - mean) * torch.exp(-log_std)
        return -0.5 * scaled.square().sum(-1) - spread, spread + 0.5 * self.size

    def gradients(self, heads: Heads, actions: Tensor, weights: Tensor, entropy_weight: float) -> Heads:
        """Of sum(weights * log-probabilities) + entropy_weight * mean entropy, with respect to the heads.

        With z = (a - mean) / std, log p has the gradients z / std and z^2 - 1, the entropy 0 and 1.
        """
        mean, log_std = heads
        inverse = torch.exp(-log_std)
        scaled = (actions - mean) * inverse
        weighted = weights[:, None] * scaled
        of_log_std = (weighted * scaled).sum(0) - weights.sum() + entropy_weight
        return weighted * inverse, of_log_std

    def divergence_gradient(self, heads: Heads, reference: Tensor) -> Tensor:
        """Of the divergence from a policy with other means [N, A] and the same spread, in the means."""
        return (heads[0] - reference) * torch.exp(-2.0 * heads[1])

    def imitation_loss(self, heads: Heads, actions: Tensor) -> Tensor:
        """Squared distance of the means; the spread is left alone, so that exploration does not die."""
        return F.mse_loss(heads[0], actions)

    def to_env(self, actions: Tensor) -> NDArray[Any]:
        """Clipped to the bounds of the space."""
        clipped: NDArray[Any] = np.clip(actions.cpu().numpy(), self._low, self._high)
        return clipped.astype(self._dtype, copy=False)


class Categorical:
    """One of K actions."""

    def __init__(self, space: gym.spaces.Discrete) -> None:
        self.size = int(space.n)
        self._start = int(space.start)

    def sample(
        self, heads: Heads, generator: torch.Generator, share: Share | None = None
    ) -> tuple[Tensor, Tensor]:
        """By a race of exponential clocks: the first one to ring is action k with probability p_k."""
        log_probs = heads[0].log_softmax(-1)
        clocks = _drawn(
            lambda shape: torch.empty(shape).exponential_(generator=generator), log_probs.shape, share
        )
        actions = (log_probs - clocks.log().to(log_probs.device)).argmax(-1)
        return actions, log_probs.gather(-1, actions[:, None])[:, 0]

    def mode(self, heads: Heads) -> Tensor:
        """The actions with the largest logits."""
        return heads[0].argmax(-1)

    def evaluate(self, heads: Heads, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of `actions` [N], and the mean entropy of the batch []."""
        log_probs = heads[0].log_softmax(-1)
        entropy = -(log_probs * log_probs.exp()).sum() / len(log_probs)
        return log_probs.gather(-1, actions[:, None])[:, 0], entropy

    def gradients(self, heads: Heads, actions: Tensor, weights: Tensor, entropy_weight: float) -> Heads:
        """As for a Gaussian. In logit j: of log p_a, [j = a] - p_j; of an entropy H, -p_j (log p_j + H)."""
        log_probs = heads[0].log_softmax(-1)
        probs = log_probs.exp()
        pull = -weights[:, None]
        if entropy_weight != 0.0:
            entropies = -(probs * log_probs).sum(-1, keepdim=True)
            pull = pull - (log_probs + entropies) * (entropy_weight / len(probs))
        return ((probs * pull).scatter_add_(-1, actions[:, None], weights[:, None]),)

    def divergence_gradient(self, heads: Heads, reference: Tensor) -> Tensor:
        """Of the divergence from a policy with other logits [N, K], in the logits."""
        return heads[0].softmax(-1) - reference.softmax(-1)

    def imitation_loss(self, heads: Heads, actions: Tensor) -> Tensor:
        """Cross entropy; `actions` are the environment's, also as floats [N, 1], as a store keeps them."""
        return F.cross_entropy(heads[0], actions.reshape(-1).long() - self._start)

    def to_env(self, actions: Tensor) -> NDArray[Any]:
        """Counted from the start of the space."""
        return actions.cpu().numpy() + self._start


def distribution_of(space: gym.Space[Any]) -> Gaussian | Categorical:
    """The family that suits an action space."""
    if isinstance(space, gym.spaces.Box):
        return Gaussian(space)
    if isinstance(space, gym.spaces.Discrete):
        return Categorical(space)
    raise ConfigError(f"this learner takes Box and Discrete actions, not {space}")


class ActorCritic(nn.Module):
    """A policy and a value function: one encoder for images, then a network for each.

    Attributes:
        distribution: how the policy's outputs are read.
        norm: running statistics of the states, or None.
    """

    def __init__(
        self,
        spec: ObsSpec,
        action_space: gym.Space[Any],
        cfg: NetworkConfig,
        *,
        initial_log_std: float = 0.0,
        normalize_obs: bool = False,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.distribution = distribution_of(action_space)
        self.encoder = ObsEncoder(spec, cfg)
        self.norm = Statistics((spec.state_size,)) if normalize_obs and spec.state_size else None
        self.policy = mlp(self.encoder.num_features, self.distribution.size, cfg, out_gain=0.01)
        self.value = mlp(self.encoder.num_features, 1, cfg)
        self.log_std: nn.Parameter | None = None
        if isinstance(self.distribution, Gaussian):
            self.log_std = nn.Parameter(torch.full((self.distribution.size,), float(initial_log_std)))
        self._policy_layers, self._value_layers = _layers(self.policy), _layers(self.value)

    def prepare(self, obs: Mapping[str, Tensor]) -> Obs:
        """Observations with scaled states, as the other methods take them; images stay uint8."""
        if self.norm is None:
            return dict(obs)
        return {**obs, STATE: self.norm.normalized(obs[STATE])}

    def observe(self, obs: Mapping[str, Tensor]) -> None:
        """Take observations [..., S] into the running statistics, where there are any."""
        if self.norm is not None:
            self.norm.update(obs[STATE])

    def forward(self, prepared: Mapping[str, Tensor]) -> tuple[Heads, Tensor]:
        """What decides the distributions of N rows, and their values float32 [N]."""
        features = self._features(prepared)
        return self._heads(features), _run(self._value_layers, features)[:, 0]

    @torch.no_grad()
    def trace(self, prepared: Mapping[str, Tensor]) -> Trace:
        """The same as `forward`, with all that its gradient takes; autograd sees the image encoder alone."""
        with torch.set_grad_enabled(bool(self.spec.images)):
            features = self._features(prepared)
        policy, value = (
            _activations(self._policy_layers, features),
            _activations(self._value_layers, features),
        )
        heads = (policy[-1],) if self.log_std is None else (policy[-1], self.log_std)
        return Trace(heads=heads, values=value[-1][:, 0], actor=self, policy=policy, value=value)

    def heads(self, prepared: Mapping[str, Tensor]) -> Heads:
        """What decides the distributions."""
        return self._heads(self._features(prepared))

    def values(self, prepared: Mapping[str, Tensor]) -> Tensor:
        """float32 [N]."""
        return _run(self._value_layers, self._features(prepared))[:, 0]

    def imitation_loss(self, prepared: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """[], to be minimised so that the policy acts like `actions`."""
        return self.distribution.imitation_loss(self.heads(prepared), actions)

    def _features(self, prepared: Mapping[str, Tensor]) -> Tensor:
        if not self.spec.images:
            return prepared[STATE]
        features: Tensor = self.encoder(prepared)
        return features

    def _heads(self, features: Tensor) -> Heads:
        outputs = _run(self._policy_layers, features)
        return (outputs,) if self.log_std is None else (outputs, self.log_std)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A pass through an `ActorCritic` that can be followed back."""

    heads: Heads
    values: Tensor
    """float32 [N]."""
    actor: ActorCritic
    policy: list[Tensor]
    """Activations of the policy network: what went into each layer, and what came out of the last."""
    value: list[Tensor]
    """The same of the value network."""

    @torch.no_grad()
    def gradients(self, head_grads: Heads, value_grads: Tensor) -> list[Tensor]:
        """Of the actor's parameters, in their order, from those of `heads` and `values`."""
        actor, seeing = self.actor, bool(self.actor.spec.images)
        by_policy, policy_grads = _backward(actor._policy_layers, self.policy, head_grads[0], seeing)
        by_value, value_net_grads = _backward(actor._value_layers, self.value, value_grads[:, None], seeing)
        of_encoder: tuple[Tensor, ...] = ()
        if seeing:
            weights = list(actor.encoder.parameters())
            of_encoder = torch.autograd.grad(self.policy[0], weights, by_policy + by_value)
        return [*head_grads[1:], *of_encoder, *policy_grads, *value_net_grads]


_Layers: TypeAlias = list[tuple[Callable[..., Tensor], tuple[Any, ...]]]


def _layers(network: nn.Sequential) -> _Layers:
    """The layers of a perceptron as functions with their weights: calling modules takes longer."""
    layers: _Layers = []
    for layer in network:
        if isinstance(layer, nn.Linear):
            layers.append((F.linear, (layer.weight, layer.bias)))
        elif isinstance(layer, nn.LayerNorm):
            layers.append((F.layer_norm, (layer.normalized_shape, layer.weight, layer.bias, layer.eps)))
        elif isinstance(layer, nn.Tanh | nn.ReLU):
            layers.append((torch.tanh if isinstance(layer, nn.Tanh) else torch.relu, ()))
        else:
            raise DataError(f"a perceptron has no layer {layer}")
    return layers


def _run(layers: _Layers, inputs: Tensor) -> Tensor:
    for function, weights in layers:
        inputs = function(inputs, *weights)
    return inputs


def _activations(layers: _Layers, inputs: Tensor) -> list[Tensor]:
    """What goes into each layer, and what comes out of the last."""
    activations = [inputs]
    for function, weights in layers:
        activations.append(function(activations[-1], *weights))
    return activations


def _backward(
    layers: _Layers, activations: list[Tensor], grad: Tensor, of_inputs: bool
) -> tuple[Tensor, list[Tensor]]:
    """Follow the gradient of the outputs back.

    Returns:
        That of the inputs (of the first layer's outputs, unless `of_inputs`) and those of all weights.
    """
    found: list[Tensor] = []  # from the last to the first
    for number in range(len(layers) - 1, -1, -1):
        function, weights = layers[number]
        before, after = activations[number], activations[number + 1]
        if function is F.linear:
            found += (grad.sum(0), grad.t().mm(before))
            if number > 0 or of_inputs:
                grad = grad.mm(weights[0])
        elif function is torch.tanh:
            grad = torch.addcmul(grad, grad * after, after, value=-1.0)
        elif function is torch.relu:
            grad = grad * (after > 0.0)
        else:
            var, mean = torch.var_mean(before, -1, correction=0, keepdim=True)
            scale = torch.rsqrt(var + weights[3])
            scaled = (before - mean) * scale
            found += (grad.sum(0), (grad * scaled).sum(0))
            grad = grad * weights[1]
            along = (grad * scaled).mean(-1, keepdim=True)
            grad = scale * (grad - grad.mean(-1, keepdim=True) - scaled * along)
    return grad, found[::-1]
