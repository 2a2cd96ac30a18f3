"""Twin delayed deep deterministic policy gradient, TD3 (Fujimoto et al., 2018).

Three changes to DDPG: targets take the minimum of two critics, the next actions in targets are smoothed with
clipped noise, and the policy and all targets are updated less often than the critics.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from guerdon.agents.actor_critic import ActorCriticAgent
from guerdon.agents.flat import BatchedMLP
from guerdon.agents.networks import ObsSpec, to_obs
from guerdon.config import NetworkConfig, TD3Config
from guerdon.core.batches import TrainBatch


class TD3(ActorCriticAgent):
    """Learns a deterministic policy for continuous actions; draws from generators of its own only."""

    name = section = "td3"
    cfg: TD3Config

    def __init__(
        self,
        spec: ObsSpec,
        action_space: gym.spaces.Box,
        cfg: TD3Config,
        network: NetworkConfig,
        *,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make the networks; see `Agent`."""
        super().__init__(spec, action_space, cfg, network, seed=seed, device=device)
        self.target_actor = self.actor.twin()

    # Acting

    @torch.inference_mode()
    def act(self, obs: Any, deterministic: bool = False, *, progress: float = 1.0) -> NDArray[np.float32]:
        """Actions for N observations, float32 [N, A]; with Gaussian noise unless `deterministic`."""
        unit = torch.tanh(self.actor(self.encoder(to_obs(obs, self.device)))[0])
        if not deterministic:
            noise = torch.randn(unit.shape, generator=self._act_noise, device=self.device)
            unit = (unit + self.cfg.exploration_noise * noise).clamp_(-1.0, 1.0)
        return self._scaled(unit).cpu().numpy()

    # Learning

    @torch.no_grad()
    def targets(self, batch: TrainBatch) -> Tensor:
        """What the critics regress on, float32 [B]; draws the noise of the next actions."""
        cfg, features = self.cfg, self.encoder(self._shifted(batch.next_obs))
        # target policy smoothing: neighbouring actions should have similar values
        unit = torch.tanh(self.target_actor(features)[0])
        noise = torch.randn(unit.shape, generator=self._noise, device=self.device) * cfg.policy_noise
        unit = (unit + noise.clamp_(-cfg.noise_clip, cfg.noise_clip)).clamp_(-1.0, 1.0)
        # the minimum of the twins keeps errors of the values from adding up
        value = self.target_critics(torch.cat([features, unit], 1)).squeeze(-1).amin(0)
        return torch.addcmul(batch.training_rewards, batch.not_terminated * batch.discount, value)

    def update(self, batch: TrainBatch, prior_rows: int = 0) -> dict[str, float]:
        """One step of the critics; at every `policy_delay`-th also of the policy and of all targets."""
        batch = self._checked(batch, prior_rows)
        targets = self.targets(batch)
        features = self.encoder(self._shifted(batch.obs))
        metrics = self._update_critics(features, self._unit(batch.actions), targets)
        self.num_updates += 1
        if self.num_updates % self.cfg.policy_delay == 0:
            metrics["actor_loss"] = self._update_actor(features.detach())
            self.target_critics.flat.lerp_(self.critics.flat, self.cfg.tau)
            self.target_actor.flat.lerp_(self.actor.flat, self.cfg.tau)
        return metrics

    def _update_critics(self, features: Tensor, unit_actions: Tensor, targets: Tensor) -> dict[str, float]:
        """Least squares: the loss is half the mean square error, summed over the critics."""
        values = self.critics(torch.cat([features, unit_actions], 1)).squeeze(-1)
        loss = 0.5 * len(values) * F.mse_loss(values, targets.expand_as(values))
        self._descend(self._critic_adam, loss)
        return {"critic_loss": loss.item(), "value": values.detach().mean().item()}

    def _update_actor(self, features: Tensor) -> float:
        """Climb the first critic's value of what the policy does; returns the loss."""
        unit = torch.tanh(self.actor(features)[0])
        loss = -self.critics(torch.cat([features, unit], 1), frozen=True)[0].mean()
        self._actor_adam.descend(loss)
        return loss.item()

    # Cloning and saving

    def _actor_was_cloned(self) -> None:
        self.target_actor.flat.copy_(self.actor.flat)

    def _networks(self) -> dict[str, BatchedMLP]:
        return {**super()._networks(), "target_actor": self.target_actor}
