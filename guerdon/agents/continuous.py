"""What SAC and TD3 share: bounded continuous actions, image shifts, networks that are copied and saved.

Inside, actions lie in [-1, 1]; they are scaled to the action space at the border. The encoder of images
follows the loss of the critics alone.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from guerdon.agents.agent import OffPolicyAgent
from guerdon.agents.cloning import imitate
from guerdon.agents.flat import BatchedMLP, FlatAdam
from guerdon.agents.networks import Obs, ObsEncoder, ObsSpec, num_rows, shift_images
from guerdon.config import BCConfig, NetworkConfig, PriorConfig
from guerdon.core.errors import ConfigError, DataError


class ContinuousAgent(OffPolicyAgent):
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
        self.cfg, self.device = cfg, torch.device(device)
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
        self._critic_adam = FlatAdam(self.critics.parameter, cfg.critic_lr)
        self._actor_adam = FlatAdam(self.actor.parameter, cfg.actor_lr)
        self._has_images = bool(spec.images)
        self._encoder_adam = (
            torch.optim.Adam(self.encoder.parameters(), lr=cfg.critic_lr, fused=True) if spec.images else None
        )
        self._noise = torch.Generator(self.device).manual_seed(seed)  # of updates
        self._act_noise = torch.Generator(self.device).manual_seed(seed + 1)  # of acting
        self.num_updates = 0

    @property
    def prior(self) -> PriorConfig:
        """Demonstrations, as RLPD samples them."""
        section: PriorConfig = self.cfg
        return section

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

    # Learning

    def _on_device(self, batch: Any, prior_rows: int) -> Any:
        """A batch where the networks are, after a check of `prior_rows`."""
        if not 0 <= prior_rows <= len(batch):
            raise DataError(f"{prior_rows} demonstrations in a batch of {len(batch)}")
        return batch if self.device.type == "cpu" else batch.to(self.device)

    def _update_critics(self, features: Tensor, unit_actions: Tensor, targets: Tensor) -> dict[str, float]:
        """Least squares: the loss is half the mean square error, summed over the critics."""
        values = self.critics(torch.cat([features, unit_actions], 1)).squeeze(-1)
        loss = 0.5 * (values - targets).square().mean(1).sum()
        if self._encoder_adam is not None:
            self._encoder_adam.zero_grad()
        self._critic_adam.descend(loss)
        if self._encoder_adam is not None:
            self._encoder_adam.step()
        return {"critic_loss": loss.item(), "value": values.mean().item()}

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

    # Copies of the policy elsewhere, and saving

    def _acting_networks(self) -> dict[str, BatchedMLP]:
        return {"actor": self.actor}

    def policy_state(self) -> dict[str, Any]:
        """What a copy needs to act as this one would now, as arrays of their own; no critics, no moments."""
        encoder = {
            name: part.detach().cpu().numpy().copy() for name, part in self.encoder.state_dict().items()
        }
        flats = {name: each.flat.cpu().numpy().copy() for name, each in self._acting_networks().items()}
        return {**flats, "encoder": encoder}

    def load_policy(self, state: Mapping[str, Any]) -> None:
        """Act as the agent did when `policy_state` was taken; noise stays this one's own."""
        for name, each in self._acting_networks().items():
            each.flat.copy_(torch.tensor(state[name]))
        self.encoder.load_state_dict({name: torch.tensor(part) for name, part in state["encoder"].items()})

    def _networks(self) -> dict[str, BatchedMLP]:
        return {**self._acting_networks(), "critics": self.critics, "target_critics": self.target_critics}

    def _stateful(self) -> dict[str, Any]:
        parts = {"encoder": self.encoder, "actor_adam": self._actor_adam, "critic_adam": self._critic_adam}
        return parts if self._encoder_adam is None else {**parts, "encoder_adam": self._encoder_adam}

    def state_dict(self) -> dict[str, Any]:
        """Everything that later updates and actions depend on, as a copy."""
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._stateful().items()}
        state |= {name: network.flat for name, network in self._networks().items()}
        state |= {"noise": self._noise.get_state(), "act_noise": self._act_noise.get_state()}
        return copy.deepcopy({**state, "num_updates": self.num_updates})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the same actions and updates follow."""
        state = copy.deepcopy(dict(state))
        wanted = {*self._stateful(), *self._networks(), "noise", "act_noise", "num_updates"}
        if state.keys() != wanted:
            title = type(self).__name__
            raise DataError(f"a state of {title} has {sorted(wanted)}, not {sorted(state)}")
        for name, network in self._networks().items():
            if state[name].shape != network.flat.shape:
                raise DataError(f"the saved {name} are of another size than the settings ask for")
            network.flat.copy_(state[name])
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])
        self._noise.set_state(state["noise"].cpu())
        self._act_noise.set_state(state["act_noise"].cpu())
        self.num_updates = int(state["num_updates"])
