"""The intrinsic curiosity module (Pathak et al., 2017, arXiv:1705.05363).

Features phi are learned by telling from two neighbouring states which action lies between them, so that they
hold what the agent can influence and little else. The reward is how wrong a forward model is in them:

    novelty(s, a, s') = 1/2 * || forward(phi(s), a) - phi(s') || ** 2 >= 0, high where the outcome surprises,

divided by a running deviation (its factor eta is `mix.reward_weight`). The loss is
(1 - forward_share) * inverse loss + forward_share * forward loss: cross entropy of discrete actions, squared
error of real-valued ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from guerdon.config.limits import Fraction
from guerdon.rewards.curiosity import CuriosityModel, CuriositySettings
from guerdon.rewards.networks import RewardNetwork, in_blocks, perceptron
from guerdon.rewards.transitions import Transitions


@dataclass(frozen=True, kw_only=True)
class ICMSettings(CuriositySettings):
    """`reward_model` of type `icm`."""

    forward_share: Fraction = 0.2
    """Share of the forward model in the loss, beta of the paper; the rest is the inverse model's."""


class InverseFeatures(RewardNetwork):
    """Features in which the action between two states can be told."""

    def __init__(
        self, obs_size: int, action_size: int, feature_size: int, hidden: tuple[int, ...], discrete: bool
    ) -> None:
        super().__init__()
        self.encoder = perceptron((obs_size, *hidden, feature_size), nn.ReLU)
        self.inverse = perceptron((2 * feature_size, *hidden[-1:], action_size), nn.ReLU)
        self.discrete = discrete

    def forward(self, obs: Tensor) -> Tensor:
        """[N, S] -> phi, float32 [N, F]."""
        phi: Tensor = self.encoder(obs)
        return phi

    def inverse_loss(self, phi: Tensor, next_phi: Tensor, actions: Tensor) -> Tensor:
        """How badly the action [N, A] (one-hot if discrete) is told from the features [N, F] around it."""
        told = self.inverse(torch.cat([phi, next_phi], 1))
        if self.discrete:
            return functional.cross_entropy(told, actions.argmax(1))
        return functional.mse_loss(told, actions)

    def learn(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
        """The loss of the inverse model."""
        phi, next_phi = self(torch.cat([obs, next_obs])).chunk(2)
        return self.inverse_loss(phi, next_phi, actions)


class Curiosity(InverseFeatures):
    """Features, and a forward model in them."""

    def __init__(
        self,
        obs_size: int,
        action_size: int,
        feature_size: int,
        hidden: tuple[int, ...],
        discrete: bool,
        forward_share: float,
    ) -> None:
        super().__init__(obs_size, action_size, feature_size, hidden, discrete)
        self.ahead = perceptron((feature_size + action_size, *hidden[-1:], feature_size), nn.ReLU)
        self.forward_share = forward_share

    def surprise(self, phi: Tensor, actions: Tensor, next_phi: Tensor) -> Tensor:
        """Half the squared error of the forward model, float32 [N]."""
        expected: Tensor = self.ahead(torch.cat([phi, actions], 1))
        return 0.5 * (expected - next_phi).square().sum(1)

    def learn(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
        """Losses of both models; the features learn from both."""
        phi, next_phi = self(torch.cat([obs, next_obs])).chunk(2)
        inverse = self.inverse_loss(phi, next_phi, actions)
        ahead = self.surprise(phi, actions, next_phi).mean()
        return (1.0 - self.forward_share) * inverse + self.forward_share * ahead


class ICM(CuriosityModel):
    """Rewards outcomes that surprise."""

    Settings = ICMSettings
    cfg: ICMSettings
    network: Curiosity

    def make_network(self) -> Curiosity:
        """Encoder, inverse and forward model."""
        cfg = self.cfg
        return Curiosity(
            cfg.obs_size,
            cfg.action_size,
            cfg.feature_size,
            cfg.hidden,
            cfg.discrete_actions,
            cfg.forward_share,
        )

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Transitions of the policy."""
        drawn = self.experience.sample(self.cfg.batch_size, self.generator)
        return self._parts(drawn)

    def _parts(self, batch: Transitions) -> tuple[Tensor, Tensor, Tensor]:
        actions = self.action_features(batch.actions)
        return self.obs_features(batch.obs), actions, self.obs_features(batch.next_obs)

    def novelty(self, batch: Transitions) -> Tensor:
        """Half the squared error of the forward model, [*L]."""
        return in_blocks(self._surprise, *self._parts(batch.flat())).view(batch.shape)

    def _surprise(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> Tensor:
        phi, next_phi = self.network(obs), self.network(next_obs)
        return self.network.surprise(phi, actions, next_phi)

    def measure(self, obs: Tensor, actions: Tensor, next_obs: Tensor) -> dict[str, float]:
        """The two losses apart."""
        phi, next_phi = self.network(torch.cat([obs, next_obs])).chunk(2)
        return {
            "inverse_loss": float(self.network.inverse_loss(phi, next_phi, actions)),
            "forward_loss": float(self.network.surprise(phi, actions, next_phi).mean()),
        }
