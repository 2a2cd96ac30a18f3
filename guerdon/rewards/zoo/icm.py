"""The intrinsic curiosity module (Pathak et al., 2017, arXiv:1705.05363).

Features phi are learned by predicting the action between two consecutive states, so that they represent
what the agent can influence. The reward is the error of a forward model in these features:

    novelty(s, a, s') = 1/2 * || forward(phi(s), a) - phi(s') || ** 2 >= 0, high for unexpected outcomes,

divided by a running deviation (its factor eta is `mix.reward_weight`). The loss is
(1 - forward_share) * inverse loss + forward_share * forward loss: cross entropy of discrete actions, squared
error of real-valued ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from guerdon.config.limits import Fraction
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.curiosity import CuriosityModel, CuriositySettings
from guerdon.rewards.zoo.networks import RewardNetwork, in_blocks, perceptron, relu


@dataclass(frozen=True, kw_only=True)
class ICMSettings(CuriositySettings):
    """`reward_model` of type `icm`."""

    forward_share: Fraction = 0.2
    """Share of the forward model in the loss, beta of the paper; the rest is the inverse model's."""


class InverseFeatures(RewardNetwork):
    """Features from which the action between two states can be predicted."""

    def __init__(self, cfg: CuriositySettings) -> None:
        super().__init__()
        self.encoder = perceptron((cfg.obs_size, *cfg.hidden, cfg.feature_size), relu)
        self.inverse = perceptron((2 * cfg.feature_size, *cfg.hidden[-1:], cfg.action_size), relu)
        self.discrete = cfg.discrete_actions

    def forward(self, obs: Tensor) -> Tensor:
        """[N, S] -> phi, float32 [N, F]."""
        phi: Tensor = self.encoder(obs)
        return phi

    def inverse_loss(self, phi: Tensor, next_phi: Tensor, actions: Tensor) -> Tensor:
        """Error of predicting the action [N, A] (one-hot if discrete) from the features [N, F] around it."""
        predicted = self.inverse(torch.cat([phi, next_phi], 1))
        if self.discrete:
            return functional.cross_entropy(predicted, actions.argmax(1))
        return functional.mse_loss(predicted, actions)

    def learn(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
        """The loss of the inverse model."""
        return self.inverse_loss(self(obs), self(next_obs), actions)


class Curiosity(InverseFeatures):
    """Features, and a forward model in them."""

    def __init__(self, cfg: ICMSettings) -> None:
        super().__init__(cfg)
        sizes = (cfg.feature_size + cfg.action_size, *cfg.hidden[-1:], cfg.feature_size)
        self.ahead = perceptron(sizes, relu)
        self.forward_share = cfg.forward_share
        self.losses: dict[str, Tensor] = {}
        """The two parts of the latest loss."""

    def surprise(self, phi: Tensor, actions: Tensor, next_phi: Tensor) -> Tensor:
        """Half the squared error of the forward model, float32 [N]."""
        expected: Tensor = self.ahead(torch.cat([phi, actions], 1))
        return 0.5 * functional.mse_loss(expected, next_phi, reduction="none").sum(1)

    def learn(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
        """Losses of both models; the features learn from both."""
        phi, next_phi = self(obs), self(next_obs)
        inverse = self.inverse_loss(phi, next_phi, actions)
        expected = self.ahead(torch.cat([phi, actions], 1))
        ahead = functional.mse_loss(expected, next_phi, reduction="sum") * (0.5 / len(obs))
        self.losses = {"inverse_loss": inverse.detach(), "forward_loss": ahead.detach()}
        return (1.0 - self.forward_share) * inverse + self.forward_share * ahead


class ICM(CuriosityModel):
    """Rewards outcomes that surprise."""

    Settings = ICMSettings
    cfg: ICMSettings
    network: Curiosity

    def make_network(self) -> Curiosity:
        """Encoder, inverse and forward model."""
        return Curiosity(self.cfg)

    def novelty(self, batch: StepBatch) -> Tensor:
        """Half the squared error of the forward model, [*L]."""
        flat = batch.flat()
        obs, next_obs = self.obs_features(flat.obs), self.obs_features(flat.next_obs)
        phi = in_blocks(self.network, obs)
        width = math.prod(batch.shape[1:])  # the next step of a stream: where it goes on, it was reached
        next_phi, apart = phi.roll(-width, 0), (obs.roll(-width, 0) != next_obs).any(1)
        next_phi[apart] = in_blocks(self.network, next_obs[apart])
        actions = self.action_features(flat.actions)
        return in_blocks(self.network.surprise, phi, actions, next_phi).view(batch.shape)

    def measure(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> dict[str, float]:
        """The two losses apart."""
        return {name: float(loss) for name, loss in self.network.losses.items()}
