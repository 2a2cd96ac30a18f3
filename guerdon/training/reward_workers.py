"""The reward workers of other processes or threads as a run sees them: one scorer, whose work they share."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from guerdon.config import RewardConfig
from guerdon.core.errors import WorkerLostError
from guerdon.core.types import FloatArray, IntArray, UInt8Array
from guerdon.distributed.engine import Engine, Pending, WorkerSpec
from guerdon.distributed.local_engine import LocalGroup
from guerdon.rewards.image.scorer import (
    MINI_BATCH,
    RewardFacts,
    RewardManager,
    Scores,
    join_scores,
)

log = logging.getLogger("guerdon")

REQUEST_FRAMES = 4 * MINI_BATCH
"""Frames in a request to a reward worker; whole mini-batches, so that sharing changes no score."""
AHEAD = 2
"""Requests that a reward worker has at a time: while it works on one, the next one travels."""


def load_manager(cfg: RewardConfig) -> RewardManager:
    """A reward worker: a manager, on a GPU if there is one where it runs."""
    return RewardManager(cfg)


class FramesLostError(Exception):
    """Frames went with the machine that held them; `part` says which."""

    def __init__(self, part: int) -> None:
        super().__init__(part)
        self.part = part


@dataclass(eq=False)
class Job:
    """A request to whichever reward worker is free first."""

    method: str
    args: tuple[Any, ...]
    done: bool = False
    answer: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        """The answer of a job that is done."""
        if self.error is not None:
            raise self.error
        return self.answer


@dataclass(frozen=True)
class PendingScores:
    """Scores under way of frames that are elsewhere."""

    jobs: list[Job]

    @property
    def done(self) -> bool:
        """Whether they are all there."""
        return all(job.done for job in self.jobs)

    def result(self) -> Scores:
        """Raises `FramesLostError` if the frames went with the machine that held them."""
        return join_scores([_answer(job, 0) for job in self.jobs])


class RewardWorkers:
    """All reward workers of a run; requests are shared among them, as fast as each one answers."""

    def __init__(self, engine: Engine, cfg: RewardConfig) -> None:
        """Start the workers; each loads the model."""
        threads = max(torch.get_num_threads() // engine.workers_beside("reward"), 1)
        spec = WorkerSpec(cls=load_manager, args=(cfg,), threads=threads)
        self.group = engine.group("reward", [spec] * engine.num_workers("reward"))
        self.facts: RewardFacts = self.group.submit(0, "describe").result()
        self._engine, self._timeout = engine, cfg.timeout_seconds
        self._waiting: deque[Job] = deque()
        self._running: list[deque[tuple[Job, Pending]]] = [deque() for _ in range(self.group.size)]
        self._heard = [time.monotonic()] * self.group.size
        self._checkpoint: str | None = None  # instead of the one that workers start with

    def use_checkpoint(self, checkpoint: Path) -> None:
        """Let all workers score with another checkpoint from now on; nothing may be under way."""
        self._checkpoint = str(checkpoint.resolve())
        for rank in range(self.group.size):
            try:
                self.facts = self.group.submit(rank, "use_checkpoint", self._checkpoint).result()
            except WorkerLostError as error:
                self._replace(rank, error)

    @property
    def local(self) -> RewardManager:
        """The worker in this process."""
        assert isinstance(self.group, LocalGroup)
        worker: RewardManager = self.group.workers[0]
        return worker

    def score(self, frames: dict[str, UInt8Array]) -> Scores:
        """Scores of frames of this process, camera -> uint8 [N, H, W, C], or nothing at all."""
        count = len(next(iter(frames.values()))) if frames else 0
        if not count:
            return join_scores([])
        return self.score_parts([self._engine.put(frames)], [count])[0]

    def score_parts(self, parts: Sequence[Pending], counts: Sequence[int]) -> list[Scores]:
        """Scores of frames that are elsewhere; `counts` says how many there are in each part."""
        asked = [self.score_later(frames, count) for frames, count in zip(parts, counts, strict=True)]
        self._finish([job for item in asked for job in item.jobs])
        return [join_scores([_answer(job, part) for job in item.jobs]) for part, item in enumerate(asked)]

    def features_of(self, parts: Sequence[Pending], rows: Sequence[IntArray]) -> FloatArray:
        """Features of the frames `rows` of each part, float32 [K, F], one part after another."""
        wanted = [part for part, picked in enumerate(rows) if len(picked)]
        jobs = [Job("features_some", (self._placed(parts[part]), rows[part])) for part in wanted]
        self._waiting.extend(jobs)
        self._finish(jobs)
        return np.concatenate([_answer(job, part) for job, part in zip(jobs, wanted, strict=True)])

    def _placed(self, frames: Any) -> Pending:
        """Frames of this process where workers find them; others are there."""
        return frames if isinstance(frames, Pending) else self._engine.put(frames)

    # Requests under way

    def score_later(self, frames: Pending, count: int) -> PendingScores:
        """Ask for scores of frames that are there, but elsewhere; `pump` brings them."""
        jobs = [
            Job("score_some", (frames, start, min(start + REQUEST_FRAMES, count)))
            for start in range(0, count, REQUEST_FRAMES)
        ]
        self._waiting.extend(jobs)
        self._hand_out()
        return PendingScores(jobs)

    def pending(self) -> list[Pending]:
        """The answers that are waited for next."""
        return [mine[0][1] for mine in self._running if mine]

    def patience(self) -> float | None:
        """Seconds until a worker that is asked and does not answer is replaced; None if none is asked."""
        asked = [heard for heard, mine in zip(self._heard, self._running, strict=True) if mine]
        return max(min(asked) + self._timeout - time.monotonic(), 0.0) if asked else None

    def pump(self, *, wait: bool) -> None:
        """Take an answer and hand out what waits; workers that are lost or stall are replaced.

        Args:
            wait: until there is an answer; otherwise all that are there are taken.
        """
        self._hand_out()
        while busy := [rank for rank, mine in enumerate(self._running) if mine]:
            patience = self.patience()
            first = self.group.first_ready(self.pending(), patience if wait else 0.0)
            if first is not None:
                self._take(busy[first])
            elif self.patience() == 0.0:
                rank = min(busy, key=lambda each: self._heard[each])
                self._give_up(rank)
            self._hand_out()
            if wait or first is None:
                return

    def _finish(self, jobs: Sequence[Job]) -> None:
        while not all(job.done for job in jobs):
            self.pump(wait=True)

    def _hand_out(self) -> None:
        """Give every worker up to `AHEAD` jobs, in turns."""
        for _ in range(AHEAD):
            for rank, mine in enumerate(self._running):
                if self._waiting and len(mine) < AHEAD:
                    self._heard[rank] = self._heard[rank] if mine else time.monotonic()
                    job = self._waiting.popleft()
                    mine.append((job, self.group.submit(rank, job.method, *job.args)))

    def _take(self, rank: int) -> None:
        """An answer of a worker is there."""
        job, pending = self._running[rank][0]
        try:
            job.answer = pending.result()
        except WorkerLostError as error:
            if error.role != "object":
                self._replace(rank, error)
                return
            job.error = error
        except Exception as error:  # of this request alone; raised where its answer is asked for
            job.error = error
        job.done = True
        self._running[rank].popleft()
        self.group.answered(rank)
        self._heard[rank] = time.monotonic()

    def _give_up(self, rank: int) -> None:
        """A worker took too long: it is replaced, or waited for where it is a part of this process."""
        if self._engine.shares_memory:
            log.warning("the reward model has given no answer for %g s; still waiting", self._timeout)
            self._heard[rank] = time.monotonic()
            return
        self._replace(rank, WorkerLostError("reward", rank, f"it gave no answer for {self._timeout:g} s"))

    def _replace(self, rank: int, error: WorkerLostError) -> None:
        """Start a worker again; what it was asked waits for whoever is free first."""
        self._waiting.extendleft(job for job, _ in reversed(self._running[rank]))
        self._running[rank].clear()
        while True:
            try:
                self.group.restart(rank, error.reason)
                if self._checkpoint is not None:
                    self.facts = self.group.submit(rank, "use_checkpoint", self._checkpoint).result()
                self._heard[rank] = time.monotonic()
                return
            except WorkerLostError as other:
                error = other


def _answer(job: Job, part: int) -> Any:
    """What came of a job on the frames of a part."""
    if isinstance(job.error, WorkerLostError) and job.error.role == "object":
        raise FramesLostError(part) from job.error
    return job.result()
