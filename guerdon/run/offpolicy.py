"""SAC and DQN on the learned reward: step, judge, store; sample, relabel, update."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.config import DQNConfig, LearnerConfig, RewardConfig, SACConfig
from guerdon.errors import ConfigError
from guerdon.learn.dqn import DQN
from guerdon.learn.episodes import EpisodeTracker
from guerdon.learn.networks import ObsSpec
from guerdon.learn.replay import ReplayBatch, ReplayBuffer, TrainBatch
from guerdon.learn.sac import SAC
from guerdon.run.demonstrations import fill_with_demonstrations
from guerdon.run.env_group import EnvGroup
from guerdon.run.loop import Iteration, Stopwatch, episode_metrics, feature_rows, reward_metrics
from guerdon.run.reward_group import RewardGroup
from guerdon.run.workers import Stepped
from guerdon.serve.relabel import RewardScale, judged_frames, learned_rewards, training_rewards
from guerdon.types import BoolArray, FloatArray, UInt8Array
from guerdon.watch.monitor import Watched
from guerdon.watch.reaches import check_reward_path

ITERATION_STEPS = 512
"""Environment steps, all environments together, that make an iteration."""
REPLAY_FILE, PRIOR_FILE = "replay.npz", "prior.npz"


class OffPolicyLoop:
    """One iteration is a stretch of steps with the updates that belong to them."""

    def __init__(
        self,
        learner: SAC | DQN,
        envs: EnvGroup,
        rewards: RewardGroup | None,
        cfg: RewardConfig,
        learner_cfg: LearnerConfig,
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        seed: int,
    ) -> None:
        self.learner, self.envs, self.rewards, self.cfg = learner, envs, rewards, cfg
        self.section: SACConfig | DQNConfig = learner_cfg.sac if isinstance(learner, SAC) else learner_cfg.dqn
        self.num_n_steps = self.section.num_n_steps if isinstance(self.section, DQNConfig) else 1
        self.scale = RewardScale() if cfg.normalize else None
        self.env_steps = 0
        self.path_checked = rewards is None
        self._owed = 0.0  # updates that are due
        self._action_space = spaces[1]
        self._rng = np.random.default_rng(seed)
        self._spec = ObsSpec.of(spaces[0])
        self.replay = self._make_replay(envs.num_envs, self.section.buffer_size, seed)
        self.prior: ReplayBuffer | None = None
        if isinstance(self.section, SACConfig) and self.section.prior_data is not None:
            self.prior = fill_with_demonstrations(
                Path(self.section.prior_data), self._spec, rewards, cfg, self._make_replay, seed
            )
        self.episodes = EpisodeTracker(envs.num_envs)
        self._obs: Any = None
        self._frames: list[UInt8Array | None] = []
        self._watched: list[dict[str, Any]] = []

    def _make_replay(self, num_envs: int, capacity: int, seed: int) -> ReplayBuffer:
        """A buffer that keeps the verdict on every frame, or the frames themselves."""
        extras: dict[str, Any] = {}
        if self.rewards is not None:
            extras["prob_success"] = ((), np.float32)
            if self.cfg.relabel_at == "sampling":
                sizes = self.rewards.facts.contract.frame_sizes
                if not sizes:
                    raise ConfigError(
                        "reward.relabel_at=sampling needs a checkpoint that knows its frame size"
                    )
                extras |= {f"frames/{name}": (sizes[name], np.uint8) for name in self._cameras}
        space = self._action_space
        discrete = isinstance(space, gym.spaces.Discrete)
        shape, dtype = ((), np.int64) if discrete else (space.shape or (), np.float32)
        return ReplayBuffer(self._spec, shape, dtype, num_envs, capacity, extras, seed=seed)

    @property
    def _cameras(self) -> tuple[str, ...]:
        return () if self.rewards is None else self.rewards.facts.image_keys

    def knows_success(self) -> bool:
        """Whether the environments tell success."""
        return bool(self.envs.facts.knows_success)

    def reset(self, seed: int) -> None:
        """Begin new episodes; those that ran are cut off in the buffer."""
        if self._obs is not None:
            self.replay.cut(self._obs)
        self._obs = self.envs.first_obs(seed, self.env_steps)
        self.episodes.reset()

    # An iteration

    def advance(self, progress: float) -> Iteration:
        """A stretch of steps and updates."""
        watch, train = Stopwatch(), dict[str, float]()
        steps = -(-ITERATION_STEPS // self.envs.num_envs)
        self._watched = []
        frames: dict[str, UInt8Array] = {}
        for t in range(steps):
            frames = self._step(t, progress, watch) or frames
            self.env_steps += self.envs.num_envs
            if self.env_steps < self.section.learning_starts:
                continue
            self._owed += self.section.updates_per_step * self.envs.num_envs
            while self._owed >= 1.0:
                train = self._update()
                self._owed -= 1.0
            watch.lap("update")
        metrics = {f"train/{name}": value for name, value in train.items()}
        metrics |= episode_metrics(self.episodes.pop())
        metrics |= watch.metrics(steps * self.envs.num_envs) | self.envs.fault_metrics()
        joined = {name: np.stack([item[name] for item in self._watched]) for name in self._watched[0]}
        if self.rewards is None:
            mean = float(joined["env_rewards"].mean())
            return Iteration(metrics={**metrics, "rollout/rewards": mean, "rollout/env_rewards": mean})
        return self._judged_iteration(metrics, joined, frames)

    def _judged_iteration(
        self, metrics: dict[str, float], joined: dict[str, NDArray[Any]], frames: dict[str, UInt8Array]
    ) -> Iteration:
        assert self.rewards is not None
        facts = self.rewards.facts
        prob, done = joined["prob_success"], joined["done"]
        success = joined["success"] if self.knows_success() else None
        learned = learned_rewards(prob, done, self.cfg, facts.threshold)
        held = training_rewards(prob, joined["env_rewards"], done, self.cfg, facts.threshold, self.scale)
        metrics |= reward_metrics(prob, joined["env_rewards"], held, learned, success, facts.threshold)
        watched = Watched(
            prob_success=prob,
            done=done,
            env_success=success,
            elapsed=joined["elapsed"],
            disagreement=joined["disagreement"] if facts.num_members > 1 else None,
            features=self._features(frames),
            frame=self._frame,
        )
        return Iteration(metrics=metrics, watched=watched)

    def _features(self, frames: dict[str, UInt8Array]) -> FloatArray | None:
        assert self.rewards is not None
        count = len(next(iter(frames.values()))) if frames else 0
        if not count:
            return None
        return self.rewards.features([self.rewards.put(frames)], [feature_rows(count, self.env_steps)])

    def _frame(self, t: int, env: int) -> UInt8Array:
        shown = self._frames[t]
        assert shown is not None  # only judged frames are asked for
        frame: UInt8Array = shown[env]
        return frame

    def _step(self, t: int, progress: float, watch: Stopwatch) -> dict[str, UInt8Array]:
        """One step of all environments into the buffer; returns the frames that were judged."""
        actions, step = self._take_step(progress)
        done, success, frames = step.terminated | step.truncated, step.success, step.frames
        elapsed = self.episodes.lengths.copy()
        self.episodes.add(step.env_rewards, done, success)
        watch.lap("rollout")
        extras = self._judge(done, step)
        watch.lap("compute_model_rewards")
        env_rewards = step.env_rewards
        stored = {name: value for name, value in extras.items() if name != "disagreement"}
        self.replay.add(
            self._obs, actions, env_rewards, step.terminated, step.truncated, step.reached, **stored
        )
        self._obs = step.obs
        if t == 0:
            self._frames = []
        if frames:
            self._frames.append(_placed(frames[self._cameras[0]], judged_frames(done, self.cfg)))
        else:
            self._frames.append(None)
        noted = {"env_rewards": env_rewards, "done": done, "success": success, "elapsed": elapsed}
        self._watched.append({**noted, **{k: v for k, v in extras.items() if not k.startswith("frames/")}})
        return frames

    def _take_step(self, progress: float) -> tuple[NDArray[Any], Stepped]:
        """Choose actions and step; where a worker was lost, its episodes are cut off and new ones begin."""
        actions = self._actions(progress)
        step, fresh = self.envs.step(actions, self.env_steps)
        while step is None:
            for rank, first in fresh.items():
                mine = slice(*self.envs.parts[rank])
                self.replay.cut(self._obs, mine)
                self.episodes.cut(mine)
                self._obs = _with_rows(self._obs, mine, first)
            again = self._actions(progress)
            actions = actions.copy()
            for rank in fresh:
                mine = slice(*self.envs.parts[rank])
                actions[mine] = again[mine]
            step, fresh = self.envs.step(actions, self.env_steps, still=list(fresh))
        return actions, step

    def _actions(self, progress: float) -> NDArray[Any]:
        if self.env_steps < self.section.learning_starts and self.prior is None:
            return _random_actions(self._action_space, self.envs.num_envs, self._rng)
        if isinstance(self.learner, DQN):
            return self.learner.act(self._obs, deterministic=False, progress=progress)
        return self.learner.act(self._obs, deterministic=False)

    def _judge(self, done: BoolArray, step: Stepped) -> dict[str, NDArray[Any]]:
        """Verdicts on what the step led to, [N] each, NaN where nothing was judged; perhaps the frames."""
        if self.rewards is None:
            return {}
        rows, frames, facts = step.rows, step.frames, self.rewards.facts
        verdict = self.rewards.judge(frames)
        prob, spread = (np.full(len(done), np.nan, np.float32) for _ in range(2))
        prob[rows], spread[rows] = verdict.prob_success, verdict.disagreement
        values: dict[str, NDArray[Any]] = {"prob_success": prob, "disagreement": spread}
        if self.scale is not None:
            self.scale.update(learned_rewards(prob, done, self.cfg, facts.threshold))
        if self.cfg.relabel_at == "sampling":
            for name in self._cameras:
                shape = facts.contract.frame_sizes[name]
                kept = np.zeros((len(done), *shape), np.uint8)
                if len(rows):
                    kept[rows] = frames[name]
                values[f"frames/{name}"] = kept
        return values

    # Learning

    def _update(self) -> dict[str, float]:
        if isinstance(self.learner, DQN):
            return self.learner.update(self._train_batch(self._sample(self.replay, self.section.batch_size)))
        assert isinstance(self.section, SACConfig)
        size = self.section.batch_size
        prior_rows = 0 if self.prior is None else round(size * self.section.prior_ratio)
        parts = [self._train_batch(self._sample(self.replay, size - prior_rows))] if prior_rows < size else []
        if self.prior is not None and prior_rows:
            parts.insert(0, self._train_batch(self._sample(self.prior, prior_rows)))
        return self.learner.update(TrainBatch.cat(parts) if len(parts) > 1 else parts[0], prior_rows)

    def _sample(self, replay: ReplayBuffer, count: int) -> ReplayBatch:
        batch = replay.sample(count, gamma=self.section.gamma, num_n_steps=self.num_n_steps)
        if not self.path_checked:
            self._check_path(batch)
        return batch

    def _train_batch(self, batch: ReplayBatch) -> TrainBatch:
        """A sample with its training rewards, which follow from the verdicts on its frames."""
        if self.rewards is None:
            return batch.train_batch(batch.env_rewards)
        return batch.train_batch(torch.from_numpy(self._relabel(batch, self._verdicts(batch))))

    def _relabel(self, batch: ReplayBatch, prob_success: FloatArray) -> FloatArray:
        """Training rewards of each step of a sample, float32 [B, n]."""
        assert self.rewards is not None
        return training_rewards(
            prob_success,
            batch.env_rewards.numpy(),
            _done_steps(batch),
            self.cfg,
            self.rewards.facts.threshold,
            self.scale,
        )

    def _verdicts(self, batch: ReplayBatch) -> FloatArray:
        """Probabilities float32 [B, n], stored at insertion or computed from the stored frames now."""
        stored: FloatArray = batch.extras["prob_success"].numpy()
        if self.cfg.relabel_at == "insertion" or self.rewards is None:
            return stored
        judged = np.isfinite(stored)
        frames = {name: batch.extras[f"frames/{name}"].numpy()[judged] for name in self._cameras}
        fresh = stored.copy()
        fresh[judged] = self.rewards.judge(frames).prob_success
        return fresh

    def _check_path(self, batch: ReplayBatch) -> None:
        """Once, before the first update: does the learned reward reach the targets?"""
        assert self.rewards is not None
        done = _done_steps(batch)
        if self.cfg.reward_mode == "terminal" and not done.any():
            return
        held: list[TrainBatch] = []
        state = copy.deepcopy(self.learner.state_dict())

        def relabel(prob_success: FloatArray) -> FloatArray:
            rewards = self._relabel(batch, prob_success)
            held[:] = [batch.train_batch(torch.from_numpy(rewards))]
            return rewards

        def objective() -> NDArray[np.floating]:
            self.learner.load_state_dict(state)  # targets draw random numbers: the same ones each time
            targets: NDArray[np.floating] = self.learner.targets(held[0]).detach().cpu().numpy()
            return targets

        check_reward_path(relabel, objective, done, self.cfg, self.rewards.facts.threshold)
        self.learner.load_state_dict(state)
        self.path_checked = True

    # State

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Counters; the replay buffer goes to a file of its own."""
        self.replay.cut(self._obs)
        self.replay.save(folder / REPLAY_FILE)
        if self.prior is not None:
            self.prior.save(folder / PRIOR_FILE)
        scale = None if self.scale is None else [self.scale.count, self.scale.mean, self.scale.spread]
        return {
            "env_steps": self.env_steps,
            "owed": self._owed,
            "scale": scale,
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Go on from `state_dict`."""
        self.env_steps, self._owed = int(state["env_steps"]), float(state["owed"])
        if self.scale is not None and state["scale"] is not None:
            self.scale = RewardScale(*state["scale"])
        self._rng.bit_generator.state = state["rng"]
        self.replay.load(folder / REPLAY_FILE)
        if self.prior is not None:
            self.prior.load(folder / PRIOR_FILE)


def _done_steps(batch: ReplayBatch) -> BoolArray:
    """Whether each of the steps [B, n] of a sample ended its episode; only the last that counts can.

    An episode that a checkpoint cut off is truncated in the buffer, but nobody judged its last frame.
    """
    mask = batch.mask.numpy() > 0
    last = mask & ~np.append(mask[:, 1:], np.zeros((len(mask), 1), np.bool_), axis=1)
    ended: BoolArray = (batch.terminated | batch.truncated).numpy()
    judged: BoolArray = np.isfinite(batch.extras["prob_success"].numpy())
    return last & ended[:, None] & judged


def _with_rows(obs: Any, rows: slice, fresh: Any) -> Any:
    """A copy of observations [N, ...] with other ones in some rows."""
    if isinstance(obs, dict):
        return {name: _with_rows(part, rows, fresh[name]) for name, part in obs.items()}
    changed = np.array(obs)
    changed[rows] = fresh
    return changed


def _random_actions(space: gym.Space[Any], count: int, rng: np.random.Generator) -> NDArray[Any]:
    if isinstance(space, gym.spaces.Discrete):
        return rng.integers(int(space.n), size=count) + int(space.start)
    assert isinstance(space, gym.spaces.Box)
    return rng.uniform(space.low, space.high, (count, *space.shape)).astype(np.float32)


def _placed(frames: UInt8Array, judged: BoolArray) -> UInt8Array:
    """A copy of the judged environments' frames in their places, [N, H, W, C]; others are black."""
    whole = np.zeros((len(judged), *frames.shape[1:]), np.uint8)
    whole[judged] = frames
    return whole
