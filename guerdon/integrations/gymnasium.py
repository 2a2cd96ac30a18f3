"""Gymnasium environments, single and vectorised, whose reward is a learned one.

`info` keeps all parts: `env_reward`, `learned_reward` and, of a model that judges frames, `prob_success` (NaN
where none was judged). A reward model of the zoo may stand in the place of the manager, with a `MixConfig`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from numpy.typing import NDArray

from guerdon.config import RewardConfig
from guerdon.config.schema_zoo import MixConfig
from guerdon.core.errors import ConfigError
from guerdon.core.images import to_numpy
from guerdon.core.types import BoolArray
from guerdon.data.collect.observations import FrameSource, native_of, with_final
from guerdon.integrations.scoring import FrameScorer, RewardStep, StepScorer, rows_from
from guerdon.integrations.zoo import TransitionJudge
from guerdon.rewards import BaseRewardModel
from guerdon.rewards.image.manager import RewardManager, available_device
from guerdon.rewards.image.worker import ImageRewardWorker

_FINALS = ("final_obs", "_final_obs", "final_info", "_final_info")


class LearnedRewardWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """One environment; its reward is that of the frame which the action led to.

    With `standalone` the model's success terminates the episode; every frame is then judged.

    Args:
        env: its frames come from the observation, or from rendering on demand.
        manager: a `RewardManager`, an `ImageRewardWorker`, the path of a checkpoint, or a reward model of the
            zoo.
        cfg: the `reward` section; None means the manager's own. For the zoo a `MixConfig`.
        train_every: of the zoo: steps after which the model is taught by them; 0 leaves it as it is.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        manager: FrameScorer | ImageRewardWorker | BaseRewardModel | str | os.PathLike[str],
        cfg: RewardConfig | MixConfig | None = None,
        train_every: int = 0,
    ) -> None:
        given: Any = env
        if isinstance(given, VectorEnv):
            raise ConfigError("this is a vector environment: use LearnedRewardVectorWrapper")
        super().__init__(env)
        self._zoo = zoo_judge(manager, cfg, 1, env.action_space, train_every)
        if self._zoo is not None:
            return
        self._judge = StepScorer(*frame_judging(manager, cfg, train_every), 1)
        self._frames = FrameSource(env, self._judge.cameras)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin a new episode."""
        if self._zoo is not None:
            obs, info = self.env.reset(seed=seed, options=options)
            self._zoo.begin(_batch_of_one(obs))
            return obs, info
        self._judge.begin()
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step, judge the frame if it counts, and return the training reward."""
        obs, env_reward, terminated, truncated, info = self.env.step(action)
        if self._zoo is not None:
            reached, ends = _batch_of_one(obs), (np.array([terminated]), np.array([truncated]))
            given = self._zoo.step(
                np.asarray(action)[None], reached, reached, [float(env_reward)], *ends, np.ones(1, np.bool_)
            )
            told = {name: float(values[0]) for name, values in given.infos().items()}
            return obs, float(given.training_reward[0]), bool(terminated), bool(truncated), {**info, **told}
        done, stepped = np.array([bool(terminated or truncated)]), np.ones(1, np.bool_)
        ids = self._judge.wanted(done, stepped)
        frames = self._frames.frames(_batch_of_one(obs), done, ids) if len(ids) else {}
        prob = self._judge.probabilities(frames, ids, done)
        ended = self._judge.ends(prob)
        rewards = self._judge.rewards(prob, [float(env_reward)], done | ended, stepped)
        told = {name: float(values[0]) for name, values in rewards.infos().items()}
        terminated = bool(terminated) or bool(ended[0])
        return obs, float(rewards.training_reward[0]), terminated, bool(truncated), {**info, **told}


class LearnedRewardVectorWrapper(VectorWrapper):
    """N environments in any of Gymnasium's auto-reset modes, judged in one call per step.

    With `SAME_STEP` the judged frame of an episode that ended is its final one. With `NEXT_STEP` the step
    that only begins a new episode has no reward. `standalone` needs environments that can be reset one by
    one: those of `SAME_STEP` are reset here at once, those of `DISABLED` by the caller.

    Args:
        envs: their frames come from the observation, or from rendering on demand.
        manager: a `RewardManager`, an `ImageRewardWorker`, the path of a checkpoint, or a reward model of the
            zoo.
        cfg: the `reward` section; None means the manager's own. For the zoo a `MixConfig`.
        train_every: of the zoo: steps after which the model is taught by them; 0 leaves it as it is.
    """

    def __init__(
        self,
        envs: VectorEnv[Any, Any, Any],
        manager: FrameScorer | ImageRewardWorker | BaseRewardModel | str | os.PathLike[str],
        cfg: RewardConfig | MixConfig | None = None,
        train_every: int = 0,
    ) -> None:
        if not isinstance(envs, VectorEnv):
            raise ConfigError("this is no vector environment: use LearnedRewardWrapper")
        super().__init__(envs)
        self._mode = AutoresetMode(envs.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._ended: BoolArray = np.zeros(envs.num_envs, np.bool_)  # NEXT_STEP: to be reset by the next step
        self._zoo = zoo_judge(manager, cfg, envs.num_envs, envs.single_action_space, train_every)
        if self._zoo is not None:
            return
        self._judge = StepScorer(*frame_judging(manager, cfg, train_every), envs.num_envs)
        self._frames = FrameSource(envs, self._judge.cameras)
        if self._judge.cfg.standalone:
            check_single_resets(envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of `options["reset_mask"]`."""
        mask = None if options is None else options.get("reset_mask")
        self._ended[slice(None) if mask is None else np.asarray(mask, np.bool_)] = False
        if self._zoo is not None:
            obs, info = self.env.reset(seed=seed, options=options)
            self._zoo.begin(obs, None if mask is None else np.asarray(mask, np.bool_))
            return obs, info
        self._judge.begin(None if mask is None else np.asarray(mask, np.bool_))
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step, judge the frames that count, and return training rewards, float32 [N]."""
        obs, env_rewards, terminated, truncated, info = self.env.step(actions)
        term, trunc = (to_numpy(flags).astype(np.bool_) for flags in (terminated, truncated))
        done, stepped = term | trunc, ~self._ended
        same_step = self._mode == AutoresetMode.SAME_STEP
        if self._zoo is not None:
            reached = with_final(obs, info.get("final_obs"), done) if same_step and done.any() else obs
            given = self._zoo.step(actions, reached, obs, env_rewards, term, trunc, stepped)
            if self._mode == AutoresetMode.NEXT_STEP:
                self._ended = done
            return obs, given.training_reward, term, trunc, {**info, **self._told(given)}
        ids = self._judge.wanted(done, stepped)
        frames = {}
        if len(ids):
            reached = with_final(obs, info.get("final_obs"), done) if same_step else obs
            frames = self._frames.frames(reached, done, ids)
        prob = self._judge.probabilities(frames, ids, done)
        ended = self._judge.ends(prob)
        rewards = self._judge.rewards(prob, env_rewards, done | ended, stepped)
        if same_step and (ended & ~done).any():
            obs, info = self._begin_again(obs, info, done, ended & ~done)
        if self._mode == AutoresetMode.NEXT_STEP:
            self._ended = done
        return obs, rewards.training_reward, term | ended, trunc, {**info, **self._told(rewards)}

    def _told(self, rewards: RewardStep) -> dict[str, Any]:
        everyone = {f"_{name}": np.ones(self.num_envs, np.bool_) for name in rewards.infos()}
        return {**rewards.infos(), **everyone}

    def _begin_again(
        self, obs: Any, info: dict[str, Any], done: BoolArray, ended: BoolArray
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environments of `ended` and report their ends as `SAME_STEP` does."""
        reached = with_final(obs, info.get("final_obs"), done)
        plain = {key: value for key, value in info.items() if key not in _FINALS}
        new_obs, new_info = self.env.reset(options={"reset_mask": ended.copy()})
        over = done | ended
        return rows_from(obs, new_obs, ended), {
            **rows_from(plain, new_info, ended),
            "final_obs": reached if native_of(self.env) is not None else _one_by_one(reached, over),
            "_final_obs": over,
            "final_info": rows_from(info.get("final_info", {}), plain, ended),
            "_final_info": over.copy(),
        }


def zoo_judge(
    manager: Any, cfg: RewardConfig | MixConfig | None, num_envs: int, action_space: Any, train_every: int
) -> TransitionJudge | None:
    """Who builds transitions, if what is given is a reward model of the zoo."""
    if not isinstance(manager, BaseRewardModel):
        return None
    return TransitionJudge(manager, cfg, num_envs, action_space, train_every)


def frame_judging(
    manager: Any, cfg: RewardConfig | MixConfig | None, train_every: int
) -> tuple[FrameScorer | ImageRewardWorker, RewardConfig | None]:
    """What judges frames, and its settings; those of the zoo are refused."""
    if isinstance(cfg, MixConfig) or train_every:
        raise ConfigError("MixConfig and train_every are for the zoo; this reward model judges frames")
    if cfg is not None and not isinstance(cfg, RewardConfig):
        raise ConfigError(f"cfg must be a RewardConfig, not {type(cfg).__name__}")
    if isinstance(manager, str | os.PathLike):
        section = RewardConfig() if cfg is None else cfg
        model = replace(section.model, checkpoint_path=os.fspath(manager))
        return RewardManager(replace(section, model=model), device=available_device()), cfg
    if not (hasattr(manager, "score") and hasattr(manager, "cfg")):
        raise ConfigError(
            "the reward comes from a RewardManager, an ImageRewardWorker, a reward model of the zoo or the "
            f"path of a checkpoint, not from {type(manager).__name__}"
        )
    return manager, cfg


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


def take_row(obs: Any, env: int) -> Any:
    """The observation of one environment out of a batched one."""
    return {key: take_row(part, env) for key, part in obs.items()} if isinstance(obs, Mapping) else obs[env]


def _batch_of_one(obs: Any) -> Any:
    """A single environment's observation with a batch axis of one."""
    if isinstance(obs, Mapping):
        return {key: _batch_of_one(part) for key, part in obs.items()}
    return to_numpy(obs)[None]
