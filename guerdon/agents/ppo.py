"""Proximal policy optimisation (Schulman et al., 2017) with clipped ratios.

The learner sees `Rollout.training_rewards` alone. Everything random comes from a generator of its own, which
is saved with the rest: a run that is saved, loaded and continued gives the same numbers to the digit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from guerdon.agents.agent import OnPolicyAgent
from guerdon.agents.cloning import clone
from guerdon.agents.flat import FlatAdam
from guerdon.agents.networks import Obs, ObsSpec, to_obs
from guerdon.agents.policies import ActorCritic, Share
from guerdon.config import BCConfig, NetworkConfig, PPOConfig
from guerdon.core.batches import Rollout
from guerdon.core.errors import DataError

ACTIONS, LOG_PROBS, ADVANTAGES, RETURNS = "/actions", "/log_probs", "/advantages", "/returns"
REFERENCE = "/reference"
"""Keys of a minibatch, beside those of the observation; no camera is called so."""
EPSILON = 1e-5
"""Of Adam."""


class PPO(OnPolicyAgent):
    """Policy, value function and their optimiser."""

    name = section = "ppo"
    action_spaces = (gym.spaces.Box, gym.spaces.Discrete)

    def __init__(
        self,
        spec: ObsSpec,
        action_space: gym.Space[Any],
        cfg: PPOConfig,
        network: NetworkConfig,
        *,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make the networks; see `Agent`."""
        self.cfg, self.device = cfg, torch.device(device)
        with torch.random.fork_rng(devices=[]):  # the weights are drawn from the global generator
            torch.manual_seed(seed)
            actor = ActorCritic(
                spec,
                action_space,
                network,
                initial_log_std=cfg.initial_log_std,
                normalize_obs=cfg.normalize_obs,
            )
        self.actor = actor.to(self.device)
        self._generator = torch.Generator().manual_seed(seed)
        # all weights become views of one vector, so that a step of Adam is one operation
        leaves = list(self.actor.parameters())
        weights = torch.cat([leaf.detach().reshape(-1) for leaf in leaves])
        parts = torch.split(weights, [leaf.numel() for leaf in leaves])
        for leaf, part in zip(leaves, parts, strict=True):
            leaf.data = part.view_as(leaf)
        self._adam = FlatAdam(weights, cfg.lr, EPSILON, leaves=leaves)
        self.reference: ActorCritic | None = None
        self._cloned = False

    def clone(self, data: tuple[Mapping[str, Tensor], Tensor], cfg: BCConfig, seed: int) -> dict[str, float]:
        """Fit the policy to demonstrations; see `Agent.clone`."""
        outcome = clone(self.actor, data, cfg, seed)
        self._cloned = True
        self.keep_reference()
        return outcome

    def keep_reference(self) -> None:
        """Remember the policy as it is: with `cfg.reference_coef` updates are pulled back to it."""
        if self.cfg.reference_coef > 0.0:
            self.reference = copy.deepcopy(self.actor).requires_grad_(False)

    def __getstate__(self) -> Any:
        raise TypeError("PPO is copied by its state_dict: plain copies would part weights and optimiser")

    # Acting

    @torch.inference_mode()
    def step(
        self, obs: Any, share: Share | None = None, generator: torch.Generator | None = None
    ) -> tuple[NDArray[Any], Tensor, Tensor, Tensor]:
        """Draw actions for N observations; see `OnPolicyAgent.step`."""
        heads, values = self.actor.forward(self._prepare(obs))
        source = self._generator if generator is None else generator
        actions, log_probs = self.actor.distribution.sample(heads, source, share)
        return self.actor.distribution.to_env(actions), actions, log_probs, values

    @torch.inference_mode()
    def act(self, obs: Any, deterministic: bool = False, *, progress: float = 1.0) -> NDArray[Any]:
        """Actions for N environments: the most likely ones, or drawn."""
        heads, distribution = self.actor.heads(self._prepare(obs)), self.actor.distribution
        if deterministic:
            return distribution.to_env(distribution.mode(heads))
        return distribution.to_env(distribution.sample(heads, self._generator)[0])

    @torch.no_grad()
    def log_probs(self, obs: Any, actions: Tensor) -> Tensor:
        """How likely actions are in N observations, float32 [N]."""
        heads = self.actor.heads(self._prepare(obs))
        return self.actor.distribution.evaluate(heads, actions.to(self.device))[0]

    @torch.no_grad()
    def values(self, obs: Any) -> Tensor:
        """float32 [N]."""
        return self.actor.values(self._prepare(obs))

    def _prepare(self, obs: Any) -> Obs:
        is_obs = isinstance(obs, dict) and all(isinstance(part, Tensor) for part in obs.values())
        parts = obs if is_obs else to_obs(obs)
        if self.device.type != "cpu":
            parts = {name: part.to(self.device) for name, part in parts.items()}
        return self.actor.prepare(parts)

    # Learning

    def advantages(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Advantages and returns from the rollout's training rewards, float32 [T, N] each."""
        return gae(
            rollout.training_rewards,
            rollout.values,
            rollout.terminated,
            rollout.truncated,
            rollout.final_values,
            rollout.last_values,
            self.cfg.gamma,
            self.cfg.gae_lambda,
        )

    def update(self, rollout: Rollout, progress: float = 0.0) -> dict[str, float]:
        """Learn from a rollout; see `OnPolicyAgent.update`.

        Returns:
            `policy_loss`, `value_loss`, `entropy`, `approx_kl` and `clip_fraction`, means over all gradient
            steps; `explained_variance` of the returns by the values, unless they do not vary; `lr`.
        """
        cfg = self.cfg
        advantages, returns = self.advantages(rollout)
        lr = cfg.lr * (1.0 - min(max(progress, 0.0), 1.0)) if cfg.anneal_lr else cfg.lr
        batch = self._flat(rollout, advantages, returns)
        notes: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for rows in self._minibatches(rollout.num_transitions):
            note = self._gradient_step({k: v.index_select(0, rows) for k, v in batch.items()}, lr)
            if note is None:
                break
            notes.append(note)
        if not self._cloned:  # with other statistics a cloned policy would do something else at once
            seen = {name: part.to(self.device) for name, part in rollout.obs.items()}
            self.actor.observe(seen)  # only now: the policy that was played had them as they were
        return {**self._statistics(notes), **_explained(rollout, returns), "lr": lr}

    def _minibatches(self, count: int) -> Iterator[Tensor]:
        """Row numbers [minibatch_size], in a new random order for each pass."""
        for _ in range(self.cfg.update_epochs):
            order = torch.randperm(count, generator=self._generator).to(self.device)
            yield from torch.split(order, self.cfg.minibatch_size)

    def _statistics(self, notes: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> dict[str, float]:
        """Means over all that the gradient steps returned."""
        if not notes:
            raise DataError("the rollout is not of this policy: it is beyond target_kl before the first step")
        gains, errors, log_ratios = (torch.cat(parts) for parts in list(zip(*notes, strict=True))[:3])
        ratios = log_ratios.exp()
        return {
            "policy_loss": -float(gains.mean()),
            "value_loss": float(errors.square().mean()),
            "entropy": float(torch.stack([entropy for *_, entropy in notes]).mean()),
            "approx_kl": float((ratios - 1.0 - log_ratios).mean()),
            "clip_fraction": float(((ratios - 1.0).abs() > self.cfg.clip_range).float().mean()),
        }

    def _flat(self, rollout: Rollout, advantages: Tensor, returns: Tensor) -> Obs:
        """All that minibatches are drawn from, [T * N, ...] each; images stay uint8."""
        obs = {name: part.flatten(0, 1).to(self.device) for name, part in rollout.obs.items()}
        rest = {
            ACTIONS: rollout.actions,
            LOG_PROBS: rollout.log_probs,
            ADVANTAGES: advantages,
            RETURNS: returns,
        }
        rest = {name: part.flatten(0, 1).to(self.device) for name, part in rest.items()}
        if self.reference is not None:
            with torch.no_grad():
                rest[REFERENCE] = self.reference.heads(self.reference.prepare(obs))[0]
        return {**self.actor.prepare(obs), **rest}

    def _gradient_step(self, batch: Obs, lr: float) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """One step on a minibatch.

        Returns:
            Gains [n] (the terms of the clipped objective), errors of the values [n], log-ratios [n] and the
            entropy []; None instead if the policy has moved too far already, and no step was made.
        """
        cfg, distribution, advantages = self.cfg, self.actor.distribution, batch[ADVANTAGES]
        if cfg.normalize_advantage and len(advantages) > 1:
            std, mean = torch.std_mean(advantages)
            advantages = (advantages - mean) / (std + 1e-8)
        heads, values = self.actor.forward(batch)
        log_probs, entropy = distribution.evaluate(heads, batch[ACTIONS])
        log_ratio = log_probs - batch[LOG_PROBS]
        ratio = log_ratio.exp()
        if cfg.target_kl is not None and float((ratio - 1.0 - log_ratio).detach().mean()) > cfg.target_kl:
            return None
        # min(ratio * advantage, clipped ratio * advantage): a bound on the side to which the advantage pulls
        pulls_up = advantages > 0.0
        most = torch.where(pulls_up, 1.0 + cfg.clip_range, math.inf)
        least = torch.where(pulls_up, -math.inf, 1.0 - cfg.clip_range)
        gains = ratio.clamp(least, most) * advantages
        loss = cfg.value_coef * F.mse_loss(values, batch[RETURNS]) - gains.mean()
        if cfg.entropy_coef:
            loss = loss - cfg.entropy_coef * entropy
        if REFERENCE in batch:
            divergence = distribution.divergence(heads, batch[REFERENCE])
            loss = loss + cfg.reference_coef * divergence.mean()
        self._adam.descend(loss, lr, max_norm=cfg.max_grad_norm)
        return gains.detach(), values.detach() - batch[RETURNS], log_ratio.detach(), entropy.detach()

    # Copies of the policy elsewhere

    def policy_state(self) -> dict[str, Any]:
        """What a copy of the policy needs to act as this one would, as arrays."""
        weights = {name: part.detach().cpu().numpy() for name, part in self.actor.state_dict().items()}
        return {"actor": weights, "generator": self.generator_state()}

    def load_policy(self, state: Mapping[str, Any]) -> None:
        """Act as the learner did when `policy_state` was taken."""
        self.actor.load_state_dict({name: torch.tensor(part) for name, part in state["actor"].items()})
        self.set_generator(state["generator"])

    def generator_state(self) -> NDArray[Any]:
        """Where the random numbers are, uint8."""
        return self._generator.get_state().numpy()

    def set_generator(self, state: NDArray[Any]) -> None:
        """Go on drawing where another copy stopped."""
        self._generator.set_state(torch.tensor(state))

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """A copy of all that learning changes."""
        return {
            "actor": {name: part.clone() for name, part in self.actor.state_dict().items()},
            "optimizer": {name: part.clone() for name, part in self._adam.state_dict().items()},
            "generator": self._generator.get_state(),
            "reference": None if self.reference is None else self.reference.state_dict(),
            "cloned": self._cloned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        try:
            self.actor.load_state_dict(state["actor"])
            self._adam.load_state_dict(state["optimizer"])
            self._generator.set_state(state["generator"].cpu())
            if state["reference"] is not None:
                self.reference = copy.deepcopy(self.actor).requires_grad_(False)
                self.reference.load_state_dict(state["reference"])
            self._cloned = bool(state.get("cloned", False))  # older files do not tell
        except (KeyError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise DataError(f"what was saved does not fit this learner: {reason}") from error


def gae(
    training_rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    last_values: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016): T steps in N environments.

    An episode that terminated has no future. One that was truncated has the future that the value of its
    final observation promises. Neither knows anything about the episode that follows it in the same row.

    Args:
        training_rewards: float [T, N], what the learner is trained on.
        values: float [T, N], of the observations that the actions were chosen in.
        terminated: bool [T, N], the episode ended in a state without a future; wins over `truncated`.
        truncated: bool [T, N], the episode was cut off, and its value goes on.
        final_values: float [T, N], of the final observation where an episode was truncated.
        last_values: float [N], of the observations after the last step.
        gamma: discount.
        lam: 0 trusts the values, 1 the rewards.

    Returns:
        Advantages and returns (advantages + values), float [T, N] each.
    """
    shape, flags = training_rewards.shape, {"terminated": terminated, "truncated": truncated}
    if len(shape) != 2 or 0 in shape:
        raise DataError(f"training_rewards must be [T, N] with at least one step, not {list(shape)}")
    parts = {"values": values, **flags, "final_values": final_values, "last_values": last_values}
    for name, part in parts.items():
        wanted = shape[1:] if name == "last_values" else shape
        if part.shape != wanted:
            raise DataError(f"{name} must have shape {list(wanted)}, not {list(part.shape)}")
        if name in flags and part.dtype != torch.bool:
            raise DataError(f"{name} must be bool, not {part.dtype}")
    next_values = torch.cat((values[1:], last_values[None]))
    next_values = torch.where(truncated, final_values, next_values).masked_fill(terminated, 0.0)
    errors = training_rewards + gamma * next_values - values
    carries = (~(terminated | truncated)).to(errors.dtype) * (gamma * lam)
    advantage, backwards = torch.zeros_like(last_values), []
    for error, carry in zip(reversed(errors.unbind()), reversed(carries.unbind()), strict=True):
        advantage = torch.addcmul(error, carry, advantage)
        backwards.append(advantage)
    advantages = torch.stack(backwards[::-1])
    return advantages, advantages + values


def _explained(rollout: Rollout, returns: Tensor) -> dict[str, float]:
    """1 if the values are the returns, 0 if they say nothing about them.

    Nothing at all where the returns vary by no more than rounding: the share would be nan, or noise.
    """
    spread = float(returns.var(correction=0))
    if spread <= 1e-12 * float((returns.square() + rollout.values.square()).mean()):
        return {}
    return {"explained_variance": 1.0 - float((returns - rollout.values).var(correction=0)) / spread}
