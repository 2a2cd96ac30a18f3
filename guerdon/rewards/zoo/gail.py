"""Generative adversarial imitation learning (Ho and Ermon, 2016, arXiv:1606.03476).

A discriminator learns to tell the expert's transitions from the policy's. Its logits are high for the expert:
D = sigmoid(logits_expert_is_high) is the probability that a transition is the expert's. The reward is one of
three increasing functions of it, which differ in what they think of long episodes:

- `positive`, -log(1 - D): never negative, so that living on always pays. Of the paper, and of tasks where
  the expert keeps going.
- `negative`, log D: never positive, so that ending early always pays. For tasks that the expert gets done.
- `logit`, log D - log(1 - D): either sign (as in AIRL). While the discriminator tells the policy from the
  expert it is negative on all steps of the policy, and then ending early pays.

The bias matters where episodes can end early (Kostrikov et al., 2019, arXiv:1809.02925). `auto`, the default,
looks at how the demonstrations end. Experts that go on until the time limit, or until the data ends, show
that living on is right: `positive`. Experts that end their episodes themselves, after different numbers of
steps, get something done by it, and a reward for every further step would put that off: `logit`. Data with
`done` alone do not tell a time limit from an end; where most episodes have one length it is a time limit.

A gradient penalty (Gulrajani et al., 2017, arXiv:1704.00028) keeps the discriminator smooth, so that it says
which way is better even where it is sure. It is needed where single transitions give an expert away: with
real-valued actions, and with states alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from guerdon.config.limits import NonNegativeFloat
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.base import ZooModel, ZooSettings
from guerdon.rewards.zoo.networks import RewardNetwork, perceptron

log = logging.getLogger("guerdon")


@dataclass(frozen=True, kw_only=True)
class GAILSettings(ZooSettings):
    """`reward_model` of type `gail`."""

    inputs: Literal["state_action", "state", "state_next_state"] = "state_action"
    """What the discriminator sees of a transition; in the latter two actions do not matter."""
    reward_form: Literal["auto", "logit", "positive", "negative"] = "auto"
    """How the discriminator's output becomes a reward; see the top of this file."""
    gradient_penalty: NonNegativeFloat = 0.0
    """Weight of the penalty on gradients whose norm is not 1; 0: none."""


class Discriminator(RewardNetwork):
    """Logits that are high for the expert."""

    def __init__(self, num_features: int, hidden: tuple[int, ...], gradient_penalty: float) -> None:
        super().__init__()
        self.layers = perceptron([num_features, *hidden, 1])
        self.gradient_penalty = gradient_penalty

    def forward(self, features: Tensor) -> Tensor:
        """[N, F] -> logits_expert_is_high, float32 [N]."""
        logits: Tensor = self.layers(features).squeeze(-1)
        return logits

    def learn(self, expert: Tensor, policy: Tensor, between: Tensor) -> Tensor:
        """Cross entropy of telling features [N, F] apart, and the penalty.

        `between` [N, 1] in 0 to 1 says where between the two the penalty looks at the gradient.
        """
        loss = cross_entropy(self(torch.cat([expert, policy])))
        if self.gradient_penalty:
            mixed = torch.lerp(policy, expert, between).requires_grad_(True)
            (slopes,) = torch.autograd.grad(self(mixed).sum(), mixed, create_graph=True)
            loss = loss + self.gradient_penalty * (slopes.norm(dim=1) - 1.0).square().mean()
        return loss


class GAIL(ZooModel):
    """Rewards what the expert would have done."""

    Settings = GAILSettings
    needs_experts = True
    scales_by = "experts"
    cfg: GAILSettings
    reward_form: str

    def setup(self) -> None:
        """Until there are demonstrations `auto` is `positive`, the form of the paper."""
        self.reward_form = "positive" if self.cfg.reward_form == "auto" else self.cfg.reward_form

    def load_expert_data(self, data: Any) -> None:
        """Take demonstrations; with `reward_form: auto` they decide the form."""
        super().load_expert_data(data)
        if self.cfg.reward_form == "auto":
            self.reward_form, why = suggest_form(self.experts)
            log.info("reward_model.reward_form: %s, because %s", self.reward_form, why)

    def own_state(self) -> dict[str, Any]:
        """The form: another set of demonstrations may suggest another one."""
        return {"reward_form": self.reward_form}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """With `auto` go on with the form that was used; older states have it in their settings."""
        if self.cfg.reward_form == "auto":
            self.reward_form = state.get("reward_form") or json.loads(state["settings"])["reward_form"]

    def make_network(self) -> Discriminator:
        """The discriminator."""
        return Discriminator(self.num_features(), self.cfg.hidden, self.cfg.gradient_penalty)

    def sample_batches(self, num_updates: int) -> Iterator[tuple[Tensor, ...]]:
        """The expert's and the policy's features, and places between them; drawn at once for all steps."""
        expert, policy = map(self.features, self.sample_pairs(num_updates))
        between = torch.rand(len(policy), 1, generator=self.generator).to(self.device)
        return self.batches(expert, policy, between)

    def rewards(self, batch: StepBatch) -> Tensor:
        """The discriminator's output in the chosen form, [*L]."""
        logits_expert_is_high = self.network(self.features(batch))
        return reward_of(logits_expert_is_high, self.reward_form).view(batch.shape)

    def measure(self, expert: Tensor, policy: Tensor, between: Tensor) -> dict[str, float]:
        """How often the discriminator is right; 0.5 where it cannot tell them apart."""
        return {"accuracy": accuracy(self.network(torch.cat([expert, policy])))}


def suggest_form(episodes: Sequence[StepBatch]) -> tuple[Literal["logit", "positive"], str]:
    """The form that does not lead a policy astray, from how demonstrations end, and the reason."""
    if not any(bool(each.terminated[-1]) for each in episodes):
        return "positive", "no demonstration ends before its time: living on is never wrong"
    lengths = [len(each) for each in episodes]
    longest = max(lengths)
    if 2 * sum(length == longest for length in lengths) >= len(lengths):
        return "positive", f"most demonstrations go on for {longest} steps, a time limit: living on is right"
    return "logit", (
        f"demonstrations end by themselves after {min(lengths)} to {longest} steps: rewards for every "
        "further step would put that off. If these ends are failures, set reward_form=positive"
    )


def reward_of(logits_expert_is_high: Tensor, form: str) -> Tensor:
    """Logits as rewards, each form increasing: `logit`, `positive` -log(1 - D), `negative` log D."""
    if form == "positive":
        return functional.softplus(logits_expert_is_high)
    if form == "negative":
        return -functional.softplus(-logits_expert_is_high)
    return logits_expert_is_high


def cross_entropy(logits_expert_is_high: Tensor) -> Tensor:
    """-log D of the first half, the expert's, and -log(1 - D) of the second, the policy's; mean of [2 N]."""
    expert, policy = logits_expert_is_high.chunk(2)
    return functional.softplus(torch.cat([-expert, policy])).mean()


def accuracy(logits_expert_is_high: Tensor) -> float:
    """Share of right answers; the first half is the expert's."""
    expert, policy = logits_expert_is_high.chunk(2)
    return float(torch.cat([expert > 0.0, policy <= 0.0]).float().mean())
