"""Rankings made by noise (D-REX; Brown et al., 2019, arXiv:1907.03976).

The ranking is made automatically. The demonstrations are cloned, and the clone is played with increasing
noise: with probability `noise` an action is drawn at random. More noise counts as a worse trajectory, and
T-REX's network learns from that ranking (see `trex.py`, also on the length of trajectories). The reward
extrapolates beyond the demonstrations.

The noisy trajectories have to be played in an environment: the serial pipelines do it
(`training/rollouts.py`), or they are given with `load_ranked_data`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from guerdon.config.limits import Fraction, PositiveFloat, PositiveInt
from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.demonstrations import read_demonstrations
from guerdon.rewards.zoo.networks import perceptron
from guerdon.rewards.zoo.trex import TREX, TREXSettings


@dataclass(frozen=True, kw_only=True)
class DREXSettings(TREXSettings):
    """`reward_model` of type `drex`."""

    noise_levels: tuple[Fraction, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Shares of random actions at which the clone is played."""
    episodes_per_level: PositiveInt = 5
    """Episodes at each."""
    clone_updates: PositiveInt = 500
    """Gradient steps of cloning."""
    clone_lr: PositiveFloat = 3e-3
    """Learning rate of cloning."""


class DREX(TREX):
    """T-REX on trajectories ranked by added noise."""

    Settings = DREXSettings
    cfg: DREXSettings

    def load_expert_data(self, data: Any) -> None:
        """Take demonstrations to clone; their rewards are not looked at."""
        super(TREX, self).load_expert_data(data)

    def load_ranked_data(self, groups: Mapping[float, Sequence[StepBatch]]) -> None:
        """Take trajectories, [T] each, by the noise with which they were played."""
        if len(groups) < 2:
            raise DataError(f"D-REX ranks by noise: it needs two levels of it at least, not {sorted(groups)}")
        ranked = [(level, each) for level, group in groups.items() for each in read_demonstrations(group)]
        trajectories = [self.checked(each) for _, each in ranked]
        if not self.experts:  # rankings may be all there is
            super(TREX, self).load_expert_data(trajectories)
        self.rank(trajectories, torch.tensor([-float(level) for level, _ in ranked]))

    @property
    def ranked(self) -> bool:
        """Whether noisy trajectories are there."""
        return hasattr(self, "_ranks")

    def clone(self) -> Callable[[Any], NDArray[Any]]:
        """Clone the demonstrations: a policy of batches of observations, [N, *S] -> actions."""
        rows, cfg = self.expert_rows, self.cfg
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(cfg.seed)
            network = perceptron([cfg.obs_size, *cfg.hidden, cfg.action_size]).to(self.device)
        optimizer = torch.optim.Adam(network.parameters(), cfg.clone_lr, fused=True)
        for _ in range(cfg.clone_updates):
            batch = rows[torch.randint(len(rows), (128,), generator=self.generator).to(self.device)]
            said = network(self.obs_features(batch.obs))
            if cfg.discrete_actions:
                loss = functional.cross_entropy(said, batch.actions)
            else:
                loss = functional.mse_loss(said, batch.actions)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        self.log({"clone_loss": float(loss.detach())})

        @torch.no_grad()
        def act(obs: Any) -> NDArray[Any]:
            seen = torch.from_numpy(np.array(obs, np.float32)).to(self.device)
            said = network(self.obs_features(seen))
            chosen = said.argmax(1) if cfg.discrete_actions else said
            actions: NDArray[Any] = chosen.cpu().numpy()
            return actions

        return act

    def _fit(self, num_updates: int) -> dict[str, float]:
        if not self.ranked:
            raise ConfigError(
                "D-REX has no noisy trajectories: a serial pipeline plays them, or use load_ranked_data"
            )
        return super()._fit(num_updates)
