"""PPO on the learned reward: rollout, judge all of it in one go, relabel, update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.agents.agent import OnPolicyAgent
from guerdon.agents.rollout import Rollout
from guerdon.config import RewardConfig
from guerdon.core.images import latest_frames
from guerdon.core.types import FloatArray, IntArray, UInt8Array
from guerdon.distributed.engine import Engine, Pending
from guerdon.fit.refit import ScoredSteps
from guerdon.monitoring.monitor import Watched
from guerdon.monitoring.reward_path import check_reward_path
from guerdon.rewards.image.scorer import Scores
from guerdon.rewards.relabel import RewardScale, combine, learned_rewards, training_rewards
from guerdon.training.env_worker import Actor, WorkerRollout
from guerdon.training.env_workers import EnvWorkers
from guerdon.training.loop import (
    Iteration,
    Stopwatch,
    episode_metrics,
    feature_rows,
    fill_scores,
    frame_metrics,
    reward_metrics,
    scored_frames_only,
)
from guerdon.training.online_reward import OnlineReward, load_online
from guerdon.training.reward_workers import FramesLostError, RewardWorkers, StreamingScorer


class OnPolicyLoop:
    """One iteration is a rollout and an update."""

    def __init__(
        self,
        engine: Engine,
        learner: OnPolicyAgent,
        envs: EnvWorkers,
        rewards: RewardWorkers | None,
        cfg: RewardConfig,
        online: OnlineReward | None = None,
    ) -> None:
        self.envs, self.rewards, self.cfg, self.online = envs, rewards, cfg, online
        self.learner, self.actor = learner, Actor(learner)
        self.scale = RewardScale() if cfg.normalize else None
        self.env_steps = 0
        self.path_checked = rewards is None
        self._online_checked = online is None
        self._online_rewards: FloatArray | float = 0.0
        self._engine = engine
        self._parts: list[WorkerRollout] = []
        self._verdicts: list[Scores] = []
        self._streaming: StreamingScorer | None = None
        if engine.shares_memory and rewards is not None and cfg.reward_mode == "per_step":
            self._streaming = envs.score_while_stepping(rewards.local)

    def score_after_rollout(self) -> None:
        """Judge no frame while a rollout goes on; the verdicts stay the same, see `StreamingScorer`."""
        if self._streaming is not None:
            self.envs.score_after_rollout()
        self._streaming = None

    def knows_success(self) -> bool:
        """Whether the environments tell success."""
        return bool(self.envs.facts.knows_success)

    def reset(self, seed: int) -> None:
        """Begin new episodes."""
        self.envs.reset(seed, self.env_steps)
        if self.online is not None:
            self.online.reset()

    def advance(self, progress: float) -> Iteration:
        """A rollout, its rewards, an update."""
        watch = Stopwatch()
        version = self.actor.version
        weights = None if self._engine.shares_memory else self._engine.put(self.learner.policy_state())
        self._parts = self.envs.rollouts(version, weights, self.env_steps)
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
        episodes = [record for part in self._parts for record in part.episodes]
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
        for part in self._parts:
            mine = np.flatnonzero((env >= part.start) & (env < part.stop))
            for name, images in (part.frames_of(t[mine], env[mine]) if len(mine) else {}).items():
                shown.setdefault(name, np.zeros((len(t), *images.shape[1:]), np.uint8))[mine] = images
        return shown

    def _judge(self, weights: Pending | None) -> None:
        """Ask for verdicts on all judged frames; rollouts whose frames got lost are played again."""
        if self._streaming is not None:
            self._verdicts = [self._streaming.scores()]
            return
        while self.rewards is not None:
            counts = [len(part.rows) for part in self._parts]
            try:
                self._verdicts = self.rewards.score_parts(self._frames(), counts)
                return
            except FramesLostError as error:
                lost = self._parts[error.part]
                self._parts[error.part] = self.envs.again(lost, lost.policy_version, weights)

    def _receive(self) -> Rollout:
        """Put the rollouts of all workers side by side and hand them to the actor."""
        first = self._parts[0]
        rollout = Rollout.join([part.arrays for part in self._parts], first.policy_version)
        if first.generator is not None:  # all copies of the policy drew the same numbers
            self.learner.set_generator(first.generator)
        self.actor.receive(rollout)
        return rollout

    def _apply_reward_model(self) -> tuple[dict[str, float], Watched | None]:
        """Make training rewards of the verdicts and hand them to the actor."""
        rollout = self.actor.rollout
        env_rewards = rollout.env_rewards.numpy()
        online = self._learn_online()
        if self.rewards is None:
            return online or _env_metrics(env_rewards), None
        done = (rollout.terminated | rollout.truncated).numpy()
        prob: FloatArray = np.full(done.shape, np.nan, np.float32)
        spread: FloatArray = np.full(done.shape, np.nan, np.float32)
        for part, verdict in zip(self._parts, self._verdicts, strict=True):
            places = part.places(self.envs.num_envs)
            prob.reshape(-1)[places] = verdict.prob_success
            spread.reshape(-1)[places] = verdict.disagreement
        facts = self.rewards.facts
        resting = facts.contract.only_at_rest
        prob = fill_scores(prob, done, self.cfg, only_at_rest=resting)
        spread = fill_scores(spread, done, self.cfg)
        threshold = facts.threshold
        if not self.path_checked and (done.any() or self.cfg.reward_mode == "per_step"):
            check_reward_path(self._relabel, self.actor.objective, done, self.cfg, threshold)
            self.path_checked = True
        learned = learned_rewards(prob, done, self.cfg, threshold) + np.float32(self._online_rewards)
        if self.scale is not None:
            self.scale.update(learned)
        held = self._relabel(prob)
        rollout.reward_version = facts.version
        success = rollout.success.numpy() if self.knows_success() else None
        metrics = online | reward_metrics(prob, env_rewards, held, learned, success, threshold)
        metrics |= frame_metrics(
            sum(part.num_rendered for part in self._parts), sum(len(part.rows) for part in self._parts)
        )
        watched = Watched(
            prob_success=scored_frames_only(prob, spread),
            done=done,
            env_success=success,
            elapsed=rollout.elapsed.numpy(),
            disagreement=spread if facts.num_members > 1 else None,
            features=self._features(),
            frame=self._frame,
        )
        return metrics, watched

    def _learn_online(self) -> dict[str, float]:
        """Teach the online reward model and score the rollout with it; returns what is to be logged."""
        if self.online is None:
            return {}
        rollout = self.actor.rollout
        steps = self.online.of_rollout(rollout)
        metrics = self.online.learn([steps])
        if not self._online_checked:
            self.online.check_path(self._hold, self.actor.objective, steps.shape, self.cfg)
            self._online_checked = True
        self._online_rewards = self.online.stream_rewards(steps, "rollout")
        metrics["reward_model/rewards"] = float(np.mean(self._online_rewards))
        if self.rewards is not None:
            return metrics
        if self.scale is not None:
            self.scale.update(self._online_rewards)
        held = self._hold(self._online_rewards)
        return metrics | {
            "rollout/rewards": float(held.mean()),
            "rollout/env_rewards": float(rollout.env_rewards.mean()),
            "rollout/learned_rewards": float(self._online_rewards.mean()),
        }

    def _hold(self, learned: FloatArray) -> FloatArray:
        """From learned rewards [T, N] to the training rewards that the actor holds."""
        return self.actor.update_rewards(
            combine(self.actor.rollout.env_rewards.numpy(), learned, self.cfg, self.scale)
        )

    def _frames(self) -> list[Pending]:
        """The scored frames of each worker, wherever they are."""
        return [part.frames for part in self._parts if part.frames is not None]

    def _features(self) -> FloatArray | None:
        """Of some of the judged frames; which ones does not depend on who made them."""
        assert self.rewards is not None
        places = [part.places(self.envs.num_envs) for part in self._parts]
        everything = np.sort(np.concatenate(places))
        if not len(everything):
            return None
        picked = everything[feature_rows(len(everything), self.env_steps)]
        rows = [np.flatnonzero(np.isin(mine, picked)) for mine in places]
        return self.rewards.features(self._frames(), rows)

    def _frame(self, t: int, env: int) -> UInt8Array:
        """The first camera's frame of a judged step."""
        assert self.rewards is not None
        shown = self._show(np.array([t]), np.array([env]))[self.rewards.facts.image_keys[0]]
        frame: UInt8Array = latest_frames(shown)[0]
        return frame

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
            self._online_rewards if self.path_checked else 0.0,
        )
        return self.actor.update_rewards(rewards)

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Counters and statistics; the learner is saved beside."""
        scale = None if self.scale is None else [self.scale.count, self.scale.mean, self.scale.spread]
        online = None if self.online is None else self.online.state_dict()
        return {"env_steps": self.env_steps, "version": self.actor.version, "scale": scale, "online": online}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Go on from `state_dict`."""
        self.env_steps, self.actor.version = int(state["env_steps"]), int(state["version"])
        if self.scale is not None and state["scale"] is not None:
            self.scale = RewardScale(*state["scale"])
        load_online(self.online, state)


def _env_metrics(env_rewards: NDArray[Any]) -> dict[str, float]:
    """Of a run that trains on the env's rewards."""
    mean = float(env_rewards.mean())
    return {"rollout/rewards": mean, "rollout/env_rewards": mean}
