"""Distributions of actions, and PPO's policy with its value function.

PPO has Gaussians for continuous and categories for discrete actions, SAC Gaussians squashed by tanh.

The formulas of the distributions are written out: the networks are small, so that time goes into the number
of operations and not into arithmetic, and distribution objects would double it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from guerdon.agents.networks import STATE, Obs, ObsEncoder, ObsSpec, mlp
from guerdon.config import NetworkConfig
from guerdon.core.errors import ConfigError
from guerdon.core.running_stats import Statistics

Heads: TypeAlias = tuple[Tensor, ...]
"""What decides a distribution: (mean [N, A], log_std [A]) or (logits [N, K],)."""
_LOG_2, _HALF_LOG_2PI = math.log(2.0), 0.5 * math.log(2.0 * math.pi)
LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
"""Of SAC's policy."""
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

    def divergence(self, heads: Heads, reference: Tensor) -> Tensor:
        """From a policy with other means [N, A] and the same deviation, which stays as it is; [N]."""
        return 0.5 * ((heads[0] - reference) * torch.exp(-heads[1].detach())).square().sum(-1)

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

    def divergence(self, heads: Heads, reference: Tensor) -> Tensor:
        """From a policy with other logits [N, K]: cross entropy, which differs by a constant; [N]."""
        return -(reference.softmax(-1) * heads[0].log_softmax(-1)).sum(-1)

    def imitation_loss(self, heads: Heads, actions: Tensor) -> Tensor:
        """Cross entropy; `actions` are the environment's, also as floats [N, 1], as a store keeps them."""
        return F.cross_entropy(heads[0], actions.reshape(-1).long() - self._start)

    def to_env(self, actions: Tensor) -> NDArray[Any]:
        """Counted from the start of the space."""
        return actions.cpu().numpy() + self._start


class Drawn(NamedTuple):
    """Actions of a Gaussian that tanh squashes into [-1, 1]; B rows."""

    actions: Tensor
    """In [-1, 1]; [B, A]."""
    log_density: Tensor
    """Of the actions; [B]."""
    mean: Tensor
    """Before squashing; [B, A]."""


def limits(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Of a policy's outputs [B, 2A]: mean and log deviation within its limits; [B, A] each."""
    mean, log_std = outputs.chunk(2, dim=-1)
    return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)


def draw(outputs: Tensor, generator: torch.Generator) -> Drawn:
    """Draw an action for each row of a policy's outputs, [B, 2A]."""
    mean, log_std = limits(outputs)
    noise = torch.randn(mean.shape, generator=generator, device=mean.device)
    before = torch.addcmul(mean, noise, log_std.exp())
    # log N(before) - log |d tanh|, with log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u))
    constant = noise.square().mul_(-0.5).sub_(_HALF_LOG_2PI + 2.0 * _LOG_2)
    # where softplus(u, beta=-2) = -softplus(-2u) / 2
    bent = (constant - log_std).add(before, alpha=2.0).add(F.softplus(before, beta=-2.0), alpha=-4.0)
    return Drawn(torch.tanh(before), bent.sum(-1), mean)


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
        # Values begin at zero: those of random weights would move the policy where there is no reward at all.
        self.value = mlp(self.encoder.num_features, 1, cfg, out_gain=0.0)
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


_Layers: TypeAlias = list[tuple[Callable[..., Tensor], tuple[Any, ...]]]


def _layers(network: nn.Sequential) -> _Layers:
    """The layers of a perceptron as functions with their weights: calling modules takes longer."""
    layers: _Layers = []
    for layer in network:
        if isinstance(layer, nn.Linear):
            layers.append((F.linear, (layer.weight, layer.bias)))
        elif isinstance(layer, nn.LayerNorm):
            layers.append((F.layer_norm, (layer.normalized_shape, layer.weight, layer.bias, layer.eps)))
        else:
            layers.append((torch.tanh_ if isinstance(layer, nn.Tanh) else torch.relu_, ()))
    return layers


def _run(layers: _Layers, inputs: Tensor) -> Tensor:
    for function, weights in layers:
        inputs = function(inputs, *weights)
    return inputs
