"""An ensemble of reward models of one type; their disagreement lowers the reward.

The members see the same data and differ in their initial weights and random numbers. Where there is little
data their rewards differ too, so that their deviation measures how far a reward can be trusted
(Lakshminarayanan et al., 2017, arXiv:1612.01474; against reward hacking: Coste et al., 2024,
arXiv:2310.02743):

    reward = mean of the members - disagreement_weight * their deviation

It is high where the members' rewards are high and agree. `reward_model/disagreement` is the mean deviation on
experience of the policy. If it grows, the policy visits states where the reward is unreliable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from guerdon.config.limits import NonNegativeFloat, PositiveInt
from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards.model import Scores
from guerdon.rewards.relabel import learned_rewards
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.base import LogProbs, ZooModel, ZooSettings
from guerdon.rewards.zoo.settings import SHAPES

NUM_MEASURED = 256
"""Transitions on which the disagreement is measured."""


@dataclass(frozen=True, kw_only=True)
class EnsembleSettings(ZooSettings):
    """`reward_model` of type `ensemble`; how members learn stands in `member`."""

    member: dict[str, Any] = field(default_factory=dict)
    """`type` and settings of one member; shapes and demonstrations are passed on, seeds are their own."""
    size: PositiveInt = 3
    """Members."""
    disagreement_weight: NonNegativeFloat = 0.5
    """Deviations of the members that are taken from their mean."""


class Ensemble(ZooModel):
    """Rewards what several models agree on."""

    Settings = EnsembleSettings
    cfg: EnsembleSettings

    def __init__(
        self,
        config: Mapping[str, Any] | ZooSettings,
        device: torch.device | str = "cpu",
        tb_logger: Any = None,
    ) -> None:
        super().__init__(config, device, tb_logger)
        self.members = [self._member(number) for number in range(self.cfg.size)]
        self.needs_experts = self.members[0].needs_experts
        self.obs_key = self.members[0].obs_key

    def _member(self, number: int) -> ZooModel:
        from guerdon.rewards.registry import create_reward_model  # the table has this class in it

        cfg = self.cfg
        unwanted = sorted({"seed", *SHAPES} & cfg.member.keys())
        if unwanted:
            raise ConfigError(f"reward_model.member.{unwanted[0]} is set for all members: leave it out")
        passed = {name: getattr(cfg, name) for name in (*SHAPES, "data_path")}
        section = {**passed, **cfg.member, "seed": cfg.seed * 1_000 + number}
        model = create_reward_model(section, self.device)
        if not isinstance(model, ZooModel) or isinstance(model, Ensemble) or model.history_dependent:
            raise ConfigError(
                f"reward_model.member.type is {cfg.member.get('type')}: members must be models of the zoo "
                "that score single transitions, and no ensembles"
            )
        return model

    @property
    def policy_log_probs(self) -> LogProbs | None:
        """How likely the policy in training is to act so; the members share it."""
        return self.members[0].policy_log_probs

    @policy_log_probs.setter
    def policy_log_probs(self, ask: LogProbs | None) -> None:
        for each in self.members:
            each.policy_log_probs = ask

    def score(self, batch: StepBatch) -> Scores:
        """Mean less weighted deviation, and the deviation of the members, [*L]."""
        ends = batch.done.cpu().numpy()
        learned = [
            learned_rewards(each.score(batch), ends, each.mapping, each.threshold) for each in self.members
        ]
        deviation, mean = torch.std_mean(torch.from_numpy(np.stack(learned)), dim=0, correction=0)
        rewards = mean - self.cfg.disagreement_weight * deviation
        return Scores(rewards=rewards.numpy(), disagreement=deviation.numpy())

    def collect_data(self, data: Any) -> None:
        """Give all members the policy's transitions."""
        for each in self.members:
            each.collect_data(data)

    def clear_data(self, iter: int) -> None:
        """As the members' settings say."""
        for each in self.members:
            each.clear_data(iter)

    def load_expert_data(self, data: Any) -> None:
        """Give all members the demonstrations."""
        for each in self.members:
            each.load_expert_data(data)

    def train(self) -> dict[str, float]:
        """Train all members; their scalars' means, and the disagreement."""
        return self._log([each.train() for each in self.members])

    def pretrain(self) -> dict[str, float]:
        """Train all members before the first update of the policy."""
        return self._log([each.pretrain() for each in self.members])

    def _log(self, metrics: list[dict[str, float]]) -> dict[str, float]:
        self.train_iter = self.members[0].train_iter
        if not all(metrics):
            return {}
        scalars = {name: sum(each[name] for each in metrics) / len(metrics) for name in metrics[0]}
        own = self.members[0].experience
        rows = own.sample(NUM_MEASURED, self.generator) if len(own) else self.members[0].expert_rows
        disagreement = self.score(rows).disagreement
        assert disagreement is not None
        scalars["disagreement"] = float(torch.from_numpy(disagreement).mean())
        self.log(scalars)
        return scalars

    def own_state(self) -> dict[str, Any]:
        """The members'."""
        return {"members": [each.state_dict() for each in self.members]}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Give them back."""
        if len(state["members"]) != len(self.members):
            raise DataError(
                f"what was saved has {len(state['members'])} members, this ensemble {len(self.members)}"
            )
        for each, saved in zip(self.members, state["members"], strict=True):
            each.load_state_dict(saved)
