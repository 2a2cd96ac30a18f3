"""Steps of environments as reward models see them, and what a model says of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from guerdon.core.errors import DataError
from guerdon.core.types import FloatArray


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


class RunningEpisodes:
    """Puts the episodes of N streams together again that come in pieces."""

    def __init__(self, num_streams: int) -> None:
        self._running: list[list[StepBatch]] = [[] for _ in range(num_streams)]

    def add(self, streams: StepBatch) -> list[StepBatch]:
        """Take the next steps, [T, N]; returns the episodes that are finished by them, [T] each."""
        finished: list[StepBatch] = []
        for env, running in enumerate(self._running):
            *ended, rest = streams.stream(env).pieces()
            for piece in ended:
                finished.append(StepBatch.cat([*running, piece]))
                running.clear()
            if len(rest):
                running.append(rest)
        return finished


def _dims(lead: Sequence[int]) -> str:
    return ", ".join(map(str, lead))


def checked_values(values: Tensor, batch: StepBatch, who: str) -> FloatArray:
    """What `who` gave for the steps of a batch, float32 [*L], if it is finite and one number for each."""
    if tuple(values.shape) != batch.shape:
        raise DataError(
            f"{who} gave rewards of shape {list(values.shape)} for transitions of {list(batch.shape)}"
        )
    array: FloatArray = values.detach().float().cpu().numpy()
    if not np.isfinite(array).all():
        raise DataError(f"{who} gave rewards that are not finite numbers")
    return array


@dataclass(frozen=True, kw_only=True)
class Scores:
    """A model's answer about steps or frames in any leading shape L: either rewards or probabilities."""

    rewards: FloatArray | None = None
    """float32 [*L]; of models that give a reward."""
    prob_success: FloatArray | None = None
    """float32 [*L], calibrated; of models that see success."""
    disagreement: FloatArray | None = None
    """float32 [*L]; deviation between the members of an ensemble. None: there is nothing to disagree."""

    def __post_init__(self) -> None:
        if (self.rewards is None) == (self.prob_success is None):
            raise DataError("Scores hold either rewards or prob_success")
        if self.disagreement is not None and self.disagreement.shape != self.values.shape:
            raise DataError(
                f"{list(self.values.shape)} scores have a disagreement of {list(self.disagreement.shape)}"
            )

    @property
    def values(self) -> FloatArray:
        """The rewards or the probabilities, whichever is there, float32 [*L]."""
        values = self.prob_success if self.rewards is None else self.rewards
        assert values is not None
        return values

    def __getitem__(self, rows: Any) -> Self:
        """Rows of the first axis."""
        named = {item.name: getattr(self, item.name) for item in fields(self)}
        return type(self)(**{name: None if part is None else part[rows] for name, part in named.items()})


@dataclass(frozen=True, kw_only=True)
class SuccessScores(Scores):
    """Scores of a model that sees success, such as a classifier of images."""

    prob_success: FloatArray
    """float32 [*L], calibrated."""
