"""The loop of the serial pipelines: collect, teach the reward model, relabel, update the policy; with PPO.

That of DQN and SAC is in `serial_offpolicy.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from torch import Tensor

from guerdon.agents.agent import AnyAgent, OnPolicyAgent
from guerdon.agents.networks import STATE
from guerdon.config.schema_zoo import SerialConfig
from guerdon.core.batches import Rollout
from guerdon.core.errors import ConfigError
from guerdon.core.types import BoolArray, FloatArray, UInt8Array
from guerdon.data.collect.observations import FrameSource
from guerdon.envs.make import make_vector_env
from guerdon.monitoring.reward_path import check_learned_rewards
from guerdon.rewards.model import BaseRewardModel, Scores, StreamState
from guerdon.rewards.relabel import RewardScale, combine, learned_rewards
from guerdon.rewards.steps import StepBatch, to_items
from guerdon.rewards.zoo.base import ZooModel
from guerdon.training.env_worker import RolloutCollector


class SerialLoop(ABC):
    """What both loops share: environments, learner, reward model, and the way to the training reward."""

    def __init__(self, cfg: SerialConfig, learner: AnyAgent, model: BaseRewardModel, env: Any) -> None:
        self.cfg, self.learner, self.model, self.env = cfg, learner, model, env
        self.env_steps, self.train_iter = 0, 0
        self.scale = RewardScale() if cfg.mix.normalize else None
        self.mapping = replace(model.mapping, reward_mode=cfg.mix.reward_mode)
        self.cooptrain = True
        self.path_checked = False
        self._first_action = int(getattr(env.single_action_space, "start", 0))
        self._source: FrameSource | None = None
        if isinstance(model, ZooModel):
            model.bind_env(env)
            if model.obs_key is not None:
                self._source = FrameSource(env, (model.obs_key,))

    def frames(self, reached: Any, done: BoolArray) -> UInt8Array | None:
        """What the model's camera shows after a step, uint8 [N, H, W, C]; None if it needs no pictures.

        Args:
            reached: [N, ...]; what the actions led to, the final observation where an episode ended.
            done: bool [N].
        """
        if self._source is None:
            return None
        (images,) = self._source.frames(reached, done, np.arange(self.env.num_envs)).values()
        return np.array(images)  # an environment may draw the next ones in the same place

    @abstractmethod
    def reset(self, seed: int) -> None:
        """Begin new episodes; everything that this loop draws follows from `seed` from here on."""

    def state_dict(self) -> dict[str, Any]:
        """What going on after `reset` needs, learner and reward model aside."""
        scale = None if self.scale is None else [self.scale.count, self.scale.mean, self.scale.spread]
        return {"env_steps": self.env_steps, "train_iter": self.train_iter, "scale": scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.env_steps, self.train_iter = int(state["env_steps"]), int(state["train_iter"])
        if self.scale is not None and state["scale"] is not None:
            self.scale = RewardScale(*state["scale"])
        self.path_checked = True

    @abstractmethod
    def collect(self, progress: float) -> StepBatch:
        """Experience of the policy, [T, N]."""

    @abstractmethod
    def learn(self, experience: StepBatch, progress: float) -> dict[str, float]:
        """Update the policy on rewards of the model."""

    def advance(self, progress: float) -> dict[str, float]:
        """One iteration: collect, teach the reward model, update the policy; returns what to log."""
        experience = self.collect(progress)
        metrics: dict[str, float] = {}
        if self.cooptrain:
            metrics |= self.teach(experience)
        return metrics | self.learn(experience, progress)

    def teach(self, experience: StepBatch) -> dict[str, float]:
        """`collect_data`, `train`, `clear_data`."""
        self._show(experience)
        told = self.model.train()
        self.model.clear_data(self.train_iter)
        return _named("reward_model", told)

    def pretrain(self) -> dict[str, float]:
        """Teach the reward model before the policy learns; one that needs experience gets a first batch."""
        if getattr(self.model, "needs_experience", True):
            self._show(self.collect(0.0))
        told = self.model.pretrain()
        self.model.clear_data(self.train_iter)
        return _named("reward_model", told)

    def _show(self, experience: StepBatch) -> None:
        self.model.collect_data(experience if isinstance(self.model, ZooModel) else to_items(experience))

    def check_path(
        self,
        relabel: Callable[[FloatArray], NDArray[Any]],
        objective: Callable[[], NDArray[Any]],
        shape: tuple[int, ...],
    ) -> None:
        """Before the first update: does what the model says reach what the policy is trained on?"""
        mix = self.cfg.mix
        weight = mix.weight_at(self.env_steps) if mix.combine_mode == "weighted" else 1.0
        if not self.path_checked and (weight or not mix.reward_weight_end):
            check_learned_rewards(relabel, objective, shape, weight)
            self.path_checked = True

    def learned_rewards(self, batch: StepBatch) -> Tensor:
        """The model's rewards of rows, float32 [*L]."""
        return self.mapped(self.model.score(batch), batch)

    def mapped(self, scores: Scores, batch: StepBatch) -> Tensor:
        """What the model's scores are worth, float32 [*L]."""
        done = batch.done.numpy()
        return torch.from_numpy(learned_rewards(scores, done, self.mapping, self.model.threshold))

    def training_rewards(self, env_rewards: Tensor, learned: Tensor) -> Tensor:
        """What the learner trains on: learned rewards, scaled if asked for, combined as `mix` says."""
        values = learned.numpy().astype(np.float32)
        return torch.from_numpy(
            combine(env_rewards.numpy(), values, self.cfg.mix, self.scale, self.env_steps)
        )


class OnPolicySerial(SerialLoop):
    """PPO: rewards of a rollout are replaced before any advantage is computed."""

    learner: OnPolicyAgent

    def __init__(self, cfg: SerialConfig, learner: OnPolicyAgent, model: BaseRewardModel, env: Any) -> None:
        super().__init__(cfg, learner, model, env)
        if isinstance(model, ZooModel) and model.augments:
            raise ConfigError(
                f"{type(model).__name__} adds transitions that no policy played: "
                f"use an off-policy agent such as dqn or sac, not {learner.name}"
            )
        self.collector = RolloutCollector(env, cfg.learner.section.num_steps)
        self._rollout: Rollout | None = None
        self._memory: StreamState = None
        if isinstance(model, ZooModel) and isinstance(env.single_observation_space, Box):
            model.policy_log_probs = lambda obs, actions: learner.log_probs({STATE: obs}, actions)

    def reset(self, seed: int) -> None:
        """Begin new episodes."""
        self.collector.reset(seed)
        self._memory = self.model.initial_state(self.env.num_envs)

    def collect(self, progress: float) -> StepBatch:
        """A rollout."""
        reached: list[NDArray[Any]] = []
        shown: list[UInt8Array] = []

        def keep(t: int, env: Any, obs: Any, done: Any, info: Any) -> None:
            reached.append(np.array(obs[STATE] if isinstance(obs, Mapping) else obs, np.float32))
            images = self.frames(obs, done)
            if images is not None:
                shown.append(images)

        rollout = self._rollout = self.collector.collect(self.learner, keep)
        self.env_steps += rollout.num_transitions
        actions = rollout.actions
        if not isinstance(self.env.single_action_space, Discrete):
            low, high = self.env.single_action_space.low, self.env.single_action_space.high
            actions = actions.clamp(
                torch.from_numpy(low), torch.from_numpy(high)
            )  # as the environment saw them
        return StepBatch(
            obs=rollout.obs[STATE],
            actions=actions,
            next_obs=torch.from_numpy(np.stack(reached)),
            env_rewards=rollout.env_rewards,
            terminated=rollout.terminated,
            truncated=rollout.truncated,
            log_probs=rollout.log_probs,
            frames=torch.from_numpy(np.stack(shown)) if shown else None,
        )

    def learn(self, experience: StepBatch, progress: float) -> dict[str, float]:
        """Score the rollout, put the rewards in place, then compute advantages and update."""
        assert self._rollout is not None
        if self.model.history_dependent:
            scores, self._memory = self.model.score_stream(experience, self._memory)
            learned = self.mapped(scores, experience)
        else:
            learned = self.learned_rewards(experience)
        self.check_path(
            lambda values: self._relabel(experience, torch.from_numpy(values)).numpy(),
            self._objective,
            experience.shape,
        )
        if self.scale is not None:
            self.scale.update(learned.numpy())
        training = self._relabel(experience, learned)
        losses = self.learner.update(self._rollout, progress)
        self.train_iter += 1
        return {
            "rollout/learned_rewards": float(learned.mean()),
            "rollout/rewards": float(training.mean()),
            **{f"train/{name}": value for name, value in losses.items()},
        }

    def _relabel(self, experience: StepBatch, learned: Tensor) -> Tensor:
        """Put rewards into the rollout; returns those that it now holds, [T, N]."""
        assert self._rollout is not None
        self._rollout.update_rewards(self.training_rewards(experience.env_rewards, learned))
        return self._rollout.training_rewards

    def _objective(self) -> NDArray[Any]:
        assert self._rollout is not None
        advantages: NDArray[Any] = self.learner.advantages(self._rollout)[0].cpu().numpy()
        return advantages.copy()


def make_env(cfg: SerialConfig) -> Any:
    """The training environments."""
    return make_vector_env(cfg.env.train, autoreset_mode=AutoresetMode.SAME_STEP, keep_final_frame=False)


def _named(section: str, told: Any) -> dict[str, float]:
    """What a model returned for the log, under names; plugins may return anything."""
    if not isinstance(told, Mapping):
        return {}
    return {f"{section}/{name}": float(value) for name, value in told.items()}
