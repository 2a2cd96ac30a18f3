"""What reward models look at: batches of transitions as tensors, and the list of dicts at the edge.

Between stages there are `StepBatch` alone. `from_items` and `to_items` translate the list-of-dicts form
(obs, action, reward, next_obs, done) that collectors and plugins of other libraries speak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from guerdon.core.errors import DataError
from guerdon.data.files.bounds import one_line
from guerdon.envs.wrappers import GOAL_KEYS

ITEM_KEYS = ("obs", "action", "reward", "next_obs", "done")
"""What an item of the list form has at least."""


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """Steps in any leading shape L: [N] in any order, [T] of one stream, [T, N] of N streams side by side.

    Streams are in order: an episode goes on until a step that is terminated or truncated, and the next row
    begins another.
    """

    obs: Tensor
    """float32 [*L, *S]; in which the action was chosen. Goal-conditioned ones are flat; see `flat_goals`."""
    actions: Tensor
    """float32 [*L, A], or int64 [*L] of discrete ones, counted from 0."""
    next_obs: Tensor
    """float32 [*L, *S]; what the action led to, the final observation where the episode ended."""
    env_rewards: Tensor
    """float32 [*L]; what the environment gave. Reward models rank by it or ignore it, and never change it."""
    terminated: Tensor
    """bool [*L]."""
    truncated: Tensor
    """bool [*L]."""
    log_probs: Tensor | None = None
    """float32 [*L]; of the actions, under the policy that chose them."""
    learned_rewards: Tensor | None = None
    """float32 [*L]; what a model that scores streams or frames gave when the step was experienced."""
    frames: Tensor | None = None
    """uint8 [*L, H, W, C]; what a camera shows of where the action led, for models that look at pictures."""

    def __post_init__(self) -> None:
        lead = self.shape
        for item in fields(self):
            part = getattr(self, item.name)
            if part is not None and tuple(part.shape[: len(lead)]) != lead:
                raise DataError(
                    f"StepBatch.{item.name} has shape {list(part.shape)}, not [{_dims(lead)}, ...]"
                )
        for name in ("terminated", "truncated"):
            part = getattr(self, name)
            if part.dtype != torch.bool or tuple(part.shape) != lead:
                raise DataError(f"StepBatch.{name} must be bool [{_dims(lead)}]")
        if self.obs.shape != self.next_obs.shape:
            raise DataError(f"obs has shape {list(self.obs.shape)}, next_obs {list(self.next_obs.shape)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """L."""
        return tuple(self.env_rewards.shape)

    @property
    def done(self) -> Tensor:
        """Whether the episode ended with this step, bool [*L]."""
        return self.terminated | self.truncated

    def __len__(self) -> int:
        """Steps, in all streams together."""
        return self.env_rewards.numel()

    def map(self, change: Callable[[Tensor], Tensor]) -> StepBatch:
        """The same change made to all parts."""
        named: dict[str, Any] = {name: change(part) for name, part in self.parts().items()}
        return StepBatch(**named)

    def parts(self) -> dict[str, Tensor]:
        """Name -> tensor, of all parts that are there."""
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: part for name, part in named.items() if part is not None}

    def flat(self) -> StepBatch:
        """[T, N] -> [T * N]; others as they are."""
        if len(self.shape) <= 1:
            return self
        return self.map(lambda part: part.flatten(0, len(self.shape) - 1))

    def streams(self) -> StepBatch:
        """[T] -> [T, 1]; [T, N] as it is."""
        return self if len(self.shape) == 2 else self.map(lambda part: part.unsqueeze(1))

    def stream(self, number: int) -> StepBatch:
        """One of the streams of [T, N], [T]."""
        return self.map(lambda part: part[:, number])

    def __getitem__(self, rows: Tensor | slice | int) -> StepBatch:
        """Rows of the first axis."""
        return self.map(lambda part: part[rows])

    def to(self, device: torch.device | str) -> StepBatch:
        """On another device; itself if it is there."""
        if all(part.device == torch.device(device) for part in self.parts().values()):
            return self
        return self.map(lambda part: part.to(device))

    def episodes(self) -> list[StepBatch]:
        """The finished episodes of all streams, [T] each, in the order in which they ended within a stream.

        What runs on at the end of a stream is left out.
        """
        streams = self.streams()
        return [each for env in range(streams.shape[1]) for each in streams.stream(env).pieces()[:-1]]

    def pieces(self) -> list[StepBatch]:
        """A stream [T] cut after each end: the finished episodes, then the rest, which may be empty."""
        edges = [0, *(torch.nonzero(self.done).flatten() + 1).tolist(), len(self)]
        return [self[start:stop] for start, stop in pairwise(edges)]

    @classmethod
    def cat(cls, parts: Sequence[StepBatch]) -> StepBatch:
        """One after the other along the first axis."""
        if not parts:
            raise DataError("there are no transitions to put together")
        try:
            return cls(
                **{name: torch.cat([getattr(part, name) for part in parts]) for name in parts[0].parts()}
            )
        except (RuntimeError, TypeError) as error:
            raise DataError(f"transitions of different shapes cannot be put together: {error}") from error

    def check_finite(self) -> None:
        """Raise if an observation or action is not a finite number; env rewards may be unknown."""
        for name in ("obs", "actions", "next_obs"):
            part = getattr(self, name)
            if not part.is_floating_point() or not part.numel():
                continue
            if not all(map(math.isfinite, torch.aminmax(part))):  # NaN is its own lowest and highest
                bad = int((~torch.isfinite(part)).sum())
                raise DataError(f"{bad} of the {part.numel()} numbers in `{name}` are not finite")


def _dims(lead: Sequence[int]) -> str:
    return ", ".join(map(str, lead))


# The list of dicts


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
