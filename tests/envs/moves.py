"""The tabletop moved by hand, for its tests."""

import numpy as np
from gymnasium.vector import AutoresetMode

from guerdon.envs import TabletopVectorEnv
from guerdon.envs.tabletop.scene import (
    CUBE,
    CUBE_HALF,
    GOAL,
    GRIPPER,
    OPENING,
    VELOCITY,
    update_relations,
)

OPEN, CLOSE = 1.0, -1.0
"""Of the gripper's action."""


def make(num_envs=1, seed=0, **settings):
    settings.setdefault("autoreset_mode", AutoresetMode.DISABLED)
    env = TabletopVectorEnv(num_envs, **settings)
    env.reset(seed=seed)
    return env


def put(env, **places):
    """Move things of a scene by hand; the gripper is then at rest."""
    rows = env._rows
    for name, place in places.items():
        where = {"gripper": GRIPPER, "cube": CUBE, "goal": GOAL, "opening": OPENING}[name]
        rows[where] = np.reshape(place, (-1, 1))
    rows[VELOCITY] = 0.0
    update_relations(rows)


def act(env, *action, times=1):
    """Take the same action in all environments, some times; the last result."""
    for _ in range(times):
        result = env.step(np.tile(np.float32(action), (env.num_envs, 1)))
    return result


def grasp(env, goal=(0.05, 0.05, 0.1)):
    put(env, gripper=(0.0, 0.0, CUBE_HALF), cube=(0.0, 0.0, CUBE_HALF), goal=goal)
    *_, info = act(env, 0, 0, 0, CLOSE, times=4)
    assert info["is_grasped"].all()
