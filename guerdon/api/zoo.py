"""`reward_model` and `check_reward_model`: the zoo of learned rewards."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import fields
from typing import Any

import gymnasium as gym

from guerdon.api.envs import EnvGiven, vector_env
from guerdon.api.settings import check_seed
from guerdon.config.build import check_field
from guerdon.core.devices import resolve_device
from guerdon.core.errors import ConfigError, DataError, unknown_name
from guerdon.rewards import check_reward_model as check_reward_model
from guerdon.rewards import create_reward_model
from guerdon.rewards.model import BaseRewardModel
from guerdon.rewards.registry import reward_model_class
from guerdon.rewards.zoo.base import ZooModel
from guerdon.training.online_reward import space_shapes

OWN = ("type", "env", "demos", "seed", "device")
GIVEN_BY_ENV = ("obs_shape", "action_size", "discrete_actions", "data_path")


def reward_model(
    type: str,
    env: EnvGiven,
    *,
    demos: Any = None,
    seed: int = 0,
    device: str = "auto",
    **settings: Any,
) -> BaseRewardModel:
    """A reward model of the zoo, or of a plugin, for an environment.

    Args:
        type: `gail`, `airl`, `rnd`, ... (`guerdon zoo list`), or the name of a plugin.
        env: an id, an environment, a vector environment, or a function that makes an environment.
        demos: demonstrations: the path of an `.npz`, `.safetensors` or DI-engine file or of a data set, or a
            list of episodes; for models that learn from them.
        seed: of the first weights and of what is drawn.
        device: where its networks are; `auto`: on a GPU where there is one.
        **settings: fields of the model's section, such as `hidden=(64, 64)`, `lr=1e-3`, `batch_size=128`.

    Examples:
        >>> gail = gd.reward_model("gail", "CartPole-v1", demos="demos.npz")
        >>> agent = gd.PPO("CartPole-v1", reward=gail).learn(20_000)
    """
    if not isinstance(type, str):
        raise ConfigError(f"type must be the name of a reward model, such as 'gail', not {type!r:.80}")
    cls, seed = reward_model_class(type), check_seed(seed)
    if issubclass(cls, ZooModel):
        known = [item.name for item in fields(cls.Settings) if item.name not in (*OWN, *GIVEN_BY_ENV)]
        for name, value in settings.items():
            if name not in known:
                raise ConfigError(f"reward_model: {unknown_name('argument', name, [*known, *OWN])}")
            settings[name] = check_field(cls.Settings, name, value, name)
    if cls.needs_experts and demos is None:
        raise ConfigError(f"demos is missing: {type} learns from demonstrations")
    if demos is not None and not cls.needs_experts:
        raise ConfigError(f"demos: {type} does not learn from demonstrations")
    with closing(vector_env(env)) as made:
        shapes = space_shapes(made.single_observation_space, made.single_action_space)
    section = {**shapes, "seed": seed, "type": type, **settings}
    try:
        model = create_reward_model(section, resolve_device(device))
    except ConfigError as error:  # here its settings are arguments
        raise ConfigError(str(error).removeprefix("reward_model.")) from error
    if demos is not None:
        try:
            model.load_expert_data(demos)
        except DataError as error:
            raise DataError(f"demos: {error}") from error
    return model


def check_fits(model: Any, observations: gym.Space[Any], actions: gym.Space[Any]) -> None:
    """Raise if `reward` is a model of the zoo that was made for another environment than `env`."""
    looks_at_obs = isinstance(model, ZooModel) and model.obs_key is None
    if not (looks_at_obs and isinstance(observations, gym.spaces.Box)):  # of dicts, some parts are taken
        return
    env = space_shapes(observations, actions)
    own = (model.cfg.obs_size, model.cfg.action_size, model.cfg.discrete_actions)
    has = (math.prod(env["obs_shape"]), env["action_size"], env["discrete_actions"])
    if own != has:
        raise ConfigError(
            f"reward: {type(model).__name__} was made for {_shapes(*own)}; env has {_shapes(*has)}"
        )


def _shapes(obs_size: int, action_size: int, discrete: bool) -> str:
    kind = f"{action_size} discrete actions" if discrete else f"continuous actions of size {action_size}"
    return f"observations of size {obs_size} and {kind}"
