"""Env workers as a run sees them: one set of environments, wherever they are and in however many processes.

Here is also what happens when a worker is lost. A rollout counts when it has reached this process, whole. If
a worker goes before that, its environments begin new episodes and play the rollout again; what the others
have delivered is kept. So no episode is counted twice, and none that was delivered is lost.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.config import CollectConfig, EnvConfig, RewardConfig
from guerdon.core.errors import ConfigError, WorkerLostError
from guerdon.distributed.engine import Engine, Group, LocalGroup, Pending, RestartCounter, WorkerSpec
from guerdon.distributed.placement import divide
from guerdon.rewards.image.worker import ImageRewardWorker
from guerdon.training.acting import EnvStep, PolicySpec, RolloutWorker, make_rollout_worker
from guerdon.training.env_worker import EnvFacts, EnvWorker, WorkerRollout
from guerdon.training.reward_workers import StreamingScorer

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
        cameras: Sequence[str],
        num_steps: int,
        seed: int,
        num_frames: int = 1,
        only_at_rest: bool = False,
        keep_next_obs: bool = False,
    ) -> None:
        """Divide the environments over the workers that the settings ask for; see `EnvWorker`."""
        count = engine.num_workers("env")
        if cfg.num_envs < count:
            raise ConfigError(f"{count} env workers cannot share env.train.num_envs={cfg.num_envs}")
        self.num_envs, self.parts = cfg.num_envs, divide(cfg.num_envs, count)
        threads = max(torch.get_num_threads() // engine.workers_beside("env"), 1)
        specs = []
        for start, stop in self.parts:
            mine = {
                "first_env": start,
                "total_envs": cfg.num_envs,
                "cameras": cameras,
                "num_steps": num_steps,
                "num_frames": num_frames,
                "only_at_rest": only_at_rest,
                "keep_next_obs": keep_next_obs,
            }
            section = replace(cfg, num_envs=stop - start)
            share = (start, stop, cfg.num_envs)
            args = (section, _reward_share(reward, share), _collect_share(collect, share))
            specs.append(WorkerSpec(cls=EnvWorker, args=args, kwargs=mine, threads=threads))
        self._engine, self._seed = engine, seed
        self.group = engine.group("env", specs)
        self.rollout_group: Group | None = None
        self.facts: EnvFacts = copy.deepcopy(self.group.submit(0, "describe").result())
        self.rollouts_lost = 0
        self._counter, self._rollout_counter = RestartCounter("env"), RestartCounter("rollout")
        self._steps_done = 0
        self._policy: PolicySpec | RolloutWorker | None = None
        self._taken: dict[int, EnvStep] = {}

    @property
    def local(self) -> EnvWorker:
        """The worker in this process."""
        assert isinstance(self.group, LocalGroup)
        worker: EnvWorker = self.group.workers[0]
        return worker

    def attach(self, policy: PolicySpec, learner: RolloutWorker) -> None:
        """Give the workers a policy for rollouts: in this process the learner itself, elsewhere copies."""
        self._policy = learner if self._engine.shares_memory else policy
        count = self._engine.num_workers("rollout")
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

    def score_while_stepping(self, worker: ImageRewardWorker) -> StreamingScorer:
        """Let a reward worker of this process judge frames while rollouts go on."""
        kept = self.local.reward_frames
        assert kept is not None
        kept.streaming = StreamingScorer(worker)
        return kept.streaming

    def score_after_rollout(self) -> None:
        """Undo `score_while_stepping`."""
        kept = self.local.reward_frames
        assert kept is not None
        if kept.streaming is not None:
            kept.streaming.close()
        kept.streaming = None

    def reset(self, seed: int, env_steps: int) -> None:
        """Begin new episodes everywhere, for rollouts."""
        self._reset_all(seed, env_steps, "reset")

    def reset_obs(self, seed: int, env_steps: int) -> Any:
        """Begin new episodes everywhere; returns the observations [N, ...], for stepping by hand."""
        return _side_by_side(self._reset_all(seed, env_steps, "reset_obs"))

    def _reset_all(self, seed: int, env_steps: int, method: str) -> list[Any]:
        self._steps_done = env_steps
        answers: list[Any] = []
        pending = [self.group.submit(rank, method, seed) for rank in range(self.group.size)]
        for rank, item in enumerate(pending):
            try:
                answers.append(item.result())
            except WorkerLostError as error:
                answers.append(self._revive(rank, error, method, seed))
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
        rank = self.parts.index((lost.start, lost.stop))
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
                self._counter.answered(rank)
                if self.rollout_group is not None:
                    self._rollout_counter.answered(rank % self.rollout_group.size)
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
        self._rollout_counter.lost(error)
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
                    self._new_episodes(rank, "reset")
                except WorkerLostError as other:
                    self._revive(rank, other, "reset")
            else:
                self._revive(rank, error, "reset")

    def _revive(self, rank: int, error: WorkerLostError, method: str, seed: int | None = None) -> Any:
        """Replace an env worker and begin its episodes; also if it is lost again meanwhile."""
        while True:
            self._counter.lost(error)
            self.group.restart(rank, error.reason)
            try:
                if self._policy is not None:
                    self._attach(rank).result()
                return self._new_episodes(rank, method, seed)
            except WorkerLostError as other:
                error = other

    def _new_episodes(self, rank: int, method: str, seed: int | None = None) -> Any:
        """With a seed that follows from that of the run, the step, and how often workers were lost."""
        if seed is None:
            restarts = sum(self._engine.restarts.values())
            entropy = [self._seed, self._steps_done, restarts, rank]
            seed = int(np.random.SeedSequence(entropy).generate_state(1)[0] >> 2)
        return self.group.submit(rank, method, seed).result()

    # Steps by hand

    def step(
        self, actions: NDArray[Any], env_steps: int, *, still: Sequence[int] | None = None
    ) -> tuple[EnvStep | None, dict[int, Any]]:
        """One step of all environments.

        Args:
            actions: [N, ...].
            env_steps: steps of the run so far.
            still: ranks of the workers that have not taken this step yet; None: none has.

        Returns:
            What came of it, and nothing else; or None and, by rank, the first observations of workers that
            were lost and started again. Their episodes were truncated before this step; it is complete when
            they have taken it too, with new actions (`still`).
        """
        self._steps_done = env_steps
        if still is None:
            self._taken, still = {}, range(self.group.size)
        pending = {rank: self.group.submit(rank, "step", actions[slice(*self.parts[rank])]) for rank in still}
        fresh: dict[int, Any] = {}
        for rank, item in pending.items():
            try:
                self._taken[rank] = item.result()
                self._counter.answered(rank)
            except WorkerLostError as error:
                fresh[rank] = self._revive(rank, error, "reset_obs")
        return (None if fresh else self._joined()), fresh

    def _joined(self) -> EnvStep:
        """The steps of all workers side by side."""
        steps = [self._taken[rank] for rank in range(self.group.size)]
        if len(steps) == 1:
            one = steps[0]
            return replace(one, obs=_side_by_side([one.obs]), next_obs=_side_by_side([one.next_obs]))
        names = ["env_rewards", "terminated", "truncated", "success"]
        if all(item.intervened is not None for item in steps):
            names += ["actions", "intervened"]
        rows = [item.rows + start for item, (start, _) in zip(steps, self.parts, strict=True)]
        judged = [item.frames for item in steps if item.frames]
        return EnvStep(
            obs=_side_by_side([item.obs for item in steps]),
            next_obs=_side_by_side([item.next_obs for item in steps]),
            rows=np.concatenate(rows),
            frames={k: np.concatenate([each[k] for each in judged]) for k in (judged[0] if judged else {})},
            num_rendered=sum(item.num_rendered for item in steps),
            **{name: np.concatenate([getattr(item, name) for item in steps]) for name in names},
        )

    # Workers that act on their own

    def attach_copies(self, policy: PolicySpec) -> None:
        """Give every worker a copy of the policy for `act`."""
        self._policy = policy
        for rank in range(self.group.size):
            self._attach(rank).result()

    def reset_acting(self, seed: int, env_steps: int) -> list[Any]:
        """Begin new episodes everywhere; returns the observations of each worker."""
        return self._reset_all(seed, env_steps, "reset_acting")

    def act(self, rank: int, *request: Any) -> tuple[Pending, Pending]:
        """Ask a worker for a chunk, and for its frames apart; see `EnvWorker.act`."""
        return self.group.submit_pair(rank, "act", *request)

    def delivered(self, rank: int) -> None:
        """A worker's chunk is here."""
        self._counter.answered(rank)

    def restart_acting(self, rank: int, error: WorkerLostError, env_steps: int, num_requests: int) -> Any:
        """Replace a worker that was lost with its requests; returns the first observations of the new one."""
        self._steps_done = env_steps
        self.rollouts_lost += num_requests
        return self._revive(rank, error, "reset_acting")

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


def _side_by_side(parts: Sequence[Any]) -> Any:
    """Observations of several workers, arrays or mappings of arrays, as one batch that may be written to."""
    if isinstance(parts[0], dict):
        return {name: _side_by_side([part[name] for part in parts]) for name in parts[0]}
    if len(parts) == 1 and (not isinstance(parts[0], np.ndarray) or parts[0].flags.writeable):
        return parts[0]
    return np.concatenate([np.asarray(part) for part in parts])


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
