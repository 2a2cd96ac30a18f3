"""A robot among the other environments: one arm as a vector environment, with the names that learners use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from guerdon.config import EnvConfig, build
from guerdon.config.schema_robot import RobotEnvConfig
from guerdon.core.errors import ConfigError
from guerdon.core.types import with_control_mode
from guerdon.envs.robot import KeyboardOperator, Operator, RobotEnv, ScriptedOperator, SpaceMouseOperator

PLACEHOLDER = "ROBOT_IP"
"""What stands in RLinf's reward workflow where the address goes."""


def robot_config(cfg: EnvConfig, **settings: Any) -> RobotEnvConfig:
    """The settings of the robot in a section such as `env.train`; `settings` go on top."""
    if cfg.num_envs != 1:
        raise ConfigError(f"a robot is one environment: set num_envs to 1, not {cfg.num_envs}")
    values = {**cfg.init_params, **cfg.override_cfg, **settings}
    if cfg.max_episode_steps is not None:
        values["max_episode_steps"] = cfg.max_episode_steps
    if values.get("robot_ip") == PLACEHOLDER:
        raise ConfigError(
            f"the robot's address is still {PLACEHOLDER}: put it into "
            "cluster.node_groups[0].hardware.configs[0].robot_ip, or into override_cfg.robot_ip"
        )
    return build(RobotEnvConfig, values, "override_cfg")


def make_operator(cfg: EnvConfig, robot: RobotEnvConfig, seed: int = 0) -> Operator | None:
    """Who may take over, as `operator` of the section says."""
    if cfg.operator == "none":
        return None
    if cfg.operator == "keyboard":
        return KeyboardOperator(robot)
    if cfg.operator == "spacemouse":
        return SpaceMouseOperator(robot, keyboard=KeyboardOperator(robot))
    try:
        return ScriptedOperator(robot, **{"seed": seed, **cfg.operator_params})
    except TypeError as error:
        raise ConfigError(f"operator_params do not fit the scripted operator: {error}") from error


def control_mode(robot: RobotEnvConfig) -> str:
    """What actions mean on this robot, in one word; data of a robot with another one does not fit."""
    metres, radians = robot.action_scale
    axes = "".join(robot.axes) + "_gripper" * robot.use_gripper
    return f"ee_{axes}_{1e3 * metres:g}mm_{1e3 * radians:g}mrad_{robot.control_hz:g}hz".replace(".", "p")


class LearnerNames(gym.Wrapper[Any, Any, Any, Any]):
    """`states` as `state` and pictures by the names of their cameras, as learners and data sets have them.

    Where the reward model's word ends episodes, nobody knows success: the infos that repeat it are left out.
    """

    env: RobotEnv

    def __init__(self, env: RobotEnv) -> None:
        super().__init__(env)
        self._names = {"states": "state", "main_images": env.config.cameras[0].name}
        assert isinstance(env.observation_space, gym.spaces.Dict)
        self.observation_space = gym.spaces.Dict(self.renamed(env.observation_space.spaces))

    def renamed(self, parts: Any) -> dict[str, Any]:
        """Parts of an observation, or of its space, under the names of learners."""
        return {self._names.get(name, name): part for name, part in parts.items()}

    def _known(self, info: dict[str, Any]) -> dict[str, Any]:
        hidden = "success" if self.env.config.standalone else None
        return {name: value for name, value in info.items() if name != hidden}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self.renamed(obs), self._known(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Act for one period."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self.renamed(obs), reward, terminated, truncated, self._known(info)


class RobotVectorEnv(SyncVectorEnv):
    """One arm; the next episode starts, with a reset of the arm, in the step that ends the one before."""

    def __init__(self, cfg: EnvConfig, *, autoreset_mode: AutoresetMode) -> None:
        self.robot = robot_config(cfg)
        self.arm = RobotEnv(self.robot, operator=make_operator(cfg, self.robot))
        self._names = LearnerNames(self.arm)
        super().__init__([lambda: self._names], autoreset_mode=autoreset_mode)
        self.source = with_control_mode(f"robot {self.robot.driver}", control_mode(self.robot))

    def set_success_detector(self, detect: Callable[[Any], bool]) -> None:
        """Who decides on success in `standalone`: gets observations [1, ...] in this environment's names."""
        self.arm.success_detector = lambda obs: detect(
            {key: part[None] for key, part in self._names.renamed(obs).items()}
        )

    def resting_action(self) -> NDArray[np.float32]:
        """An action [1, A] that leaves the arm where it is."""
        return np.zeros((1, self.robot.action_size), np.float32)


def make_env(cfg: EnvConfig, *, autoreset_mode: AutoresetMode, **_: Any) -> RobotVectorEnv:
    """The robot of a section with `env_type: robot`."""
    return RobotVectorEnv(cfg, autoreset_mode=autoreset_mode)
