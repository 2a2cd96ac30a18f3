"""Drivers of robot arms: what they measure, what they must do, and the table of them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from guerdon.config.schema_robot import DRIVER_PLUGINS, RobotEnvConfig
from guerdon.core.errors import RobotError
from guerdon.core.plugins import load_named
from guerdon.envs.robot.poses import Vector, pose_fault

_SHAPES: dict[str, tuple[int, ...]] = {
    "pose": (7,), "vel": (6,), "force": (3,), "torque": (3,), "q": (7,), "dq": (7,), "jacobian": (6, 7),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RobotState:
    """What the arm measures, all float64."""

    pose: Vector
    """[7] of the end effector in the base frame: x, y, z in metres, quaternion x, y, z, w."""
    vel: Vector
    """[6] metres and radians a second."""
    force: Vector
    """[3] newtons at the end effector."""
    torque: Vector
    """[3] newton metres."""
    q: Vector
    """[7] joint angles."""
    dq: Vector
    """[7] joint velocities."""
    jacobian: Vector
    """[6, 7]."""
    gripper_pos: float
    """How far the gripper is open, as the server tells it."""

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> RobotState:
        """The state in an answer of `/getstate`; RobotError if a part is missing or makes no sense."""
        values: dict[str, Any] = {}
        for item in fields(cls):
            if item.name not in answer:
                raise RobotError(f"the robot's state has no {item.name!r}; it has {sorted(answer)}")
            try:
                value = np.asarray(answer[item.name], np.float64)
            except (TypeError, ValueError) as error:
                raise RobotError(f"the robot's {item.name} cannot be read: {error}") from error
            if not np.isfinite(value).all() or value.size != int(np.prod(_SHAPES.get(item.name, ()))):
                raise RobotError(f"the robot's {item.name} makes no sense: {answer[item.name]!r}")
            values[item.name] = value.reshape(_SHAPES[item.name]) if item.name in _SHAPES else value.item()
        if (fault := pose_fault(values["pose"])) is not None:
            raise RobotError(f"the robot's pose makes no sense, {fault}: {values['pose'].tolist()}")
        values["pose"][3:] /= np.linalg.norm(values["pose"][3:])
        return cls(**values)


def import_extra(module: str, extra: str, note: str = "") -> Any:
    """A package that one of our extras installs; RobotError, with what to install, if it is not there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise RobotError(f"{module} is not installed: pip install guerdon[{extra}]{note}") from error


class Driver(Protocol):
    """Moves one arm. Any method may raise RobotError, and RobotUnreachableError if nobody answers."""

    def state(self) -> RobotState:
        """Measure."""

    def move(self, pose: Vector) -> None:
        """Pull the end effector towards a pose [7] from now on; returns at once."""

    def open_gripper(self) -> None:
        """Open it."""

    def close_gripper(self) -> None:
        """Close it."""

    def move_gripper(self, position: float) -> None:
        """Open it to a share from 0 to 1."""

    def reset(self) -> None:
        """Bring the joints to their resting place; returns when they are there."""

    def clear_errors(self) -> None:
        """Let the controller go on after an error."""

    def start(self) -> None:
        """Start the controller."""

    def stop(self) -> None:
        """Stop the controller; the arm holds by its brakes or its own weight compensation."""

    def update_param(self, parameters: Mapping[str, Any]) -> None:
        """Change the controller's settings, such as its stiffness."""

    def time_scale(self) -> float | None:
        """How much faster than the wall clock a simulated arm's time passes; None for a real arm."""

    def close(self) -> None:
        """Let go of the connection."""


DRIVERS = {
    "serl_http": "guerdon.envs.robot.serl_http:SerlHttpDriver.from_config",
    "franky": "guerdon.envs.robot.franky:FrankyDriver.from_config",
}
"""`driver` -> `(config) -> Driver`, imported on use. A new driver is a module and a line here (and its name
among those that `RobotEnvConfig.driver` takes); one of another distribution is an entry point of
`DRIVER_PLUGINS`."""


def make_driver(config: RobotEnvConfig) -> Driver:
    """The driver of the settings."""
    driver: Driver = load_named("driver", config.driver, DRIVERS, DRIVER_PLUGINS)(config)
    return driver
