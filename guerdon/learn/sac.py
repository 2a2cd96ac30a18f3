"""Soft actor-critic (Haarnoja et al., 2018) with the options of RLPD (Ball et al., 2023).

Updates of these small networks decide how long a run takes, and much of their time would go to bookkeeping.
So the critics are one network with a leading ensemble axis, every network keeps its weights in one vector,
and the gradients, which are short formulas, are written out; autograd is left with the encoder of images.

Inside, actions lie in [-1, 1]; they are scaled to the action space at the border. The encoder follows the
loss of the critics alone.
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

from guerdon.config import NetworkConfig, SACConfig
from guerdon.errors import ConfigError, DataError
from guerdon.learn.batches import TrainBatch
from guerdon.learn.flat import BatchedMLP, FlatAdam
from guerdon.learn.networks import Obs, ObsEncoder, ObsSpec, num_rows, to_obs

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0
_LOG_2, _HALF_LOG_2PI = math.log(2.0), 0.5 * math.log(2.0 * math.pi)


class SAC:
    """Learns a policy for continuous actions; draws from generators of its own only."""

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
            self.target_critics = BatchedMLP(cfg.num_critics, features + size, 1, network, device=self.device)
        self.target_critics.flat.copy_(self.critics.flat)
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

    # Acting

    @torch.no_grad()
    def act(self, obs: Any, deterministic: bool = False) -> NDArray[np.float32]:
        """Actions for a batch of observations as the environments give them: float32 [N, A]."""
        mean, log_std = self._policy(self.encoder(to_obs(obs, self.device)))
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

    def _policy(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation before squashing, [B, A] each."""
        mean, log_std = self.actor(features)[0].chunk(2, dim=-1)
        return mean, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)

    def _draw(self, mean: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Actions in [-1, 1], their log densities [B], and how far noise moved them before squashing."""
        noise = torch.randn(mean.shape, generator=self._noise, device=self.device)
        moved = noise * log_std.exp()
        before = mean + moved
        # log N(before) - log |d tanh|, with log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u))
        constant = noise.square_().mul_(-0.5).sub_(_HALF_LOG_2PI + 2.0 * _LOG_2)
        log_density = constant.sub_(log_std).add_(before + F.softplus(-2.0 * before), alpha=2.0)
        return before.tanh_(), log_density.sum(-1), moved

    # Learning

    @torch.no_grad()
    def targets(self, batch: TrainBatch) -> Tensor:
        """What the critics regress on, float32 [B]; draws the next actions and the subset of critics."""
        features = self.encoder(self._shifted(batch.next_obs))
        actions, log_density, _ = self._draw(*self._policy(features))
        values = self.target_critics(torch.cat([features, actions], 1)).squeeze(-1)
        if self.cfg.num_min_critics < self.cfg.num_critics:
            order = torch.randperm(self.cfg.num_critics, generator=self._noise, device=self.device)
            values = values[order[: self.cfg.num_min_critics]]
        value = values.amin(0)
        if self.cfg.entropy_in_backup:
            value = value - self.log_alpha.exp() * log_density
        return torch.addcmul(batch.training_rewards, batch.not_terminated * batch.discount, value)

    def update(self, batch: TrainBatch, prior_rows: int = 0) -> dict[str, float]:
        """One step of the critics, and of the policy and temperature when it is their turn.

        Args:
            batch: on which to learn.
            prior_rows: how many of its first rows are demonstrations; `bc_coef` acts on them.
        """
        if not 0 <= prior_rows <= len(batch):
            raise DataError(f"{prior_rows} demonstrations in a batch of {len(batch)}")
        if self.device.type != "cpu":
            batch = batch.to(self.device)
        unit_actions = (batch.actions - self._middle) / self._half
        targets = self.targets(batch)
        with torch.set_grad_enabled(self._has_images):
            features = self.encoder(self._shifted(batch.obs))
        metrics = self._update_critics(features, unit_actions, targets)
        if self.num_updates % self.cfg.actor_every == 0:
            metrics |= self._update_actor(features.detach(), unit_actions, prior_rows)
        self.target_critics.flat.lerp_(self.critics.flat, self.cfg.tau)
        self.num_updates += 1
        return metrics

    def _update_critics(self, features: Tensor, unit_actions: Tensor, targets: Tensor) -> dict[str, float]:
        """Least squares: the loss is half the mean square error, summed over the critics."""
        inputs = torch.cat([features.detach(), unit_actions], 1)
        values, trace = self.critics.forward(inputs)
        errors = values.squeeze(-1) - targets
        gradient = self.critics.backward(trace, errors.unsqueeze(-1) / len(targets), inputs=self._has_images)
        self._critic_adam.step()
        if self._encoder_adam is not None:
            self._encoder_adam.zero_grad()
            features.backward(gradient[:, : features.shape[1]])  # type: ignore[no-untyped-call]
            self._encoder_adam.step()
        loss = 0.5 * len(values) * errors.square().mean().item()
        return {"critic_loss": loss, "value": values.mean().item()}

    @torch.no_grad()
    def _update_actor(self, features: Tensor, unit_actions: Tensor, prior_rows: int) -> dict[str, float]:
        """Minimise alpha * log density - value over actions = tanh(mean + noise * std)."""
        alpha, count = self.log_alpha.exp().item(), len(features)
        outputs, trace = self.actor.forward(features)
        mean, raw_log_std = outputs[0].chunk(2, dim=-1)
        log_std = raw_log_std.clamp(LOG_STD_MIN, LOG_STD_MAX)
        actions, log_density, moved = self._draw(mean, log_std)
        value, value_slope = self._values_and_slopes(features, actions)
        # d log density / d before = 2 tanh(before); d tanh(before) / d before = 1 - tanh(before)^2
        before_slope = actions.mul(2.0 * alpha).sub_(value_slope * (1.0 - actions.square())).div_(count)
        log_std_slope = (before_slope * moved).sub_(alpha / count).mul_(raw_log_std == log_std)
        entropy = -log_density.mean().item()
        metrics = {"actor_loss": -alpha * entropy - value.mean().item(), "entropy": entropy, "alpha": alpha}
        if prior_rows and self.cfg.bc_coef:
            # after log_std_slope, so that it acts on the mean alone
            pull, slope = _imitation(mean[:prior_rows], unit_actions[:prior_rows])
            before_slope[:prior_rows] += self.cfg.bc_coef * slope
            metrics["bc_loss"] = pull
        self.actor.backward(trace, torch.cat([before_slope, log_std_slope], 1).unsqueeze(0))
        self._actor_adam.step()
        if self.cfg.learn_alpha:  # minimise log_alpha * (entropy - target)
            self._alpha_gradient.fill_(entropy - self._target_entropy)
            self._alpha_adam.step()
        return metrics

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
        slopes = self.critics.backward(trace, weights.unsqueeze(-1), weights=False, inputs=True)
        return value, slopes[:, features.shape[1] :]

    @torch.no_grad()
    def imitate(self, obs: Obs, actions: Tensor) -> float:
        """One step of the policy's mean towards actions [B, A]; returns the mean square error before it."""
        features = self.encoder({name: part.to(self.device) for name, part in obs.items()})
        outputs, trace = self.actor.forward(features)
        mean, log_std = outputs[0].chunk(2, dim=-1)
        error, slope = _imitation(mean, (actions.to(self.device) - self._middle) / self._half)
        self.actor.backward(trace, torch.cat([slope, torch.zeros_like(log_std)], 1).unsqueeze(0))
        self._actor_adam.step()
        return error

    def _shifted(self, obs: Obs) -> Obs:
        """Each image moved by up to `image_shift` pixels, its border repeated; the same for all cameras."""
        pixels = self.cfg.image_shift
        if not pixels or not self._has_images:
            return obs
        moves = torch.randint(
            -pixels, pixels + 1, (num_rows(obs), 2, 1), generator=self._noise, device=self.device
        )
        return {name: shift_images(part, moves) if part.ndim == 4 else part for name, part in obs.items()}

    # Copies of the policy elsewhere

    def policy_state(self) -> dict[str, Any]:
        """What a copy needs to act as this one would now, as arrays of their own; no critics, no moments."""
        encoder = {
            name: part.detach().cpu().numpy().copy() for name, part in self.encoder.state_dict().items()
        }
        return {"actor": self.actor.flat.cpu().numpy().copy(), "encoder": encoder}

    def load_policy(self, state: Mapping[str, Any]) -> None:
        """Act as the learner did when `policy_state` was taken; noise stays this one's own."""
        self.actor.flat.copy_(torch.tensor(state["actor"]))
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
        return {"actor": self.actor, "critics": self.critics, "target_critics": self.target_critics}

    def _stateful(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"encoder": self.encoder, "encoder_adam": self._encoder_adam}
        parts |= {"actor_adam": self._actor_adam, "critic_adam": self._critic_adam}
        parts["alpha_adam"] = self._alpha_adam
        return {name: part for name, part in parts.items() if part is not None}


def _imitation(mean: Tensor, unit_actions: Tensor) -> tuple[float, Tensor]:
    """Mean square error of tanh(mean) against actions, [N, A] each, and its gradient in the mean."""
    squashed = torch.tanh(mean)
    errors = squashed - unit_actions
    slope = errors * (1.0 - squashed.square()) * (2.0 / errors.numel())
    return errors.square().mean().item(), slope


def shift_images(images: Tensor, moves: Tensor) -> Tensor:
    """Move each image: [N, H, W, C], int64 [N, 2, 1] (down, right) -> [N, H, W, C].

    Repeating the border is the same as holding the index of a pixel within the image.
    """
    count, height, width, channels = images.shape
    rows = (torch.arange(height, device=images.device) - moves[:, 0]).clamp_(0, height - 1)
    columns = (torch.arange(width, device=images.device) - moves[:, 1]).clamp_(0, width - 1)
    first = torch.arange(count, device=images.device)[:, None] * height
    pixels = ((first + rows) * width)[:, :, None] + columns[:, None, :]
    return images.reshape(-1, channels).index_select(0, pixels.reshape(-1)).view(images.shape)
