"""Extrapolation beyond ranked trajectories (T-REX; Brown et al., 2019, arXiv:1904.06387).

Trajectories are ranked by their returns; none of them has to be good. A network gives a reward to each step
so that the sums of rewards explain the ranking (Bradley and Terry, 1952):

    P(j is better than i) = exp(sum_j reward) / (exp(sum_i reward) + exp(sum_j reward))

The sums are over parts of `snippet_length` steps, drawn at random and equally long in both trajectories, or
over whole trajectories (`snippet_length: 0`). Trajectories may have any lengths. Pairs of the same rank are
left out. A long fit memorises the parts: few gradient steps extrapolate better. Whole trajectories need a
longer fit; where all have the same length they are the better choice.

Several networks are fitted. They agree near the trajectories and differ elsewhere, and a policy exploits
places where one of them is high. Therefore their disagreement is subtracted, and observations are clipped
at some deviations of the demonstrations.

Length bias: whole trajectories of unequal length are also explained by a constant reward, positive if long
ones are better, negative if short ones are. Parts of equal length and tasks of fixed length do not
determine the constant. After learning, rewards are scaled to deviation 1 over the demonstrations. Where
episodes can end early, their zero matters (`zero_at`). `mean` of the demonstrations' steps: better parts
get positive rewards, worse parts negative ones. `worst`, their lowest tenth: nearly all rewards are
positive, which favours long episodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from guerdon.config.limits import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.base import ZooModel, ZooSettings
from guerdon.rewards.zoo.demonstrations import returns_of
from guerdon.rewards.zoo.networks import RewardNetwork, perceptron


@dataclass(frozen=True, kw_only=True)
class TREXSettings(ZooSettings):
    """`reward_model` of type `trex`."""

    inputs: Literal["state", "state_action"] = "state"
    """What the reward is a function of: the state that was reached, or what was done where."""
    snippet_length: NonNegativeInt = 50
    """Steps that are compared, fewer in shorter trajectories. 0: whole ones; see the length bias."""
    obs_limit: PositiveFloat = 3.0
    """Observations that lie farther out, in deviations of the demonstrations, count as the edge: what a
    network says of states that nobody has been in is made up, and policies find where it is high."""
    num_members: PositiveInt = 5
    """Networks that learn the same from different first weights, as in the paper's real-valued tasks."""
    pessimism: NonNegativeFloat = 1.0
    """How much of the members' disagreement, a deviation, is taken off their mean."""
    reward_penalty: NonNegativeFloat = 1e-3
    """Weight of the rewards' mean square in the loss: rankings alone do not bound them."""
    zero_at: Literal["mean", "worst"] = "mean"
    """Which of the demonstrated rewards counts as 0; see the top of this file."""
    batch_size: PositiveInt = 32
    """Trajectories in a gradient step; all pairs of them are compared."""
    pretrain_updates: PositiveInt = 200
    """Gradient steps before the first update of the policy, where that is asked for."""


class RankingNetwork(RewardNetwork):
    """M members, each of which gives rewards to steps that explain a ranking of their sums."""

    offset: Tensor
    scale: Tensor

    def __init__(
        self, num_features: int, hidden: tuple[int, ...], num_members: int, reward_penalty: float
    ) -> None:
        super().__init__()
        members = [perceptron([num_features, *hidden, 1]) for _ in range(num_members)]
        linear = [[each for each in member if isinstance(each, nn.Linear)] for member in members]
        layers = list(zip(*linear, strict=True))
        self.weights = nn.ParameterList(
            torch.stack([each.weight.detach().T for each in row]) for row in layers
        )
        self.biases = nn.ParameterList(
            torch.stack([each.bias.detach()[None, :] for each in row]) for row in layers
        )
        self.reward_penalty = reward_penalty
        self.register_buffer("offset", torch.zeros(num_members, 1))
        self.register_buffer("scale", torch.ones(num_members, 1))

    def forward(self, features: Tensor) -> Tensor:
        """[N, F] -> rewards of the members before scaling, float32 [M, N]."""
        values = features.expand(len(self.weights[0]), -1, -1)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = torch.baddbmm(bias, torch.tanh(values) if number else values, weight)
        return values.squeeze(-1)

    def learn(self, features: Tensor, lengths: Tensor, ranks: Tensor, equal: bool) -> Tensor:
        """Cross entropy of the ranking over all pairs that differ in rank, and the penalty; of all members.

        Args:
            features: [B, L, F], of parts of B trajectories.
            lengths: int64 [B]; steps that are there.
            ranks: [B]; higher is better.
            equal: compare as many steps of both as the shorter part has.
        """
        rewards = self.rewards_of(features, lengths)
        ranking = functional.softplus(-margins(rewards, lengths, ranks, equal)).sum()
        pairs = int((ranks[:, None] < ranks[None, :]).sum())
        return ranking / max(pairs, 1) + self.reward_penalty * rewards.square().sum() / lengths.sum()

    def rewards_of(self, features: Tensor, lengths: Tensor) -> Tensor:
        """[B, L, F] -> [M, B, L], 0 where there is no step."""
        there = torch.arange(features.shape[1], device=features.device) < lengths[:, None]
        rewards: Tensor = self(features.flatten(0, 1)).view(-1, *there.shape)
        return rewards.masked_fill(~there, 0.0)


def margins(rewards: Tensor, lengths: Tensor, ranks: Tensor, equal: bool) -> Tensor:
    """By how much the better one's sum of rewards is higher: [M, B, L] -> [M, pairs that differ in rank]."""
    worse, better = torch.nonzero(ranks[:, None] < ranks[None, :]).T
    sums = rewards.cumsum(2)
    if equal:
        last = torch.minimum(lengths[worse], lengths[better]) - 1
        return sums[:, better, last] - sums[:, worse, last]
    return sums[:, better, -1] - sums[:, worse, -1]


class TREX(ZooModel):
    """Learned from ranked trajectories."""

    Settings = TREXSettings
    needs_experts = True
    needs_experience = False
    cfg: TREXSettings
    network: RankingNetwork

    def make_network(self) -> RankingNetwork:
        """The rewards."""
        cfg = self.cfg
        return RankingNetwork(self.num_features(), cfg.hidden, cfg.num_members, cfg.reward_penalty)

    def obs_features(self, obs: Tensor) -> Tensor:
        """Observations as flat vectors within the limit, float32 [N, obs_size]."""
        features = super().obs_features(obs)
        limit = self.cfg.obs_limit
        return features.clamp(-limit, limit) if self.cfg.normalize_obs else features

    def load_expert_data(self, data: Any) -> None:
        """Take trajectories, ranked by the sums of their env rewards."""
        super().load_expert_data(data)
        self.rank(self.experts, returns_of(self.experts))

    def rank(self, trajectories: Sequence[StepBatch], ranks: Tensor) -> None:
        """Learn from these trajectories, [T] each; a higher rank [E] is better."""
        if not bool(torch.isfinite(ranks).all()):
            raise DataError(
                f"{int((~torch.isfinite(ranks)).sum())} of the {len(ranks)} trajectories have a return that "
                "is not a finite number: they cannot be ranked"
            )
        self._ranks = ranks.to(self.device)
        if len(ranks) < 2 or bool((ranks == ranks[0]).all()):
            raise DataError(
                f"{type(self).__name__} needs trajectories that differ in rank: "
                + ("there is one alone" if len(ranks) < 2 else f"all {len(ranks)} tie at {float(ranks[0]):g}")
            )
        self._lengths = torch.tensor([len(each) for each in trajectories], device=self.device)
        rows = [self.features(each) for each in trajectories]
        self._features = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def sample_batch(self) -> tuple[Tensor, Tensor, Tensor, bool]:
        """Parts of trajectories [B, L, F], their lengths and ranks, and whether to cut them equally."""
        count = min(self.cfg.batch_size, len(self._ranks))
        rows = torch.randperm(len(self._ranks), generator=self.generator)[:count].to(self.device)
        lengths = self._lengths[rows]
        used = lengths.clamp(max=self.cfg.snippet_length) if self.cfg.snippet_length else lengths
        spread = torch.rand(count, generator=self.generator).to(self.device)
        first = ((lengths - used + 1) * spread).long()
        steps = first[:, None] + torch.arange(int(used.max()), device=self.device)
        steps = steps.clamp(max=self._features.shape[1] - 1)
        return self._features[rows[:, None], steps], used, self._ranks[rows], self.cfg.snippet_length > 0

    def _fit(self, num_updates: int) -> dict[str, float]:
        """Gradient steps, then each member's scale from the demonstrations."""
        if not hasattr(self, "_ranks"):
            raise ConfigError(f"{type(self).__name__} has no ranked trajectories")
        scalars = super()._fit(num_updates)
        with torch.no_grad():
            there = torch.arange(self._features.shape[1], device=self.device) < self._lengths[:, None]
            rewards = self.network(self._features[there])
            zero_at_mean = self.cfg.zero_at == "mean"
            zero = rewards.mean(1) if zero_at_mean else torch.quantile(rewards, 0.1, dim=1)
            self.network.offset.copy_(zero[:, None])
            self.network.scale.copy_(rewards.std(1, keepdim=True).clamp(min=1e-6))
        return scalars

    def rewards(self, batch: StepBatch) -> Tensor:
        """The members' mean, each scaled, less what they disagree by, [*L]."""
        rewards = self.network(self.features(batch))
        rewards = (rewards - self.network.offset) / self.network.scale
        lower: Tensor = rewards.mean(0) - self.cfg.pessimism * rewards.std(0, correction=0)
        return lower.view(batch.shape)

    def measure(self, features: Tensor, lengths: Tensor, ranks: Tensor, equal: bool) -> dict[str, float]:
        """How many of the pairs are ranked right."""
        found = margins(self.network.rewards_of(features, lengths), lengths, ranks, equal)
        return {"accuracy": float((found > 0.0).float().mean()) if found.numel() else 0.5}
