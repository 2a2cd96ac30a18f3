"""Make vector environments from their config section: one table of env types, and plugins beside it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.vector import AutoresetMode, VectorEnv

from guerdon.config import EnvConfig
from guerdon.core.errors import ConfigError, unknown_name
from guerdon.core.plugins import load_named
from guerdon.envs import wrappers
from guerdon.envs.success import LabelSuccess, SuccessLabels

EnvMaker: TypeAlias = Callable[..., VectorEnv[Any, Any, Any]]
"""`(config, *, autoreset_mode, keep_final_frame) -> VectorEnv`; takes further keywords, too."""

ENV_TYPES = {
    "gymnasium": "guerdon.envs.make:make_gymnasium",
    "maniskill": "guerdon.envs.maniskill.env:make_env",
    "robot": "guerdon.envs.robot.vector:make_env",
}
"""`env_type` -> its maker, imported on use. A new simulator is a module and a line here (and its name among
those that `EnvConfig.env_type` takes); one of another distribution is an entry point of `PLUGIN_GROUP`."""
PLUGIN_GROUP = "guerdon.envs"


def make_vector_env(
    cfg: EnvConfig, *, autoreset_mode: AutoresetMode, keep_final_frame: bool = True
) -> VectorEnv[Any, Any, Any]:
    """`cfg.num_envs` environments as `cfg.env_type` makes them.

    Args:
        cfg: a section such as `env.train`.
        autoreset_mode: when ended episodes give way to new ones.
        keep_final_frame: whether the frames will be looked at. Environments of Gymnasium's registry are then
            made such that they render, if they can, and that the end of an episode outlives a reset.

    Goal-conditioned observations come as one vector (`FlatGoals`), and so do those of MiniGrid
    (`id: minigrid:MiniGrid-DoorKey-5x5-v0`, `FlatGrid`). With `cfg.success_key` or `cfg.label_fn` the
    info has `success`.
    """
    maker: EnvMaker = load_named("env_type", cfg.env_type, ENV_TYPES, PLUGIN_GROUP)
    env = maker(cfg, autoreset_mode=autoreset_mode, keep_final_frame=keep_final_frame)
    labels = SuccessLabels(cfg.success_key, cfg.label_fn)
    if labels.given:
        env = LabelSuccess(env, labels)
    return wrappers.FlatGoals(env) if wrappers.has_goals(env.single_observation_space) else env


def make_gymnasium(
    cfg: EnvConfig, *, autoreset_mode: AutoresetMode, keep_final_frame: bool
) -> VectorEnv[Any, Any, Any]:
    """Environments of Gymnasium's registry; ours are batched natively, others stepped one after another."""
    spec = registered(cfg.id)
    arguments: dict[str, Any] = dict(cfg.init_params)
    if cfg.max_episode_steps is not None:
        arguments["max_episode_steps"] = cfg.max_episode_steps
    if spec.namespace == "guerdon":  # ours keep the final frame in every mode
        how: dict[str, Any] = {"vectorization_mode": "vector_entry_point", "autoreset_mode": autoreset_mode}
    else:
        around: list[Any] = [wrappers.flatten_grid]
        if keep_final_frame:
            around.append(wrappers.keep_final_frame)
            if _can_render(spec):
                arguments.setdefault("render_mode", "rgb_array")
        how = {
            "vectorization_mode": "sync",
            "vector_kwargs": {"autoreset_mode": autoreset_mode},
            "wrappers": around,
        }
    try:
        return gym.make_vec(cfg.id, cfg.num_envs, **how, **arguments)
    except (TypeError, gym.error.Error) as error:
        raise ConfigError(f"{cfg.id} cannot be made with {arguments}: {error}") from error


def registered(env_id: str) -> EnvSpec:
    """What Gymnasium knows of an id; its module, if it names one (`module:Id`), is imported."""
    module, _, name = env_id.rpartition(":")
    if module:  # Gymnasium's way to name an environment that is registered when a module is imported
        try:
            importlib.import_module(module)
        except ImportError as error:
            hint = ": pip install 'guerdon[minigrid]'" if module == "minigrid" else ""
            raise ConfigError(
                f"the module of the environment {env_id!r} cannot be imported: {error}{hint}"
            ) from error
    spec = gym.registry.get(name)
    if spec is None:
        raise ConfigError(unknown_name("environment", name, gym.registry))
    return spec


def _can_render(spec: EnvSpec) -> bool:
    """Whether an environment can be made with render_mode="rgb_array"."""
    if spec.entry_point is None:
        return False
    creator: Any = spec.entry_point
    if isinstance(creator, str):
        creator = load_env_creator(creator)
    parameters = inspect.signature(creator).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    modes = getattr(creator, "metadata", {}).get("render_modes", ["rgb_array"])
    return "rgb_array" in modes and (takes_any or "render_mode" in parameters)


def is_maniskill(env: object) -> bool:
    """Whether it is one of our ManiSkill environments; asking does not load the simulator's module."""
    module = sys.modules.get("guerdon.envs.maniskill.env")  # it is loaded where there is such an environment
    return module is not None and isinstance(env, module.ManiSkillVectorEnv)
