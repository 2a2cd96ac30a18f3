"""The settings that all reward models of the zoo have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from guerdon.config.build import Checked
from guerdon.config.limits import LayerWidth, NonNegativeInt, PositiveFloat, PositiveInt

SHAPES = ("obs_shape", "action_size", "discrete_actions")
"""Settings that follow from the environment."""


@dataclass(frozen=True, kw_only=True)
class ZooSettings(Checked):
    """`reward_model`: what all models of the zoo have. The pipelines fill in the first three."""

    type: str = ""
    """Name in the table of reward models."""
    obs_shape: PositiveInt | tuple[PositiveInt, ...] = 1
    """Of a single observation."""
    action_size: PositiveInt = 1
    """Number of discrete actions, or size of a real-valued one."""
    discrete_actions: bool = True
    """Whether actions are numbers of choices."""
    hidden: tuple[LayerWidth, ...] = (64, 64)
    """Widths of the hidden layers."""
    lr: PositiveFloat = 1e-3
    """Learning rate of Adam."""
    batch_size: PositiveInt = 128
    """Transitions in a gradient step, of each kind."""
    update_per_collect: PositiveInt = 10
    """Gradient steps after each collection."""
    pretrain_updates: PositiveInt = 500
    """Gradient steps before the first update of the policy, where that is asked for."""
    clear_buffer_per_iters: NonNegativeInt = 1
    """Training iterations after which collected experience is forgotten; 0 keeps it."""
    target_new_data_count: NonNegativeInt = 0
    """Wait for so many new transitions before learning again."""
    buffer_size: PositiveInt = 100_000
    """Transitions that are kept, the latest ones."""
    normalize_obs: bool = True
    """Scale observations by their running statistics."""
    data_path: str | None = None
    """Demonstrations."""
    expert_steps: NonNegativeInt = 0
    """Steps of the demonstrations that are used, from the first on; 0: all."""
    seed: int = 0
    """Of the first weights and of what is drawn."""

    @property
    def obs_size(self) -> int:
        """Numbers in an observation."""
        shape = (self.obs_shape,) if isinstance(self.obs_shape, int) else self.obs_shape
        return int(torch.Size(shape).numel())
