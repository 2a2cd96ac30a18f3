"""MiniGrid's observations as vectors."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode

from guerdon.config import EnvConfig
from guerdon.core.errors import ConfigError
from guerdon.envs.make import make_vector_env

DOOR_KEY = "minigrid:MiniGrid-DoorKey-5x5-v0"


def test_every_cell_is_one_object_one_colour_one_state():
    env = make_vector_env(EnvConfig(id=DOOR_KEY, num_envs=2), autoreset_mode=AutoresetMode.SAME_STEP)
    plain = gym.make(DOOR_KEY)
    seen, _ = plain.reset(seed=3)
    obs, _ = env.reset(seed=[3, 4])
    for action in (0, 1, 2, 3, 5):
        cells, direction = obs[0, :-4].reshape(7, 7, 20), obs[0, -4:]
        assert (cells[..., :11].argmax(-1) == seen["image"][..., 0]).all()
        assert (cells[..., 11:17].argmax(-1) == seen["image"][..., 1]).all()
        assert (cells[..., 17:].argmax(-1) == seen["image"][..., 2]).all()
        assert (cells.sum(-1) == 3.0).all()
        assert direction.argmax() == seen["direction"] and direction.sum() == 1.0
        obs, *_ = env.step(np.array([action, action]))
        seen, *_ = plain.step(action)
    assert isinstance(env.single_observation_space, Box)
    assert env.single_observation_space.contains(obs[0])
    env.close()
    plain.close()


def test_an_unknown_task_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="MiniGrid-DoorKey-5x5-v0"):
        make_vector_env(
            EnvConfig(id="minigrid:MiniGrid-DoorKey-5x5-v1"), autoreset_mode=AutoresetMode.SAME_STEP
        )
