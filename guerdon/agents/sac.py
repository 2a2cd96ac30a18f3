"""Soft actor-critic (Haarnoja et al., 2018) with the options of RLPD (Ball et al., 2023).

Beside the policy that learns there may be two that do not: its running mean, which acts when it matters
(`actor_ema`), and the cloned one, from which it should not stray (`bc_towards`).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from guerdon.agents.actor_critic import ActorCriticAgent
from guerdon.agents.flat import BatchedMLP, FlatAdam
from guerdon.agents.networks import ObsEncoder, ObsSpec, to_obs
from guerdon.agents.policies import Drawn, draw, limits
from guerdon.config import NetworkConfig, SACConfig
from guerdon.core.batches import TrainBatch
from guerdon.core.errors import ConfigError


class SAC(ActorCriticAgent):
    """Learns a stochastic policy for continuous actions; draws from generators of its own only."""

    name = section = "sac"
    cfg: SACConfig

    def __init__(
        self,
        spec: ObsSpec,
        action_space: gym.spaces.Box,
        cfg: SACConfig,
        network: NetworkConfig,
        *,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make the networks; see `Agent`."""
        if cfg.num_min_critics > cfg.num_critics:
            raise ConfigError(
                f"sac.num_min_critics is {cfg.num_min_critics}, but there are {cfg.num_critics} critics"
            )
        if cfg.actor_ema >= 1.0:
            raise ConfigError("sac.actor_ema is 1: the mean of the policy's weights would never change")
        super().__init__(
            spec,
            action_space,
            cfg,
            network,
            seed=seed,
            device=device,
            num_critics=cfg.num_critics,
            outputs_per_action=2,
        )
        self.num_first_updates = cfg.num_critic_only_updates  # of the critics alone
        self.actor.shift_outputs(slice(self.num_actions, None), cfg.initial_log_std)
        self.mean_actor = self.actor.twin() if cfg.actor_ema else None
        self.reference: tuple[ObsEncoder, BatchedMLP] | None = None
        self.log_alpha = torch.tensor([math.log(cfg.initial_alpha)], device=self.device)
        self._alpha_adam = FlatAdam(self.log_alpha, cfg.alpha_lr)
        self._target_entropy = -float(self.num_actions) if cfg.target_entropy is None else cfg.target_entropy

    @classmethod
    def acting_settings(cls, cfg: SACConfig) -> SACConfig:
        """With a single critic: a copy that only acts asks none."""
        return dataclasses.replace(cfg, num_critics=1, num_min_critics=1)

    # Acting

    @torch.inference_mode()
    def act(self, obs: Any, deterministic: bool = False, *, progress: float = 1.0) -> NDArray[np.float32]:
        """Actions float32 [N, A]; `deterministic`: no noise, and the mean of the policy's weights acts."""
        actor = self.mean_actor if deterministic and self.mean_actor is not None else self.actor
        mean, log_std = limits(actor(self.encoder(to_obs(obs, self.device)))[0])
        if not deterministic:
            noise = torch.randn(mean.shape, generator=self._act_noise, device=self.device)
            mean = torch.addcmul(mean, noise, log_std.exp())
        return self._scaled(torch.tanh(mean)).cpu().numpy()

    # Learning

    @torch.no_grad()
    def targets(self, batch: TrainBatch) -> Tensor:
        """What the critics regress on, float32 [B]; draws the next actions and the subset of critics."""
        return self._targets(batch, self.encoder(self._shifted(batch.next_obs)))

    @torch.no_grad()
    def _targets(self, batch: TrainBatch, features: Tensor) -> Tensor:
        """The same, from features of what follows, [B, F]."""
        drawn = draw(self.actor(features)[0], self._noise)
        values = self.target_critics(torch.cat([features, drawn.actions], 1)).squeeze(-1)
        if self.cfg.num_min_critics < self.cfg.num_critics:
            order = torch.randperm(self.cfg.num_critics, generator=self._noise, device=self.device)
            values = values[order[: self.cfg.num_min_critics]]
        value = values.amin(0)
        if self.cfg.entropy_in_backup:
            value = value - self.log_alpha.exp() * drawn.log_density
        return torch.addcmul(batch.training_rewards, batch.not_terminated * batch.discount, value)

    def update(self, batch: TrainBatch, prior_rows: int = 0) -> dict[str, float]:
        """One step of the critics, and of the policy and temperature when it is their turn.

        `bc_coef` may act on the `prior_rows` first rows alone.
        """
        batch = self._checked(batch, prior_rows)
        unit_actions = self._unit(batch.actions)
        with torch.no_grad():
            next_features = self.encoder(self._shifted(batch.next_obs))
        features = self.encoder(self._shifted(batch.obs))
        here = features.detach()
        drawn = draw(self.actor(here)[0], self._noise) if self._is_the_policys_turn() else None
        metrics = self._update_critics(features, unit_actions, self._targets(batch, next_features))
        if drawn is not None:
            goal = self._goal(batch, here, unit_actions, prior_rows)
            metrics |= self._update_actor(here, drawn, goal)
        self.target_critics.flat.lerp_(self.critics.flat, self.cfg.tau)
        self.num_updates += 1
        return metrics

    def _is_the_policys_turn(self) -> bool:
        done = self.num_updates - self.cfg.num_critic_only_updates
        return done >= 0 and done % self.cfg.actor_every == 0

    def _update_critics(self, features: Tensor, unit_actions: Tensor, targets: Tensor) -> dict[str, float]:
        """Least squares: the loss is half the mean square error, summed over the critics."""
        values = self.critics(torch.cat([features, unit_actions], 1)).squeeze(-1)
        loss = 0.5 * len(values) * F.mse_loss(values, targets.expand_as(values))
        self._descend(self._critic_adam, loss)
        return {"critic_loss": loss.item(), "value": values.detach().mean().item()}

    def _update_actor(self, features: Tensor, drawn: Drawn, goal: Tensor | None) -> dict[str, float]:
        """Minimise alpha * log density - value over actions = tanh(mean + noise * std).

        Args:
            features: what the policy saw, [B, F].
            drawn: what it drew.
            goal: actions in [-1, 1] towards which to pull the first rows, [up to B, A].
        """
        alpha = self.log_alpha.exp().item()
        value = self._value(features, drawn.actions)
        loss = (alpha * drawn.log_density - value).mean()
        entropy = -drawn.log_density.mean().item()
        metrics = {"actor_loss": loss.item(), "entropy": entropy, "alpha": alpha}
        if goal is not None:  # it acts on the mean alone
            coef = self._bc_coef() * (value.abs().mean().item() if self.cfg.bc_scaled else 1.0)
            distance = F.mse_loss(torch.tanh(drawn.mean[: len(goal)]), goal)
            loss = loss + coef * distance
            metrics |= {"bc_loss": distance.item(), "bc_coef": coef}
        self._actor_adam.descend(loss)
        if self.mean_actor is not None:
            self.mean_actor.flat.lerp_(self.actor.flat, 1.0 - self.cfg.actor_ema)
        if self.cfg.learn_alpha:  # minimise log_alpha * (entropy - target)
            self._alpha_adam.step(torch.full_like(self.log_alpha, entropy - self._target_entropy))
        return metrics

    def _value(self, features: Tensor, actions: Tensor) -> Tensor:
        """The critics' value of actions, [B]; gradients reach the actions alone.

        It is the mean of the critics, as in RLPD, if targets take the minimum of a part of them, and else the
        minimum of all, as usual in SAC.
        """
        values = self.critics(torch.cat([features, actions], 1), frozen=True).squeeze(-1)
        return values.min(0).values if self.cfg.num_min_critics == self.cfg.num_critics else values.mean(0)

    @torch.no_grad()
    def _goal(
        self, batch: TrainBatch, features: Tensor, unit_actions: Tensor, prior_rows: int
    ) -> Tensor | None:
        """Actions in [-1, 1] towards which the policy is pulled in the first rows of a batch, if in any."""
        if not self._bc_coef():
            return None
        if self.cfg.bc_towards == "demonstrations":
            return unit_actions[:prior_rows] if prior_rows else None
        self.check_reference()
        assert self.reference is not None
        encoder, actor = self.reference
        seen = encoder(batch.obs) if self._has_images else features
        return torch.tanh(limits(actor(seen)[0])[0])

    def _bc_coef(self) -> float:
        """The weight of the pull now."""
        cfg = self.cfg
        if cfg.bc_coef_end is None:
            return cfg.bc_coef
        done = min(max(self.num_updates - cfg.num_critic_only_updates, 0) / cfg.bc_decay_updates, 1.0)
        return cfg.bc_coef + done * (cfg.bc_coef_end - cfg.bc_coef)

    # Cloning

    def _actor_was_cloned(self) -> None:
        if self.mean_actor is not None:
            self.mean_actor.flat.copy_(self.actor.flat)

    def keep_reference(self) -> None:
        """Cloning is over; with `bc_towards: cloned_policy` updates are pulled back to this policy."""
        super().keep_reference()
        if self.cfg.bc_towards == "cloned_policy":
            encoder = copy.deepcopy(self.encoder).requires_grad_(False)
            self.reference = (encoder, self.actor.twin())

    def check_reference(self) -> None:
        """Raise if the policy is to be pulled towards a cloned one that there is not."""
        cfg = self.cfg
        if cfg.bc_towards == "cloned_policy" and (cfg.bc_coef or cfg.bc_coef_end) and self.reference is None:
            raise ConfigError(
                "bc_towards is cloned_policy, but no policy was cloned: give demonstrations to clone as "
                "warm_start (in a config: learner.warm_start.data), or set bc_towards"
            )

    # Saving

    def _acting_networks(self) -> dict[str, BatchedMLP]:
        mean = {} if self.mean_actor is None else {"mean_actor": self.mean_actor}
        return {"actor": self.actor, **mean}

    def _networks(self) -> dict[str, BatchedMLP]:
        reference = {} if self.reference is None else {"reference": self.reference[1]}
        return {**super()._networks(), **reference}

    def _stateful(self) -> dict[str, Any]:
        reference = {} if self.reference is None else {"reference_encoder": self.reference[0]}
        return {**super()._stateful(), "alpha_adam": self._alpha_adam, **reference}

    def _counters(self) -> dict[str, Any]:
        return {**super()._counters(), "log_alpha": self.log_alpha}

    def _set_counters(self, state: Mapping[str, Any]) -> None:
        super()._set_counters(state)
        self.log_alpha.copy_(state["log_alpha"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the same actions and updates follow."""
        self.reference = None
        if "reference" in state:
            self.keep_reference()  # with weights that follow below
        super().load_state_dict(state)
