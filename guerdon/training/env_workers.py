"""Env workers of other processes or threads as a run sees them: one set of environments.

Here is also what happens when a worker is lost. A rollout counts when it has reached this process, whole. If
a worker goes before that, its environments begin new episodes and play the rollout again; what the others
have delivered is kept. So no episode is counted twice, and none that was delivered is lost.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.config import CollectConfig, EnvConfig, RewardConfig
from guerdon.core.batches import StepChunk, WorkerRollout
from guerdon.core.errors import ConfigError, WorkerLostError
from guerdon.distributed.engine import Engine, Group, Pending, WorkerSpec
from guerdon.distributed.local_engine import LocalGroup
from guerdon.distributed.placement import divide
from guerdon.training.acting import PolicySpec, make_rollout_worker
from guerdon.training.env_setup import EnvFacts
from guerdon.training.env_worker import EnvWorker, Frames

log = logging.getLogger("guerdon")

CLOSE_SECONDS = 60.0
"""How long workers may take to finish writing."""


class EnvWorkers:
    """All env workers of a run, and the rollout workers where these are apart."""

    def __init__(
        self,
        engine: Engine,
        cfg: EnvConfig,
        reward: RewardConfig,
        collect: CollectConfig,
        *,
        seed: int,
        **worker: Any,
    ) -> None:
        """Divide the environments over the workers that the settings ask for.

        Args:
            engine: makes the workers.
            cfg: the `env.train` section.
            reward: the `reward` section.
            collect: the `collect` section.
            seed: of the run.
            **worker: further arguments of `EnvWorker`.
        """
        count = engine.num_workers("env")
        if cfg.num_envs < count:
            raise ConfigError(f"{count} env workers cannot share env.train.num_envs={cfg.num_envs}")
        self.num_envs, self.parts = cfg.num_envs, divide(cfg.num_envs, count)
        threads = max(torch.get_num_threads() // engine.workers_beside("env"), 1)
        specs = []
        for start, stop in self.parts:
            mine = {"first_env": start, "total_envs": cfg.num_envs, **worker}
            section = replace(cfg, num_envs=stop - start)
            share = (start, stop, cfg.num_envs)
            args = (section, _reward_share(reward, share), _collect_share(collect, share))
            specs.append(WorkerSpec(cls=EnvWorker, args=args, kwargs=mine, threads=threads))
        self._engine, self._seed = engine, seed
        self.group = engine.group("env", specs)
        self.rollout_group: Group | None = None
        self.facts: EnvFacts = copy.deepcopy(self.group.submit(0, "describe").result())
        self.rollouts_lost = 0
        self._steps_done = 0
        self._policy: PolicySpec | None = None
        self._taken: dict[int, tuple[StepChunk, Frames]] = {}

    @property
    def local(self) -> EnvWorker:
        """The worker in this process."""
        assert isinstance(self.group, LocalGroup)
        worker: EnvWorker = self.group.workers[0]
        return worker

    def attach(self, policy: PolicySpec, agent: Any = None) -> None:
        """Give every worker a copy of the policy, or, where they are apart, a rollout worker to ask."""
        self._policy = policy
        count = self._engine.num_workers("rollout") if agent is not None and agent.on_policy else 0
        if count:
            threads = max(torch.get_num_threads() // self._engine.workers_beside("rollout"), 1)
            spec = WorkerSpec(cls=make_rollout_worker, args=(policy,), threads=threads)
            self.rollout_group = self._engine.group("rollout", [spec] * count)
        for rank in range(self.group.size):
            self._attach(rank).result()

    def _attach(self, rank: int) -> Pending:
        if self.rollout_group is not None:
            return self.group.submit(
                rank, "attach", self.rollout_group.handle(rank % self.rollout_group.size)
            )
        return self.group.submit(rank, "attach", self._policy)

    def reset(self, seed: int, env_steps: int) -> list[Any]:
        """Begin new episodes everywhere; returns the observations [n, ...] of each worker."""
        self._steps_done = env_steps
        answers: list[Any] = []
        pending = [self.group.submit(rank, "reset", seed) for rank in range(self.group.size)]
        for rank, item in enumerate(pending):
            try:
                answers.append(item.result())
            except WorkerLostError as error:
                answers.append(self._revive(rank, error, seed))
        return answers

    # Rollouts

    def rollouts(self, version: int, weights: Pending | None, env_steps: int) -> list[WorkerRollout]:
        """A rollout of every worker with the same policy; lost workers are replaced and play again."""
        self._steps_done = env_steps
        done: dict[int, WorkerRollout] = {}
        while len(done) < self.group.size:
            missing = [rank for rank in range(self.group.size) if rank not in done]
            self._play(missing, version, weights, done)
        return [done[rank] for rank in range(self.group.size)]

    def again(self, lost: WorkerRollout, version: int, weights: Pending | None) -> WorkerRollout:
        """Play a rollout again whose frames went with their machine."""
        rank = self.parts.index((lost.first_env, lost.first_env + lost.num_envs))
        error = WorkerLostError("env", rank, "its machine has gone with the frames it made")
        self._recover({rank: error})
        done: dict[int, WorkerRollout] = {}
        while not done:
            self._play([rank], version, weights, done)
        return done[rank]

    def _play(
        self, ranks: Sequence[int], version: int, weights: Pending | None, done: dict[int, WorkerRollout]
    ) -> None:
        lost: dict[int, WorkerLostError] = {}
        if self.rollout_group is not None:
            self._sync(version, weights)
        given = None if self.rollout_group is not None else weights
        pairs = {rank: self.group.submit_pair(rank, "rollout", version, given) for rank in ranks}
        for rank, (played, frames) in pairs.items():
            try:
                done[rank] = replace(played.result(), frames=frames)
                self.group.answered(rank)
                if self.rollout_group is not None:
                    self.rollout_group.answered(rank % self.rollout_group.size)
            except WorkerLostError as error:
                lost[rank] = error
        if lost:
            self._recover(lost)

    def _sync(self, version: int, weights: Pending | None) -> None:
        """Give the rollout workers the weights."""
        assert self.rollout_group is not None
        group = self.rollout_group
        for rank in range(group.size):
            while True:
                try:
                    group.submit(rank, "sync", version, weights).result()
                    break
                except WorkerLostError as error:
                    self._restart_rollout(rank, error)

    def _restart_rollout(self, rank: int, error: WorkerLostError) -> None:
        """Replace a rollout worker and tell the env workers; those of its env workers that wait are lost."""
        assert self.rollout_group is not None
        self.rollout_group.restart(rank, error.reason)
        for env_rank in range(rank, self.group.size, self.rollout_group.size):
            self._attach(env_rank)

    def _recover(self, lost: dict[int, WorkerLostError]) -> None:
        """Replace what was lost, once each, and begin new episodes where rollouts broke off."""
        for rank in sorted({error.rank for error in lost.values() if error.role == "rollout"}):
            self._restart_rollout(
                rank, next(e for e in lost.values() if (e.role, e.rank) == ("rollout", rank))
            )
        for rank, error in lost.items():
            self.rollouts_lost += 1
            if error.role == "rollout":
                try:
                    self._new_episodes(rank)
                except WorkerLostError as other:
                    self._revive(rank, other)
            else:
                self._revive(rank, error)

    def _revive(self, rank: int, error: WorkerLostError, seed: int | None = None) -> Any:
        """Replace an env worker and begin its episodes; also if it is lost again meanwhile."""
        while True:
            self.group.restart(rank, error.reason)
            try:
                if self._policy is not None:
                    self._attach(rank).result()
                return self._new_episodes(rank, seed)
            except WorkerLostError as other:
                error = other

    def _new_episodes(self, rank: int, seed: int | None = None) -> Any:
        """With a seed that follows from that of the run, the step, and how often workers were lost."""
        if seed is None:
            restarts = sum(self._engine.restarts.values())
            entropy = [self._seed, self._steps_done, restarts, rank]
            seed = int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 2)
        return self.group.submit(rank, "reset", seed).result()

    # Single steps

    def step(
        self, actions: NDArray[Any], env_steps: int, on_lost: Callable[[dict[int, Any]], NDArray[Any]]
    ) -> tuple[StepChunk, Frames]:
        """One step of all environments, with the frames to be scored.

        Args:
            actions: [N, ...].
            env_steps: steps of the run so far.
            on_lost: takes, by rank, the first observations of workers that were lost and started again; their
                episodes were truncated before this step. Returns the actions [N, ...] that they take.
        """
        self._steps_done = env_steps
        ranks = list(range(self.group.size))
        while ranks:
            pending = {
                rank: self.group.submit(rank, "step", actions[slice(*self.parts[rank])]) for rank in ranks
            }
            fresh: dict[int, Any] = {}
            for rank, item in pending.items():
                try:
                    self._taken[rank] = item.result()
                    self.group.answered(rank)
                except WorkerLostError as error:
                    fresh[rank] = self._revive(rank, error)
            if fresh:
                actions = on_lost(fresh)
            ranks = list(fresh)
        return self._joined()

    def _joined(self) -> tuple[StepChunk, Frames]:
        """The steps of all workers side by side."""
        steps = [self._taken[rank] for rank in range(self.group.size)]
        chunks, frames = [chunk for chunk, _ in steps], [shown for _, shown in steps if shown]
        names = ["actions", "env_rewards", "terminated", "truncated", "success"]
        if all(item.intervened is not None for item in chunks):
            names.append("intervened")
        rows = [item.rows + start for item, (start, _) in zip(chunks, self.parts, strict=True)]
        after = [item.final_obs.get(0, item.last_obs) for item in chunks]
        ended = any(item.final_obs for item in chunks)
        values: dict[str, Any] = {
            name: np.concatenate([getattr(item, name) for item in chunks], axis=1) for name in names
        }
        return StepChunk(
            obs=side_by_side([item.obs for item in chunks], axis=1),
            final_obs={0: side_by_side(after)} if ended else {},
            last_obs=side_by_side([item.last_obs for item in chunks]),
            rows=np.concatenate(rows),
            num_rendered=sum(item.num_rendered for item in chunks),
            **values,
        ), side_by_side(frames) if frames else {}

    # Workers that act on their own

    def restart_acting(self, rank: int, error: WorkerLostError, env_steps: int, num_requests: int) -> Any:
        """Replace a worker that was lost with its requests; returns the first observations of the new one."""
        self._steps_done = env_steps
        self.rollouts_lost += num_requests
        return self._revive(rank, error)

    def fault_metrics(self) -> dict[str, float]:
        """What was lost so far in this run, all roles together; nothing if nothing was."""
        restarts = self._engine.restarts
        if not restarts and not self.rollouts_lost:
            return {}
        named = {f"fault/{role}_restarts": float(count) for role, count in restarts.items()}
        return {"fault/restarts": float(sum(restarts.values())), **named} | (
            {"fault/rollouts_lost": float(self.rollouts_lost)} if self.rollouts_lost else {}
        )

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let the workers finish writing and close their environments."""
        pending = [self.group.submit(rank, "close") for rank in range(self.group.size)]
        for item in pending:
            try:
                item.result(seconds)
            except WorkerLostError as error:
                log.warning("while closing: %s", error)


def side_by_side(parts: Sequence[Any], axis: int = 0) -> Any:
    """Observations of several workers, arrays or mappings of arrays, as one batch that may be written to."""
    if isinstance(parts[0], dict):
        return {name: side_by_side([part[name] for part in parts], axis) for name in parts[0]}
    if len(parts) == 1 and (not isinstance(parts[0], np.ndarray) or parts[0].flags.writeable):
        return parts[0]
    return np.concatenate([np.asarray(part) for part in parts], axis)


def _limit(total: int | None, share: tuple[int, int, int]) -> int | None:
    """A worker's part of a limit, so that the parts add up to it."""
    start, stop, count = share
    return None if total is None else total * stop // count - total * start // count


def _collect_share(collect: CollectConfig, share: tuple[int, int, int]) -> CollectConfig:
    success, failure = (_limit(each, share) or 0 for each in (collect.target_success, collect.target_failure))
    return replace(collect, target_success=success, target_failure=failure)


def _reward_share(reward: RewardConfig, share: tuple[int, int, int]) -> RewardConfig:
    section = reward.data_collection
    mine = replace(
        section,
        max_positive_trajectories=_limit(section.max_positive_trajectories, share),
        max_negative_trajectories=_limit(section.max_negative_trajectories, share),
    )
    return replace(reward, data_collection=mine)
