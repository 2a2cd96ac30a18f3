"""The list of dicts at the edge: `StepBatch` is the record between all stages.

`from_items` and `to_items` translate the list-of-dicts form
(obs, action, reward, next_obs, done) that collectors and plugins of other libraries speak.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from guerdon.core.errors import DataError
from guerdon.core.steps import StepBatch as StepBatch
from guerdon.data.files.bounds import one_line
from guerdon.envs.wrappers import GOAL_KEYS

ITEM_KEYS = ("obs", "action", "reward", "next_obs", "done")
"""What an item of the list form has at least."""


def from_items(items: Any) -> StepBatch:
    """A list of dicts with `ITEM_KEYS` (arrays, tensors or numbers) as one stream, [T]; copies.

    `done` without `truncated` counts as terminated. Goal-conditioned observations are made flat.
    """
    if isinstance(items, StepBatch):
        return items
    if isinstance(items, Mapping) or not isinstance(items, Sequence) or not items:
        raise DataError(f"a list of transitions is needed, not {type(items).__name__} {one_line(items, 40)}")
    for number, item in enumerate(items):
        missing = [key for key in ITEM_KEYS if not isinstance(item, Mapping) or key not in item]
        if missing:
            raise DataError(f"transition {number} has no {missing[0]!r}; each needs {', '.join(ITEM_KEYS)}")
    ended = _column(items, "done").bool().reshape(len(items))
    truncated = torch.zeros_like(ended)
    if all("truncated" in item for item in items):
        truncated = _column(items, "truncated").bool().reshape(len(items))
    obs, next_obs = ([flat_goals(item[key]) for item in items] for key in ("obs", "next_obs"))
    return StepBatch(
        obs=_stacked(obs, "obs").float(),
        actions=as_actions(_column(items, "action"), len(items)),
        next_obs=_stacked(next_obs, "next_obs").float(),
        env_rewards=_column(items, "reward").float().reshape(len(items)),
        terminated=ended & ~truncated,
        truncated=truncated,
        log_probs=_column(items, "log_prob").float().reshape(len(items)) if "log_prob" in items[0] else None,
    )


def flat_goals(obs: Any) -> Any:
    """A goal-conditioned observation as one vector: observation, achieved goal, desired goal; others stay."""
    if not isinstance(obs, Mapping):
        return obs
    lacking = [key for key in GOAL_KEYS if key not in obs]
    if lacking:
        raise DataError(f"a dict observation needs {', '.join(GOAL_KEYS)}; it has no {lacking[0]}")
    return torch.cat([torch.as_tensor(obs[key]).float().flatten() for key in GOAL_KEYS])


def with_rewards(items: Sequence[Mapping[str, Any]], learned_rewards: Tensor) -> list[dict[str, Any]]:
    """New items with `reward` replaced, in the shape and type that it had; all else is shared."""
    return [
        {**item, "reward": value.reshape(torch.as_tensor(item["reward"]).shape).clone()}
        for item, value in zip(items, learned_rewards, strict=True)
    ]


def to_items(batch: StepBatch) -> list[dict[str, Any]]:
    """A flat batch as a list of dicts of tensors; `reward` is the env's."""
    flat = batch.flat()
    columns = {
        "obs": flat.obs,
        "action": flat.actions,
        "reward": flat.env_rewards,
        "next_obs": flat.next_obs,
        "done": flat.done,
        "truncated": flat.truncated,
    }
    rows = zip(*(part.unbind(0) for part in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _column(items: Sequence[Mapping[str, Any]], key: str) -> Tensor:
    return _stacked([item[key] for item in items], key)


def _stacked(values: Sequence[Any], name: str) -> Tensor:
    try:
        return torch.stack([torch.as_tensor(value).detach().cpu() for value in values])
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"the transitions differ in `{name}`: {str(error).splitlines()[0]}") from error


def as_actions(actions: Tensor, count: int) -> Tensor:
    """float32 [N, A] of real numbers, int64 [N] of whole ones."""
    if actions.is_floating_point():
        return actions.float().reshape(count, math.prod(actions.shape[1:]))
    if actions.numel() != count:
        raise DataError(f"discrete actions must be one number each, not of shape {list(actions.shape[1:])}")
    return actions.long().reshape(count)
