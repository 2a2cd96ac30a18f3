"""SAC, TD3 and DQN on the learned reward: step, score, store; sample, relabel, update.

`ReplayLearning` is what synchronous and asynchronous runs share; `OffPolicyLoop` is the synchronous one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.agents.networks import STATE
from guerdon.agents.replay import ReplayBuffer, ReplayParts
from guerdon.core.batches import ReplayBatch, StepChunk, TrainBatch
from guerdon.core.progress import Stopwatch
from guerdon.core.steps import StepBatch
from guerdon.core.streams import EnvStream
from guerdon.core.types import FloatArray
from guerdon.monitoring.reward_path import check_reward_path, drive_targets
from guerdon.rewards.image.scorer import Scores
from guerdon.rewards.relabel import (
    combine,
    ends_are_verdicts,
    fill_scores,
    learned_rewards,
    training_rewards,
    verdicts,
)
from guerdon.training.acting import random_actions
from guerdon.training.demonstrations import add_interventions
from guerdon.training.env_worker import Frames
from guerdon.training.env_workers import side_by_side
from guerdon.training.loop import (
    Iteration,
    StoredChunk,
)
from guerdon.training.online_reward import OnlineReward
from guerdon.training.replay_run import ReplayRun


class ReplayLearning(ReplayRun):
    """Stores scored steps, and learns from samples of them; how experience comes in is left to others."""

    # Storing

    def _store(self, stream: EnvStream, chunk: StepChunk, frames: Any, scores: Scores | None) -> None:
        """Put steps with their scores into the replay buffer, and note them for the log and the monitor."""
        done = chunk.done
        prob, spread = (np.full(done.shape, np.nan, np.float32) for _ in range(2))
        if scores is not None and self.rewards is not None:
            prob.reshape(-1)[chunk.rows] = scores.prob_success
            spread.reshape(-1)[chunk.rows] = scores.disagreement
            prob = verdicts(prob, chunk.success, done, self.cfg)
            facts, last = self.rewards.facts, stream.last_scores.get
            resting = facts.only_at_rest
            prob = fill_scores(prob, done, self.cfg, only_at_rest=resting, last=last("prob"))
            spread = fill_scores(spread, done, self.cfg, last=last("spread"))
            stream.last_scores = {"prob": prob[-1], "spread": spread[-1]}
            if self.scale is not None:
                self.scale.update(learned_rewards(prob, done, self.cfg, facts.threshold))
        extras = self._extras(chunk, frames, prob)
        if self.online is not None and self.online.history_dependent:
            extras["online_rewards"] = self.online.stream_rewards(
                chunk.steps(self.online.action_space), stream.rank
            )
        elapsed = stream.store(chunk, extras)
        if self.online is not None:
            self._add_hindsight(self.online, chunk, stream.rank)
        if chunk.intervened is not None and chunk.intervened.any() and self.learner.prior is not None:
            add_interventions(self._intervened(), chunk, extras)
        self._stored.append(
            StoredChunk(
                rank=stream.rank,
                first_env=stream.first_env,
                chunk=chunk,
                frames=frames,
                prob_success=prob,
                disagreement=spread,
                elapsed=elapsed,
                online_rewards=extras.get("online_rewards"),
                policy_lag=self.learner.num_updates - chunk.policy_version,
                reward_version=None if self.rewards is None else self.rewards.facts.version,
            )
        )

    def _extras(self, chunk: StepChunk, frames: Any, prob: FloatArray) -> dict[str, NDArray[Any]]:
        """What the replay buffer keeps beside the steps, [K, n, ...] each."""
        if self.rewards is None:
            return {}
        extras: dict[str, NDArray[Any]] = {"prob_success": prob}
        if self.cfg.relabel_at == "sampling":
            frames = frames if isinstance(frames, dict) else frames.result()
            for name in self._cameras:
                shape = self.rewards.facts.contract.input_sizes[name]
                kept = np.zeros((prob.size, *shape), np.uint8)
                if len(chunk.rows):
                    kept[chunk.rows] = frames[name]
                extras[f"frames/{name}"] = kept.reshape(*prob.shape, *shape)
        return extras

    def _add_hindsight(self, online: OnlineReward, chunk: StepChunk, stream: int) -> None:
        """Keep the transitions that the reward model makes of finished episodes, beside the others."""
        made = online.augment(chunk.steps(online.action_space), stream)
        if made is None:
            return
        self.replay.parts[-1].add_transitions(
            {STATE: made.obs.numpy()},
            {
                "actions": online.env_actions(made.actions).numpy(),
                "env_rewards": made.env_rewards.numpy(),
                "terminated": made.terminated.numpy(),
                "truncated": ~made.terminated.numpy(),
            },
            {STATE: made.next_obs.numpy()},
        )

    # Learning

    def _add_pending_updates(self, num_steps: int) -> None:
        """Environment steps were stored after the start of learning; their updates are due."""
        if not self._pending_updates and not self.learner.num_updates:
            self._pending_updates += self.learner.num_first_updates
        self._pending_updates += self.section.updates_per_step * num_steps

    def _update(self) -> dict[str, float]:
        size, shown, prior = self.section.batch_size, self._demonstrations(), self.learner.prior
        prior_rows = 0 if shown is None or prior is None else round(size * prior.prior_ratio)
        samples = [self._sample(self.replay, size - prior_rows)] if prior_rows < size else []
        if shown is not None and prior_rows:
            samples.insert(0, self._sample(shown, prior_rows))
        if self.cfg.control == "shuffled":  # together, else demonstrations would keep the higher ones
            samples = [ReplayBatch.cat(samples)]
        parts = [self._train_batch(sample) for sample in samples]
        return self.learner.update(TrainBatch.cat(parts) if len(parts) > 1 else parts[0], prior_rows)

    def _demonstrations(self) -> ReplayBuffer | ReplayParts | None:
        """What people did: demonstrations, and the steps in which they took over."""
        parts = [part for part in (self.prior, self.interventions) if part is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        return ReplayParts(parts, rng=self._rng)

    def _sample(self, replay: ReplayBuffer | ReplayParts, count: int) -> ReplayBatch:
        batch = replay.sample(count, gamma=self.section.gamma, num_n_steps=self.learner.num_n_steps)
        if not self.path_checked:
            self._check_path(batch)
        if not self._online_checked and self.online is not None:
            shape, cfg, env_steps = (len(batch), 1), self.cfg, self.env_steps
            check = self.online.check_path
            self._online_checked = drive_targets(
                self.learner,
                batch,
                self._hold,
                lambda relabel, objective: check(relabel, objective, shape, cfg, env_steps),
            )
        return batch

    def _train_batch(self, batch: ReplayBatch) -> TrainBatch:
        """A sample with its training rewards, which follow from the scores of its frames."""
        if self.rewards is not None:
            rewards = torch.from_numpy(self._relabel(batch, self._probabilities(batch)))
            if ends_are_verdicts(self.cfg):  # for a control they are time limits
                batch = replace(batch, terminated=torch.zeros_like(batch.terminated))
            return batch.train_batch(rewards)
        if self.online is None:
            return batch.train_batch(batch.env_rewards)
        learned = self._online_rewards(batch)
        if self.scale is not None:
            self.scale.update(learned)
        held = self._hold(batch, learned)
        self._sampled = {
            "rollout/rewards": float(held.mean()),
            "rollout/learned_rewards": float(learned.mean()),
        }
        return batch.train_batch(torch.from_numpy(held))

    def _relabel(self, batch: ReplayBatch, prob_success: FloatArray) -> FloatArray:
        """Training rewards of each step of a sample, float32 [B, n]."""
        assert self.rewards is not None
        return training_rewards(
            prob_success,
            batch.env_rewards.numpy(),
            batch.scored_ends(),
            self.cfg,
            self.rewards.facts.threshold,
            self.scale,
            0.0 if self.online is None or not self.path_checked else self._online_rewards(batch),
            self.env_steps,
        )

    def _hold(self, batch: ReplayBatch, learned: FloatArray) -> FloatArray:
        """Training rewards of each step of a sample from learned ones, float32 [B, n]."""
        return combine(batch.env_rewards.numpy(), learned, self.cfg, self.scale, self.env_steps)

    def _online_rewards(self, batch: ReplayBatch) -> FloatArray:
        """What the online reward model says of a sample now, or said when its steps came; float32 [B, 1]."""
        assert self.online is not None
        if self.online.history_dependent:
            stored: FloatArray = batch.extras["online_rewards"].numpy()
            return stored
        return self.online.rewards(batch.steps(self.online.action_space))[:, None]

    def _probabilities(self, batch: ReplayBatch) -> FloatArray:
        """Probabilities float32 [B, n], stored at insertion or computed from the stored frames now."""
        stored: FloatArray = batch.extras["prob_success"].numpy()
        if self.cfg.relabel_at == "insertion" or self.rewards is None or not self.cfg.looks_at_frames:
            return stored
        scored = np.isfinite(stored)
        frames = {name: batch.extras[f"frames/{name}"].numpy()[scored] for name in self._cameras}
        fresh = stored.copy()
        fresh[scored] = self.rewards.score(frames).prob_success
        return fresh

    def _check_path(self, batch: ReplayBatch) -> None:
        """Once, before the first update: does the learned reward reach the targets?"""
        assert self.rewards is not None
        done = batch.scored_ends()
        if self.cfg.reward_mode == "terminal" and not done.any():
            return
        cfg, threshold = self.cfg, self.rewards.facts.threshold
        drive_targets(
            self.learner,
            batch,
            self._relabel,
            lambda relabel, objective: check_reward_path(relabel, objective, done, cfg, threshold),
        )
        self.path_checked = True


class OffPolicyLoop(ReplayLearning):
    """One iteration is a stretch of steps with the updates that belong to them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._make_streams([(0, self.envs.num_envs)])
        self._progress = 0.0
        self._collected: list[tuple[StepChunk, Frames, Scores | None]] = []

    def reset(self, seed: int) -> None:
        """Begin new episodes; those that ran are cut off in the buffer."""
        (stream,) = self.streams
        if stream.obs is not None:
            self.truncate_running_episodes()
        stream.reset(side_by_side(self.envs.reset(seed, self.env_steps)))
        if self.online is not None:
            self.online.reset()

    def truncate_running_episodes(self) -> None:
        """The running episodes will not go on; what a broken iteration did not store counts for nothing."""
        if self._collected:
            self.streams[0].obs = self._collected[0][0].obs_at(0)
            self.env_steps -= len(self._collected) * self.envs.num_envs
            self._collected = []
        super().truncate_running_episodes()

    def advance(self, progress: float) -> Iteration:
        """A stretch of steps and updates."""
        clock, train, steps_before = Stopwatch(), dict[str, float](), self.env_steps
        self._stored, self._progress = [], progress
        # A model that learns beside the policy does so first: its rewards may stay in the buffer.
        together = 1 if self.online is None else self.iteration_rows
        for _ in range(self.iteration_rows // together):
            self._collect(together, clock)
            if self.online is not None:
                self._learned_online = self.online.learn([self._new_steps(self.online)])
            self._store_collected(clock)
            # The very first step has no successor yet, where what was played before it counts as steps.
            while self._pending_updates >= 1.0 and self.streams[0].replay.num_complete:
                train |= self._update()
                self._pending_updates -= 1.0
            clock.lap("update")
        return self._iteration(train, clock, steps_before)

    def collect_steps(self) -> list[StepBatch]:
        """The steps of an iteration, which are stored, for a reward model that learns before the policy."""
        assert self.online is not None
        self._stored = []
        self._collect(self.iteration_rows, Stopwatch())
        steps = [self._new_steps(self.online)]
        self._store_collected(Stopwatch())
        self._pending_updates = 0.0
        return steps

    def _collect(self, num_steps: int, clock: Stopwatch) -> None:
        for _ in range(num_steps):
            chunk, frames = self.envs.step(self._actions(), self.env_steps, self._begin_again)
            clock.lap("rollout")
            scores = None if self.rewards is None else self.rewards.score(frames)
            self._collected.append((chunk, frames, scores))
            self.streams[0].obs = chunk.last_obs
            self.env_steps += self.envs.num_envs
            clock.lap("compute_model_rewards")
            if self.env_steps >= self.section.learning_starts:
                self._add_pending_updates(self.envs.num_envs)

    def _store_collected(self, clock: Stopwatch) -> None:
        """Put what was collected into the buffer."""
        for chunk, frames, scores in self._collected:
            self._store(self.streams[0], chunk, frames, scores)
        self._collected = []
        clock.lap("compute_model_rewards")

    def _new_steps(self, online: OnlineReward) -> StepBatch:
        """What was collected, [T, N]."""
        return StepBatch.cat([chunk.steps(online.action_space) for chunk, _, _ in self._collected])

    def _actions(self) -> NDArray[Any]:
        if self.env_steps < self.section.learning_starts and self.prior is None:
            return random_actions(self._action_space, self.envs.num_envs, self._rng)
        return self.learner.act(self.streams[0].obs, progress=self._progress)

    def _begin_again(self, fresh: dict[int, Any]) -> NDArray[Any]:
        """Lost workers begin new episodes with the observations `fresh`, by rank; returns actions."""
        (stream,) = self.streams
        self._store_collected(Stopwatch())
        for rank, first in fresh.items():
            mine = slice(*self.envs.parts[rank])
            stream.replay.truncate_running_episodes(stream.obs, mine)
            stream.episodes.reset_envs(mine)
            stream.obs = _with_rows(stream.obs, mine, first)
        return self._actions()


def _with_rows(obs: Any, rows: slice, fresh: Any) -> Any:
    """A copy of observations [N, ...] with other ones in some rows."""
    if isinstance(obs, dict):
        return {name: _with_rows(part, rows, fresh[name]) for name, part in obs.items()}
    changed = np.array(obs)
    changed[rows] = fresh
    return changed
