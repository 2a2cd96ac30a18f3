"""SAC and DQN with acting, scores and learning side by side, each at its own pace.

A *request* asks an env worker for some steps with weights of a certain version. Its answer, a chunk, stays
under way until a reward worker has judged the frames and the learner has stored the steps. There are no
queues beside these requests: each worker has at most `max_in_flight` of them, none is handed out while the
learner is behind with its updates, and the learner waits for steps rather than run away from the weights that
act. So memory and staleness are bounded whoever is slow.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.agents.episodes import EpisodeTracker
from guerdon.agents.networks import STATE
from guerdon.agents.replay_parts import ReplayParts
from guerdon.config import AsynchronousConfig
from guerdon.core.errors import GuerdonError, WorkerError, WorkerLostError
from guerdon.core.types import BoolArray
from guerdon.distributed.engine import Engine, Pending
from guerdon.rewards.relabel import learned_rewards
from guerdon.rewards.steps import StepBatch
from guerdon.training.acting import PolicySpec, StepChunk
from guerdon.training.interventions import store_interventions
from guerdon.training.loop import Iteration, Stopwatch, episode_metrics, fill_scores, frame_metrics
from guerdon.training.replay_learning import ITERATION_STEPS, LearningParts, ReplayLearning
from guerdon.training.requests import Request, StoredChunk, WorkerState, watch
from guerdon.training.reward_workers import FramesLostError

log = logging.getLogger("guerdon")


class AsynchronousLoop(ReplayLearning[ReplayParts]):
    """An iteration is as many stored steps as in `OffPolicyLoop`; requests stay under way in between."""

    def __init__(self, engine: Engine, parts: LearningParts, pace: AsynchronousConfig) -> None:
        super().__init__(parts)
        self._engine, self._learner_cfg, self.pace = engine, parts.learner_cfg, pace
        envs, seed = self.envs, parts.seed
        self.workers: list[WorkerState] = []
        for rank, (start, stop) in enumerate(envs.parts):
            count = stop - start
            room = self.section.buffer_size * count // envs.num_envs
            replay, episodes = self._make_replay(count, room, seed + rank), EpisodeTracker(count)
            self.workers.append(WorkerState(rank, start, count, replay, episodes))
        self.replay = ReplayParts([worker.replay for worker in self.workers], seed=seed)
        self.steps_per_request = steps_per_request(pace, envs.num_envs, self.section.updates_per_step)
        round_updates = self.steps_per_request * envs.num_envs * self.section.updates_per_step
        self.max_pending_updates = max(round_updates, 1.0)
        """No request is handed out while the learner owes more updates than this."""
        if engine.num_workers("rollout"):
            log.warning("cluster.component_placement.rollout is not used: env workers choose their actions")
        envs.attach_copies(PolicySpec(cfg=parts.learner_cfg, spaces=parts.spaces))
        self._weights: tuple[int, Pending] | None = None
        self._stored: list[StoredChunk] = []
        self._lag_waits = 0

    def reset(self, seed: int) -> None:
        """Begin new episodes; those that ran are cut off, and what is under way counts for nothing."""
        if self.workers[0].obs is not None:
            self.truncate_running_episodes()
        for worker, obs in zip(self.workers, self.envs.reset_acting(seed, self.env_steps), strict=True):
            worker.reset(obs)
        if self.online is not None:
            self.online.reset()

    def truncate_running_episodes(self) -> None:
        """The running episodes will not go on, from the latest stored step of each."""
        for worker in self.workers:
            worker.requests.clear()
            worker.replay.cut(worker.obs)

    # An iteration

    def advance(self, progress: float) -> Iteration:
        """A stretch of stored steps and updates; before a checkpoint nothing is left under way or owed."""
        clock, train, begin = Stopwatch(), dict[str, float](), self.env_steps
        length = -(-ITERATION_STEPS // self.envs.num_envs) * self.envs.num_envs
        goal = (begin // length + 1) * length
        limit = goal if self._must_settle(begin, goal) else None
        self._stored, self._lag_waits = [], 0
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
        metrics = {f"train/{name}": value for name, value in train.items()}
        metrics |= episode_metrics([record for worker in self.workers for record in worker.records()])
        metrics |= clock.metrics(self.env_steps - begin) | self.envs.fault_metrics() | self._pace_metrics()
        metrics |= self._intervention_metrics()
        if self.online is not None:
            metrics |= self.online.learn([self._steps_of(item.chunk) for item in self._stored])
        joined = {name: _flat(self._stored, name) for name in ("env_rewards", "done", "success")}
        if self.rewards is None:
            return Iteration(metrics=metrics | self._unscored_metrics(joined["env_rewards"]))
        joined["prob_success"] = _flat(self._stored, "prob_success")
        watched = watch(self._stored, self.envs.parts, self.rewards, self.env_steps, self.knows_success())
        metrics |= frame_metrics(
            sum(item.chunk.num_rendered for item in self._stored),
            sum(len(item.chunk.rows) for item in self._stored),
        )
        return Iteration(metrics=metrics | self._judged_metrics(joined), watched=watched)

    def _must_settle(self, begin: int, goal: int) -> bool:
        """Whether the run may save after this iteration, however far it gets."""
        reach = self.steps_per_request * self.envs.num_envs * self.pace.max_in_flight
        every = self._learner_cfg.save_interval
        return (goal + reach) // every > begin // every or goal + reach >= self._learner_cfg.total_steps

    def _pace_metrics(self) -> dict[str, float]:
        lags = [item.policy_lag for item in self._stored]
        return {
            "async/policy_lag_mean": float(np.mean(lags)),
            "async/policy_lag_max": float(np.max(lags)),
            "async/queue_seconds": float(np.mean([item.queue_seconds for item in self._stored])),
            "async/act_seconds": float(np.mean([item.chunk.seconds for item in self._stored])),
            "async/updates_owed": self._pending_updates,
            "async/lag_waits": float(self._lag_waits),
        }

    def _intervention_metrics(self) -> dict[str, float]:
        """How much people did of this iteration's steps; nothing where nobody can step in."""
        flags = [item.chunk.intervened for item in self._stored if item.chunk.intervened is not None]
        if not flags:
            return {}
        kept = 0 if self.interventions is None else len(self.interventions)
        return {
            "env/intervened": float(np.concatenate([part.reshape(-1) for part in flags]).mean()),
            "env/interventions_kept": float(kept),
        }

    # Requests

    def _in_flight(self) -> int:
        return sum(len(worker.requests) for worker in self.workers)

    def _steps_asked(self) -> int:
        """Environment steps that are stored or under way."""
        under_way = sum(
            request.num_steps * worker.num_envs for worker in self.workers for request in worker.requests
        )
        return self.env_steps + under_way

    def _hand_out(self, limit: int | None) -> None:
        """Ask for steps, those with the fewest requests first, as far as the learner keeps up."""
        if self._pending_updates > self.max_pending_updates:
            return
        for depth in range(self.pace.max_in_flight):
            for worker in self.workers:
                if len(worker.requests) == depth:
                    self._ask(worker, limit)

    def _ask(self, worker: WorkerState, limit: int | None) -> None:
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
        pair = self.envs.act(worker.rank, num_steps, version, weights, random_steps, progress)
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
        acting = [worker.requests[0].version for worker in self.workers if worker.requests]
        return not acting or self.learner.num_updates - min(acting) < self.pace.max_policy_lag

    # Answers

    def _expected(self) -> list[tuple[WorkerState, Request]]:
        """The next answer of each env worker."""
        return [
            (worker, request)
            for worker in self.workers
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
        """Take what is there: chunks go on to be judged, judged ones are stored, each worker's in order."""
        while expected := self._expected():
            first = self.envs.group.first_ready([request.answer for _, request in expected], 0.0)
            if first is None:
                break
            self._receive(*expected[first])
        if self.rewards is not None:
            self.rewards.pump(wait=False)
        for worker in self.workers:
            while worker.requests and worker.requests[0].is_whole:
                try:
                    self._store(worker, worker.requests[0])
                except FramesLostError:
                    reason = "its machine has gone with the frames it made"
                    self._replace(worker, WorkerLostError("env", worker.rank, reason))

    def _receive(self, worker: WorkerState, request: Request) -> None:
        """An answer is there; its frames go on to be judged."""
        try:
            request.chunk = request.answer.result()
        except WorkerLostError as error:
            self._store_delivered(worker)
            self._replace(worker, WorkerLostError("env", worker.rank, error.reason))
            return
        except GuerdonError:
            for each in self.workers:  # the state that is saved has all that came before
                self._store_delivered(each)
            raise
        assert request.chunk is not None
        self.envs.delivered(worker.rank)
        if self.rewards is not None:
            request.scores = self.rewards.score_later(request.frames, len(request.chunk.rows))

    def _store_delivered(self, worker: WorkerState) -> None:
        """Wait for the verdicts on chunks that are here and store them, unless their frames are lost."""
        while worker.requests and worker.requests[0].chunk is not None:
            while not worker.requests[0].is_whole:
                assert self.rewards is not None
                self.rewards.pump(wait=True)
            try:
                self._store(worker, worker.requests[0])
            except FramesLostError:
                log.warning("steps of env worker %d are lost with the frames they led to", worker.rank)
                return

    def _replace(self, worker: WorkerState, error: WorkerLostError) -> None:
        """A worker is lost: what was stored stays, what was under way counts for nothing."""
        worker.replay.cut(worker.obs)
        begun = self.envs.restart_acting(worker.rank, error, self.env_steps, len(worker.requests))
        worker.reset(begun)
        if self.online is not None:
            self.online.reset(worker.rank)

    def _store(self, worker: WorkerState, request: Request) -> None:
        """Put a judged chunk into the replay buffer and note it; raises if its frames were lost."""
        chunk = request.chunk
        assert chunk is not None
        if chunk.first_step != worker.stored_steps or chunk.policy_version != request.version:
            raise WorkerError(
                f"env worker {worker.rank} sent steps from {chunk.first_step} on with version "
                f"{chunk.policy_version}; expected are {worker.stored_steps} and {request.version}"
            )
        prob, spread = (np.full(chunk.env_rewards.shape, np.nan, np.float32) for _ in range(2))
        if request.scores is not None:
            verdict = request.scores.result()
            prob.reshape(-1)[chunk.rows] = verdict.prob_success
            spread.reshape(-1)[chunk.rows] = verdict.disagreement
        worker.requests.popleft()
        done = chunk.terminated | chunk.truncated
        if self.rewards is not None:
            resting = self.rewards.facts.contract.only_at_rest
            prob = fill_scores(prob, done, self.cfg, only_at_rest=resting)
            spread = fill_scores(spread, done, self.cfg)
        if self.scale is not None and self.rewards is not None:
            self.scale.update(learned_rewards(prob, done, self.cfg, self.rewards.facts.threshold))
        extras = self._extras(request, chunk, prob)
        if self.online is not None and self.online.history_dependent:
            extras["online_rewards"] = self.online.stream_rewards(self._steps_of(chunk), worker.rank)
        elapsed = worker.store(chunk, done, extras)
        self._store_interventions(chunk, done, extras)
        self._count(len(chunk), worker.num_envs)
        self._stored.append(
            StoredChunk(
                rank=worker.rank,
                chunk=chunk,
                frames=request.frames,
                done=done,
                prob_success=prob,
                disagreement=spread,
                elapsed=elapsed,
                policy_lag=self.learner.num_updates - chunk.policy_version,
                queue_seconds=max(time.monotonic() - request.began - chunk.seconds, 0.0),
                reward_version=None if self.rewards is None else self.rewards.facts.version,
            )
        )

    def _store_interventions(
        self, chunk: StepChunk, done: BoolArray, extras: dict[str, NDArray[Any]]
    ) -> None:
        """What a person did in a chunk goes to the demonstrations as well."""
        if chunk.intervened is None or self.learner.prior is None:
            return
        if chunk.intervened.any():
            store_interventions(self._intervened(), chunk, done, extras)

    def _steps_of(self, chunk: StepChunk) -> StepBatch:
        """A chunk as the online reward model sees it, [K, n]."""
        assert self.online is not None
        next_obs = [chunk.final_obs.get(t, chunk.obs_after(t)) for t in range(len(chunk))]
        states = [obs[STATE] if isinstance(obs, dict) else obs for obs in next_obs]
        return self.online.of_steps(
            chunk.obs, chunk.actions, np.stack(states), chunk.env_rewards, chunk.terminated, chunk.truncated
        )

    def _count(self, num_steps: int, num_envs: int) -> None:
        """Steps of some environments are stored; updates are owed for those after the start of learning."""
        before = -(-(self.section.learning_starts - self.env_steps) // num_envs) - 1
        late = num_steps - min(max(before, 0), num_steps)
        self.env_steps += num_steps * num_envs
        if late:
            self._add_pending_updates(late * num_envs)

    def _extras(
        self, request: Request, chunk: StepChunk, prob: NDArray[np.float32]
    ) -> dict[str, NDArray[Any]]:
        """What the replay buffer keeps beside the steps, [K, n, ...] each."""
        if self.rewards is None:
            return {}
        extras: dict[str, NDArray[Any]] = {"prob_success": prob}
        if self.cfg.relabel_at == "sampling":
            frames = request.frames.result()
            for name in self._cameras:
                shape = self.rewards.facts.contract.input_sizes[name]
                kept = np.zeros((prob.size, *shape), np.uint8)
                if len(chunk.rows):
                    kept[chunk.rows] = frames[name]
                extras[f"frames/{name}"] = kept.reshape(*prob.shape, *shape)
        return extras

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
                "the checkpoint is of an older version: batches are drawn from the workers' buffers afresh"
            )


def steps_per_request(pace: AsynchronousConfig, num_envs: int, updates_per_step: float) -> int:
    """Steps of each environment in a request.

    While a request is under way, the learner does the updates of about `max_in_flight` rounds of requests.
    Requests are made so small that this stays within `max_policy_lag`, if one step does.
    """
    round_updates = pace.max_in_flight * num_envs * updates_per_step
    return max(min(pace.steps_per_request, int(pace.max_policy_lag / round_updates)), 1)


def _flat(stored: list[StoredChunk], name: str) -> NDArray[Any]:
    """One value of all steps, in a row."""
    return np.concatenate([item.value(name).reshape(-1) for item in stored])
