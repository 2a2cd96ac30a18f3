"""PPO on the learned reward: a rollout, the scores of its frames, relabel, update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.agents.agent import OnPolicyAgent
from guerdon.config import RewardConfig
from guerdon.core.batches import Rollout, WorkerRollout
from guerdon.core.progress import Stopwatch
from guerdon.core.steps import StepBatch
from guerdon.core.types import BoolArray, FloatArray
from guerdon.distributed.engine import Engine, Pending
from guerdon.monitoring.monitor import ScoredRollout
from guerdon.monitoring.reward_path import check_reward_path
from guerdon.rewards.image.scorer import ImageScorer, Scores, StreamingScorer
from guerdon.rewards.relabel import (
    RewardScale,
    combine,
    fill_scores,
    learned_rewards,
    scored_frames,
    training_rewards,
    verdicts,
)
from guerdon.training.env_worker import LocalEnvs
from guerdon.training.env_workers import EnvWorkers
from guerdon.training.loop import (
    Iteration,
    ScoredIteration,
    ScoredPart,
    env_reward_metrics,
    episode_metrics,
)
from guerdon.training.online_reward import OnlineReward, load_online
from guerdon.training.reward_workers import FramesLostError, RewardWorkers


class OnPolicyLoop:
    """One iteration is a rollout and an update."""

    rollout: Rollout
    """The latest one; its training rewards come through `_hold` and from nowhere else."""

    def __init__(
        self,
        engine: Engine,
        learner: OnPolicyAgent,
        envs: LocalEnvs | EnvWorkers,
        rewards: ImageScorer | RewardWorkers | None,
        cfg: RewardConfig,
        online: OnlineReward | None = None,
    ) -> None:
        self.learner, self.envs, self.rewards, self.cfg, self.online = learner, envs, rewards, cfg, online
        self.scale = RewardScale() if cfg.normalize else None
        self.env_steps, self.version, self.watches = 0, 0, False
        self.path_checked = rewards is None
        self._online_checked = online is None
        self._online_rewards: FloatArray | float = 0.0
        self._engine = engine
        self._parts: list[WorkerRollout] = []
        self._scores: list[Scores] = []
        self._streaming: StreamingScorer | None = None
        if isinstance(rewards, ImageScorer) and isinstance(envs, LocalEnvs):
            frames = envs.local.reward_frames
            if cfg.reward_mode == "per_step" and frames is not None and cfg.looks_at_frames:
                self._streaming = frames.streaming = StreamingScorer(rewards)

    def score_after_rollout(self) -> None:
        """Score no frame while a rollout goes on; the scores stay the same, see `StreamingScorer`."""
        if self._streaming is not None and isinstance(self.envs, LocalEnvs):
            self._streaming.close()
            assert self.envs.local.reward_frames is not None
            self._streaming = self.envs.local.reward_frames.streaming = None

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
        clock = Stopwatch()
        weights = None if self._engine.shares_memory else self._engine.put(self.learner.policy_state())
        self._parts = self.envs.rollouts(self.version, weights, self.env_steps)
        clock.lap("rollout")
        self._score(weights)
        clock.lap("compute_model_rewards")
        self._receive()
        clock.lap("rollout")
        scored, online = self.apply_reward_model()
        clock.lap("compute_model_rewards")
        train = self.learner.update(self.rollout, progress)
        self.version += 1
        clock.lap("update")
        metrics = {f"train/{name}": value for name, value in train.items()} | online
        metrics |= self._reward_metrics(scored)
        metrics |= episode_metrics([record for part in self._parts for record in part.episodes])
        metrics |= self.envs.fault_metrics() | clock.metrics(self.rollout.num_transitions)
        self.env_steps += self.rollout.num_transitions
        if scored is None or self.rewards is None:
            return Iteration(metrics=metrics, for_monitor=self._rewards_for_monitor())
        return Iteration(
            metrics=metrics, for_monitor=scored.for_monitor(self.rewards), scored=scored.for_refits()
        )

    def _rewards_for_monitor(self) -> ScoredRollout | None:
        """What the monitor sees of a model that gives rewards."""
        if not isinstance(self._online_rewards, np.ndarray) or not self.watches:
            return None
        return ScoredRollout.of_rewards(
            self._online_rewards,
            done=_done(self.rollout),
            elapsed=self.rollout.elapsed.numpy(),
            env_success=self.rollout.success.numpy() if self.knows_success() else None,
        )

    def collect_steps(self) -> list[StepBatch]:
        """A rollout of the policy as it is, for a reward model that learns before the policy does."""
        assert self.online is not None
        weights = None if self._engine.shares_memory else self._engine.put(self.learner.policy_state())
        self._parts = self.envs.rollouts(self.version, weights, self.env_steps)
        self._receive()
        self.env_steps += self.rollout.num_transitions
        return [self.rollout.steps(self.online.action_space)]

    @property
    def num_updates(self) -> int:
        """Of the policy, as the serial pipelines count them."""
        return self.version

    def _score(self, weights: Pending | None) -> None:
        """Score all frames of the rollouts; those whose frames got lost are played again."""
        if self._streaming is not None:
            self._scores = [self._streaming.scores()]
            return
        while self.rewards is not None:
            frames, counts = [part.frames for part in self._parts], [len(part.rows) for part in self._parts]
            try:
                self._scores = self.rewards.score_parts(frames, counts)
                return
            except FramesLostError as error:
                assert isinstance(self.envs, EnvWorkers)
                lost = self._parts[error.part]
                self._parts[error.part] = self.envs.again(lost, lost.policy_version, weights)

    def _receive(self) -> None:
        """Put the rollouts of all workers side by side."""
        first = self._parts[0]
        self.rollout = Rollout.join([part.arrays for part in self._parts], first.policy_version)
        if first.generator is not None:  # all copies of the policy drew the same numbers
            self.learner.set_generator(first.generator)

    # From scores to training rewards

    def apply_reward_model(self) -> tuple[ScoredIteration | None, dict[str, float]]:
        """Give the rollout its training rewards; returns what was scored, and the online model's metrics."""
        online = self._learn_online()
        if self.rewards is None:
            if isinstance(self._online_rewards, np.ndarray):
                self._scaled(self._online_rewards)
                self._hold(self._online_rewards)
            return None, online
        scored = self._scored_iteration(self.rewards)
        prob, threshold = scored.prob_success, self.rewards.facts.threshold
        if not self.path_checked and (scored.done.any() or self.cfg.reward_mode == "per_step"):
            check_reward_path(self._relabel, self._objective, scored.done, self.cfg, threshold)
            self.path_checked = True
        self._scaled(
            learned_rewards(prob, scored.done, self.cfg, threshold) + np.float32(self._online_rewards)
        )
        self._relabel(prob)
        self.rollout.reward_version = self.rewards.facts.version
        return scored, online

    def _scored_iteration(self, rewards: ImageScorer | RewardWorkers) -> ScoredIteration:
        rollout, total = self.rollout, self.envs.num_envs
        done = _done(rollout)
        parts = [
            ScoredPart(
                first_step=0,
                num_steps=len(done),
                first_env=part.first_env,
                num_envs=part.num_envs,
                rows=part.rows,
                frames=part.frames,
            )
            for part in self._parts
        ]
        prob: FloatArray = np.full(done.shape, np.nan, np.float32)
        spread: FloatArray = np.full(done.shape, np.nan, np.float32)
        for played, scores in zip(self._parts, self._scores, strict=True):
            places = played.places(total)
            prob.reshape(-1)[places] = scores.prob_success
            spread.reshape(-1)[places] = scores.disagreement
        resting = rewards.facts.only_at_rest
        prob = verdicts(prob, rollout.success.numpy(), done, self.cfg)
        return ScoredIteration(
            parts=parts,
            prob_success=fill_scores(prob, done, self.cfg, only_at_rest=resting),
            disagreement=fill_scores(spread, done, self.cfg),
            done=done,
            success=rollout.success.numpy() if self.knows_success() else None,
            elapsed=rollout.elapsed.numpy(),
            num_rendered=sum(part.num_rendered for part in self._parts),
            env_steps=self.env_steps,
        )

    def _learn_online(self) -> dict[str, float]:
        """Teach the online reward model and score the rollout with it; returns what is to be logged."""
        if self.online is None:
            return {}
        steps = self.rollout.steps(self.online.action_space)
        metrics = self.online.learn([steps])
        if not self._online_checked:
            check = (self._hold, self._objective, steps.shape, self.cfg, self.env_steps)
            self._online_checked = self.online.check_path(*check)
        self._online_rewards = self.online.stream_rewards(steps, "rollout")
        return {**metrics, "reward_model/rewards": float(np.mean(self._online_rewards))}

    def _scaled(self, learned: FloatArray) -> None:
        """Take learned rewards into the running deviation, if they are divided by it."""
        if self.scale is not None:
            self.scale.update(learned)

    def _hold(self, learned: FloatArray) -> FloatArray:
        """From learned rewards [T, N] to the training rewards that the rollout holds; returns these."""
        env_rewards, chosen = self.rollout.env_rewards.numpy(), scored_frames(_done(self.rollout), self.cfg)
        return self._update_rewards(
            combine(env_rewards, learned, self.cfg, self.scale, self.env_steps, chosen)
        )

    def _relabel(self, prob_success: FloatArray) -> FloatArray:
        """The same from probabilities [T, N]."""
        assert self.rewards is not None
        rollout = self.rollout
        return self._update_rewards(
            training_rewards(
                prob_success,
                rollout.env_rewards.numpy(),
                _done(rollout),
                self.cfg,
                self.rewards.facts.threshold,
                self.scale,
                self._online_rewards if self.path_checked else 0.0,
                self.env_steps,
            )
        )

    def _update_rewards(self, training: FloatArray) -> FloatArray:
        self.rollout.update_rewards(training)
        held: FloatArray = self.rollout.training_rewards.numpy()
        return held

    def _objective(self) -> NDArray[np.floating]:
        """What the policy is trained on, made of the training rewards as they are now: advantages [T, N]."""
        advantages: NDArray[np.floating] = self.learner.advantages(self.rollout)[0].numpy()
        return advantages

    def _reward_metrics(self, scored: ScoredIteration | None) -> dict[str, float]:
        rollout = self.rollout
        env_rewards, training = rollout.env_rewards.numpy(), rollout.training_rewards.numpy()
        if scored is not None and self.rewards is not None:
            facts = self.rewards.facts
            learned = learned_rewards(scored.prob_success, scored.done, self.cfg, facts.threshold)
            return scored.metrics(facts, env_rewards, training, learned + np.float32(self._online_rewards))
        own = env_reward_metrics(env_rewards, trained_on=self.online is None)
        if self.online is not None:
            own["rollout/rewards"] = float(training.mean())
            own["rollout/learned_rewards"] = float(np.mean(self._online_rewards))
        return own

    # State

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Counters and statistics; the learner is saved beside."""
        scale = None if self.scale is None else [self.scale.count, self.scale.mean, self.scale.spread]
        online = None if self.online is None else self.online.state_dict()
        return {"env_steps": self.env_steps, "version": self.version, "scale": scale, "online": online}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Go on from `state_dict`."""
        self.env_steps, self.version = int(state["env_steps"]), int(state["version"])
        if self.scale is not None and state["scale"] is not None:
            self.scale = RewardScale(*state["scale"])
        load_online(self.online, state)


def _done(rollout: Rollout) -> BoolArray:
    """Bool [T, N]; whether the episode ended with the step."""
    done: BoolArray = (rollout.terminated | rollout.truncated).numpy()
    return done
