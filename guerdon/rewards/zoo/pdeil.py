"""Imitation learning by probability density estimation (Liu et al., 2021, arXiv:2112.06746).

    reward(s, a) = p_expert(s, a) / (alpha * p_expert(s) + (1 - alpha) * p_policy(s))

It is high for the expert's actions in the expert's states, and lower where the policy goes more often.
The densities are sums of Gaussian kernels at the steps that were seen. The kernel of (s, a) is one of the
observation times one of the action: Gaussian as well, or, where actions are discrete, 1 for the same action
and 0 for another one, which makes p_expert(s, a) / p_expert(s) the expert's probability of the action.

Coordinates are scaled by the demonstrations' deviations, and densities are computed as logarithms: far from
all data densities underflow, their ratio does not. Rewards are never negative: where episodes can end
early, they favour long ones. Until states of the policy were collected, p_policy is the expert's density
with kernels that are `background` times as wide, so that leaving the demonstrations lowers the reward from
the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from guerdon.config.limits import Fraction, PositiveFloat, PositiveInt
from guerdon.core.running_stats import Statistics
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.base import ZooModel, ZooSettings

CHUNK = 4_000_000
"""Kernel values that are computed at once."""


@dataclass(frozen=True, kw_only=True)
class PDEILSettings(ZooSettings):
    """`reward_model` of type `pdeil`."""

    alpha: Fraction = 0.5
    """Weight of the expert's state density in the denominator, against the policy's."""
    bandwidth: PositiveFloat | None = None
    """Width of the kernels, in deviations of the demonstrations; null: Scott's rule, n ** (-1 / (d + 4))."""
    background: PositiveFloat = 3.0
    """How many times wider the kernels of p_policy are before the policy's states are known."""
    num_kernels: PositiveInt = 1024
    """Steps of the policy, and of the expert, that the densities are made of, drawn from all."""
    max_reward: PositiveFloat = 10.0
    """Rewards end here: a density of real-valued actions has no bound."""
    normalize_obs: bool = False
    """The kernels have their own scaling."""


class PDEIL(ZooModel):
    """Rewards the expert's actions in the expert's states."""

    Settings = PDEILSettings
    needs_experts = True
    saved = ("kernels", "scale", "action_scale")
    cfg: PDEILSettings

    def setup(self) -> None:
        """Without demonstrations yet."""
        self.kernels: dict[str, Tensor] = {}
        """`obs` [M, S], `actions` [M, A] of the expert, `policy_obs` [K, S], scaled; empty without data."""
        self.scale = Statistics((self.cfg.obs_size,)).to(self.device)
        self.action_scale = Statistics((self.cfg.action_size,)).to(self.device)

    def load_expert_data(self, data: Any) -> None:
        """Take demonstrations, and the scale from them."""
        super().load_expert_data(data)
        rows = self.expert_rows
        self.scale.count.zero_()  # other demonstrations take the place of earlier ones
        self.scale.update(rows.obs.flatten(1))
        self.action_scale.count.zero_()
        if not self.cfg.discrete_actions:
            self.action_scale.update(rows.actions)
        picked = self._picked(rows)
        self.kernels = {"obs": self._obs(picked), "actions": self._actions(picked)}

    def _fit(self, num_updates: int) -> dict[str, float]:
        """Take the collected states as the policy's; there are no gradient steps."""
        self._expert()
        if not len(self.experience):
            return {}
        self.kernels["policy_obs"] = self._obs(self._picked(self.experience.rows))
        self.train_iter += 1
        of_states = _log_kernels(self.kernels["policy_obs"], self.kernels["obs"], self._width)
        scalars = {"log_density_of_policy_states": float(_log_density(of_states).mean())}
        self.log(scalars)
        return scalars

    def rewards(self, batch: StepBatch) -> Tensor:
        """The ratio of densities, [*L]."""
        flat, size = batch.flat(), max(1, CHUNK // len(self._expert()["obs"]))
        rewards = [self._ratio(flat[start : start + size]) for start in range(0, len(flat), size)]
        return torch.cat(rewards).float().view(batch.shape) if rewards else torch.zeros(batch.shape)

    def _ratio(self, rows: StepBatch) -> Tensor:
        kernels, alpha, width = self._expert(), self.cfg.alpha, self._width
        obs, actions = self._obs(rows), self._actions(rows)
        of_states = _log_kernels(obs, kernels["obs"], width)
        if self.cfg.discrete_actions:
            same = actions[:, None] == kernels["actions"][None, :]
            of_steps = of_states.masked_fill(~same, -math.inf)
        else:
            of_steps = of_states + _log_kernels(actions, kernels["actions"], width)
        log_states = _log_density(of_states)
        if "policy_obs" not in kernels:
            width *= self.cfg.background
        log_policy = _log_density(_log_kernels(obs, kernels.get("policy_obs", kernels["obs"]), width))
        if alpha in (0.0, 1.0):
            log_denominator = log_states if alpha else log_policy
        else:
            log_denominator = torch.logaddexp(math.log(alpha) + log_states, math.log1p(-alpha) + log_policy)
        return (_log_density(of_steps) - log_denominator).exp().clamp(max=self.cfg.max_reward)

    @property
    def _width(self) -> float:
        if self.cfg.bandwidth is not None:
            return self.cfg.bandwidth
        size = self.cfg.obs_size + (0 if self.cfg.discrete_actions else self.cfg.action_size)
        return math.pow(len(self._expert()["obs"]), -1.0 / (size + 4))

    def _picked(self, rows: StepBatch) -> StepBatch:
        if len(rows) <= self.cfg.num_kernels:
            return rows
        picked = torch.randperm(len(rows), generator=self.generator)[: self.cfg.num_kernels]
        return rows[picked.to(self.device)]

    def _obs(self, rows: StepBatch) -> Tensor:
        """float64 [N, S], scaled."""
        return (rows.obs.flatten(1).double() - self.scale.mean) / self.scale.deviation.double()

    def _actions(self, rows: StepBatch) -> Tensor:
        """int64 [N], or float64 [N, A], scaled."""
        if self.cfg.discrete_actions:
            return rows.actions
        return (rows.actions.double() - self.action_scale.mean) / self.action_scale.deviation.double()

    def _expert(self) -> dict[str, Tensor]:
        if not self.kernels:
            len(self.expert_rows)  # raises: there are no demonstrations
        return self.kernels


def _log_kernels(points: Tensor, centres: Tensor, width: float) -> Tensor:
    """Logarithms of Gaussian kernels, [N, S] and [M, S] -> [N, M]."""
    constant = 0.5 * points.shape[1] * math.log(2.0 * math.pi * width**2)
    return torch.cdist(points, centres).square() * (-0.5 / width**2) - constant


def _log_density(log_kernels: Tensor) -> Tensor:
    """Logarithm of their mean, [N, M] -> [N]."""
    return torch.logsumexp(log_kernels, dim=1) - math.log(log_kernels.shape[1])
