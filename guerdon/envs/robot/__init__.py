"""Robot arms as environments, and a simulated robot that speaks the same protocol."""

from __future__ import annotations

from guerdon.envs.robot.env import RobotEnv
from guerdon.envs.robot.operators import (
    Intervention,
    KeyboardOperator,
    Operator,
    ScriptedOperator,
    SpaceMouseOperator,
)

__all__ = [
    "Intervention",
    "KeyboardOperator",
    "Operator",
    "RobotEnv",
    "ScriptedOperator",
    "SpaceMouseOperator",
]
