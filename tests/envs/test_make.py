"""Env types and robot drivers: one table each, and plugins beside them."""

from typing import get_args, get_type_hints

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode

from guerdon.config import EnvConfig, build
from guerdon.config.schema_robot import RobotEnvConfig
from guerdon.core.errors import ConfigError
from guerdon.core.plugins import load_named
from guerdon.envs.make import ENV_TYPES, PLUGIN_GROUP, make_vector_env
from guerdon.envs.robot.driver import DRIVERS, make_driver
from tests.core.test_entry_points import install

SAME_STEP = AutoresetMode.SAME_STEP


def limit(cls, field):
    """The names that a setting takes."""
    return get_args(get_type_hints(cls, include_extras=True)[field])[1]


def test_the_tables_and_the_settings_name_the_same():
    assert limit(EnvConfig, "env_type").builtin == tuple(ENV_TYPES)
    assert limit(EnvConfig, "env_type").group == PLUGIN_GROUP
    assert limit(RobotEnvConfig, "driver").builtin == tuple(DRIVERS)


def test_everything_in_the_tables_can_be_imported():
    for table in (ENV_TYPES, DRIVERS):
        for name in table:
            assert callable(load_named("entry", name, table, "guerdon.no_such_group"))


def test_the_simulator_of_another_distribution(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "acme-sim", ["acme = acme_envs:make", "broken = acme_envs:absent"], PLUGIN_GROUP)
    (tmp_path / "acme_envs.py").write_text(
        "import gymnasium\n"
        "def make(config, *, autoreset_mode, **_):\n"
        "    return gymnasium.make_vec(config.id, config.num_envs, vectorization_mode='sync',\n"
        "                              vector_kwargs={'autoreset_mode': autoreset_mode})\n"
    )
    cfg = build(EnvConfig, {"env_type": "acme", "id": "CartPole-v1", "num_envs": 2})
    env = make_vector_env(cfg, autoreset_mode=SAME_STEP)
    assert isinstance(env, gym.vector.SyncVectorEnv) and env.reset(seed=0)[0].shape == (2, 4)
    env.close()
    with pytest.raises(ConfigError, match=r"'broken' .*of acme-sim cannot be loaded"):
        make_vector_env(EnvConfig(env_type="broken"), autoreset_mode=SAME_STEP)
    with pytest.raises(ConfigError, match=r"env_type must be one of .*'acme'.*did you mean 'acme'\?"):
        EnvConfig(env_type="acm")


def test_an_env_type_that_nobody_has():
    with pytest.raises(ConfigError, match=r"env.train.env_type must be .*did you mean 'maniskill'\?"):
        build(EnvConfig, {"env_type": "maniskil"}, "env.train")
    with pytest.raises(ConfigError, match="unknown env_type 'robt'; did you mean 'robot'"):
        load_named("env_type", "robt", ENV_TYPES, PLUGIN_GROUP)


def test_the_driver_of_another_distribution(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    install(tmp_path, "acme-arm", ["acme = acme_arm:make"], "guerdon.robot_drivers")
    (tmp_path / "acme_arm.py").write_text("def make(config):\n    return config.robot_ip\n")
    assert make_driver(RobotEnvConfig(driver="acme", robot_ip="10.0.0.7")) == "10.0.0.7"
    with pytest.raises(ConfigError, match="driver must be one of 'serl_http', 'franky', 'acme'"):
        RobotEnvConfig(driver="none", robot_ip="10.0.0.7")
