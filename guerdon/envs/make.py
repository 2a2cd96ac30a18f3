"""Make vector environments from their config section."""

from __future__ import annotations

import importlib
import sys
from difflib import get_close_matches
from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode, VectorEnv

from guerdon.config import EnvConfig
from guerdon.config.maniskill import ManiSkillConfig
from guerdon.core.errors import ConfigError
from guerdon.envs.classic.goals import FlatGoals, has_goals
from guerdon.envs.minigrid import flat_grid


def make_vector_env(
    cfg: EnvConfig, *, autoreset_mode: AutoresetMode, keep_final_frame: bool = True
) -> VectorEnv[Any, Any, Any]:
    """`cfg.num_envs` environments of `cfg.id`; ours are batched natively, others stepped one after another.

    Args:
        cfg: a section such as `env.train`.
        autoreset_mode: `SAME_STEP` loses the final frame of environments that render through Gymnasium's
            `render()` alone; those get `NEXT_STEP` instead, in which every frame can be seen.
        keep_final_frame: False keeps to `autoreset_mode` whatever becomes of that frame.

    Goal-conditioned observations come as one vector (`classic/goals.py`), and so do those of MiniGrid
    (`id: minigrid:MiniGrid-DoorKey-5x5-v0`, see `guerdon.envs.minigrid`).
    """
    env = _make(cfg, autoreset_mode, keep_final_frame)
    return FlatGoals(env) if has_goals(env.single_observation_space) else env


def _make(cfg: EnvConfig, autoreset_mode: AutoresetMode, keep_final_frame: bool) -> VectorEnv[Any, Any, Any]:
    if cfg.env_type == "maniskill":
        return _make_maniskill(cfg, autoreset_mode)
    if cfg.env_type == "robot":
        from guerdon.envs.robot.vector import RobotVectorEnv

        return RobotVectorEnv(cfg, autoreset_mode=autoreset_mode)
    module, _, name = cfg.id.rpartition(":")
    if module:  # Gymnasium's way to name an environment that is registered when a module is imported
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"the module of the environment {cfg.id!r} cannot be imported: {error}"
            ) from error
    spec = gym.registry.get(name)
    if spec is None:
        near = get_close_matches(name, list(gym.registry), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no environment is registered as {cfg.id!r}{hint}")
    arguments: dict[str, Any] = dict(cfg.init_params)
    if cfg.max_episode_steps is not None:
        arguments["max_episode_steps"] = cfg.max_episode_steps
    try:
        if spec.namespace == "guerdon":  # ours batch natively and keep the final frame in every mode
            return gym.make_vec(
                cfg.id, cfg.num_envs, vectorization_mode="vector_entry_point", autoreset_mode=autoreset_mode,
                **arguments,
            )  # fmt: skip
        vector = {"autoreset_mode": AutoresetMode.NEXT_STEP if keep_final_frame else autoreset_mode}
        return gym.make_vec(
            cfg.id, cfg.num_envs, vectorization_mode="sync", vector_kwargs=vector,
            wrappers=[flat_grid],
            **arguments,
        )  # fmt: skip
    except (TypeError, gym.error.Error) as error:
        raise ConfigError(f"{cfg.id} cannot be made with {arguments}: {error}") from error


def is_maniskill(env: object) -> bool:
    """Whether it is one of our ManiSkill environments; asking does not load the simulator's module."""
    module = sys.modules.get("guerdon.envs.maniskill.env")  # it is loaded where there is such an environment
    return module is not None and isinstance(env, module.ManiSkillVectorEnv)


def _make_maniskill(cfg: EnvConfig, autoreset_mode: AutoresetMode) -> VectorEnv[Any, Any, Any]:
    """A ManiSkill task; its name may stand in `init_params` too, as ManiSkill's own `gym.make` has it."""
    from guerdon.envs.maniskill.env import ManiSkillVectorEnv

    settings: dict[str, Any] = {"id": cfg.id, **cfg.init_params}
    if cfg.max_episode_steps is not None:
        settings["max_episode_steps"] = cfg.max_episode_steps
    return ManiSkillVectorEnv(
        cfg.num_envs, config=ManiSkillConfig.from_settings(settings), autoreset_mode=autoreset_mode
    )
