"""Adversarial inverse reinforcement learning (Fu et al., 2018, arXiv:1710.11248).

The discriminator is given the policy's probability of the action and learns the rest:

    f(s, s') = g(s) + gamma h(s') - h(s)
    D = exp(f) / (exp(f) + pi(a | s)),  so that  logits_expert_is_high = f - log pi(a | s)

g is the reward. h is a potential for reward shaping (Ng et al., 1999); it absorbs the shaping, so that g also
holds under other dynamics. h is 0 after a step that terminated. The reward is high for the expert:

- `shaped`, f: dense, the default. The policy's own entropy bonus replaces log pi.
- `log_ratio`, f - log pi(a | s) = log D - log(1 - D): as in the paper; needs log-probabilities of actions.
- `positive`, -log(1 - D): never negative, so it favours long episodes, as in GAIL. For tasks in which
  episodes can end early and the expert keeps going. It needs the log-probabilities too.
- `plain`, g: for transfer to another environment.

It needs the policy's probability of the demonstrated actions and therefore works on-policy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from guerdon.config.limits import Fraction
from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.base import ZooModel, ZooSettings
from guerdon.rewards.zoo.gail import accuracy, cross_entropy, reward_of
from guerdon.rewards.zoo.networks import RewardNetwork, perceptron


@dataclass(frozen=True, kw_only=True)
class AIRLSettings(ZooSettings):
    """`reward_model` of type `airl`."""

    inputs: Literal["state", "state_action"] = "state"
    """What g sees: the state in which the action was chosen, as in the paper, or the action too."""
    reward_form: Literal["shaped", "log_ratio", "positive", "plain"] = "shaped"
    """See the top of this file."""
    gamma: Fraction = 0.99
    """Discount of the potential; that of the learner."""


PARTS = {"state": ("obs",), "state_action": ("obs", "action")}
"""What g is given."""


class ShapedReward(RewardNetwork):
    """g, h and what they make together."""

    def __init__(self, num_features: int, obs_size: int, hidden: tuple[int, ...], gamma: float) -> None:
        super().__init__()
        self.reward = perceptron([num_features, *hidden, 1])
        self.potential = perceptron([obs_size, *hidden, 1])
        self.gamma = gamma

    def forward(self, seen: Tensor, obs: Tensor, next_obs: Tensor, goes_on: Tensor) -> Tensor:
        """f, float32 [N]."""
        before, after = self.potential(torch.cat([obs, next_obs])).squeeze(-1).chunk(2)
        shaped: Tensor = self.plain(seen) + self.gamma * goes_on * after - before
        return shaped

    def plain(self, seen: Tensor) -> Tensor:
        """g, float32 [N]."""
        reward: Tensor = self.reward(seen).squeeze(-1)
        return reward

    def learn(self, *drawn: Tensor) -> Tensor:
        """Cross entropy of telling them apart; log pi(a | s) [2 N] and inputs, the expert's rows first."""
        return cross_entropy(self.logits_expert_is_high(*drawn))

    def logits_expert_is_high(self, log_probs: Tensor, *seen: Tensor) -> Tensor:
        """The discriminator's output f - log pi(a | s), float32 [N]."""
        f: Tensor = self(*seen)
        return f - log_probs


class AIRL(ZooModel):
    """Rewards what explains the expert better than the policy's habit does."""

    Settings = AIRLSettings
    needs_experts = True
    scales_by = "experts"
    cfg: AIRLSettings
    network: ShapedReward

    def make_network(self) -> ShapedReward:
        """Reward and potential."""
        size = self.num_features(PARTS[self.cfg.inputs])
        return ShapedReward(size, self.cfg.obs_size, self.cfg.hidden, self.cfg.gamma)

    def sample_batches(self, num_updates: int) -> Iterator[tuple[Tensor, ...]]:
        """What `learn` takes: log pi(a | s) and what the network sees, the expert's rows first."""
        expert, policy = self.sample_pairs(num_updates)
        of_expert = self.batches(demonstrated_log_probs(self, expert), *self.inputs_of(expert))
        of_policy = self.batches(chosen_log_probs(self, policy), *self.inputs_of(policy))
        for sides in zip(of_expert, of_policy, strict=True):
            yield tuple(torch.cat(both) for both in zip(*sides, strict=True))

    def rewards(self, batch: StepBatch) -> Tensor:
        """The reward in the chosen form, [*L]."""
        flat, form = batch.flat(), self.cfg.reward_form
        seen = self.inputs_of(flat)
        if form == "plain":
            rewards = self.network.plain(seen[0])
        elif form == "shaped":
            rewards = self.network(*seen)
        else:
            logits_expert_is_high = self.network.logits_expert_is_high(chosen_log_probs(self, flat), *seen)
            rewards = reward_of(logits_expert_is_high, "logit" if form == "log_ratio" else form)
        return rewards.view(batch.shape)

    def measure(self, *drawn: Tensor) -> dict[str, float]:
        """How often the discriminator is right; 0.5 where it cannot tell them apart."""
        return {"accuracy": accuracy(self.network.logits_expert_is_high(*drawn))}

    def inputs_of(self, flat: StepBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What g takes [N, F], observations [N, S], next ones [N, S], and 1 where the episode goes on [N]."""
        return (
            self.features(flat, PARTS[self.cfg.inputs]),
            self.obs_features(flat.obs),
            self.obs_features(flat.next_obs),
            (~flat.terminated).float(),
        )


def chosen_log_probs(model: ZooModel, flat: StepBatch) -> Tensor:
    """Get log pi(a | s) of the policy's own transitions, as it was when it chose, float32 [N]."""
    if flat.log_probs is None:
        raise DataError(
            f"{type(model).__name__} needs `log_probs` of the policy's actions, which only the on-policy "
            "pipeline (learner.algorithm: ppo) records"
        )
    return flat.log_probs.float()


def demonstrated_log_probs(model: ZooModel, flat: StepBatch) -> Tensor:
    """Get log pi(a | s) of demonstrated transitions under the policy in training, float32 [N]."""
    if model.policy_log_probs is None:
        raise ConfigError(
            f"{type(model).__name__} asks the policy how likely the demonstrated actions are, which only the "
            "on-policy pipeline (learner.algorithm: ppo) can tell, of policies that look at vectors; else "
            "set `policy_log_probs`"
        )
    return model.policy_log_probs(flat.obs, flat.actions).to(model.device).float()
