"""What is sampled from a replay buffer, and what becomes of it on the way to a learner.

A `ReplayBatch` has env rewards, and whatever else was kept of each step. A learned reward is put in their
place on the way to a `TrainBatch`, which is all that a learner sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guerdon.agents.networks import Obs
from guerdon.core.errors import DataError


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """What a learner takes: one reward, whatever it was mixed from."""

    obs: Obs
    """`state` -> float32 [B, S], camera -> uint8 [B, H, W, C]."""
    actions: Tensor
    """[B, A] of a continuous, int64 [B] of a discrete action space."""
    training_rewards: Tensor
    """float32 [B]; summed and discounted over the steps up to `next_obs`."""
    next_obs: Obs
    """As `obs`; the final observation where the episode ended."""
    not_terminated: Tensor
    """float32 [B]; 0 where there is no future. A truncated episode has one."""
    discount: Tensor
    """float32 [B]; gamma ** k for `next_obs` k steps ahead."""

    def __post_init__(self) -> None:
        wanted = (len(self.actions),)
        for name in ("training_rewards", "not_terminated", "discount"):
            shape = tuple(getattr(self, name).shape)
            if shape != wanted:
                raise DataError(f"TrainBatch.{name} must have shape {list(wanted)}, not {list(shape)}")

    def __len__(self) -> int:
        return len(self.actions)

    @classmethod
    def cat(cls, parts: Sequence[TrainBatch]) -> TrainBatch:
        """One batch of several, in order; demonstrations go first."""
        first = parts[0]
        return cls(
            obs={name: torch.cat([part.obs[name] for part in parts]) for name in first.obs},
            next_obs={name: torch.cat([part.next_obs[name] for part in parts]) for name in first.next_obs},
            actions=torch.cat([part.actions for part in parts]),
            training_rewards=torch.cat([part.training_rewards for part in parts]),
            not_terminated=torch.cat([part.not_terminated for part in parts]),
            discount=torch.cat([part.discount for part in parts]),
        )

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same on another device."""
        return TrainBatch(
            obs={name: part.to(device) for name, part in self.obs.items()},
            next_obs={name: part.to(device) for name, part in self.next_obs.items()},
            actions=self.actions.to(device),
            training_rewards=self.training_rewards.to(device),
            not_terminated=self.not_terminated.to(device),
            discount=self.discount.to(device),
        )


@dataclass(frozen=True, kw_only=True)
class ReplayBatch:
    """A sample of B stretches of up to n steps; n is 1 unless more were asked for."""

    obs: Obs
    """In which the first action was chosen; [B, ...]."""
    actions: Tensor
    """The first action; [B, ...]."""
    env_rewards: Tensor
    """float32 [B, n]; 0 where `mask` is."""
    mask: Tensor
    """float32 [B, n]; 0 from where the episode ended or the data do."""
    next_obs: Obs
    """After the last step that counts."""
    terminated: Tensor
    """bool [B]; of the last step that counts."""
    truncated: Tensor
    """bool [B]; of the last step that counts."""
    discount: Tensor
    """float32 [B]; gamma ** (number of steps that count)."""
    gamma: float
    """Of the steps."""
    rows: NDArray[np.int64]
    """int64 [B, n]; where each step lies in the buffer. Masked steps repeat the last one."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """name -> [B, n, ...]; masked steps repeat the last one."""

    def __len__(self) -> int:
        return len(self.mask)

    @classmethod
    def cat(cls, parts: Sequence[ReplayBatch]) -> ReplayBatch:
        """One batch of several, in order; `rows` then refer to the buffer of each part."""
        first = parts[0]
        if len(parts) == 1:
            return first

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in parts])

        def by_key(name: str) -> dict[str, Tensor]:
            return {
                key: torch.cat([getattr(part, name)[key] for part in parts]) for key in getattr(first, name)
            }

        return cls(
            obs=by_key("obs"),
            actions=joined("actions"),
            env_rewards=joined("env_rewards"),
            mask=joined("mask"),
            next_obs=by_key("next_obs"),
            terminated=joined("terminated"),
            truncated=joined("truncated"),
            discount=joined("discount"),
            gamma=first.gamma,
            rows=np.concatenate([part.rows for part in parts]),
            extras=by_key("extras"),
        )

    def train_batch(self, training_rewards: Tensor) -> TrainBatch:
        """For the learner, with the rewards of each step, float32 [B, n]."""
        return TrainBatch(
            obs=self.obs,
            actions=self.actions,
            training_rewards=n_step_return(training_rewards, self.mask, self.gamma),
            next_obs=self.next_obs,
            not_terminated=(~self.terminated).float(),
            discount=self.discount,
        )


def n_step_return(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the steps that count: [B, n], [B, n] -> [B]."""
    if rewards.shape != mask.shape:
        raise DataError(f"rewards of shape {list(rewards.shape)} do not fit steps of {list(mask.shape)}")
    if mask.shape[1] == 1:  # the first step always counts
        return rewards[:, 0]
    powers = gamma ** torch.arange(mask.shape[1], dtype=torch.float32, device=rewards.device)
    return torch.where(mask > 0, rewards, 0.0) @ powers
