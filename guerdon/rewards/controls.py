"""Controls: what a policy does whose reward says nothing. A proof of a reward model needs both to fail.

In ordinary CartPole a reward of zero can "solve" the task, since ending an episode is a signal of its own;
see `guerdon.envs.classic` for tasks without one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from guerdon.rewards.base import ZooModel
from guerdon.rewards.transitions import Transitions


class ZeroReward(ZooModel):
    """Says nothing."""

    needs_experience = False

    def score(self, batch: Transitions) -> Tensor:
        """Zeros, [*L]."""
        return torch.zeros(batch.shape, device=batch.obs.device)


class NoiseReward(ZooModel):
    """Says something that has nothing to do with the task, but always the same of the same transition."""

    needs_experience = False

    def score(self, batch: Transitions) -> Tensor:
        """A rapid wave over the observations, within -1 and 1, [*L]."""
        flat = batch.flat()
        seen = torch.cat([flat.obs.flatten(1), flat.next_obs.flatten(1)], 1).double()
        weights = torch.randn(seen.shape[1], generator=torch.Generator().manual_seed(self.cfg.seed))
        return torch.sin(1e4 * (seen @ weights.double().to(seen.device))).float().view(batch.shape)


CONTROLS: dict[str, type[ZooModel]] = {"zero": ZeroReward, "noise": NoiseReward}
"""`reward_model.type` of each."""
