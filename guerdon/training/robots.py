"""What has to fit together in a run on a robot; all of it is asked before the arm moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from guerdon.agents.networks import ObsSpec
from guerdon.agents.recorded import open_demonstrations
from guerdon.config import EnvConfig, GuerdonConfig
from guerdon.config.schema_robot import RobotEnvConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.envs.robot.arm import raise_on_sigterm
from guerdon.envs.robot.env import STATE_NAMES
from guerdon.envs.robot.vector import control_mode, robot_config
from guerdon.rewards.image import load_checkpoint


def fit_for_robots(config: GuerdonConfig) -> GuerdonConfig:
    """The config of a run; on a robot, the environment gets `reward.standalone`.

    Raises:
        ConfigError: Settings contradict each other, or the reward model looks at a camera that is missing.
        DataError: The demonstrations are of another robot.
    """
    train, cfg = config.env.train, config.learner
    if train.env_type != "robot":
        if config.reward.standalone:
            raise ConfigError("reward.standalone ends episodes on a robot; use the wrappers for it elsewhere")
        return config
    raise_on_sigterm()  # the environment may be made on another thread
    if cfg.eval_interval < cfg.total_steps:
        raise ConfigError(
            f"learner.eval_interval is {cfg.eval_interval}: the one arm is in use until the end of the run "
            f"(learner.total_steps={cfg.total_steps}), and can be evaluated only then"
        )
    if config.reward.standalone and not config.reward.use_reward_model:
        raise ConfigError("reward.standalone needs a reward model: set reward.use_reward_model=true")
    override = {**train.override_cfg, "standalone": config.reward.standalone}
    train = replace(train, override_cfg=override)
    robot = robot_config(train)
    if train.id == EnvConfig().id:  # what a run is called by, if nobody gave it a name
        train = replace(train, id=f"robot {robot.driver}")
    _check_cameras(config, robot)
    for place in (getattr(cfg.section, "prior_data", None), cfg.warm_start.data):
        if place is not None:
            _check_demonstrations(place, robot)
    return replace(config, env=replace(config.env, train=train))


def _check_cameras(config: GuerdonConfig, robot: RobotEnvConfig) -> None:
    section = config.reward.model
    if not config.reward.use_reward_model or section.checkpoint_path is None:
        return  # without a checkpoint the reward worker says what is missing
    model, _, _ = load_checkpoint(Path(section.checkpoint_path))
    there = [camera.name for camera in robot.cameras]
    missing = [name for name in model.config.image_keys if name not in there]
    if missing:
        raise ConfigError(f"the reward model looks at {missing[0]}, but the robot has the cameras {there}")


def _check_demonstrations(place: str, robot: RobotEnvConfig) -> None:
    if not Path(place).exists():
        raise DataError(f"there are no demonstrations at {place}: give the data.pkl of a recording")
    images = tuple((camera.name, (*robot.image_size, 3)) for camera in robot.cameras)
    spec = ObsSpec(state_size=len(STATE_NAMES), images=images)
    with open_demonstrations(place, spec, control_mode(robot)):
        pass  # what does not fit is refused
