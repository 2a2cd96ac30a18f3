"""Deep Q-learning (Mnih et al., 2015) with double targets (van Hasselt et al., 2016) and n-step returns."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from guerdon.agents.flat import BatchedMLP, FlatAdam, FlatAgent
from guerdon.agents.networks import ObsEncoder, ObsSpec, to_obs
from guerdon.config import DQNConfig, NetworkConfig
from guerdon.core.batches import TrainBatch
from guerdon.core.errors import ConfigError


class DQN(FlatAgent):
    """Learns the values of discrete actions; draws from a generator of its own only."""

    name = section = "dqn"
    action_spaces = (gym.spaces.Discrete,)
    cfg: DQNConfig

    def __init__(
        self,
        spec: ObsSpec,
        action_space: gym.spaces.Discrete,
        cfg: DQNConfig,
        network: NetworkConfig,
        *,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Make the networks; see `Agent`."""
        if not isinstance(action_space, gym.spaces.Discrete):
            raise ConfigError(f"DQN takes discrete actions, not {action_space}")
        self.cfg, self.device = cfg, torch.device(device)
        self.num_actions, self._start = int(action_space.n), int(action_space.start)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = ObsEncoder(spec, network).to(self.device)
            size = self.encoder.num_features
            self.values = BatchedMLP(1, size, self.num_actions, network, device=self.device)
        self.target_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.target_values = self.values.twin()
        self._adam = FlatAdam.of(self.values, cfg.lr)
        self._encoder_adam = self._make_encoder_adam(cfg.lr)
        self._rng = np.random.default_rng(seed)
        self.num_n_steps = cfg.num_n_steps

    def epsilon(self, progress: float) -> float:
        """Share of random actions when `progress` (0 to 1) of the run is over; falls in a straight line."""
        cfg = self.cfg
        done = min(progress / cfg.epsilon_fraction, 1.0) if cfg.epsilon_fraction else 1.0
        return cfg.epsilon_start + done * (cfg.epsilon_end - cfg.epsilon_start)

    @torch.inference_mode()
    def act(self, obs: Any, deterministic: bool = False, *, progress: float = 1.0) -> NDArray[np.int64]:
        """Actions int64 [N]: the best ones, and random ones at times unless `deterministic`."""
        parts = to_obs(obs, self.device)
        count = len(next(iter(parts.values())))
        if deterministic:
            return self._best(parts)
        at_random = self._rng.random(count) < self.epsilon(progress)
        drawn = self._rng.integers(self.num_actions, size=count) + self._start
        if at_random.all():
            return drawn
        return np.where(at_random, drawn, self._best(parts))

    def _best(self, parts: Mapping[str, Tensor]) -> NDArray[np.int64]:
        best: NDArray[np.int64] = self.values(self.encoder(parts))[0].argmax(1).cpu().numpy()
        return best + self._start

    @torch.no_grad()
    def targets(self, batch: TrainBatch) -> Tensor:
        """What the values regress on, float32 [B]."""
        held = self.target_values(self.target_encoder(batch.next_obs))[0]
        if self.cfg.double:
            best = self.values(self.encoder(batch.next_obs))[0].argmax(1, keepdim=True)
            value = held.gather(1, best).squeeze(1)
        else:
            value = held.amax(1)
        return torch.addcmul(batch.training_rewards, batch.not_terminated * batch.discount, value)

    def update(self, batch: TrainBatch, prior_rows: int = 0) -> dict[str, float]:
        """One step on the Huber loss, and a copy to the target network when it is due."""
        batch = self._checked(batch, prior_rows)
        targets = self.targets(batch)
        chosen = (batch.actions - self._start).unsqueeze(1)
        values = self.values(self.encoder(batch.obs))[0].gather(1, chosen).squeeze(1)
        loss = F.smooth_l1_loss(values, targets)
        self._descend(self._adam, loss)
        self.num_updates += 1
        if self.num_updates % self.cfg.target_interval == 0:
            self.target_values.flat.copy_(self.values.flat)
            self.target_encoder.load_state_dict(self.encoder.state_dict())
        return {"loss": loss.item(), "value": values.detach().mean().item()}

    # Copies and saving

    def seed_acting(self, seed: int) -> None:
        """Begin a new sequence of random actions."""
        self._rng = np.random.default_rng(seed)

    def _acting_networks(self) -> dict[str, BatchedMLP]:
        return {"values": self.values}

    def _networks(self) -> dict[str, BatchedMLP]:
        return {"values": self.values, "target_values": self.target_values}

    def _stateful(self) -> dict[str, Any]:
        return {**super()._stateful(), "target_encoder": self.target_encoder, "adam": self._adam}

    def _counters(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state, "num_updates": self.num_updates}

    def _set_counters(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]
        self.num_updates = int(state["num_updates"])
