"""Reward workers as a run sees them: one judge, whose work is shared among however many there are."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from guerdon.config import RewardConfig
from guerdon.errors import WorkerLostError
from guerdon.parallel.engine import Engine, LocalGroup, Pending, RestartCounter, WorkerSpec
from guerdon.serve.manager import RewardFacts, Verdict
from guerdon.serve.worker import REQUEST_FRAMES, ImageRewardWorker, join_verdicts, load_image_worker
from guerdon.types import FloatArray, IntArray, UInt8Array

AHEAD = 2
"""Requests that a reward worker has at a time: while it works on one, the next one travels."""


class FramesLostError(Exception):
    """Frames went with the machine that held them; `part` says which."""

    def __init__(self, part: int) -> None:
        super().__init__(part)
        self.part = part


class RewardGroup:
    """All reward workers of a run; requests are shared among them, as fast as each one answers."""

    def __init__(self, engine: Engine, cfg: RewardConfig, task_type: Any) -> None:
        """Start the workers; each loads the model."""
        threads = max(torch.get_num_threads() // engine.workers_beside("reward"), 1)
        spec = WorkerSpec(cls=load_image_worker, args=(cfg, task_type), threads=threads)
        self.group = engine.group("reward", [spec] * engine.num_workers("reward"))
        self.facts: RewardFacts = self.group.submit(0, "describe").result()
        self._engine, self._timeout = engine, cfg.timeout_seconds
        self._counter = RestartCounter("reward")

    @property
    def local(self) -> ImageRewardWorker:
        """The worker in this process."""
        assert isinstance(self.group, LocalGroup)
        worker: ImageRewardWorker = self.group.workers[0]
        return worker

    def put(self, frames: dict[str, UInt8Array]) -> Pending:
        """Frames of this process, for several requests."""
        return self._engine.put(frames)

    def judge(self, frames: dict[str, UInt8Array]) -> Verdict:
        """Verdicts on frames of this process, camera -> uint8 [N, H, W, C], or nothing at all."""
        count = len(next(iter(frames.values()))) if frames else 0
        if not count:
            return join_verdicts([])
        return self.judge_parts([self.put(frames)], [count])[0]

    def judge_parts(self, parts: Sequence[Pending], counts: Sequence[int]) -> list[Verdict]:
        """Verdicts on frames that are elsewhere; `counts` says how many there are in each part."""
        jobs, owners = [], []
        for part, (frames, count) in enumerate(zip(parts, counts, strict=True)):
            for start in range(0, count, REQUEST_FRAMES):
                jobs.append(("judge_some", (frames, start, min(start + REQUEST_FRAMES, count))))
                owners.append(part)
        answers = self._share(jobs, owners)
        return [
            join_verdicts([answer for answer, owner in zip(answers, owners, strict=True) if owner == part])
            for part in range(len(parts))
        ]

    def features(self, parts: Sequence[Pending], rows: Sequence[IntArray]) -> FloatArray:
        """Features of the frames `rows` of each part, float32 [K, F], one part after another."""
        wanted = [part for part, picked in enumerate(rows) if len(picked)]
        jobs = [("features_of", (parts[part], rows[part])) for part in wanted]
        return np.concatenate(self._share(jobs, wanted))

    def _share(self, jobs: Sequence[tuple[str, tuple[Any, ...]]], owners: Sequence[int]) -> list[Any]:
        """Answers to all jobs in order; workers that are lost or stall are replaced."""
        answers: list[Any] = [None] * len(jobs)
        waiting = deque(range(len(jobs)))
        running: list[deque[tuple[int, Pending]]] = [deque() for _ in range(self.group.size)]
        heard = [time.monotonic()] * self.group.size
        while waiting or any(running):
            for _ in range(AHEAD):
                for rank, mine in enumerate(running):
                    if waiting and len(mine) < AHEAD:
                        heard[rank] = heard[rank] if mine else time.monotonic()
                        job = waiting.popleft()
                        mine.append((job, self.group.submit(rank, jobs[job][0], *jobs[job][1])))
            busy = [rank for rank, mine in enumerate(running) if mine]
            until = min(heard[rank] for rank in busy) + self._timeout
            first = self.group.first_ready(
                [running[rank][0][1] for rank in busy], max(until - time.monotonic(), 0.0)
            )
            if first is None:
                rank = min(busy, key=lambda each: heard[each])
                error = WorkerLostError("reward", rank, f"it gave no answer for {self._timeout:g} s")
                self._replace(rank, error, running, waiting)
                heard[rank] = time.monotonic()
                continue
            rank = busy[first]
            job, pending = running[rank][0]
            try:
                answers[job] = pending.result()
            except WorkerLostError as error:
                if error.role == "object":
                    raise FramesLostError(owners[job]) from error
                self._replace(rank, error, running, waiting)
            else:
                running[rank].popleft()
                self._counter.answered(rank)
            heard[rank] = time.monotonic()
        return answers

    def _replace(
        self,
        rank: int,
        error: WorkerLostError,
        running: list[deque[tuple[int, Pending]]],
        waiting: deque[int],
    ) -> None:
        """Start a worker again; what it was asked waits for whoever is free first."""
        waiting.extendleft(job for job, _ in reversed(running[rank]))
        running[rank].clear()
        while True:
            self._counter.lost(error)
            try:
                self.group.restart(rank, error.reason)
                return
            except WorkerLostError as other:
                error = other
