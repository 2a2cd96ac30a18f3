"""What the models of curiosity share: rewards for the new, divided by how much such rewards vary over a run.

What counts as new differs from model to model (`novelty`); its size depends on networks and observations,
and shrinks as they learn. It is divided by a running deviation, as in Burda et al. (2018, arXiv:1810.12894),
never by anything of the batch at hand. The rewards join those of the environment (`mix`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from guerdon.config.limits import Fraction, LayerWidth, PositiveFloat
from guerdon.core.running_stats import Statistics
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.base import ZooModel, ZooSettings

BLOCK = 128
"""Steps whose discounted sums are one matrix product."""
AT_ONCE = 2**21
"""Numbers of observations that are drawn for gradient steps at a time."""
TRACKED_STREAMS = 4
"""Streams whose rewards tell the deviation; more of the same policy cost time and tell little."""


@dataclass(frozen=True, kw_only=True)
class CuriositySettings(ZooSettings):
    """Settings of all models of curiosity."""

    feature_size: LayerWidth = 64
    """Numbers that the networks make of an observation."""
    obs_limit: PositiveFloat = 5.0
    """Scaled observations are kept within +- this."""
    scale_by: Literal["returns", "rewards", "nothing"] = "returns"
    """Rewards are divided by the running deviation of their discounted sums, of themselves, or not at all."""
    scale_gamma: Fraction = 0.99
    """Discount of these sums; they go on over the ends of episodes."""


class CuriosityModel(ZooModel):
    """A subclass has `make_network` and `novelty`."""

    Settings = CuriositySettings
    saved: ClassVar[tuple[str, ...]] = ("reward_statistics", "running_returns")
    cfg: Any

    def setup(self) -> None:
        """The running deviation."""
        self.reward_statistics = Statistics().to(self.device)
        self.running_returns = torch.zeros(0, device=self.device)

    @abstractmethod
    def novelty(self, batch: StepBatch) -> Tensor:
        """How new each transition is, float32 [*L], before any scaling; changes nothing."""

    def sample_batches(self, num_updates: int) -> Iterator[tuple[Tensor, ...]]:
        """What gradient steps take; it is drawn and scaled for many of them at once."""
        size = self.cfg.batch_size
        at_once = max(1, AT_ONCE // (size * self.cfg.obs_size))
        for first in range(0, num_updates, at_once):
            yield from self.batches(*self.sample_features(size * min(at_once, num_updates - first)))

    def sample_features(self, count: int) -> tuple[Tensor, ...]:
        """What networks take of `count` transitions of the policy: by default (obs, action, next_obs)."""
        names = ("obs", "actions", "next_obs")
        obs, actions, next_obs = self.experience.sample_parts(count, self.generator, *names)
        return self.obs_features(obs), self.action_features(actions), self.obs_features(next_obs)

    def rewards(self, batch: StepBatch) -> Tensor:
        """Novelty over its running deviation, [*L]."""
        return self.scaled(self.novelty(batch))

    def scaled(self, novelty: Tensor) -> Tensor:
        """Novelty in units of its deviation so far."""
        return novelty if self.cfg.scale_by == "nothing" else novelty / self.reward_statistics.deviation

    def update_statistics(self, batch: StepBatch) -> None:
        """Bring the deviation up to date."""
        if self.cfg.scale_by == "nothing" or not len(batch):
            return
        with torch.no_grad():
            novelty = self.novelty(tracked(batch))
        if self.cfg.scale_by == "returns":
            if len(self.running_returns) != novelty.shape[1]:
                self.running_returns = novelty.new_zeros(novelty.shape[1])
            novelty = discounted_sums(novelty, self.cfg.scale_gamma, self.running_returns)
            self.running_returns = novelty[-1].clone()
        self.reward_statistics.update(novelty.flatten())

    def obs_features(self, obs: Tensor) -> Tensor:
        """Observations as flat vectors, scaled and limited if asked for: [N, *S] -> float32 [N, obs_size]."""
        flat = obs.flatten(1).float()
        return self.obs_statistics.normalized(flat, self.cfg.obs_limit) if self.cfg.normalize_obs else flat


def tracked(batch: StepBatch) -> StepBatch:
    """The first streams of it, [T, N]."""
    return batch.streams().map(lambda part: part[:, :TRACKED_STREAMS])


def discounted_sums(rewards: Tensor, gamma: float, before: Tensor) -> Tensor:
    """sums[t] = rewards[t] + gamma * sums[t - 1], [T, N]; `before` [N] are those before the first step."""
    found: list[Tensor] = []
    for block in torch.split(rewards, BLOCK):
        weights, decay = _discounts(len(block), gamma, rewards.device)
        sums = torch.addmm(decay * before, weights, block)
        found.append(sums)
        before = sums[-1]
    return torch.cat(found)


@lru_cache(maxsize=16)
def _discounts(count: int, gamma: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weights of the rewards up to each step, [count, count], and of the sums before them, [count, 1]."""
    steps = torch.arange(count, device=device)
    weights = gamma ** (steps[:, None] - steps).clamp(min=0).float()
    return weights.tril(), gamma ** (steps[:, None] + 1).float()
