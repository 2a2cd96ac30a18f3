"""Gymnasium environments, single and vectorised, whose reward is a learned one.

`info` keeps all parts: `env_reward`, `learned_reward` and, of a model that sees success, `prob_success` (NaN
where nothing was scored). A reward model of the zoo may stand in for the manager, with a `MixConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from numpy.typing import NDArray

from guerdon.config import RewardConfig
from guerdon.config.schema_zoo import MixConfig
from guerdon.core.errors import ConfigError
from guerdon.core.images import to_numpy
from guerdon.core.types import BoolArray
from guerdon.envs.observations import FrameSource, native_of, take_row, with_final
from guerdon.integrations.scoring import RewardSource, rows_from, step_scorer
from guerdon.integrations.steps import EnvStep

_FINALS = ("final_obs", "_final_obs", "final_info", "_final_info")


class LearnedRewardWrapper(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """One environment; its reward is that of the frame or state which the action led to.

    With `standalone` the model's success terminates the episode; every frame is then scored.
    `gymnasium.make(env.spec)` makes it again, with a copy of `manager` unless that is a path.

    Args:
        env: its frames come from the observation, or from rendering on demand.
        manager: a `RewardManager`, an `ImageRewardWorker`, the path of a checkpoint, a reward model of the
            zoo, or a function of frames (`RewardFunction`).
        cfg: the `reward` section; None means the manager's own. For the zoo a `MixConfig`, for a
            function either.
        train_every: of the zoo: steps after which the model learns from them; 0 leaves it as it is.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        manager: RewardSource,
        cfg: RewardConfig | MixConfig | None = None,
        train_every: int = 0,
    ) -> None:
        given: Any = env
        if isinstance(given, VectorEnv):
            raise ConfigError("this is a vector environment: use LearnedRewardVectorWrapper")
        RecordConstructorArgs.__init__(
            self, _disable_deepcopy=True, manager=manager, cfg=cfg, train_every=train_every
        )
        super().__init__(env)
        self._scorer = step_scorer(manager, cfg, 1, env.action_space, train_every)
        self._frames = FrameSource(env, self._scorer.cameras) if self._scorer.cameras else None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a new episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        self._scorer.reset(_batch_of_one(obs))
        return obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, score what the action led to if it counts, and return the training reward."""
        obs, env_reward, terminated, truncated, info = self.env.step(action)
        batch, done = _batch_of_one(obs), np.array([bool(terminated or truncated)])
        rewards = self._scorer.step(
            EnvStep(
                actions=np.asarray(action)[None],
                obs=batch,
                next_obs=lambda: batch,
                frames=lambda ids: self._frames.frames(batch, done, ids) if self._frames else {},
                env_rewards=[float(env_reward)],
                terminated=np.array([bool(terminated)]),
                truncated=np.array([bool(truncated)]),
                stepped=np.ones(1, np.bool_),
            )
        )
        parts = {name: float(values[0]) for name, values in rewards.infos().items()}
        ended = bool(terminated) or bool(rewards.ended[0])
        return obs, float(rewards.training_reward[0]), ended, bool(truncated), {**info, **parts}


class LearnedRewardVectorWrapper(VectorWrapper):
    """N environments in any of Gymnasium's auto-reset modes, scored in one call per step.

    With `SAME_STEP` the scored frame of an episode that ended is its final one. With `NEXT_STEP` the step
    that only starts a new episode has no reward. `standalone` needs environments that can be reset one by
    one: those of `SAME_STEP` are reset here at once, those of `DISABLED` by the caller.

    Args:
        envs: their frames come from the observation, or from rendering on demand.
        manager: a `RewardManager`, an `ImageRewardWorker`, the path of a checkpoint, a reward model of the
            zoo, or a function of frames (`RewardFunction`).
        cfg: the `reward` section; None means the manager's own. For the zoo a `MixConfig`, for a
            function either.
        train_every: of the zoo: steps after which the model learns from them; 0 leaves it as it is.
    """

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        manager: RewardSource,
        cfg: RewardConfig | MixConfig | None = None,
        train_every: int = 0,
    ) -> None:
        if not isinstance(envs, VectorEnv):
            raise ConfigError("this is no vector environment: use LearnedRewardWrapper")
        super().__init__(envs)
        self._mode = AutoresetMode(envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._resetting: BoolArray = np.zeros(envs.num_envs, np.bool_)  # NEXT_STEP: by the next step
        self._scorer = step_scorer(manager, cfg, envs.num_envs, envs.single_action_space, train_every)
        self._frames = FrameSource(envs, self._scorer.cameras) if self._scorer.cameras else None
        if self._scorer.standalone:
            check_single_resets(envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `options["reset_mask"]`."""
        given = None if options is None else options.get("reset_mask")
        mask = None if given is None else np.asarray(given, np.bool_)
        self._resetting[slice(None) if mask is None else mask] = False
        obs, info = self.env.reset(seed=seed, options=options)
        self._scorer.reset(obs, mask)
        return obs, info

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step, score what counts, and return training rewards, float32 [N]."""
        obs, env_rewards, terminated, truncated, info = self.env.step(actions)
        term, trunc = (to_numpy(flags).astype(np.bool_) for flags in (terminated, truncated))
        done, same_step = term | trunc, self._mode == AutoresetMode.SAME_STEP

        def next_obs() -> Any:
            return with_final(obs, info.get("final_obs"), done) if same_step and done.any() else obs

        rewards = self._scorer.step(
            EnvStep(
                actions=actions,
                obs=obs,
                next_obs=next_obs,
                frames=lambda ids: self._frames.frames(next_obs(), done, ids) if self._frames else {},
                env_rewards=env_rewards,
                terminated=term,
                truncated=trunc,
                stepped=~self._resetting,
            )
        )
        parts = rewards.infos()
        parts |= {f"_{name}": np.ones(self.num_envs, np.bool_) for name in rewards.infos()}
        new = rewards.ended & ~done
        if same_step and new.any():
            obs, info = self._reset_ended(obs, info, done, new)
        if self._mode == AutoresetMode.NEXT_STEP:
            self._resetting = done
        return obs, rewards.training_reward, term | rewards.ended, trunc, {**info, **parts}

    def _reset_ended(
        self, obs: Any, info: dict[str, Any], done: BoolArray, ended: BoolArray
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments of `ended` and report their ends as `SAME_STEP` does."""
        final = with_final(obs, info.get("final_obs"), done)
        plain = {key: value for key, value in info.items() if key not in _FINALS}
        new_obs, new_info = self.env.reset(options={"reset_mask": ended.copy()})
        over = done | ended
        return rows_from(obs, new_obs, ended), {
            **rows_from(plain, new_info, ended),
            "final_obs": final if native_of(self.env) is not None else _one_by_one(final, over),
            "_final_obs": over,
            "final_info": rows_from(info.get("final_info", {}), plain, ended),
            "_final_info": over.copy(),
        }


def check_single_resets(envs: VectorEnv[Any, Any, Any]) -> None:
    """Raise unless single environments can be reset, as `standalone` needs it."""
    if envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP) == AutoresetMode.NEXT_STEP:
        raise ConfigError(
            "standalone cannot end single episodes with auto-reset in the next step: make the vector "
            "environment with autoreset_mode SAME_STEP or DISABLED"
        )
    if native_of(envs) is None and not isinstance(envs.unwrapped, SyncVectorEnv | AsyncVectorEnv):
        raise ConfigError(
            f"standalone must reset single environments, and {type(envs.unwrapped).__name__} is not known "
            "to take options['reset_mask']"
        )


def _one_by_one(obs: Any, mask: BoolArray) -> NDArray[Any]:
    """A batched observation as Gymnasium gives final ones: an object array [N], None where not in `mask`."""
    result = np.full(len(mask), None, object)
    for env in np.flatnonzero(mask).tolist():
        result[env] = take_row(obs, env)
    return result


def _batch_of_one(obs: Any) -> Any:
    """A single environment's observation with a batch axis of one."""
    if isinstance(obs, Mapping):
        return {key: _batch_of_one(part) for key, part in obs.items()}
    return to_numpy(obs)[None]
