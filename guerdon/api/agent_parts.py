"""What the arguments of an agent stand for: settings, environments, a reward."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from guerdon.api.envs import EnvGiven, env_config, vector_env
from guerdon.api.reward import REWARD_WITHOUT, load_reward
from guerdon.api.settings import Keywords, check_env_kwargs
from guerdon.config import EnvConfig, GuerdonConfig
from guerdon.core.errors import ConfigError
from guerdon.envs.make import make_vector_env
from guerdon.envs.success import LabelSuccess, SuccessLabels
from guerdon.rewards import REWARD_MODELS
from guerdon.rewards.image.function import FunctionScorer, is_function
from guerdon.rewards.image.scorer import RewardManager
from guerdon.rewards.model import BaseRewardModel

OWN = (
    *("env", "reward", "eval_env", "num_envs", "env_kwargs", "monitor", "seed", "device", "out", "engine"),
    *("success_key", "label_fn", "placement", "resume"),
)
_WITHOUT = (
    *("algorithm", "total_steps", "settings", "device", *REWARD_WITHOUT),
    *("standalone", "refit_interval", "refit_epochs", "refit_frames"),  # for robots, and for the command
)
FITTED_MODELS_ONLY = ("reward_type", "success_reward", "fail_reward", "relabel_at", "timeout_seconds")
"""Settings of the `reward` section that a reward function does not have."""
_COMMON = {
    "net_arch": "learner.network.hidden",
    "warm_start": "learner.warm_start.data",
    "warm_start_epochs": "learner.warm_start.epochs",
    "warm_start_lr": "learner.warm_start.lr",
    "normalize_reward": "reward.normalize",
}
_OFF_POLICY = {"gradient_steps": "updates_per_step"}
_ALIASES: dict[str, dict[str, str | tuple[str, ...]]] = {
    "ppo": {
        "learning_rate": "lr",
        "n_steps": "num_steps",
        "n_epochs": "update_epochs",
        "batch_size": "minibatch_size",
        "ent_coef": "entropy_coef",
        "vf_coef": "value_coef",
    },
    "sac": {**_OFF_POLICY, "learning_rate": ("actor_lr", "critic_lr", "alpha_lr"), "demos": "prior_data"},
    "td3": {**_OFF_POLICY, "learning_rate": ("actor_lr", "critic_lr"), "demos": "prior_data"},
    "dqn": {
        **_OFF_POLICY,
        "learning_rate": "lr",
        "target_update_interval": "target_interval",
        "exploration_fraction": "epsilon_fraction",
        "exploration_initial_eps": "epsilon_start",
        "exploration_final_eps": "epsilon_end",
    },
}
"""Names that Stable-Baselines3 has for settings of ours."""


def agent_keywords(owner: str, algorithm: str) -> Keywords:
    """The keyword settings of an agent."""
    own = {
        name: tuple(f"learner.{algorithm}.{each}" for each in ((to,) if isinstance(to, str) else to))
        for name, to in _ALIASES[algorithm].items()
    }
    places = [("learner", algorithm), ("learner", "network"), ("learner",), ("reward",)]
    return Keywords(owner, GuerdonConfig, places, {**_COMMON, **own}, _WITHOUT)


def environments(
    env: EnvGiven,
    num_envs: int | None,
    env_kwargs: Mapping[str, Any] | None,
    eval_env: EnvGiven | None,
    labels: SuccessLabels,
    *,
    looks: bool,
) -> tuple[EnvConfig, Any, Any]:
    """The section, the environments to train in and those to evaluate in; None: those of the section.

    `looks`: whether the reward looks at frames.
    """
    played = None if eval_env is None else vector_env(eval_env, labels=labels, name="eval_env")
    if isinstance(env, str):
        section = env_config(env, num_envs, init_params=check_env_kwargs(env_kwargs))
        if not labels.given:
            return section, None, played

        def make() -> Any:
            made = make_vector_env(section, autoreset_mode=AutoresetMode.SAME_STEP, keep_final_frame=looks)
            return LabelSuccess(made, labels)

        return section, make(), make() if played is None else played
    if env_kwargs is not None:
        raise ConfigError("env_kwargs belongs to an id: env is there already")
    made = vector_env(env, num_envs, keep_final_frame=looks, labels=labels)
    if played is None:  # a function makes others; an environment that is there has to serve for both
        there = isinstance(env, gym.Env | VectorEnv)
        played = made if there else vector_env(env, made.num_envs, labels=labels)
    return EnvConfig(id=_name_of(made), num_envs=made.num_envs), made, played


def _name_of(env: Any) -> str:
    """The id of vector environments, or the name of their class."""
    single = next(iter(getattr(env.unwrapped, "envs", ())), env)
    spec = env.spec or single.spec
    return type(single.unwrapped).__name__ if spec is None else str(spec.id)


def with_reward(config: GuerdonConfig, reward: Any) -> tuple[GuerdonConfig, Any]:
    """The config for a reward, and the model that is there already."""
    if isinstance(reward, str | os.PathLike):
        if not Path(reward).exists():
            hint = f": gd.reward_model({reward!r}, env) makes one" if reward in REWARD_MODELS else ""
            raise ConfigError(f"reward: there is no checkpoint at {os.fspath(reward)!r}{hint}")
        reward = load_reward(reward)
    if isinstance(reward, RewardManager):
        return replace(config, reward=replace(reward.cfg, use_reward_model=True)), reward
    if reward is None or isinstance(reward, BaseRewardModel):
        return config, reward
    if is_function(reward):
        section = replace(config.reward, use_reward_model=True, reward_type="continuous")
        return replace(config, reward=section), FunctionScorer(reward)
    raise ConfigError(
        "reward must be a Reward, the path of a checkpoint, a model of the zoo (gd.reward_model), a function "
        f"of frames or None, not {type(reward).__name__}"
    )


def check_function(model: Any, settings: Mapping[str, Any], engine: str) -> None:
    """Raise if a reward function is combined with settings of models that give probabilities."""
    if not isinstance(model, FunctionScorer):
        return
    if engine != "local":
        raise ConfigError(
            f"engine={engine!r} cannot be used with a reward function: it stays in this process"
        )
    wrong = [name for name in FITTED_MODELS_ONLY if name in settings]
    if wrong:
        raise ConfigError(
            f"{wrong[0]} is for fitted reward models: what the function {model.name!r} returns is the reward"
        )
