"""Synthetic transitions for checks, and comparing what they leave behind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """Whether nested containers hold the same numbers; NaN is the same as NaN in tensors."""
    left, right = dict(_leaves(one)), dict(_leaves(other))
    return left.keys() == right.keys() and all(_equal(part, right[path]) for path, part in left.items())


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors that an attribute holds."""
    return [part for _, part in _leaves(value) if isinstance(part, Tensor)]


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Path and value of all that is no container."""
    parts: dict[Any, Any]
    if isinstance(value, nn.Module):
        parts = {**dict(value.named_parameters()), **dict(value.named_buffers())}
    elif isinstance(value, Mapping):
        parts = dict(value)
    elif isinstance(value, list | tuple):
        parts = dict(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        parts = {item.name: getattr(value, item.name) for item in fields(value)}
    else:
        yield path, value
        return
    for key, part in parts.items():
        yield from _leaves(part, (*path, key))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)
