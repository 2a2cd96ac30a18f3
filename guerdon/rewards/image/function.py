"""A reward function of the user's own in the place of an image model: frames -> rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from guerdon.core.calls import check_takes
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy
from guerdon.core.types import FloatArray, UInt8Array
from guerdon.rewards.image.contract import Contract
from guerdon.rewards.image.scorer import Frames, ImageScorer, RewardFacts, Scores

RewardFunction: TypeAlias = Callable[[Any], Any]
"""Frames, uint8 [n, H, W, C] (camera -> frames, if there are several), -> a number for each, [n]. They are
rewards; with a `RewardConfig` they are probabilities of success, which become rewards as it says."""


def is_function(reward: Any) -> bool:
    """Whether a reward is given as a function, and not as a model; a class is neither, and refused."""
    if isinstance(reward, type):
        raise ConfigError(f"reward is the class {reward.__name__}: give an instance of it")
    if not callable(reward) or hasattr(reward, "score"):
        return False
    check_takes(reward, "reward", "frames")
    return True


def cameras_of(function: RewardFunction) -> tuple[str, ...]:
    """The cameras that a function looks at: its attribute `image_keys`, or `base_camera`."""
    return tuple(getattr(function, "image_keys", ("base_camera",)))


def call_reward_function(function: RewardFunction, frames: Mapping[str, UInt8Array]) -> FloatArray:
    """What a function says of n frames, float32 [n]; one camera is given as it is."""
    first = next(iter(frames.values()))
    answer = function(first if len(frames) == 1 else dict(frames))
    try:
        values = None if answer is None else np.asarray(to_numpy(answer), np.float32)
    except (TypeError, ValueError):
        values = None
    if values is None:
        raise DataError(
            f"the reward function must return a number for each of {len(first)} frames, not {answer!r:.80}"
        )
    if values.size != len(first) or not np.isfinite(values).all():
        raise DataError(
            f"the reward function must return a finite number for each of {len(first)} frames, not "
            f"{list(values.shape)} of which {int(np.count_nonzero(~np.isfinite(values)))} are not finite"
        )
    return values.reshape(-1)


class FunctionScorer(ImageScorer):
    """A function in the place of an image model in a run; what it returns are rewards, not probabilities.

    Buffers and rollouts keep its values where they keep the probabilities of a classifier.

    Args:
        function: see `RewardFunction`; its attribute `image_keys` may name other cameras than `base_camera`.
    """

    def __init__(self, function: RewardFunction) -> None:
        self.function, self.image_keys = function, cameras_of(function)
        self.name = str(getattr(function, "__name__", type(function).__name__))
        seen = {"image_keys": list(self.image_keys), "num_frames": 1, "only_at_rest": False}
        self.contract, self.threshold, self.source = Contract(model=seen), 0.5, self.name
        self.facts = RewardFacts(
            image_keys=self.image_keys,
            threshold=self.threshold,
            num_members=1,
            num_frames=1,
            only_at_rest=False,
            contract=self.contract,
            version=f"function/{self.name}",
            gives_rewards=True,
        )

    def check(self, frames: Frames) -> None:
        """Nothing: a function takes frames of every size."""

    def score_some(self, frames: Frames, start: int, stop: int) -> Scores:
        """What the function says of the frames from `start` to `stop`."""
        if start == stop:
            values = np.zeros(0, np.float32)
        else:
            values = call_reward_function(
                self.function, {name: images[start:stop] for name, images in frames.items()}
            )
        return Scores(prob_success=values, disagreement=np.zeros_like(values))
