"""A simulated robot on loopback, with small pictures and fast time."""

import pytest

from guerdon.config import EnvConfig
from guerdon.config.schema_robot import RobotSimConfig
from guerdon.envs.robot.sim.server import SimServer

SCALE, SIZE, HOLD = 25.0, 32, 4


@pytest.fixture
def robot():
    """A server without faults."""
    with SimServer(RobotSimConfig(port=0, time_scale=SCALE, image_size=(SIZE, SIZE))) as server:
        yield server


def section(server, operator="scripted", params=None, **settings):
    """`env.eval` for it."""
    override = {
        "url": server.url,
        "time_scale": SCALE,
        "image_size": [SIZE, SIZE],
        "success_hold_steps": HOLD,
    }
    return EnvConfig(
        env_type="robot",
        operator=operator,
        operator_params=params or {},
        override_cfg={**override, "max_episode_steps": 40, "axes": ["x", "y", "z"], **settings},
    )
