"""PPO on the learned reward: rollout, judge all of it in one go, relabel, update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from guerdon.config import RewardConfig
from guerdon.learn.ppo import PPO
from guerdon.run.loop import Iteration, Stopwatch, episode_metrics, pick_features, reward_metrics
from guerdon.run.workers import Actor, EnvWorker, RolloutWorker
from guerdon.serve.relabel import RewardScale, learned_rewards, training_rewards
from guerdon.serve.worker import ImageRewardWorker
from guerdon.types import FloatArray
from guerdon.watch.monitor import Watched
from guerdon.watch.reaches import check_reward_path


class OnPolicyLoop:
    """One iteration is a rollout and an update."""

    def __init__(
        self, learner: PPO, env_worker: EnvWorker, reward_worker: ImageRewardWorker | None, cfg: RewardConfig
    ) -> None:
        self.env_worker, self.reward_worker, self.cfg = env_worker, reward_worker, cfg
        self.rollout_worker, self.actor = RolloutWorker(learner), Actor(learner)
        self.scale = RewardScale() if cfg.normalize else None
        self.env_steps = 0
        self.path_checked = reward_worker is None

    def knows_success(self) -> bool:
        """Whether the environments tell success."""
        return self.env_worker.knows_success

    def reset(self, seed: int) -> None:
        """Begin new episodes."""
        self.env_worker.reset(seed)

    def advance(self, progress: float) -> Iteration:
        """A rollout, its rewards, an update."""
        watch = Stopwatch()
        self.rollout_worker.sync(self.actor.version)
        rollout = self.env_worker.interact(self.rollout_worker)
        self.actor.receive(rollout)
        watch.lap("rollout")
        metrics, watched = self._apply_reward_model()
        watch.lap("compute_model_rewards")
        train = self.actor.update(progress)
        watch.lap("update")
        self.env_steps += rollout.env_rewards.numel()
        metrics |= {f"train/{name}": value for name, value in train.items()}
        metrics |= episode_metrics(self.env_worker.rollouts.pop_episodes())
        return Iteration(metrics={**metrics, **watch.metrics(rollout.env_rewards.numel())}, watched=watched)

    def _apply_reward_model(self) -> tuple[dict[str, float], Watched | None]:
        """Judge the rollout's frames in one batch and hand the training rewards to the actor."""
        rollout = self.actor.rollout
        env_rewards = rollout.env_rewards.numpy()
        if self.reward_worker is None or self.env_worker.judged is None:
            mean = float(env_rewards.mean())
            return {"rollout/rewards": mean, "rollout/env_rewards": mean}, None
        done = (rollout.terminated | rollout.truncated).numpy()
        rows, frames = self.env_worker.judged.gathered()
        verdict = self.reward_worker.judge(frames)
        prob: FloatArray = np.full(done.shape, np.nan, np.float32)
        spread: FloatArray = np.full(done.shape, np.nan, np.float32)
        prob.reshape(-1)[rows], spread.reshape(-1)[rows] = verdict.prob_success, verdict.disagreement
        threshold = self.reward_worker.manager.threshold
        if not self.path_checked and (done.any() or self.cfg.reward_mode == "per_step"):
            check_reward_path(self._relabel, self.actor.objective, done, self.cfg, threshold)
            self.path_checked = True
        learned = learned_rewards(prob, done, self.cfg, threshold)
        if self.scale is not None:
            self.scale.update(learned)
        held = self._relabel(prob)
        success = rollout.success.numpy() if self.knows_success() else None
        metrics = reward_metrics(prob, env_rewards, held, learned, success, threshold)
        watched = Watched(
            prob_success=prob,
            done=done,
            env_success=success,
            elapsed=rollout.elapsed.numpy(),
            disagreement=spread if self.reward_worker.manager.model.num_members > 1 else None,
            features=pick_features(self.reward_worker, frames, self.env_steps),
            frame=self.env_worker.judged.frame,
        )
        return metrics, watched

    def _relabel(self, prob_success: FloatArray) -> FloatArray:
        """From probabilities [T, N] to the training rewards that the actor holds."""
        assert self.reward_worker is not None
        rollout = self.actor.rollout
        rewards = training_rewards(
            prob_success,
            rollout.env_rewards.numpy(),
            (rollout.terminated | rollout.truncated).numpy(),
            self.cfg,
            self.reward_worker.manager.threshold,
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
