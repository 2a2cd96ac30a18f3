"""What SAC and TD3 share: an actor and critics over one encoder, bounded actions, cloning, saving.

Inside, actions lie in [-1, 1]; they are scaled to the action space at the border. The encoder of images
follows the loss of the critics alone.
"""

from __future__ import annotations

import dataclasses
import zlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from guerdon.agents.cloning import imitate
from guerdon.agents.flat import BatchedMLP, FlatAdam, FlatAgent
from guerdon.agents.networks import Obs, ObsEncoder, ObsSpec, num_rows, shift_images
from guerdon.config import BCConfig, NetworkConfig
from guerdon.core.errors import ConfigError

GENERATOR_BYTES = {16, 5056}
"""How long the states of torch's generators are: on a GPU, and on the CPU."""


class ActorCriticAgent(FlatAgent):
    """An actor and an ensemble of critics over one encoder."""

    action_spaces = (gym.spaces.Box,)
    cfg: Any
    """An `OffPolicyConfig` that is a `PriorConfig` too."""

    def __init__(
        self,
        spec: ObsSpec,
        action_space: gym.spaces.Box,
        cfg: Any,
        network: NetworkConfig,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        num_critics: int = 2,
        outputs_per_action: int = 1,
    ) -> None:
        """Make the networks; see `Agent`.

        Args:
            spec: what an observation holds.
            action_space: of a single environment; bounded.
            cfg: the agent's section.
            network: `layer_norm` is for the critics.
            seed: of the initial weights and of all noise.
            device: where the networks are.
            num_critics: critics in the ensemble.
            outputs_per_action: numbers that the actor gives for each action dimension.
        """
        title = type(self).__name__
        if not isinstance(action_space, gym.spaces.Box) or len(action_space.shape) != 1:
            raise ConfigError(f"{title} takes actions that are vectors, not {action_space}")
        if not action_space.is_bounded():
            raise ConfigError(f"{title} needs bounds of the actions, not {action_space}")
        self.cfg = self.prior = cfg
        self.device = torch.device(device)
        self._low = torch.as_tensor(action_space.low, dtype=torch.float32, device=self.device)
        self._high = torch.as_tensor(action_space.high, dtype=torch.float32, device=self.device)
        self._middle, self._half = (self._high + self._low) / 2, (self._high - self._low) / 2
        size = self.num_actions = len(self._low)
        with torch.random.fork_rng(devices=[]):  # the weights are drawn from the global generator
            torch.manual_seed(seed)
            self.encoder = ObsEncoder(spec, network).to(self.device)
            features = self.encoder.num_features
            plain = dataclasses.replace(network, layer_norm=False)
            self.actor = BatchedMLP(
                1, features, outputs_per_action * size, plain, out_gain=0.01, device=self.device
            )
            self.critics = BatchedMLP(num_critics, features + size, 1, network, device=self.device)
        self.target_critics = self.critics.twin()
        self._critic_adam = FlatAdam.of(self.critics, cfg.critic_lr)
        self._actor_adam = FlatAdam.of(self.actor, cfg.actor_lr)
        self._encoder_adam = self._make_encoder_adam(cfg.critic_lr)
        self._has_images = bool(spec.images)
        self._noise = torch.Generator(self.device).manual_seed(seed)  # of updates
        self._act_noise = torch.Generator(self.device).manual_seed(seed + 1)  # of acting

    def seed_acting(self, seed: int) -> None:
        """Begin a new sequence of noise for acting."""
        self._act_noise.manual_seed(seed)

    # Actions and images

    def _scaled(self, unit: Tensor) -> Tensor:
        """[-1, 1] -> the action space, also after rounding."""
        return torch.addcmul(self._middle, unit, self._half).clamp_(self._low, self._high)

    def _unit(self, actions: Tensor) -> Tensor:
        """The action space -> [-1, 1]."""
        return (actions - self._middle) / self._half

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

    def imitate(self, obs: Obs, actions: Tensor, lr: float | None = None) -> float:
        """One step of the policy's mean towards actions [B, A]; returns the mean square error before it.

        Args:
            obs: what was seen, [B, ...].
            actions: what was done.
            lr: learning rate of this step; None: `actor_lr`.
        """
        with torch.no_grad():
            features = self.encoder({name: part.to(self.device) for name, part in obs.items()})
        mean = torch.tanh(self.actor(features)[0][:, : self.num_actions])
        loss = torch.nn.functional.mse_loss(mean, self._unit(actions.to(self.device)))
        self._actor_adam.descend(loss, lr)
        self._actor_was_cloned()
        return loss.item()

    @abstractmethod
    def _actor_was_cloned(self) -> None:
        """Bring networks that follow the policy to where it is."""

    def keep_reference(self) -> None:
        """Cloning is over.

        Adam forgets what it knows of the gradients: those of cloning were small in the end, and measured by
        them the first steps on the critics' slopes would be several times as large as they should.
        """
        self._actor_adam.forget()

    # Saving

    def _acting_networks(self) -> dict[str, BatchedMLP]:
        return {"actor": self.actor}

    def _networks(self) -> dict[str, BatchedMLP]:
        return {**self._acting_networks(), "critics": self.critics, "target_critics": self.target_critics}

    def _stateful(self) -> dict[str, Any]:
        return {**super()._stateful(), "actor_adam": self._actor_adam, "critic_adam": self._critic_adam}

    def _counters(self) -> dict[str, Any]:
        noise = {"noise": self._noise.get_state(), "act_noise": self._act_noise.get_state()}
        return {**noise, "num_updates": self.num_updates}

    def _set_counters(self, state: Mapping[str, Any]) -> None:
        _restore(self._noise, state["noise"])
        _restore(self._act_noise, state["act_noise"])
        self.num_updates = int(state["num_updates"])


def _restore(generator: torch.Generator, state: Tensor) -> None:
    """Draw on from a saved state; one of another kind of device becomes a seed."""
    state, sizes = state.cpu(), {state.numel(), generator.get_state().numel()}
    if len(sizes) == 2 and sizes == GENERATOR_BYTES:
        generator.manual_seed(zlib.crc32(state.numpy().tobytes()))
    else:
        generator.set_state(state)
