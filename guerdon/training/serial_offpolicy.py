"""The serial pipeline's loop for DQN and SAC, over a replay buffer of transitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from numpy.typing import NDArray
from torch import Tensor

from guerdon.agents.agent import OffPolicyAgent
from guerdon.agents.networks import STATE
from guerdon.config.schema_zoo import SerialConfig
from guerdon.core.batches import TrainBatch
from guerdon.core.errors import ConfigError
from guerdon.core.types import FloatArray
from guerdon.data.collect.observations import with_final
from guerdon.rewards.model import BaseRewardModel, StreamState
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.base import ZooModel
from guerdon.rewards.zoo.experience import Experience, RunningEpisodes
from guerdon.training.acting import random_actions
from guerdon.training.serial_loops import SerialLoop


class OffPolicySerial(SerialLoop):
    """DQN and SAC: rewards are computed for each sampled batch, or once if they depend on the episode."""

    learner: OffPolicyAgent

    def __init__(self, cfg: SerialConfig, learner: OffPolicyAgent, model: BaseRewardModel, env: Any) -> None:
        super().__init__(cfg, learner, model, env)
        if not isinstance(env.single_observation_space, Box):
            raise ConfigError(
                f"learner.algorithm is {cfg.learner.algorithm}: off-policy, the serial pipelines take "
                "observations that are vectors, beside which a reward model may look at a camera; use ppo"
            )
        self.section = learner.cfg
        if learner.num_n_steps != 1:
            raise ConfigError(
                f"the serial pipelines learn from single steps: learner.{learner.name}.num_n_steps must be 1"
            )
        self.replay = Experience(self.section.buffer_size)
        self.generator = torch.Generator().manual_seed(0)
        self._rng = np.random.default_rng(0)
        self._obs: Any = None
        self._memory: StreamState = None
        self._pending_updates = 0.0
        self._running = RunningEpisodes(env.num_envs)

    def reset(self, seed: int) -> None:
        """Begin new episodes."""
        self._obs, _ = self.env.reset(seed=seed)
        self.generator.manual_seed(seed)
        self._rng = np.random.default_rng(seed)
        self._running = RunningEpisodes(self.env.num_envs)
        self._memory = self.model.initial_state(self.env.num_envs)

    def collect(self, progress: float) -> StepBatch:
        """`steps_per_collect` steps."""
        steps = -(-self.cfg.steps_per_collect // self.env.num_envs)
        return _stacked([self._step(progress) for _ in range(steps)])

    def _store(self, experience: StepBatch) -> None:
        """Put steps into the replay buffer, with rewards that depend on the episode, and what is made of it.

        The reward model has been taught by them before: rewards that stay in the buffer need its statistics.
        Frames are judged at once, and only the verdicts are kept.
        """
        if experience.frames is not None:
            experience = replace(experience, learned_rewards=self.learned_rewards(experience), frames=None)
        if self.model.history_dependent:
            scores, self._memory = self.model.score_stream(experience, self._memory)
            experience = replace(experience, learned_rewards=self.mapped(scores, experience))
        self.replay.add(experience.flat())
        if isinstance(self.model, ZooModel) and self.model.augments:
            finished = self._running.add(experience)
            if finished:
                self.replay.add(self.model.augment(finished).to("cpu"))

    def _step(self, progress: float) -> StepBatch:
        obs = np.array(self._obs, np.float32)
        actions = self._actions(progress)
        self._obs, env_rewards, terminated, truncated, info = self.env.step(actions)
        done = np.asarray(terminated) | np.asarray(truncated)
        reached = with_final(self._obs, info.get("final_obs"), done) if done.any() else self._obs
        self.env_steps += self.env.num_envs
        images = self.frames(reached, done)
        return StepBatch(
            obs=torch.from_numpy(obs),
            actions=torch.from_numpy(np.asarray(actions) - self._first_action),
            next_obs=torch.from_numpy(np.array(reached, np.float32)),
            env_rewards=torch.from_numpy(np.asarray(env_rewards, np.float32)),
            terminated=torch.from_numpy(np.asarray(terminated, np.bool_)),
            truncated=torch.from_numpy(np.asarray(truncated, np.bool_)),
            frames=None if images is None else torch.from_numpy(images),
        )

    def _actions(self, progress: float) -> NDArray[Any]:
        if self.env_steps < self.section.learning_starts:
            return random_actions(self.env.single_action_space, self.env.num_envs, self._rng)
        return self.learner.act(self._obs, progress=progress)

    def learn(self, experience: StepBatch, progress: float) -> dict[str, float]:
        """Store the steps, and do the updates that they are worth: sample, score, update."""
        self._store(experience)
        if self.env_steps < self.section.learning_starts:
            return {}
        self._pending_updates += len(experience) * self.section.updates_per_step
        losses: dict[str, float] = {}
        learned = torch.zeros(0)
        if not self.path_checked:
            self._check_on(self.replay.sample(self.section.batch_size, torch.Generator().manual_seed(0)))
        for _ in range(int(self._pending_updates)):
            batch = self.replay.sample(self.section.batch_size, self.generator)
            learned = self.learned_rewards(batch) if batch.learned_rewards is None else batch.learned_rewards
            if self.scale is not None:
                self.scale.update(learned.numpy())
            losses = self.learner.update(self._train_batch(batch, learned))
            self.train_iter += 1
        self._pending_updates -= int(self._pending_updates)
        if not len(learned):
            return {}
        return {
            "rollout/learned_rewards": float(learned.mean()),
            **{f"train/{name}": value for name, value in losses.items()},
        }

    def _check_on(self, batch: StepBatch) -> None:
        """Drive a batch through relabelling twice; the learner is as before afterwards."""
        state = self.learner.state_dict()
        held: list[TrainBatch] = []

        def relabel(values: FloatArray) -> NDArray[Any]:
            held[:] = [self._train_batch(batch, torch.from_numpy(values))]
            return held[0].training_rewards.numpy()

        def objective() -> NDArray[Any]:
            self.learner.load_state_dict(state)  # targets draw random numbers: the same ones each time
            targets: NDArray[Any] = self.learner.targets(held[0].to(self.learner.device)).cpu().numpy()
            return targets

        self.check_path(relabel, objective, batch.shape)
        self.learner.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """With the replay buffer."""
        return {**super().state_dict(), "owed": self._pending_updates, "replay": self.replay.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        super().load_state_dict(state)
        self._pending_updates = float(state["owed"])
        self.replay.load_state_dict(state["replay"])

    def _train_batch(self, batch: StepBatch, learned: Tensor) -> TrainBatch:
        return TrainBatch(
            obs={STATE: batch.obs},
            actions=batch.actions + self._first_action if self._first_action else batch.actions,
            training_rewards=self.training_rewards(batch.env_rewards, learned),
            next_obs={STATE: batch.next_obs},
            not_terminated=(~batch.terminated).float(),
            discount=torch.full((len(batch),), self.section.gamma),
        )


def _stacked(steps: list[StepBatch]) -> StepBatch:
    """Steps [N] as [T, N]."""
    parts: dict[str, Any] = {
        name: torch.stack([getattr(step, name) for step in steps]) for name in steps[0].parts()
    }
    return StepBatch(**parts)
