"""SAC, TD3 and DQN with acting, scoring and learning side by side, each at its own pace.

A *request* asks an env worker for some steps with weights of a certain version. Its answer, a chunk, stays
under way until a reward worker has scored the frames and the learner has stored the steps. There are no
queues beside these requests: each worker has at most `max_in_flight` of them, none is handed out while the
learner is behind with its updates, and the learner waits for steps rather than run away from the weights that
act. So memory and staleness are bounded whoever is slow.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.config import AsynchronousConfig, LearnerConfig
from guerdon.core.batches import StepChunk
from guerdon.core.errors import ConfigError, GuerdonError, WorkerError, WorkerLostError
from guerdon.core.progress import Stopwatch
from guerdon.core.steps import StepBatch
from guerdon.core.streams import EnvStream
from guerdon.distributed.engine import Engine, Pending
from guerdon.training.acting import PolicySpec
from guerdon.training.env_workers import EnvWorkers
from guerdon.training.loop import Iteration
from guerdon.training.off_policy import ReplayLearning
from guerdon.training.online_reward import OnlineReward
from guerdon.training.reward_workers import FramesLostError, PendingScores, RewardWorkers

log = logging.getLogger("guerdon")


@dataclass(eq=False)
class Request:
    """Steps that an env worker was asked for and that are not stored yet."""

    num_steps: int
    version: int
    """Of the weights that act."""
    answer: Pending
    frames: Pending
    began: float = field(default_factory=time.monotonic)
    chunk: StepChunk | None = None
    """The answer, once it is here ..."""
    scores: PendingScores | None = None
    """... and the scores of its frames; None where nothing is scored."""

    @property
    def is_whole(self) -> bool:
        """Whether it can be stored."""
        return self.chunk is not None and (self.scores is None or self.scores.done)


class AsynchronousLoop(ReplayLearning):
    """An iteration is as many stored steps as in `OffPolicyLoop`; requests stay under way in between."""

    envs: EnvWorkers
    rewards: RewardWorkers | None

    def __init__(
        self, engine: Engine, learner_cfg: LearnerConfig, pace: AsynchronousConfig, *parts: Any
    ) -> None:
        """Give every env worker a copy of the policy and a replay buffer.

        Args:
            engine: of the workers.
            learner_cfg: the `learner` section.
            pace: the `asynchronous` section.
            *parts: see `ReplayLearning`.
        """
        super().__init__(*parts)
        self._engine, self._learner_cfg, self.pace = engine, learner_cfg, pace
        envs = self.envs
        self._make_streams(envs.parts)
        self.steps_per_request = steps_per_request(pace, envs.num_envs, self.section.updates_per_step)
        round_updates = self.steps_per_request * envs.num_envs * self.section.updates_per_step
        self.max_pending_updates = max(round_updates, 1.0)
        """No request is handed out while the learner owes more updates than this."""
        if engine.num_workers("rollout"):
            log.warning("cluster.component_placement.rollout is not used: env workers choose their actions")
        envs.attach(PolicySpec(cfg=learner_cfg, spaces=envs.facts.spaces), self.learner)
        self._weights: tuple[int, Pending] | None = None
        self._queue_seconds: list[float] = []
        self._lag_waits = 0

    def reset(self, seed: int) -> None:
        """Begin new episodes; those that ran are cut off, and what is under way counts for nothing."""
        if self.streams[0].obs is not None:
            self.truncate_running_episodes()
        for stream, obs in zip(self.streams, self.envs.reset(seed, self.env_steps), strict=True):
            stream.reset(obs)
        if self.online is not None:
            self.online.reset()

    # An iteration

    def advance(self, progress: float) -> Iteration:
        """A stretch of stored steps and updates; before a checkpoint nothing is left under way or owed."""
        clock, train, steps_before = Stopwatch(), dict[str, float](), self.env_steps
        length = self.iteration_rows * self.envs.num_envs
        goal = (steps_before // length + 1) * length
        limit = goal if self._must_settle(steps_before, goal) else None
        self._stored, self._queue_seconds, self._lag_waits = [], [], 0
        while self.env_steps < goal or (
            limit is not None and (self._in_flight() or self._pending_updates >= 1.0)
        ):
            self._hand_out(limit)
            if self._may_update():
                train |= self._update()
                self._pending_updates -= 1.0
                clock.lap("update")
            else:
                self._lag_waits += self._pending_updates >= 1.0
                self._wait()
                clock.lap("wait")
            self._take_answers()
            clock.lap("store")
        if self.online is not None:
            self._learned_online = self.online.learn(self._new_steps(self.online))
        iteration = self._iteration(train, clock, steps_before)
        iteration.metrics.update(self._pace_metrics())
        return iteration

    def collect_steps(self) -> list[StepBatch]:
        """Not in asynchronous runs."""
        raise ConfigError("reward_model.pretrain needs steps of the policy: set asynchronous.enabled=false")

    def _new_steps(self, online: OnlineReward) -> list[StepBatch]:
        """The stored steps of each worker, [T, n]."""
        mine: dict[int, list[StepBatch]] = {}
        for item in self._stored:
            mine.setdefault(item.rank, []).append(item.chunk.steps(online.action_space))
        return [StepBatch.cat(parts) for parts in mine.values()]

    def _must_settle(self, steps_before: int, goal: int) -> bool:
        """Whether the run may save after this iteration, however far it gets."""
        reach = self.steps_per_request * self.envs.num_envs * self.pace.max_in_flight
        every = self._learner_cfg.save_interval
        end = goal + reach
        return end // every > steps_before // every or end >= self._learner_cfg.total_steps

    def _pace_metrics(self) -> dict[str, float]:
        lags = [item.policy_lag for item in self._stored]
        return {
            "async/policy_lag_mean": float(np.mean(lags)),
            "async/policy_lag_max": float(np.max(lags)),
            "async/queue_seconds": float(np.mean(self._queue_seconds)),
            "async/act_seconds": float(np.mean([item.chunk.seconds for item in self._stored])),
            "async/pending_updates": self._pending_updates,
            "async/lag_waits": float(self._lag_waits),
        }

    # Requests

    def _in_flight(self) -> int:
        return sum(len(worker.requests) for worker in self.streams)

    def _steps_asked(self) -> int:
        """Environment steps that are stored or under way."""
        under_way = [item.num_steps * stream.num_envs for stream in self.streams for item in stream.requests]
        return self.env_steps + sum(map(int, under_way))

    def _hand_out(self, limit: int | None) -> None:
        """Ask for steps, those with the fewest requests first, as far as the learner keeps up."""
        if self._pending_updates > self.max_pending_updates:
            return
        for depth in range(self.pace.max_in_flight):
            for worker in self.streams:
                if len(worker.requests) == depth:
                    self._ask(worker, limit)

    def _ask(self, worker: EnvStream, limit: int | None) -> None:
        asked, num_steps = self._steps_asked(), self.steps_per_request
        if limit is not None:
            num_steps = min(num_steps, -(-(limit - asked) // worker.num_envs))
        if num_steps < 1:
            return
        version, random_steps = self.learner.num_updates, 0
        if self.prior is None:
            random_steps = max(-(-(self.section.learning_starts - asked) // worker.num_envs), 0)
        weights = None if worker.version == version else self._current_weights()
        progress = min(asked / self._learner_cfg.total_steps, 1.0)
        request = (num_steps, version, weights, random_steps, progress)
        pair = self.envs.group.submit_pair(worker.rank, "act", *request)
        worker.version = version
        worker.requests.append(Request(num_steps, version, *pair))

    def _current_weights(self) -> Pending:
        """The policy as it is now, made once for all workers."""
        if self._weights is None or self._weights[0] != self.learner.num_updates:
            self._weights = self.learner.num_updates, self._engine.put(self.learner.policy_state())
        return self._weights[1]

    def _may_update(self) -> bool:
        """Whether an update is due and leaves all requests within the bound on the policy's lag."""
        if self._pending_updates < 1.0:
            return False
        acting = [worker.requests[0].version for worker in self.streams if worker.requests]
        return not acting or self.learner.num_updates - min(acting) < self.pace.max_policy_lag

    # Answers

    def _expected(self) -> list[tuple[EnvStream, Request]]:
        """The next answer of each env worker."""
        return [
            (worker, request)
            for worker in self.streams
            for request in [item for item in worker.requests if item.chunk is None][:1]
        ]

    def _wait(self) -> None:
        """Until an env worker or a reward worker has answered, or a reward worker took too long."""
        pending = [request.answer for _, request in self._expected()]
        patience = None
        if self.rewards is not None:
            pending += self.rewards.pending()
            patience = self.rewards.patience()
        if not pending:
            raise RuntimeError("the learner waits for steps that nobody was asked for")
        self.envs.group.first_ready(pending, patience)

    def _take_answers(self) -> None:
        """Take what is there: chunks go on to be scored, scored ones are stored, each worker's in order."""
        while expected := self._expected():
            first = self.envs.group.first_ready([request.answer for _, request in expected], 0.0)
            if first is None:
                break
            self._receive(*expected[first])
        if self.rewards is not None:
            self.rewards.pump(wait=False)
        for worker in self.streams:
            while worker.requests and worker.requests[0].is_whole:
                try:
                    self._store_request(worker, worker.requests[0])
                except FramesLostError:
                    reason = "its machine has gone with the frames it made"
                    self._replace(worker, WorkerLostError("env", worker.rank, reason))

    def _receive(self, worker: EnvStream, request: Request) -> None:
        """An answer is there; its frames go on to be scored."""
        try:
            request.chunk = request.answer.result()
        except WorkerLostError as error:
            self._store_delivered(worker)
            self._replace(worker, WorkerLostError("env", worker.rank, error.reason))
            return
        except GuerdonError:
            for each in self.streams:  # the state that is saved has all that came before
                self._store_delivered(each)
            raise
        assert request.chunk is not None
        self.envs.group.answered(worker.rank)
        if self.rewards is not None:
            request.scores = self.rewards.score_later(request.frames, len(request.chunk.rows))

    def _store_delivered(self, worker: EnvStream) -> None:
        """Wait for the verdicts on chunks that are here and store them, unless their frames are lost."""
        while worker.requests and worker.requests[0].chunk is not None:
            while not worker.requests[0].is_whole:
                assert self.rewards is not None
                self.rewards.pump(wait=True)
            try:
                self._store_request(worker, worker.requests[0])
            except FramesLostError:
                log.warning("steps of env worker %d are lost, because their frames are lost", worker.rank)
                return

    def _replace(self, worker: EnvStream, error: WorkerLostError) -> None:
        """A worker is lost: what was stored stays, what was under way counts for nothing."""
        worker.replay.truncate_running_episodes(worker.obs)
        begun = self.envs.restart_acting(worker.rank, error, self.env_steps, len(worker.requests))
        worker.reset(begun)
        if self.online is not None:
            self.online.reset(worker.rank)

    def _store_request(self, stream: EnvStream, request: Request) -> None:
        """Put a scored chunk into the replay buffer; raises if its frames were lost."""
        chunk = request.chunk
        assert chunk is not None
        if chunk.first_step != stream.stored_steps or chunk.policy_version != request.version:
            raise WorkerError(
                f"env worker {stream.rank} sent steps from {chunk.first_step} on with version "
                f"{chunk.policy_version}; expected are {stream.stored_steps} and {request.version}"
            )
        scores = None if request.scores is None else request.scores.result()
        stream.requests.popleft()
        self._store(stream, chunk, request.frames, scores)
        self._count(len(chunk), stream.num_envs)
        self._queue_seconds.append(max(time.monotonic() - request.began - chunk.seconds, 0.0))

    def _count(self, num_steps: int, num_envs: int) -> None:
        """Steps of some environments are stored; updates are owed for those after the start of learning."""
        before = -(-(self.section.learning_starts - self.env_steps) // num_envs) - 1
        late = num_steps - min(max(before, 0), num_steps)
        self.env_steps += num_steps * num_envs
        if late:
            self._add_pending_updates(late * num_envs)

    # State

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """As of every off-policy run, and how batches are shared out among the buffers of the workers."""
        return {**super().state_dict(folder), "parts_rng": self.replay.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Go on from `state_dict`; a synchronous run has one buffer, and nothing to share out."""
        super().load_state_dict(state, folder)
        if "parts_rng" in state:
            self.replay.rng.bit_generator.state = state["parts_rng"]
        elif len(self.replay.parts) > 1:
            log.warning(
                "the checkpoint is of an older version: batches are sampled in another order than before"
            )


def steps_per_request(pace: AsynchronousConfig, num_envs: int, updates_per_step: float) -> int:
    """Steps of each environment in a request.

    While a request is under way, the learner does the updates of about `max_in_flight` rounds of requests.
    Requests are made so small that this stays within `max_policy_lag`, if one step does.
    """
    round_updates = pace.max_in_flight * num_envs * updates_per_step
    return max(min(pace.steps_per_request, int(pace.max_policy_lag / round_updates)), 1)
