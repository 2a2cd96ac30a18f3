"""Guided cost learning (Finn et al., 2016, arXiv:1603.00448).

Maximum-entropy inverse reinforcement learning: demonstrations are likely where their cost is low, p(s, a) =
exp(-cost) / Z. The unknown Z is estimated from samples whose probability is known, those of the policy in
training (importance weights), together with the demonstrations, which keep the estimate from collapsing:

    loss = mean cost of demonstrations + log mean over samples of exp(-cost) / q,   q = pi(a | s)

The reward is the negative cost, high for demonstrated transitions. As in later work (Fu et al., 2018,
section 4) samples are single transitions: products of weights along whole episodes have too high a
variance.

Weights need the policy's log-probabilities, so it works on-policy only. A penalty on large costs replaces the
paper's two regularisers, which compare neighbouring time steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from guerdon.config.limits import NonNegativeFloat
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.airl import chosen_log_probs, demonstrated_log_probs
from guerdon.rewards.zoo.base import ZooModel, ZooSettings
from guerdon.rewards.zoo.networks import RewardNetwork, perceptron


@dataclass(frozen=True, kw_only=True)
class GCLSettings(ZooSettings):
    """`reward_model` of type `gcl`."""

    inputs: Literal["state_action", "state"] = "state_action"
    """What the cost depends on."""
    cost_sign: Literal["any", "positive", "negative"] = "any"
    """The loss does not mind a constant, but where episodes end early it matters to the policy: with positive
    costs, as in the paper, ending early pays, with negative ones living on. For tasks that the expert gets
    done, and those in which it keeps going."""
    cost_penalty: NonNegativeFloat = 1e-2
    """Weight of the mean squared cost in the loss."""


class Cost(RewardNetwork):
    """A cost that is low for demonstrations."""

    def __init__(self, num_features: int, hidden: tuple[int, ...], sign: str, cost_penalty: float) -> None:
        super().__init__()
        self.layers = perceptron([num_features, *hidden, 1])
        self.sign, self.cost_penalty = sign, cost_penalty

    def forward(self, features: Tensor) -> Tensor:
        """[N, F] -> cost_expert_is_low, float32 [N]."""
        cost: Tensor = self.layers(features).squeeze(-1)
        if self.sign == "any":
            return cost
        return functional.softplus(cost) if self.sign == "positive" else -functional.softplus(-cost)

    def learn(self, expert: Tensor, policy: Tensor, log_probs: Tensor) -> Tensor:
        """The negative log-likelihood of the demonstrations, and the penalty; [N, F] twice, log q [2 N]."""
        costs_expert_is_low: Tensor = self(torch.cat([expert, policy]))
        loss = negative_log_likelihood(costs_expert_is_low, log_probs)
        return loss + self.cost_penalty * costs_expert_is_low.square().mean()


class GCL(ZooModel):
    """Maximum-entropy IRL: negative learned cost."""

    Settings = GCLSettings
    needs_experts = True
    scales_by = "experts"
    cfg: GCLSettings

    def make_network(self) -> Cost:
        """The cost."""
        return Cost(self.num_features(), self.cfg.hidden, self.cfg.cost_sign, self.cfg.cost_penalty)

    def sample_batches(self, num_updates: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The expert's and the policy's features and the log-probabilities of both, for each step."""
        expert, policy = self.sample_pairs(num_updates)
        features = self.features(expert), self.features(policy)
        log_probs = demonstrated_log_probs(self, expert), chosen_log_probs(self, policy)
        for of_expert, of_policy, *both in self.batches(*features, *log_probs):
            yield of_expert, of_policy, torch.cat(both)

    def rewards(self, batch: StepBatch) -> Tensor:
        """The negative cost, [*L]."""
        costs_expert_is_low: Tensor = self.network(self.features(batch))
        return -costs_expert_is_low.view(batch.shape)

    def measure(self, expert: Tensor, policy: Tensor, log_probs: Tensor) -> dict[str, float]:
        """How much cheaper demonstrations are, and the share of samples that carry the weight (0 to 1)."""
        costs = self.network(torch.cat([expert, policy]))
        weights = torch.softmax(-costs - log_probs, 0)
        of_expert, of_policy = costs.chunk(2)
        return {
            "cost_gap": float(of_policy.mean() - of_expert.mean()),
            "effective_samples": float(1.0 / weights.square().sum() / len(weights)),
        }


def negative_log_likelihood(costs_expert_is_low: Tensor, log_probs: Tensor) -> Tensor:
    """Mean cost of the first half, the expert's, + log mean of exp(-cost) / q over all; [2 N] each -> []."""
    expert, _ = costs_expert_is_low.chunk(2)
    log_z = torch.logsumexp(-costs_expert_is_low - log_probs, 0) - math.log(len(log_probs))
    return expert.mean() + log_z
