"""Judging while a rollout goes on, on a thread of its own: stepping leaves processor time that it can use."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from guerdon.core.types import UInt8Array
from guerdon.rewards.image.scorer import MINI_BATCH, Scores
from guerdon.rewards.image.worker import ImageRewardWorker, join_scores

AHEAD_FRAMES = 2 * MINI_BATCH
"""Frames in a request: few, so that judging begins early and little is left for the end."""


class StreamingScorer:
    """Takes the frames of a rollout as they are made; verdicts are those of judging them all in the end."""

    def __init__(self, worker: ImageRewardWorker) -> None:
        """Judge with `worker`, which nobody else may ask meanwhile."""
        self._worker = worker
        self._pool = ThreadPoolExecutor(1, "judge")
        self._parts: list[Future[Scores]] = []
        self._asked = 0

    def begin(self) -> None:
        """A new rollout; what is left of a broken one is dropped."""
        for part in self._parts:
            part.cancel()
        self._parts, self._asked = [], 0

    def ready(self, frames: Mapping[str, UInt8Array], count: int, *, last: bool = False) -> None:
        """The first `count` frames, camera -> uint8 [M, H, W, C], are there and stay as they are.

        Requests are whole mini-batches, so that no verdict depends on when its frame came; the `last` takes
        the rest.
        """
        while self._asked + AHEAD_FRAMES <= count or (last and self._asked < count):
            stop = min(self._asked + AHEAD_FRAMES, count)
            self._parts.append(self._pool.submit(self._worker.score_some, frames, self._asked, stop))
            self._asked = stop

    def verdict(self) -> Scores:
        """On all frames since `begin`; raises what judging raised."""
        return join_scores([part.result() for part in self._parts])

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)
