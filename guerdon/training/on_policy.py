"""PPO on the learned reward: rollout, judge all of it in one go, relabel, update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from guerdon.agents.ppo import PPO
from guerdon.agents.rollout import Rollout
from guerdon.config import RewardConfig
from guerdon.core.types import FloatArray, IntArray, UInt8Array
from guerdon.distributed.engine import Engine, Pending
from guerdon.fit.refit import ScoredSteps
from guerdon.monitoring.monitor import Watched
from guerdon.monitoring.reward_path import check_reward_path
from guerdon.rewards.image.scorer import Scores
from guerdon.rewards.relabel import RewardScale, learned_rewards, training_rewards
from guerdon.training.ahead import StreamingScorer
from guerdon.training.env_group import EnvGroup, Fragment
from guerdon.training.env_worker import Actor
from guerdon.training.feed import complete, looked_at
from guerdon.training.loop import (
    Iteration,
    Stopwatch,
    episode_metrics,
    feature_rows,
    frame_metrics,
    reward_metrics,
)
from guerdon.training.reward_group import FramesLostError, RewardGroup


class OnPolicyLoop:
    """One iteration is a rollout and an update."""

    def __init__(
        self, engine: Engine, learner: PPO, envs: EnvGroup, rewards: RewardGroup | None, cfg: RewardConfig
    ) -> None:
        self.envs, self.rewards, self.cfg = envs, rewards, cfg
        self.learner, self.actor = learner, Actor(learner)
        self.scale = RewardScale() if cfg.normalize else None
        self.env_steps = 0
        self.path_checked = rewards is None
        self._engine = engine
        self._fragments: list[Fragment] = []
        self._verdicts: list[Scores] = []
        self._ahead: StreamingScorer | None = None
        if engine.shares_memory and rewards is not None and cfg.reward_mode == "per_step":
            self._ahead = envs.judge_ahead(rewards.local)

    def judge_at_the_end(self) -> None:
        """Judge no frame while a rollout goes on; the verdicts stay the same, see `StreamingScorer`."""
        if self._ahead is not None:
            self.envs.judge_at_the_end()
        self._ahead = None

    def knows_success(self) -> bool:
        """Whether the environments tell success."""
        return bool(self.envs.facts.knows_success)

    def reset(self, seed: int) -> None:
        """Begin new episodes."""
        self.envs.reset(seed, self.env_steps)

    def advance(self, progress: float) -> Iteration:
        """A rollout, its rewards, an update."""
        watch = Stopwatch()
        version = self.actor.version
        weights = None if self._engine.shares_memory else self._engine.put(self.learner.policy_state())
        self._fragments = self.envs.rollouts(version, weights, self.env_steps)
        watch.lap("rollout")
        self._judge(weights)
        watch.lap("compute_model_rewards")
        rollout = self._receive()
        watch.lap("rollout")
        metrics, watched = self._apply_reward_model()
        judged = self._judged(watched)
        watch.lap("compute_model_rewards")
        train = self.actor.update(progress)
        watch.lap("update")
        self.env_steps += rollout.num_transitions
        metrics |= {f"train/{name}": value for name, value in train.items()}
        episodes = [record for fragment in self._fragments for record in fragment.played.episodes]
        metrics |= episode_metrics(episodes) | self.envs.fault_metrics()
        metrics |= watch.metrics(rollout.num_transitions)
        return Iteration(metrics=metrics, watched=watched, judged=judged)

    def _judged(self, watched: Watched | None) -> ScoredSteps | None:
        """The rollout at hand for whoever learns from its frames."""
        if watched is None or watched.env_success is None:
            return None
        return ScoredSteps(
            prob_success=watched.prob_success,
            success=watched.env_success,
            elapsed=watched.elapsed,
            first_step=self.env_steps // self.envs.num_envs,
            frames_at=self._show,
        )

    def _show(self, t: IntArray, env: IntArray) -> dict[str, UInt8Array]:
        """What was judged of some steps, camera -> [M, ...]."""
        shown: dict[str, UInt8Array] = {}
        for fragment in self._fragments:
            mine = np.flatnonzero((env >= fragment.start) & (env < fragment.stop))
            for name, images in (fragment.show(t[mine], env[mine]) if len(mine) else {}).items():
                shown.setdefault(name, np.zeros((len(t), *images.shape[1:]), np.uint8))[mine] = images
        return shown

    def _judge(self, weights: Pending | None) -> None:
        """Ask for verdicts on all judged frames; rollouts whose frames got lost are played again."""
        if self._ahead is not None:
            self._verdicts = [self._ahead.verdict()]
            return
        while self.rewards is not None:
            counts = [len(item.played.rows) for item in self._fragments]
            try:
                self._verdicts = self.rewards.score_parts([item.frames for item in self._fragments], counts)
                return
            except FramesLostError as error:
                lost = self._fragments[error.part]
                again = self.envs.again(lost, lost.played.policy_version, weights)
                self._fragments[error.part] = again

    def _receive(self) -> Rollout:
        """Put the rollouts of all workers side by side and hand them to the actor."""
        played = [fragment.played for fragment in self._fragments]
        rollout = Rollout.join([item.arrays for item in played], played[0].policy_version)
        if played[0].generator is not None:  # all copies of the policy drew the same numbers
            self.learner.set_generator(played[0].generator)
        self.actor.receive(rollout)
        return rollout

    def _apply_reward_model(self) -> tuple[dict[str, float], Watched | None]:
        """Make training rewards of the verdicts and hand them to the actor."""
        rollout = self.actor.rollout
        env_rewards = rollout.env_rewards.numpy()
        if self.rewards is None:
            mean = float(env_rewards.mean())
            return {"rollout/rewards": mean, "rollout/env_rewards": mean}, None
        done = (rollout.terminated | rollout.truncated).numpy()
        prob: FloatArray = np.full(done.shape, np.nan, np.float32)
        spread: FloatArray = np.full(done.shape, np.nan, np.float32)
        for fragment, verdict in zip(self._fragments, self._verdicts, strict=True):
            places = self._places(fragment)
            prob.reshape(-1)[places] = verdict.prob_success
            spread.reshape(-1)[places] = verdict.disagreement
        facts = self.rewards.facts
        resting = facts.contract.only_at_rest
        prob = complete(prob, done, self.cfg, only_at_rest=resting)
        spread = complete(spread, done, self.cfg)
        threshold = facts.threshold
        if not self.path_checked and (done.any() or self.cfg.reward_mode == "per_step"):
            check_reward_path(self._relabel, self.actor.objective, done, self.cfg, threshold)
            self.path_checked = True
        learned = learned_rewards(prob, done, self.cfg, threshold)
        if self.scale is not None:
            self.scale.update(learned)
        held = self._relabel(prob)
        rollout.reward_version = facts.version
        success = rollout.success.numpy() if self.knows_success() else None
        metrics = reward_metrics(prob, env_rewards, held, learned, success, threshold)
        played = [fragment.played for fragment in self._fragments]
        metrics |= frame_metrics(
            sum(item.num_rendered for item in played), sum(len(item.rows) for item in played)
        )
        watched = Watched(
            prob_success=looked_at(prob, spread),
            done=done,
            env_success=success,
            elapsed=rollout.elapsed.numpy(),
            disagreement=spread if facts.num_members > 1 else None,
            features=self._features(),
            frame=self._frame,
        )
        return metrics, watched

    def _places(self, fragment: Fragment) -> IntArray:
        """Where the judged steps of a worker lie in the flat [T * N] of all."""
        steps, envs = np.divmod(fragment.played.rows, fragment.stop - fragment.start)
        return steps * self.envs.num_envs + fragment.start + envs

    def _features(self) -> FloatArray | None:
        """Of some of the judged frames; which ones does not depend on who made them."""
        assert self.rewards is not None
        places = [self._places(fragment) for fragment in self._fragments]
        everything = np.sort(np.concatenate(places))
        if not len(everything):
            return None
        picked = everything[feature_rows(len(everything), self.env_steps)]
        rows = [np.flatnonzero(np.isin(mine, picked)) for mine in places]
        return self.rewards.features([fragment.frames for fragment in self._fragments], rows)

    def _frame(self, t: int, env: int) -> UInt8Array:
        """The first camera's frame of a judged step."""
        assert self.rewards is not None
        fragment = next(item for item in self._fragments if item.start <= env < item.stop)
        return fragment.frame(t, env, self.rewards.facts.image_keys[0])

    def _relabel(self, prob_success: FloatArray) -> FloatArray:
        """From probabilities [T, N] to the training rewards that the actor holds."""
        assert self.rewards is not None
        rollout = self.actor.rollout
        rewards = training_rewards(
            prob_success,
            rollout.env_rewards.numpy(),
            (rollout.terminated | rollout.truncated).numpy(),
            self.cfg,
            self.rewards.facts.threshold,
            self.scale,
        )
        return self.actor.update_rewards(rewards)

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Counters and statistics; the learner is saved beside."""
        scale = None if self.scale is None else [self.scale.count, self.scale.mean, self.scale.spread]
        return {"env_steps": self.env_steps, "version": self.actor.version, "scale": scale}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Go on from `state_dict`."""
        self.env_steps, self.actor.version = int(state["env_steps"]), int(state["version"])
        if self.scale is not None and state["scale"] is not None:
            self.scale = RewardScale(*state["scale"])
