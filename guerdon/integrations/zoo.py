"""Reward models of the zoo behind the wrappers: steps become transitions, transitions get rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from guerdon.config import RewardConfig
from guerdon.config.schema_zoo import MixConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy
from guerdon.core.types import BoolArray, FloatArray
from guerdon.envs.wrappers import GOAL_KEYS, flat_batch
from guerdon.integrations.scoring import RewardStep, rows_from
from guerdon.rewards import BaseRewardModel, StepBatch, ZooModel
from guerdon.rewards.relabel import RewardScale, combine
from guerdon.rewards.steps import to_items


class TransitionJudge:
    """Builds the transitions of N environments and gives them rewards.

    Args:
        model: of the zoo, or a plugin.
        cfg: how its reward and the environment's are mixed; None: the learned reward alone.
        num_envs: N.
        action_space: of a single environment.
        teach_every: after so many steps, all environments together, the model is taught by them
            (`collect_data`, `train`, `clear_data`); 0 leaves it as it is.
    """

    def __init__(
        self,
        model: BaseRewardModel,
        cfg: MixConfig | RewardConfig | None,
        num_envs: int,
        action_space: Any,
        teach_every: int = 0,
    ) -> None:
        if isinstance(cfg, RewardConfig):
            raise ConfigError("a reward model of the zoo is mixed by a MixConfig, not by a reward section")
        self.model, self.mix, self.num_envs = model, cfg or MixConfig(), num_envs
        self.has_memory = isinstance(model, ZooModel) and model.scores == "streams"
        self.env_steps, self.rounds, self._teach_every = 0, 0, teach_every
        self._discrete = isinstance(action_space, Discrete)
        self._first = int(getattr(action_space, "start", 0))
        self._bounds = (action_space.low, action_space.high) if isinstance(action_space, Box) else None
        self._scale = RewardScale() if self.mix.normalize else None
        self._obs: Any = None
        self._running: BoolArray = np.zeros(num_envs, np.bool_)
        self._memory = model.begin(num_envs) if isinstance(model, ZooModel) else None
        self._recent: list[StepBatch] = []

    def begin(self, obs: Any, mask: BoolArray | None = None) -> None:
        """New episodes begin in the environments of `mask` (bool [N]), or in all, with `obs` [N, ...]."""
        if mask is None:
            self._obs, self._running[:] = self._vectors(obs).copy(), False
            self._memory = self.model.begin(self.num_envs) if isinstance(self.model, ZooModel) else None
            self._recent = []  # of episodes that nobody ends
            return
        if self.has_memory and (self._running & mask).any():
            raise ConfigError(
                f"{type(self.model).__name__} remembers episodes: none can be reset before its end"
            )
        self._obs = rows_from(self._obs, self._vectors(obs), mask)

    def step(
        self,
        actions: Any,
        reached: Any,
        obs: Any,
        env_rewards: Any,
        terminated: BoolArray,
        truncated: BoolArray,
        stepped: BoolArray,
    ) -> RewardStep:
        """Rewards of a step; those of environments that were not `stepped` are zero.

        Args:
            actions: [N, ...]; what the environments were given.
            reached: [N, ...]; what the actions led to, the final observation where an episode ended.
            obs: [N, ...]; what the next actions are chosen in.
            env_rewards: [N].
            terminated: bool [N].
            truncated: bool [N].
            stepped: bool [N]; False where an environment only began a new episode.
        """
        if self._obs is None:
            raise DataError("the environments have not been reset yet")
        env = to_numpy(env_rewards).astype(np.float32)
        batch = StepBatch(
            obs=torch.from_numpy(self._obs),
            actions=torch.from_numpy(self._actions(actions)),
            next_obs=torch.from_numpy(self._vectors(reached).copy()),
            env_rewards=torch.from_numpy(env.copy()),
            terminated=torch.from_numpy(terminated.copy()),
            truncated=torch.from_numpy(truncated & ~terminated),
        )
        learned = np.zeros(self.num_envs, np.float32)
        if stepped.any():
            learned[stepped] = self._learned(batch, stepped)
        training = np.zeros_like(learned)
        if stepped.any():
            training[stepped] = self._mixed(env[stepped], learned[stepped])
        self.env_steps += int(stepped.sum())
        self._running = ~(terminated | truncated)
        self._obs = self._vectors(obs).copy()
        self._teach(batch, stepped)
        return RewardStep(env_reward=env, learned_reward=learned, training_reward=training)

    def _learned(self, batch: StepBatch, stepped: BoolArray) -> FloatArray:
        rows = torch.from_numpy(stepped)
        if isinstance(self.model, ZooModel):
            with torch.no_grad():
                if self.has_memory:
                    if not stepped.all():
                        raise ConfigError(
                            f"{type(self.model).__name__} remembers episodes: make the vector environment "
                            "with autoreset_mode SAME_STEP"
                        )
                    one = self.model.checked(batch.map(lambda part: part.unsqueeze(0)))
                    rewards, self._memory = self.model.score_stream(one, self._memory)
                    rewards = rewards[0]
                else:
                    rewards = self.model.score(self.model.checked(batch[rows]))
            values: FloatArray = rewards.float().cpu().numpy()
        else:
            items = self.model.estimate(to_items(batch[rows]))
            values = np.array([float(torch.as_tensor(item["reward"])) for item in items], np.float32)
        if values.shape != (int(stepped.sum()),) or not np.isfinite(values).all():
            raise DataError(
                f"{type(self.model).__name__} must give {int(stepped.sum())} finite rewards, not {values}"
            )
        return values

    def _mixed(self, env: FloatArray, learned: FloatArray) -> FloatArray:
        if self._scale is not None:
            self._scale.update(learned)
            learned = self._scale.apply(learned)
        return combine(env, learned, replace(self.mix, reward_weight=self.mix.weight_at(self.env_steps)))

    def _teach(self, batch: StepBatch, stepped: BoolArray) -> None:
        """Keep the step; when it is time, teach the model by all that was kept."""
        if not self._teach_every:
            return
        if not stepped.all():
            raise ConfigError("teach_every needs environments that reset in the same step (SAME_STEP)")
        self._recent.append(batch)
        if len(self._recent) * self.num_envs < self._teach_every:
            return
        streams: dict[str, Any] = {
            name: torch.stack([getattr(each, name) for each in self._recent]) for name in batch.parts()
        }
        experience = StepBatch(**streams)
        self._recent = []
        self.rounds += 1
        self.model.collect_data(experience if isinstance(self.model, ZooModel) else to_items(experience))
        self.model.train()
        self.model.clear_data(self.rounds)

    def _vectors(self, obs: Any) -> NDArray[np.float32]:
        """Observations as the model takes them, float32 [N, ...]; of a dict its camera or goals."""
        if isinstance(obs, Mapping):
            key = getattr(self.model, "obs_key", None)
            if key in obs:
                obs = obs[key]
            elif set(GOAL_KEYS) <= obs.keys():
                return flat_batch({name: to_numpy(obs[name]) for name in GOAL_KEYS})
            else:
                raise ConfigError(
                    f"{type(self.model).__name__} takes vectors, images or goal-conditioned observations, "
                    f"not a dict of {', '.join(map(str, obs))}"
                )
        return np.ascontiguousarray(to_numpy(obs), np.float32)

    def _actions(self, actions: Any) -> NDArray[Any]:
        given = to_numpy(actions)
        if self._discrete:
            return given.astype(np.int64) - self._first
        if self._bounds is not None:
            given = np.clip(given, *self._bounds)
        return given.astype(np.float32)
