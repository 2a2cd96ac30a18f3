"""A task in which no single frame tells success: the cube is at the goal, and must be held still."""

import numpy as np

from guerdon.core.types import Episode
from guerdon.data.store import StoreWriter
from guerdon.envs import TabletopVectorEnv
from guerdon.envs.tabletop.expert import ScriptedExpert
from guerdon.envs.tabletop.scene import STATE_NAMES

STEPS, LEAD = 44, 20
"""Steps of an episode, and those before which the cube is not at the goal."""
_TO_GOAL = [STATE_NAMES.index(f"cube_to_goal_{axis}") for axis in "xyz"]


def play(num_envs, seed, size=32):
    """Frames uint8 [T, N, H, W, 3] and success bool [T, N] of steps with the cube at the goal.

    The gripper's lamp is off; every few steps it goes from holding still to shaking the cube, or back.
    """
    env = TabletopVectorEnv(
        num_envs,
        image_size=(size, size),
        max_episode_steps=STEPS + 1,
        status_lamp=False,
        autoreset_mode="Disabled",
    )
    expert, rng = ScriptedExpert(0.0, seed), np.random.default_rng(seed)
    states, _ = env.reset(seed=seed)
    frames, success, placed = [], [], []
    where = np.zeros((num_envs, 3))
    for step in range(STEPS):
        actions = expert.act(states)
        if step >= LEAD:
            if step % 4 == 0:
                shaking = rng.random(num_envs) < 0.5
            if step % 2 == 0:
                where = rng.normal(size=(num_envs, 3))
                where *= (0.018 * rng.random((num_envs, 1)) ** 0.3) / np.linalg.norm(where, axis=1)[:, None]
            way = states[:, _TO_GOAL] + where
            moving = np.clip(way / 0.05 / 0.4 / 0.7, -1, 1)
            actions[:, :3] = np.where(shaking[:, None], moving, 0.0)
        states, _, _, _, info = env.step(actions)
        if step > LEAD:
            frames.append(env.render_frames())
            success.append(info["success"])
            placed.append(info["is_obj_placed"])
    return np.stack(frames), np.stack(success), np.stack(placed)


def write_moving(path, num_envs, seed, size=32):
    """A store of such episodes; those in which the cube left the goal are left out."""
    frames, success, placed = play(num_envs, seed, size)
    episodes = [
        Episode(
            frames={"base_camera": np.ascontiguousarray(frames[:, env])},
            labels=success[:, env].astype(np.float32),
            success=bool(success[:, env].any()),
            source=f"{seed}/{env}",
        )
        for env in np.flatnonzero(placed.mean(axis=0) > 0.9)
    ]
    with StoreWriter(path) as writer:
        writer.add_many(episodes)
    return path
