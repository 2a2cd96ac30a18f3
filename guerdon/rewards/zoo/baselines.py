"""Uninformative rewards: with each of them a run must fail where one with a reward model succeeds.

In ordinary CartPole a reward of zero can "solve" the task, since ending an episode is a signal of its own;
see `guerdon.envs.classic` for tasks without one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.base import ZooModel


class ZeroReward(ZooModel):
    """Rewards nothing."""

    needs_experience = False

    def rewards(self, batch: StepBatch) -> Tensor:
        """Zeros, [*L]."""
        return torch.zeros(batch.shape, device=batch.obs.device)


class NoiseReward(ZooModel):
    """Rewards something that has nothing to do with the task.

    The number of the step takes part in it. If a state had always the same reward, lying still where that
    happens to be low would be a reason not to go there, and a pole that fell lies still.
    """

    needs_experience = False
    history_dependent = True

    def initial_state(self, num_streams: int) -> Tensor:
        """Steps so far, int64 [N]."""
        return torch.zeros(num_streams, dtype=torch.int64, device=self.device)

    def stream_rewards(self, batch: StepBatch, state: Tensor) -> tuple[Tensor, Tensor]:
        """A rapid wave over steps and observations, within -1 and 1, [T, N]."""
        flat, count = batch.flat(), batch.shape[0]
        steps = state + torch.arange(count, device=self.device)[:, None]
        seen = torch.cat([steps.reshape(-1, 1), flat.obs.flatten(1), flat.next_obs.flatten(1)], 1).double()
        weights = torch.randn(seen.shape[1], generator=torch.Generator().manual_seed(self.cfg.seed))
        wave = torch.sin(1e4 * (seen @ weights.double().to(seen.device)))
        return wave.float().view(batch.shape), state + count


BASELINES: dict[str, type[ZooModel]] = {"zero": ZeroReward, "noise": NoiseReward}
"""`reward_model.type` of each."""
