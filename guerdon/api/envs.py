"""The `env` argument: an id, an environment, a vector environment, or a function that makes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium as gym
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from guerdon.api.settings import check_count
from guerdon.config import EnvConfig
from guerdon.core.calls import check_takes
from guerdon.core.errors import ConfigError
from guerdon.envs import wrappers
from guerdon.envs.make import make_vector_env
from guerdon.envs.success import LabelSuccess, SuccessLabels

AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]
EnvGiven: TypeAlias = "str | gym.Env[Any, Any] | AnyVectorEnv | Callable[[], gym.Env[Any, Any]]"
"""An id, an environment, a vector environment, or a function without arguments that makes an environment."""
BATCHED = 16
"""Environments that are made of an id of ours, which are stepped as one batch; of others one is made."""


class _LeaveOpen(gym.Wrapper[Any, Any, Any, Any]):
    """An environment of the caller, who closes it."""

    def close(self) -> None:
        """Nothing."""


class _LeaveVectorOpen(VectorWrapper):
    """Vector environments of the caller, who closes them."""

    def close(self, **kwargs: Any) -> None:
        """Nothing."""


def env_config(env: str, num_envs: int | None = None, **settings: Any) -> EnvConfig:
    """The section of an environment that is given by its id."""
    if num_envs is None:
        num_envs = BATCHED if env.startswith("guerdon/") else 1
    return EnvConfig(id=env, num_envs=check_count("num_envs", num_envs), **settings)


def vector_env(
    env: EnvGiven,
    num_envs: int | None = None,
    *,
    keep_final_frame: bool = False,
    labels: SuccessLabels | None = None,
    name: str = "env",
) -> AnyVectorEnv:
    """Vector environments of whatever was given, which reset in the same step unless the caller made them.

    `close` leaves those of the caller open.

    Args:
        env: see `EnvGiven`.
        num_envs: how many to make of an id or a function; None: 1, or a batch of ours.
        keep_final_frame: whether frames will be looked at: the end of an episode then outlives the reset.
        labels: find success where the info does not have it.
        name: of the argument, for messages.
    """
    given: Any = env
    if isinstance(env, str):
        made = make_vector_env(
            env_config(env, num_envs),
            autoreset_mode=AutoresetMode.SAME_STEP,
            keep_final_frame=keep_final_frame,
        )
        return made if labels is None or not labels.given else LabelSuccess(made, labels)
    if isinstance(env, VectorEnv):
        if num_envs not in (None, env.num_envs):
            raise ConfigError(f"num_envs is {num_envs}, but {name} has {env.num_envs} environments")
        return _flat(_LeaveVectorOpen(env), labels)
    if isinstance(given, gym.Env):
        if num_envs not in (None, 1):
            raise ConfigError(
                f"{name} is one environment and num_envs is {num_envs}: give a function that makes one, such "
                "as lambda: MyEnv()"
            )
        makers: list[Callable[[], Any]] = [lambda: _LeaveOpen(given)]
    elif callable(given):
        count = check_count("num_envs", 1 if num_envs is None else num_envs)
        makers = [lambda: made_env(given, name)] * count
    else:
        raise ConfigError(
            f"{name} must be an id, a gymnasium.Env, a vector environment or a function that makes an "
            f"environment, not {type(env).__name__}"
        )
    kept = wrappers.keep_final_frame if keep_final_frame else lambda single: single
    around = [lambda make=make: kept(wrappers.flatten_grid(make())) for make in makers]
    return _flat(SyncVectorEnv(around, autoreset_mode=AutoresetMode.SAME_STEP), labels)


def made_env(make: Callable[[], Any], name: str) -> Any:
    """The environment that a function makes; `name` is that of the argument."""
    check_takes(make, name)
    env = make()
    if not isinstance(env, gym.Env):
        raise ConfigError(f"{name} is a function that returned a {type(env).__name__}, not a gymnasium.Env")
    return env


def _flat(env: AnyVectorEnv, labels: SuccessLabels | None) -> AnyVectorEnv:
    """With success in the info, and goal-conditioned observations as one vector, as in `make_vector_env`."""
    if labels is not None and labels.given:
        env = LabelSuccess(env, labels)
    return wrappers.FlatGoals(env) if wrappers.has_goals(env.single_observation_space) else env
