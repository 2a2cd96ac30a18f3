"""What off-policy runs have in common: sample, relabel, update, and what is saved of it."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from guerdon.agents.agent import OffPolicyAgent
from guerdon.agents.networks import ObsSpec
from guerdon.agents.replay import ReplayBatch, ReplayBuffer, TrainBatch
from guerdon.agents.replay_parts import ReplayParts, check_layout
from guerdon.config import LearnerConfig, RewardConfig
from guerdon.core.errors import ConfigError
from guerdon.core.types import BoolArray, FloatArray
from guerdon.monitoring.reward_path import check_reward_path
from guerdon.rewards.relabel import RewardScale, combine, learned_rewards, training_rewards
from guerdon.training.demonstrations import fill_with_demonstrations
from guerdon.training.env_workers import EnvWorkers
from guerdon.training.loop import reward_metrics
from guerdon.training.online_reward import OnlineReward, load_online
from guerdon.training.reward_workers import RewardWorkers

ITERATION_STEPS = 512
"""Environment steps, all environments together, that make an iteration."""
REPLAY_FILE, PRIOR_FILE, INTERVENTIONS_FILE = "replay.npz", "prior.npz", "interventions.npz"

Replay = TypeVar("Replay", ReplayBuffer, ReplayParts)


@dataclass(frozen=True, kw_only=True)
class LearningParts:
    """What an off-policy loop puts together."""

    learner: OffPolicyAgent
    envs: EnvWorkers
    rewards: RewardWorkers | None
    """None without a reward model."""
    cfg: RewardConfig
    learner_cfg: LearnerConfig
    spaces: tuple[gym.Space[Any], gym.Space[Any]]
    """Of observations and of actions, for a single environment."""
    seed: int
    online: OnlineReward | None = None
    """A reward model of the zoo; None: there is none."""


class ReplayLearning(ABC, Generic[Replay]):
    """Learner, replay buffer and demonstrations; how experience comes in is left to others."""

    replay: Replay

    def __init__(self, parts: LearningParts) -> None:
        self.learner, self.envs, self.rewards, self.cfg = parts.learner, parts.envs, parts.rewards, parts.cfg
        self.section = self.learner.cfg
        self.scale = RewardScale() if self.cfg.normalize else None
        self.env_steps = 0
        self.path_checked = self.rewards is None
        self.online = parts.online
        self._online_checked = self.online is None
        self._sampled: dict[str, float] = {}  # rewards of the latest sample that the online model scored
        self._pending_updates = 0.0  # updates that are due
        self._action_space = parts.spaces[1]
        self._rng = np.random.default_rng(parts.seed)
        self._spec = ObsSpec.of(parts.spaces[0])
        self._seed = parts.seed
        self.prior: ReplayBuffer | None = None
        self.interventions: ReplayBuffer | None = None
        """Steps in which a person took over, sampled with the demonstrations; None until there are some."""
        shown = self.learner.prior
        if shown is not None and shown.prior_data is not None:
            self.prior = fill_with_demonstrations(
                Path(shown.prior_data),
                self._spec,
                self.rewards,
                self.cfg,
                self._make_replay,
                parts.seed,
                parts.envs.facts.control_mode,
            )

    @abstractmethod
    def truncate_running_episodes(self) -> None:
        """Mark the running episodes as truncated in the replay buffer: they will not go on."""

    def _make_replay(self, num_envs: int, capacity: int, seed: int) -> ReplayBuffer:
        """A buffer that keeps the verdict on every frame, or the frames themselves."""
        extras: dict[str, Any] = {}
        if self.rewards is not None:
            extras["prob_success"] = ((), np.float32)
            if self.cfg.relabel_at == "sampling":
                sizes = self.rewards.facts.contract.input_sizes
                if not sizes:
                    raise ConfigError(
                        "reward.relabel_at=sampling needs a checkpoint that knows its frame size"
                    )
                extras |= {f"frames/{name}": (sizes[name], np.uint8) for name in self._cameras}
        if self.online is not None and self.online.history_dependent:
            extras["online_rewards"] = ((), np.float32)
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

    def _judged_metrics(self, joined: dict[str, NDArray[Any]]) -> dict[str, float]:
        """All three rewards of some steps, and how the learned one behaves."""
        assert self.rewards is not None
        facts = self.rewards.facts
        prob, done = joined["prob_success"], joined["done"]
        success = joined["success"] if self.knows_success() else None
        learned = learned_rewards(prob, done, self.cfg, facts.threshold)
        held = training_rewards(prob, joined["env_rewards"], done, self.cfg, facts.threshold, self.scale)
        return reward_metrics(prob, joined["env_rewards"], held, learned, success, facts.threshold)

    def _unscored_metrics(self, env_rewards: NDArray[Any]) -> dict[str, float]:
        """Rewards of a run without an image model; with an online one, of the latest sampled batch."""
        mean = float(env_rewards.mean())
        own = {"rollout/rewards": mean} if self.online is None else self._sampled
        return {**own, "rollout/env_rewards": mean}

    # Learning

    def _add_pending_updates(self, num_steps: int) -> None:
        """Environment steps were stored after the start of learning; their updates are due."""
        if not self._pending_updates and not self.learner.num_updates:
            self._pending_updates += self.learner.num_first_updates
        self._pending_updates += self.section.updates_per_step * num_steps

    def _update(self) -> dict[str, float]:
        size, shown, prior = self.section.batch_size, self._demonstrations(), self.learner.prior
        prior_rows = 0 if shown is None or prior is None else round(size * prior.prior_ratio)
        parts = [self._train_batch(self._sample(self.replay, size - prior_rows))] if prior_rows < size else []
        if shown is not None and prior_rows:
            parts.insert(0, self._train_batch(self._sample(shown, prior_rows)))
        return self.learner.update(TrainBatch.cat(parts) if len(parts) > 1 else parts[0], prior_rows)

    def _demonstrations(self) -> ReplayBuffer | ReplayParts | None:
        """What people did: demonstrations, and the steps in which they took over."""
        parts = [part for part in (self.prior, self.interventions) if part is not None]
        if len(parts) < 2:
            return parts[0] if parts else None
        return ReplayParts(parts, rng=self._rng)

    def _intervened(self) -> ReplayBuffer:
        """The buffer for steps in which a person took over, made when it is first needed."""
        if self.interventions is None:
            assert self.learner.prior is not None
            self.interventions = self._make_replay(1, self.learner.prior.interventions_size, self._seed + 1)
        return self.interventions

    def _sample(self, replay: ReplayBuffer | ReplayParts, count: int) -> ReplayBatch:
        batch = replay.sample(count, gamma=self.section.gamma, num_n_steps=self.learner.num_n_steps)
        if not self.path_checked:
            self._check_path(batch)
        if not self._online_checked and self.online is not None:
            online, cfg = self.online, self.cfg
            self._drive(
                batch,
                self._hold,
                lambda relabel, objective: online.check_path(relabel, objective, (len(batch), 1), cfg),
            )
            self._online_checked = True
        return batch

    def _train_batch(self, batch: ReplayBatch) -> TrainBatch:
        """A sample with its training rewards, which follow from the verdicts on its frames."""
        if self.rewards is not None:
            return batch.train_batch(torch.from_numpy(self._relabel(batch, self._verdicts(batch))))
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
            _done_steps(batch),
            self.cfg,
            self.rewards.facts.threshold,
            self.scale,
            0.0 if self.online is None or not self.path_checked else self._online_rewards(batch),
        )

    def _hold(self, batch: ReplayBatch, learned: FloatArray) -> FloatArray:
        """Training rewards of each step of a sample from learned ones, float32 [B, n]."""
        return combine(batch.env_rewards.numpy(), learned, self.cfg, self.scale)

    def _online_rewards(self, batch: ReplayBatch) -> FloatArray:
        """What the online reward model says of a sample now, or said when its steps came; float32 [B, 1]."""
        assert self.online is not None
        if self.online.history_dependent:
            stored: FloatArray = batch.extras["online_rewards"].numpy()
            return stored
        return self.online.rewards(self.online.of_sample(batch))[:, None]

    def _verdicts(self, batch: ReplayBatch) -> FloatArray:
        """Probabilities float32 [B, n], stored at insertion or computed from the stored frames now."""
        stored: FloatArray = batch.extras["prob_success"].numpy()
        if self.cfg.relabel_at == "insertion" or self.rewards is None:
            return stored
        judged = np.isfinite(stored)
        frames = {name: batch.extras[f"frames/{name}"].numpy()[judged] for name in self._cameras}
        fresh = stored.copy()
        fresh[judged] = self.rewards.score(frames).prob_success
        return fresh

    def _check_path(self, batch: ReplayBatch) -> None:
        """Once, before the first update: does the learned reward reach the targets?"""
        assert self.rewards is not None
        done = _done_steps(batch)
        if self.cfg.reward_mode == "terminal" and not done.any():
            return
        cfg, threshold = self.cfg, self.rewards.facts.threshold
        self._drive(
            batch,
            self._relabel,
            lambda relabel, objective: check_reward_path(relabel, objective, done, cfg, threshold),
        )
        self.path_checked = True

    def _drive(
        self,
        batch: ReplayBatch,
        relabel: Callable[[ReplayBatch, FloatArray], FloatArray],
        check: Callable[[Callable[[FloatArray], FloatArray], Callable[[], NDArray[np.floating]]], None],
    ) -> None:
        """Let `check` drive values through `relabel` to the targets; the learner is as before afterwards."""
        held: list[TrainBatch] = []
        state = copy.deepcopy(self.learner.state_dict())

        def relabelled(values: FloatArray) -> FloatArray:
            rewards = relabel(batch, values)
            held[:] = [batch.train_batch(torch.from_numpy(rewards))]
            return rewards

        def objective() -> NDArray[np.floating]:
            self.learner.load_state_dict(state)  # targets draw random numbers: the same ones each time
            targets: NDArray[np.floating] = self.learner.targets(held[0]).detach().cpu().numpy()
            return targets

        check(relabelled, objective)
        self.learner.load_state_dict(state)

    # State

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """Counters; the replay buffer goes to a file of its own."""
        self.truncate_running_episodes()
        self.replay.save(folder / REPLAY_FILE)
        if self.prior is not None:
            self.prior.save(folder / PRIOR_FILE)
        if self.interventions is not None:
            self.interventions.save(folder / INTERVENTIONS_FILE)
        scale = None if self.scale is None else [self.scale.count, self.scale.mean, self.scale.spread]
        return {
            "env_steps": self.env_steps,
            "owed": self._pending_updates,
            "scale": scale,
            "online": None if self.online is None else self.online.state_dict(),
            "rng": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Go on from `state_dict`."""
        self.env_steps, self._pending_updates = int(state["env_steps"]), float(state["owed"])
        if self.scale is not None and state["scale"] is not None:
            self.scale = RewardScale(*state["scale"])
        self._rng.bit_generator.state = state["rng"]
        load_online(self.online, state)
        if isinstance(self.replay, ReplayBuffer):
            check_layout(folder / REPLAY_FILE, 1)
        self.replay.load(folder / REPLAY_FILE)
        if self.prior is not None:
            self.prior.load(folder / PRIOR_FILE)
        if (folder / INTERVENTIONS_FILE).exists():
            self._intervened().load(folder / INTERVENTIONS_FILE)


def _done_steps(batch: ReplayBatch) -> BoolArray:
    """Whether each of the steps [B, n] of a sample ended its episode; only the last that counts can.

    An episode that a checkpoint cut off is truncated in the buffer, but nobody judged its last frame.
    """
    mask = batch.mask.numpy() > 0
    last = mask & ~np.append(mask[:, 1:], np.zeros((len(mask), 1), np.bool_), axis=1)
    ended: BoolArray = (batch.terminated | batch.truncated).numpy()
    judged: BoolArray = np.isfinite(batch.extras["prob_success"].numpy())
    return last & ended[:, None] & judged
