"""A step of N environments, its rewards, and what computes them, as all wrappers know them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from guerdon.config import RewardConfig
from guerdon.config.schema_zoo import MixConfig
from guerdon.core.errors import DataError
from guerdon.core.images import to_numpy
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.rewards.relabel import RewardScale, combine


@dataclass(frozen=True, kw_only=True)
class EnvStep:
    """A step of N environments."""

    actions: Any
    """[N, ...]; what the environments were given."""
    obs: Any
    """[N, ...]; in which the next actions are chosen."""
    next_obs: Callable[[], Any]
    """Gives [N, ...], what the actions led to: the final observation where an episode ended."""
    frames: Callable[[IntArray], Mapping[str, UInt8Array]]
    """Gives what the cameras show of that, of some environments: camera -> uint8 [n, H, W, C]."""
    env_rewards: Any
    """[N]."""
    terminated: BoolArray
    """bool [N]."""
    truncated: BoolArray
    """bool [N]."""
    stepped: BoolArray
    """bool [N]; False where the environment only started a new episode: its reward is zero."""

    @property
    def done(self) -> BoolArray:
        """Bool [N]; the episode ended with this step."""
        return self.terminated | self.truncated


@dataclass(frozen=True, kw_only=True)
class RewardStep:
    """The rewards of one step of N environments."""

    env_reward: FloatArray
    """float32 [N]; what the environment gave."""
    learned_reward: FloatArray
    """float32 [N]; what the model's score is worth, before it is scaled or combined."""
    training_reward: FloatArray
    """float32 [N]; what the learner gets."""
    prob_success: FloatArray | None = None
    """float32 [N]; NaN where nothing was scored. None of a model that gives rewards."""
    ended: BoolArray
    """bool [N]; episodes that the model's success ends (`standalone`)."""

    def infos(self) -> dict[str, FloatArray]:
        """What the wrappers report beside the reward that they return."""
        known = {"env_reward": self.env_reward, "learned_reward": self.learned_reward}
        return known if self.prob_success is None else {**known, "prob_success": self.prob_success}


class StepScorer(ABC):
    """Computes the rewards of N environments step by step.

    Args:
        num_envs: N.
        cfg: how learned and env rewards are combined.
    """

    cameras: tuple[str, ...] = ()
    """The cameras that the model looks at."""
    standalone: bool = False
    """Whether the model's success ends episodes."""

    def __init__(self, num_envs: int, cfg: RewardConfig | MixConfig) -> None:
        self.num_envs, self.cfg, self.env_steps = num_envs, cfg, 0
        self._scale = RewardScale() if cfg.normalize else None

    @abstractmethod
    def reset(self, obs: Any, mask: BoolArray | None = None) -> None:
        """New episodes start in the environments of `mask` (bool [N]), or in all, with `obs` [N, ...]."""

    @abstractmethod
    def step(self, step: EnvStep) -> RewardStep:
        """Rewards of a step."""

    def _rewards(
        self, step: EnvStep, learned: FloatArray, prob_success: FloatArray | None, ended: BoolArray
    ) -> RewardStep:
        """Rewards of a step from the learned ones [n] of the environments that were `stepped`."""
        env = to_numpy(step.env_rewards).astype(np.float32)
        if env.shape != (self.num_envs,):
            raise DataError(f"env rewards have shape {list(env.shape)}; expected [{self.num_envs}]")
        everywhere, training = np.zeros_like(env), np.zeros_like(env)
        everywhere[step.stepped] = learned
        if self._scale is not None and len(learned):
            self._scale.update(learned)
        training[step.stepped] = combine(env[step.stepped], learned, self.cfg, self._scale, self.env_steps)
        self.env_steps += len(learned)
        return RewardStep(
            env_reward=env,
            learned_reward=everywhere,
            training_reward=training,
            prob_success=prob_success,
            ended=ended,
        )
