"""Generalised advantage estimation (Schulman et al., 2016): the one place where values stand for the future.

An episode that terminated has no future. One that was truncated has the future that the value of its final
observation promises. Neither knows anything about the episode that follows it in the same row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from guerdon.core.errors import DataError


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
    """Advantages and returns of a rollout of T steps in N environments.

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
    _check(training_rewards, values, terminated, truncated, final_values, last_values)
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


def _check(
    training_rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_values: Tensor,
    last_values: Tensor,
) -> None:
    shape = training_rewards.shape
    if len(shape) != 2 or 0 in shape:
        raise DataError(f"training_rewards must be [T, N] with at least one step, not {list(shape)}")
    for name, tensor, wanted in (
        ("values", values, shape),
        ("terminated", terminated, shape),
        ("truncated", truncated, shape),
        ("final_values", final_values, shape),
        ("last_values", last_values, shape[1:]),
    ):
        if tensor.shape != wanted:
            raise DataError(f"{name} must have shape {list(wanted)}, not {list(tensor.shape)}")
    for name, flags in (("terminated", terminated), ("truncated", truncated)):
        if flags.dtype != torch.bool:
            raise DataError(f"{name} must be bool, not {flags.dtype}")
