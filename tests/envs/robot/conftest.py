"""A simulated robot on a real socket, whose time passes faster than ours."""

import time

import pytest

from guerdon.config.schema_robot import RobotEnvConfig, RobotSimConfig
from guerdon.envs.robot import RobotEnv
from guerdon.envs.robot.sim.server import SimServer

SCALE = 20.0


@pytest.fixture
def server():
    with SimServer(RobotSimConfig(port=0, time_scale=SCALE, image_size=(32, 32))) as running:
        running.world.set_box(*settings(running).box)
        yield running


def wait_for(condition, seconds=120.0):
    """Until it is true; the limit is for what hangs."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


def settings(server, **changes):
    return RobotEnvConfig(**{"url": server.url, "time_scale": SCALE, "image_size": (32, 32), **changes})


@pytest.fixture
def make_env(server):
    made = []

    def make(*, operator=None, success_detector=None, **changes):
        config = settings(server, **changes)
        env = RobotEnv(config, operator=operator and operator(config), success_detector=success_detector)
        made.append(env)
        return env

    yield make
    for env in made:
        env.close()
