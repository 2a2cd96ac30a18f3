"""Extrapolation beyond ranked trajectories (T-REX; Brown et al., 2019, arXiv:1904.06387).

Trajectories, none of which need be good, are ranked by their returns. A network gives a reward to each step so
that the sums of rewards explain the ranking (Bradley and Terry, 1952):

    P(j is better than i) = exp(sum_j reward) / (exp(sum_i reward) + exp(sum_j reward))

The sums are over parts of `snippet_length` steps, drawn at random and equally long in both trajectories, or
over whole trajectories (`snippet_length: 0`). Trajectories may have any lengths. Pairs of the same rank teach
nothing and are left out.

Length bias: whole trajectories of unequal length are also explained by a constant reward, positive if long ones
are better, negative if short ones are. Parts of equal length do not see a constant; so do tasks of fixed length.
After learning, rewards are scaled to deviation 1 over the demonstrations. What they are measured from is a
choice where episodes can end early (`zero_at`): `mean`, of the demonstrations' steps: their better parts pay,
their worse ones cost; `worst`, the lowest tenth of them: nearly all steps pay, so that living on pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from guerdon.config.limits import NonNegativeFloat, NonNegativeInt
from guerdon.errors import ConfigError, DataError
from guerdon.rewards.base import RewardNetwork, ZooModel, ZooSettings
from guerdon.rewards.demonstrations import returns_of
from guerdon.rewards.networks import perceptron
from guerdon.rewards.transitions import Transitions


@dataclass(frozen=True, kw_only=True)
class TREXSettings(ZooSettings):
    """`reward_model` of type `trex`."""

    inputs: Literal["state", "state_action"] = "state"
    """What the reward is a function of: the state that was reached, or what was done where."""
    snippet_length: NonNegativeInt = 50
    """Steps that are compared; shorter trajectories as they are. 0: whole trajectories, see the length bias."""
    reward_penalty: NonNegativeFloat = 1e-3
    """Weight of the rewards' mean square in the loss: rankings alone do not bound them."""
    zero_at: Literal["mean", "worst"] = "mean"
    """Which of the demonstrated rewards counts as 0; see the top of this file."""
    batch_size: int = 32
    """Pairs in a gradient step."""
    pretrain_updates: int = 300
    """Gradient steps before the first update of the policy, where that is asked for."""


PARTS = {"state_action": ("obs", "action"), "state": ("next_obs",)}


class RankingNetwork(RewardNetwork):
    """Rewards of steps, unscaled, that explain a ranking of their sums."""

    offset: Tensor
    scale: Tensor

    def __init__(self, num_features: int, hidden: tuple[int, ...], reward_penalty: float) -> None:
        super().__init__()
        self.layers = perceptron([num_features, *hidden, 1])
        self.reward_penalty = reward_penalty
        self.register_buffer("offset", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, features: Tensor) -> Tensor:
        """[..., F] -> rewards before scaling, float32 [...]."""
        rewards: Tensor = self.layers(features).squeeze(-1)
        return rewards

    def learn(self, worse: Tensor, better: Tensor, valid: Tensor) -> Tensor:
        """Cross entropy of the ranking, and the penalty.

        Args:
            worse: [P, L, F].
            better: [P, L, F]; each the better one of its pair.
            valid: bool [2, P, L]; steps that are there, of the worse and the better ones.
        """
        rewards = self(torch.stack([worse, better])).masked_fill(~valid, 0.0)
        sums_worse, sums_better = rewards.sum(-1)
        loss = functional.softplus(sums_worse - sums_better).mean()
        return loss + self.reward_penalty * rewards.square().sum() / valid.sum()


class TREX(ZooModel):
    """Rewards what better trajectories have more of."""

    Settings = TREXSettings
    needs_experts = True
    needs_experience = False
    cfg: TREXSettings
    network: RankingNetwork

    def make_network(self) -> RankingNetwork:
        """The rewards."""
        size = self.num_features(PARTS[self.cfg.inputs])
        return RankingNetwork(size, self.cfg.hidden, self.cfg.reward_penalty)

    def load_expert_data(self, data: Any) -> None:
        """Take trajectories, ranked by the sums of their env rewards."""
        super().load_expert_data(data)
        self.rank(self.experts, returns_of(self.experts))

    def rank(self, trajectories: Sequence[Transitions], ranks: Tensor) -> None:
        """Learn from these trajectories, [T] each; a higher rank [E] is better."""
        if not bool(torch.isfinite(ranks).all()):
            raise DataError(
                f"{int((~torch.isfinite(ranks)).sum())} of the {len(ranks)} trajectories have a return that is "
                "not a finite number: they cannot be ranked"
            )
        ranks = ranks.to(self.device)
        self._pairs = torch.nonzero(ranks[:, None] < ranks[None, :])
        if not len(self._pairs):
            raise DataError(
                f"{type(self).__name__} needs trajectories that differ in rank: "
                + ("there is one alone" if len(ranks) < 2 else f"all {len(ranks)} tie at {float(ranks[0]):g}")
            )
        self._lengths = torch.tensor([len(each) for each in trajectories], device=self.device)
        rows = [self.features(each, PARTS[self.cfg.inputs]) for each in trajectories]
        self._features = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def draw(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs of parts: worse and better [P, L, F], and which steps are there [2, P, L]."""
        picked = torch.randint(len(self._pairs), (self.cfg.batch_size,), generator=self.generator)
        pairs = self._pairs[picked.to(self.device)].T  # [2, P]
        lengths = self._lengths[pairs]
        used = lengths
        if self.cfg.snippet_length:
            used = lengths.amin(0).clamp(max=self.cfg.snippet_length).expand(2, -1)
        spread = torch.rand(lengths.shape, generator=self.generator).to(self.device)
        first = ((lengths - used + 1) * spread).long()
        steps = torch.arange(int(used.max()), device=self.device)
        valid = steps < used[..., None]
        rows = (first[..., None] + steps).clamp(max=self._features.shape[1] - 1)
        worse, better = self._features[pairs[..., None], rows]
        return worse, better, valid

    def _learn(self, num_updates: int) -> dict[str, float]:
        """Gradient steps, then the scale from the demonstrations."""
        if not hasattr(self, "_pairs"):
            raise ConfigError(f"{type(self).__name__} has no ranked trajectories")
        scalars = super()._learn(num_updates)
        with torch.no_grad():
            steps = torch.arange(self._features.shape[1], device=self.device) < self._lengths[:, None]
            rewards = self.network(self._features)[steps]
            zero = rewards.mean() if self.cfg.zero_at == "mean" else torch.quantile(rewards, 0.1)
            self.network.offset.copy_(zero)
            self.network.scale.copy_(rewards.std().clamp(min=1e-6))
        return scalars

    def measure(self, worse: Tensor, better: Tensor, valid: Tensor) -> dict[str, float]:
        """How many of the pairs are ranked right."""
        sums = self.network(torch.stack([worse, better])).masked_fill(~valid, 0.0).sum(-1)
        return {"accuracy": float((sums[1] > sums[0]).float().mean())}

    def score(self, batch: Transitions) -> Tensor:
        """Scaled rewards, [*L]."""
        rewards = self.network(self.features(batch.flat(), PARTS[self.cfg.inputs]))
        return ((rewards - self.network.offset) / self.network.scale).view(batch.shape)

    def to_device(self, device: torch.device | str) -> None:
        """Move to another device."""
        super().to_device(device)
        if hasattr(self, "_pairs"):
            self._pairs, self._lengths = self._pairs.to(self.device), self._lengths.to(self.device)
            self._features = self._features.to(self.device)
