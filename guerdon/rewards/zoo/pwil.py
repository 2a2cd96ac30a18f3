"""Primal Wasserstein imitation learning (Dadashi et al., 2020, arXiv:2006.04678).

The reward is a greedy optimal transport from an episode of the policy to the demonstrations. Both have mass
1: each of the T steps of an episode has mass 1 / T, each of the D demonstrated steps 1 / D. Step by step,
the policy's mass is moved to the nearest demonstrated steps with remaining mass. Used mass is not available
again:

    cost_t = sum over demonstrated steps d of mass(t -> d) * distance(t, d)
    reward_t = alpha * exp(-beta * T / sqrt(size of states + size of actions) * cost_t)

The distance is Euclidean, of observations and actions scaled by the demonstrations' deviations. Masses are
counted in whole units of 1 / (T * D), so that rounding loses nothing: after T steps all mass is used.

Rewards lie between 0 and alpha: where episodes can end early, they favour long ones. Steps after the T-th
of an episode get 0, because no mass remains. Nothing is learned. Rewards depend on the earlier steps of the
episode, so each step is scored once, when it is collected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from guerdon.config.limits import PositiveFloat, PositiveInt
from guerdon.core.running_stats import Statistics
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.base import ZooModel, ZooSettings

PARTS = ("obs", "action")
SPARE = 8
"""Demonstrated steps that are looked at beyond the fewest that a step needs."""


@dataclass(frozen=True, kw_only=True)
class PWILSettings(ZooSettings):
    """`reward_model` of type `pwil`."""

    alpha: PositiveFloat = 5.0
    """The highest reward."""
    beta: PositiveFloat = 5.0
    """How fast it falls with the distance from what was demonstrated."""
    horizon: PositiveInt | None = None
    """T, steps of an episode; null: of the longest demonstration."""
    subsample: PositiveInt = 1
    """Keep every so many-th demonstrated step."""
    normalize_obs: bool = False
    """The distance has its own scaling."""


class PWIL(ZooModel):
    """Rewards steps that are close to demonstrated ones, each of which counts once in an episode."""

    Settings = PWILSettings
    needs_experts = True
    needs_experience = False
    history_dependent = True
    saved = ("atoms", "steps", "scale")
    cfg: PWILSettings

    def setup(self) -> None:
        """Without demonstrations yet."""
        self.atoms: Tensor | None = None
        """Demonstrated steps, float32 [D, F], scaled."""
        self.steps = 0
        """T."""
        self.scale = Statistics((self.num_features(PARTS),)).to(self.device)

    def load_expert_data(self, data: Any) -> None:
        """Take demonstrations, and the scale of the distance from them."""
        super().load_expert_data(data)
        self.scale.count.zero_()  # other demonstrations take the place of earlier ones
        self.scale.update(self.features(self.expert_rows, PARTS))
        self.atoms = self._scaled(self.expert_rows)[:: self.cfg.subsample]
        self.steps = self.cfg.horizon or max(len(each) for each in self.experts)

    def initial_state(self, num_streams: int) -> Tensor:
        """Units of mass that are left, all of them: int64 [N, D]."""
        atoms = self._demonstrated()
        return torch.full((num_streams, len(atoms)), self.steps, device=self.device)

    def stream_rewards(self, batch: StepBatch, state: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards [T, N] of streams that go on with the masses of `state`, and the masses left after."""
        atoms, left = self._demonstrated(), state.clone()
        points = self._scaled(batch).view(*batch.shape, -1)
        ended = batch.done
        costs = torch.empty(batch.shape, device=self.device)
        for t in range(batch.shape[0]):
            costs[t], left = self._coupled(torch.cdist(points[t], atoms), left)
            if bool(ended[t].any()):
                left[ended[t]] = self.steps
        return self.cfg.alpha * torch.exp(-self.cfg.beta / math.sqrt(points.shape[-1]) * costs), left

    def _coupled(self, distances: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """Move one step's mass to the nearest with mass left: T * cost [N], and units left [N, D].

        A step has D units and a demonstrated one at most T, so that about D / T are needed; where that was
        not enough because some of the nearest are almost used up, more are looked at.
        """
        units, available = distances.shape[1], left.sum(1, keepdim=True)
        distances = distances.masked_fill(left == 0, math.inf)
        count = units // self.steps + SPARE
        while True:
            count = min(count, units)
            nearest, rows = distances.topk(count, dim=1, largest=False)
            held = left.gather(1, rows)
            if count == units or bool((held.sum(1, keepdim=True) >= available.clamp(max=units)).all()):
                break
            count *= 2
        taken = (units - (held.cumsum(1) - held)).clamp(min=0).minimum(held)
        costs = (taken * nearest.masked_fill(taken == 0, 0.0)).sum(1) / units
        costs = costs.masked_fill(available[:, 0] == 0, math.inf)
        return costs, left.scatter_add(1, rows, -taken)

    def _scaled(self, rows: StepBatch) -> Tensor:
        return (self.features(rows, PARTS) - self.scale.mean.float()) / self.scale.deviation

    def _demonstrated(self) -> Tensor:
        if self.atoms is None:
            len(self.expert_rows)  # raises: there are no demonstrations
        assert self.atoms is not None
        return self.atoms
