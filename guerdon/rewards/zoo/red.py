"""Random expert distillation (Wang et al., 2019, arXiv:1905.06750).

A network learns to predict the outputs of a fixed random network for demonstrated states and actions. The
prediction is good near demonstrations and bad elsewhere:

    reward = exp(-sigma * |predicted - target|^2), between 0 and 1.

sigma sets the scale of the error. The paper chooses it by hand so that demonstrations get almost 1. Here a
share of the demonstrated steps is held out, and sigma is chosen so that a step whose error is the
`expert_quantile` of theirs gets `reward_at_quantile`. Without this calibration rewards are almost constant.

It is fitted on demonstrations alone, best before the policy (`pretrain_reward`), and rewards are positive:
where episodes can end early, they favour long ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from guerdon.config.limits import Fraction, PositiveInt
from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.base import ZooModel, ZooSettings
from guerdon.rewards.zoo.networks import Distillation


@dataclass(frozen=True, kw_only=True)
class REDSettings(ZooSettings):
    """`reward_model` of type `red`."""

    inputs: Literal["state_action", "state"] = "state_action"
    """What is distilled of a step."""
    num_outputs: PositiveInt = 32
    """Outputs of the random network for a step."""
    held_out: Fraction = 0.2
    """Share of the demonstrated steps that sigma is calibrated on."""
    expert_quantile: Fraction = 0.9
    """Of the held-out errors: the one ..."""
    reward_at_quantile: Fraction = 0.5
    """... that gets this reward."""


class CalibratedDistillation(Distillation):
    """A distillation, and how large its errors may be."""

    sigma: Tensor

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes, nn.Tanh)
        self.register_buffer("sigma", torch.ones(()))


class RED(ZooModel):
    """Rewards what is like the demonstrations."""

    Settings = REDSettings
    needs_experts = True
    needs_experience = False
    cfg: REDSettings
    network: CalibratedDistillation

    def make_network(self) -> CalibratedDistillation:
        """The two networks."""
        if not 0.0 < self.cfg.reward_at_quantile < 1.0:
            raise ConfigError("reward_model.reward_at_quantile must be more than 0 and less than 1")
        return CalibratedDistillation((self.num_features(), *self.cfg.hidden, self.cfg.num_outputs))

    def load_expert_data(self, data: Any) -> None:
        """Take demonstrations, and put some of their steps aside."""
        super().load_expert_data(data)
        count = len(self.expert_rows)
        aside = max(1, round(self.cfg.held_out * count))
        if aside >= count:
            raise DataError(f"{count} demonstrated steps leave nothing to learn from: RED needs more")
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.cfg.seed)).to(self.device)
        features = self.features(self.expert_rows)
        self._held, self._learned = features[order[:aside]], features[order[aside:]]

    def sample_batch(self) -> tuple[Tensor]:
        """Demonstrated steps, [N, F]."""
        rows = torch.randint(len(self._learned), (self.cfg.batch_size,), generator=self.generator)
        return (self._learned[rows.to(self.device)],)

    def _fit(self, num_updates: int) -> dict[str, float]:
        """Gradient steps, then sigma from the steps that were not learned from."""
        scalars = super()._fit(num_updates)
        with torch.no_grad():
            errors = self.network(self._held)
            limit = torch.quantile(errors, self.cfg.expert_quantile).clamp(min=1e-12)
            self.network.sigma.copy_(-math.log(self.cfg.reward_at_quantile) / limit)
        found = {"held_out_error": float(errors.mean()), "sigma": float(self.network.sigma)}
        self.log(found)
        return scalars | found

    def rewards(self, batch: StepBatch) -> Tensor:
        """exp(-sigma * error), [*L]."""
        errors_expert_is_low = self.network(self.features(batch))
        return torch.exp(-self.network.sigma * errors_expert_is_low).view(batch.shape)
