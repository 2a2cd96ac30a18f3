"""Synthetic transitions for checks, and comparing what they leave behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from guerdon.rewards.steps import StepBatch


def synthetic_steps(shapes: Mapping[str, Any], num_steps: int, num_streams: int, seed: int) -> StepBatch:
    """Streams [T, N] of random numbers in the given shapes; episodes end after ten steps and at the end.

    With a single stream it is one episode, [T].
    """
    draw = torch.Generator().manual_seed(seed)
    shape = shapes["obs_shape"]
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    lead = (num_steps, num_streams)
    states = torch.randn((num_steps + 1, num_streams, *size), generator=draw)
    count = int(shapes["action_size"])
    actions = torch.randint(count, lead, generator=draw)
    if not shapes["discrete_actions"]:
        actions = torch.rand((*lead, count), generator=draw) * 2.0 - 1.0
    ends = torch.zeros(lead, dtype=torch.bool)
    ends[9 :: 10 if num_streams > 1 else num_steps] = num_streams > 1
    ends[-1] = True
    truncated = ends & (torch.arange(num_streams) % 2 == 0)
    made = StepBatch(
        obs=states[:-1],
        actions=actions,
        next_obs=states[1:],
        env_rewards=torch.rand(lead, generator=draw),
        terminated=ends & ~truncated,
        truncated=truncated,
        log_probs=-torch.rand(lead, generator=draw),
    )
    return made if num_streams > 1 else made.stream(0)


def same(one: Any, other: Any) -> bool:
    """Whether nested containers hold the same numbers."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.shape == other.shape
            and one.dtype == other.dtype
            and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if is_dataclass(one) and not isinstance(one, type):
        names = [item.name for item in fields(one)]
        return type(one) is type(other) and all(same(getattr(one, n), getattr(other, n)) for n in names)
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(same(one[key], other[key]) for key in one)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors that an attribute holds."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, Mapping):
        return [part for item in value.values() for part in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [part for item in value for part in tensors_in(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return [part for item in fields(value) for part in tensors_in(getattr(value, item.name))]
    return []
