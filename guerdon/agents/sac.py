"""Soft actor-critic (Haarnoja et al., 2018) with the options of RLPD (Ball et al., 2023).

Updates of these small networks decide how long a run takes, and much of their time would go to bookkeeping.
So the critics are one network with a leading ensemble axis, every network keeps its weights in one vector,
and the gradients, which are short formulas, are written out; autograd is left with the encoder of images.

Inside, actions lie in [-1, 1]; they are scaled to the action space at the border. The encoder follows the
loss of the critics alone.

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
from numpy.typing import NDArray
from torch import Tensor

from guerdon.agents.agent import OffPolicyAgent
from guerdon.agents.batches import TrainBatch
from guerdon.agents.cloning import imitate
from guerdon.agents.flat import BatchedMLP, FlatAdam, Trace, first_rows
from guerdon.agents.networks import Obs, ObsEncoder, ObsSpec, num_rows, shift_images, to_obs
from guerdon.agents.squashed import Drawn, draw, imitation, limits
from guerdon.config import BCConfig, NetworkConfig, PriorConfig, SACConfig
from guerdon.core.errors import ConfigError, DataError


class SAC(OffPolicyAgent):
    """Learns a policy for continuous actions; draws from generators of its own only."""

    name = "sac"
    action_spaces = (gym.spaces.Box,)
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
        """Make the networks.

        Args:
            spec: what an observation holds.
            action_space: of a single environment; bounded.
            cfg: the `learner.sac` section.
            network: `layer_norm` is for the critics.
            seed: of the initial weights and of all noise.
            device: where the networks are.
        """
        if not isinstance(action_space, gym.spaces.Box) or len(action_space.shape) != 1:
            raise ConfigError(f"SAC takes actions that are vectors, not {action_space}")
        if not action_space.is_bounded():
            raise ConfigError(f"SAC needs bounds of the actions, not {action_space}")
        if cfg.num_min_critics > cfg.num_critics:
            raise ConfigError(
                f"sac.num_min_critics is {cfg.num_min_critics}, but there are {cfg.num_critics} critics"
            )
        if cfg.actor_ema >= 1.0:
            raise ConfigError("sac.actor_ema is 1: the mean of the policy's weights would never change")
        self.cfg, self.device = cfg, torch.device(device)
        self._low = torch.as_tensor(action_space.low, dtype=torch.float32, device=self.device)
        self._high = torch.as_tensor(action_space.high, dtype=torch.float32, device=self.device)
        self._middle, self._half = (self._high + self._low) / 2, (self._high - self._low) / 2
        size = len(self._low)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = ObsEncoder(spec, network).to(self.device)
            features = self.encoder.num_features
            plain = dataclasses.replace(network, layer_norm=False)
            self.actor = BatchedMLP(1, features, 2 * size, plain, out_gain=0.01, device=self.device)
            self.critics = BatchedMLP(cfg.num_critics, features + size, 1, network, device=self.device)
        self.target_critics = self.critics.twin(share_arrays=True)
        self.actor.shift_outputs(slice(size, None), cfg.initial_log_std)
        self.mean_actor = self.actor.twin() if cfg.actor_ema else None
        self.reference: tuple[ObsEncoder, BatchedMLP] | None = None
        self.log_alpha = torch.tensor([math.log(cfg.initial_alpha)], device=self.device)
        self._alpha_gradient = torch.zeros_like(self.log_alpha)
        self._target_entropy = -float(size) if cfg.target_entropy is None else cfg.target_entropy
        self._critic_adam = FlatAdam(self.critics.flat, self.critics.gradient, cfg.critic_lr)
        self._actor_adam = FlatAdam(self.actor.flat, self.actor.gradient, cfg.actor_lr)
        self._alpha_adam = FlatAdam(self.log_alpha, self._alpha_gradient, cfg.alpha_lr)
        self._has_images = bool(spec.images)
        self._encoder_adam = (
            torch.optim.Adam(self.encoder.parameters(), lr=cfg.critic_lr, fused=True) if spec.images else None
        )
        self._noise = torch.Generator(self.device).manual_seed(seed)  # of updates
        self._act_noise = torch.Generator(self.device).manual_seed(seed + 1)  # of acting
        self.num_updates = 0

    @classmethod
    def acting_settings(cls, cfg: SACConfig) -> SACConfig:
        """With a single critic: a copy that only acts asks none."""
        return dataclasses.replace(cfg, num_critics=1, num_min_critics=1)

    @property
    def prior(self) -> PriorConfig:
        """Demonstrations, as RLPD samples them."""
        return self.cfg

    @property
    def num_first_updates(self) -> int:
        """Of the critics alone."""
        return self.cfg.num_critic_only_updates

    # Acting

    @torch.no_grad()
    def act(self, obs: Any, deterministic: bool = False, *, progress: float = 1.0) -> NDArray[np.float32]:
        """Actions for a batch of observations as the environments give them: float32 [N, A].

        Args:
            obs: states or a mapping, [N, ...].
            deterministic: without noise, and by the mean of the policy's weights if there is one.
            progress: not used.
        """
        actor = self.mean_actor if deterministic and self.mean_actor is not None else self.actor
        mean, log_std, _ = limits(actor(self.encoder(to_obs(obs, self.device)))[0])
        if not deterministic:
            noise = torch.randn(mean.shape, generator=self._act_noise, device=self.device)
            mean = torch.addcmul(mean, noise, log_std.exp())
        return self._scaled(torch.tanh(mean)).cpu().numpy()

    def random_actions(self, count: int) -> NDArray[np.float32]:
        """Uniform actions, float32 [count, A], for the steps before learning starts."""
        unit = torch.rand((count, len(self._half)), generator=self._act_noise, device=self.device)
        return self._scaled(2.0 * unit - 1.0).cpu().numpy()

    def _scaled(self, unit: Tensor) -> Tensor:
        """[-1, 1] -> the action space, also after rounding."""
        return torch.addcmul(self._middle, unit, self._half).clamp_(self._low, self._high)

    # Learning

    @torch.no_grad()
    def targets(self, batch: TrainBatch) -> Tensor:
        """What the critics regress on, float32 [B]; draws the next actions and the subset of critics."""
        features = self.encoder(self._shifted(batch.next_obs))
        return self._targets(batch, features, draw(self.actor(features)[0], self._noise))

    def _targets(self, batch: TrainBatch, features: Tensor, drawn: Drawn) -> Tensor:
        """The same, from features of what follows and actions in it."""
        values = self.target_critics(torch.cat([features, drawn.actions], 1)).squeeze(-1)
        if self.cfg.num_min_critics < self.cfg.num_critics:
            order = torch.randperm(self.cfg.num_critics, generator=self._noise, device=self.device)
            values = values[order[: self.cfg.num_min_critics]]
        value = values.amin(0)
        if self.cfg.entropy_in_backup:
            value = value - self.log_alpha.exp() * drawn.log_density
        return torch.addcmul(batch.training_rewards, batch.not_terminated * batch.discount, value)

    @torch.no_grad()
    def update(self, batch: TrainBatch, prior_rows: int = 0) -> dict[str, float]:
        """One step of the critics, and of the policy and temperature when it is their turn.

        Args:
            batch: on which to learn.
            prior_rows: how many of its first rows are demonstrations; `bc_coef` may act on them alone.
        """
        count = len(batch)
        if not 0 <= prior_rows <= count:
            raise DataError(f"{prior_rows} demonstrations in a batch of {count}")
        if self.device.type != "cpu":
            batch = batch.to(self.device)
        unit_actions = (batch.actions - self._middle) / self._half
        ahead = self.encoder(self._shifted(batch.next_obs))
        with torch.set_grad_enabled(self._has_images):
            features = self.encoder(self._shifted(batch.obs))
        here, turn = features.detach(), self._is_the_policys_turn()
        # the policy changes last: one pass over what is seen now and next serves its own update as well
        outputs, trace = self.actor.forward(torch.cat([here, ahead]) if turn else ahead)
        drawn = draw(outputs[0], self._noise)
        now, after = drawn.halves() if turn else (None, drawn)
        targets = self._targets(batch, ahead, after)
        metrics = self._update_critics(features, unit_actions, targets)
        if now is not None:
            goal = self._goal(batch, here, unit_actions, prior_rows)
            metrics |= self._update_actor(here, now, first_rows(trace, count), goal)
        self.target_critics.flat.lerp_(self.critics.flat, self.cfg.tau)
        self.num_updates += 1
        return metrics

    def _is_the_policys_turn(self) -> bool:
        done = self.num_updates - self.cfg.num_critic_only_updates
        return done >= 0 and done % self.cfg.actor_every == 0

    def _update_critics(self, features: Tensor, unit_actions: Tensor, targets: Tensor) -> dict[str, float]:
        """Least squares: the loss is half the mean square error, summed over the critics."""
        inputs = torch.cat([features.detach(), unit_actions], 1)
        values, trace = self.critics.forward(inputs)
        errors = values.squeeze(-1) - targets
        seen = slice(features.shape[1]) if self._has_images else None
        gradient = self.critics.backward(trace, (errors / len(targets)).unsqueeze(-1), inputs=seen)
        self._critic_adam.step()
        if self._encoder_adam is not None:
            self._encoder_adam.zero_grad()
            features.backward(gradient)  # type: ignore[no-untyped-call]
            self._encoder_adam.step()
        loss = 0.5 * len(values) * errors.square().mean().item()
        return {"critic_loss": loss, "value": values.mean().item()}

    def _update_actor(
        self, features: Tensor, drawn: Drawn, trace: Trace, goal: Tensor | None
    ) -> dict[str, float]:
        """Minimise alpha * log density - value over actions = tanh(mean + noise * std).

        Args:
            features: what the policy saw, [B, F].
            drawn: what it drew.
            trace: of its pass.
            goal: actions in [-1, 1] towards which to pull the first rows, [up to B, A].
        """
        alpha = self.log_alpha.exp().item()
        value, value_slopes = self._values_and_slopes(features, drawn.actions)
        mean_slopes, log_std_slopes = drawn.slopes(alpha, value_slopes)
        entropy = -drawn.log_density.mean().item()
        metrics = {"actor_loss": -alpha * entropy - value.mean().item(), "entropy": entropy, "alpha": alpha}
        if goal is not None:  # it acts on the mean alone
            coef = self._bc_coef() * (value.abs().mean().item() if self.cfg.bc_scaled else 1.0)
            metrics["bc_loss"], slopes = imitation(drawn.mean[: len(goal)], goal)
            mean_slopes[: len(goal)].add_(slopes, alpha=coef)
            metrics["bc_coef"] = coef
        self.actor.backward(trace, torch.cat([mean_slopes, log_std_slopes], 1).unsqueeze(0))
        self._actor_adam.step()
        if self.mean_actor is not None:
            self.mean_actor.flat.lerp_(self.actor.flat, 1.0 - self.cfg.actor_ema)
        if self.cfg.learn_alpha:  # minimise log_alpha * (entropy - target)
            self._alpha_gradient.fill_(entropy - self._target_entropy)
            self._alpha_adam.step()
        return metrics

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

    def _values_and_slopes(self, features: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """The critics' verdict on actions, [B], and its gradient in them, [B, A].

        It is the mean of the critics, as in RLPD, if targets take the minimum of a part of them, and else the
        minimum of all, as usual in SAC.
        """
        outputs, trace = self.critics.forward(torch.cat([features, actions], 1))
        values = outputs.squeeze(-1)
        if self.cfg.num_min_critics == self.cfg.num_critics:
            value, which = values.min(0)
            weights = torch.zeros_like(values).scatter_(0, which.unsqueeze(0), 1.0)
        else:
            value, weights = values.mean(0), torch.full_like(values, 1.0 / len(values))
        chosen = slice(features.shape[1], None)
        return value, self.critics.backward(trace, weights.unsqueeze(-1), weights=False, inputs=chosen)

    def _shifted(self, obs: Obs) -> Obs:
        """Each image moved by up to `image_shift` pixels, its border repeated; the same for all cameras."""
        pixels = self.cfg.image_shift
        if not pixels or not self._has_images:
            return obs
        moves = torch.randint(
            -pixels, pixels + 1, (num_rows(obs), 2, 1), generator=self._noise, device=self.device
        )
        return {name: shift_images(part, moves) if part.ndim == 4 else part for name, part in obs.items()}

    # Cloning

    def clone(self, data: tuple[Mapping[str, Tensor], Tensor], cfg: BCConfig, seed: int) -> dict[str, float]:
        """Fit the policy's mean to demonstrations; see `Agent.clone`."""
        outcome = imitate(self.imitate, data, cfg, seed)
        self.keep_reference()
        return outcome

    @torch.no_grad()
    def imitate(self, obs: Obs, actions: Tensor, lr: float | None = None) -> float:
        """One step of the policy's mean towards actions [B, A]; returns the mean square error before it.

        Args:
            obs: what was seen, [B, ...].
            actions: what was done.
            lr: learning rate of this step; None: `actor_lr`.
        """
        features = self.encoder({name: part.to(self.device) for name, part in obs.items()})
        outputs, trace = self.actor.forward(features)
        mean, log_std, _ = limits(outputs[0])
        error, slope = imitation(mean, (actions.to(self.device) - self._middle) / self._half)
        self.actor.backward(trace, torch.cat([slope, torch.zeros_like(log_std)], 1).unsqueeze(0))
        self._actor_adam.step(lr)
        if self.mean_actor is not None:
            self.mean_actor.flat.copy_(self.actor.flat)
        return error

    def keep_reference(self) -> None:
        """Cloning is over; with `bc_towards: cloned_policy` updates are pulled back to the policy as it is.

        Adam forgets what it knows of the gradients: those of cloning were small in the end, and measured by
        them the first steps on the critics' slopes would be several times as large as they should.
        """
        self._actor_adam.forget()
        if self.cfg.bc_towards == "cloned_policy":
            encoder = copy.deepcopy(self.encoder).requires_grad_(False)
            self.reference = (encoder, self.actor.twin())

    def check_reference(self) -> None:
        """Raise if the policy is to be pulled towards a cloned one that there is not."""
        cfg = self.cfg
        if cfg.bc_towards == "cloned_policy" and (cfg.bc_coef or cfg.bc_coef_end) and self.reference is None:
            raise ConfigError(
                "sac.bc_towards is cloned_policy, but none was cloned; give learner.warm_start.data"
            )

    # Copies of the policy elsewhere

    def policy_state(self) -> dict[str, Any]:
        """What a copy needs to act as this one would now, as arrays of their own; no critics, no moments."""
        encoder = {
            name: part.detach().cpu().numpy().copy() for name, part in self.encoder.state_dict().items()
        }
        flats = {"actor": self.actor.flat.cpu().numpy().copy(), "encoder": encoder}
        if self.mean_actor is not None:
            flats["mean_actor"] = self.mean_actor.flat.cpu().numpy().copy()
        return flats

    def load_policy(self, state: Mapping[str, Any]) -> None:
        """Act as the learner did when `policy_state` was taken; noise stays this one's own."""
        self.actor.flat.copy_(torch.tensor(state["actor"]))
        if self.mean_actor is not None:
            self.mean_actor.flat.copy_(torch.tensor(state["mean_actor"]))
        self.encoder.load_state_dict({name: torch.tensor(part) for name, part in state["encoder"].items()})

    def seed_acting(self, seed: int) -> None:
        """Begin a new sequence of noise for acting."""
        self._act_noise.manual_seed(seed)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Everything that later updates and actions depend on, as a copy."""
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._stateful().items()}
        state |= {name: network.flat for name, network in self._networks().items()}
        state |= {"noise": self._noise.get_state(), "act_noise": self._act_noise.get_state()}
        return copy.deepcopy({**state, "log_alpha": self.log_alpha, "num_updates": self.num_updates})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the same actions and updates follow."""
        state = copy.deepcopy(dict(state))
        self.reference = None
        if "reference" in state:
            self.keep_reference()  # with weights that follow below
        wanted = {*self._stateful(), *self._networks(), "noise", "act_noise", "log_alpha", "num_updates"}
        if state.keys() != wanted:
            raise DataError(f"a state of SAC has {sorted(wanted)}, not {sorted(state)}")
        for name, network in self._networks().items():
            if state[name].shape != network.flat.shape:
                raise DataError(f"the saved {name} are of another size than the settings ask for")
            network.flat.copy_(state[name])
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])
        self.log_alpha.copy_(state["log_alpha"])
        self._noise.set_state(state["noise"].cpu())
        self._act_noise.set_state(state["act_noise"].cpu())
        self.num_updates = int(state["num_updates"])

    def _networks(self) -> dict[str, BatchedMLP]:
        networks: dict[str, BatchedMLP | None] = {"actor": self.actor, "mean_actor": self.mean_actor}
        networks |= {"critics": self.critics, "target_critics": self.target_critics}
        networks["reference"] = None if self.reference is None else self.reference[1]
        return {name: network for name, network in networks.items() if network is not None}

    def _stateful(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"encoder": self.encoder, "encoder_adam": self._encoder_adam}
        parts |= {"actor_adam": self._actor_adam, "critic_adam": self._critic_adam}
        parts["alpha_adam"] = self._alpha_adam
        parts["reference_encoder"] = None if self.reference is None else self.reference[0]
        return {name: part for name, part in parts.items() if part is not None}
