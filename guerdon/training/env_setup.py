"""The training environments as a run wants them: probed, with what collects labelled data around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from guerdon.config import CollectConfig, EnvConfig, RewardConfig
from guerdon.core.errors import ConfigError
from guerdon.core.types import BoolArray, UInt8Array, control_mode_of
from guerdon.data.collect import RewardDataCollector
from guerdon.data.collect.wrapper import VectorDataCollectorWrapper
from guerdon.envs.make import make_vector_env
from guerdon.envs.observations import FrameSource, with_final
from guerdon.envs.success import missing_success, success_of
from guerdon.rewards.image.scorer import RewardManager


@dataclass(frozen=True, kw_only=True)
class EnvFacts:
    """What others need to know of the environments of a worker."""

    knows_success: bool
    """Whether they tell success."""
    first_frames: dict[str, UInt8Array]
    """What the cameras show after one step."""
    spaces: tuple[gym.Space[Any], gym.Space[Any]]
    """Of observations and actions of a single one."""
    info_keys: tuple[str, ...] = ()
    """What the info of a step has."""
    control_mode: str | None = None
    """What actions mean, where a robot knows several ways."""


def make_train_env(
    cfg: EnvConfig, reward: RewardConfig, collect: CollectConfig, cameras: Sequence[str], env: Any = None
) -> tuple[VectorEnv[Any, Any, Any], EnvFacts]:
    """The environments of `cfg`, which save episodes where `collect.enabled`, and what they are like.

    `env` is used instead of making them, if it is there.
    """
    if env is None:
        looked_at = bool(cameras) or collect.enabled or reward.collect_data
        env = make_vector_env(cfg, autoreset_mode=AutoresetMode.SAME_STEP, keep_final_frame=looked_at)
    if reward.standalone:
        _end_on_success(env.unwrapped, reward)
    facts = _probe(env, cameras)
    if (collect.enabled or reward.collect_data) and not facts.knows_success:
        raise ConfigError(f"{cfg.id} does not tell success: {missing_success(facts.info_keys)}")
    if collect.enabled:
        env = VectorDataCollectorWrapper(
            env,
            Path(collect.save_dir),
            collect.target_success,
            collect.target_failure,
            cfg.reward_render_mode,
            cameras=collect.cameras,
            format=collect.format,
            keep_states=collect.keep_states,
            only_at_rest=collect.only_at_rest,
        )
    return env, facts


def _probe(env: VectorEnv[Any, Any, Any], cameras: Sequence[str]) -> EnvFacts:
    """Take one step: does the environment tell success, and what do its cameras show?"""
    env.reset(seed=0)
    action = getattr(env.unwrapped, "resting_action", env.action_space.sample)()  # a robot is not to jerk
    obs, _, terminated, truncated, info = env.step(action)
    done = np.asarray(terminated, np.bool_) | np.asarray(truncated, np.bool_)
    next_obs = with_final(obs, info.get("final_obs"), done)
    frames = FrameSource(env, cameras).frames(next_obs, done, np.arange(len(done))) if cameras else {}
    return EnvFacts(
        knows_success=success_of(info, len(done), done) is not None,
        first_frames=frames,
        info_keys=tuple(info),
        spaces=(env.single_observation_space, env.single_action_space),
        control_mode=control_mode_of(str(getattr(env.unwrapped, "source", ""))),
    )


def _end_on_success(env: Any, reward: RewardConfig) -> None:
    """Have the reward model end the episodes of a robot; its verdict is the one that is learned from."""
    if not hasattr(env, "set_success_detector"):
        raise ConfigError("reward.standalone ends episodes on a robot; use the wrappers for it elsewhere")
    manager = RewardManager(reward)
    env.set_success_detector(
        lambda obs: bool(manager.fires(manager.score(manager.images(obs)).prob_success)[0])
    )


class TrajectoryCollector:
    """Saves the trajectories of a run where `reward.collect_data`, as RLinf's reward workflow does."""

    def __init__(self, env: VectorEnv[Any, Any, Any], reward: RewardConfig) -> None:
        section = reward.data_collection
        self._source = FrameSource(env, section.image_keys)
        self._collector = RewardDataCollector(
            positive_dir=section.positive_dir,
            negative_dir=section.negative_dir,
            image_keys=section.image_keys,
            max_positive_trajectories=section.max_positive_trajectories,
            max_negative_trajectories=section.max_negative_trajectories,
        )

    def add(self, next_obs: Any, done: BoolArray, info: Mapping[str, Any]) -> None:
        """Take what a step of the environments led to."""
        frames = self._source.frames(next_obs, done, np.arange(len(done)))
        success = success_of(info, len(done), done)
        env_info = {} if success is None else {"success": success}
        self._collector.add_env_output({"obs": frames, "dones": done}, env_info)

    def reset(self) -> None:
        """The running episodes will not go on."""
        self._collector.truncate_running_episodes()

    def close(self) -> None:
        """Finish writing."""
        self._collector.close()
