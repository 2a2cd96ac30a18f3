"""GAIL from an `.npz` of demonstrations: the reward is learned from what an expert did."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import guerdon as gd


def write_demonstrations(path: Path, episodes: int) -> None:
    """A stand-in for your own recording: a controller that balances the pole, in the usual arrays."""
    env = gym.make("CartPole-v1", max_episode_steps=200)
    rows: dict[str, list[Any]] = {"observations": [], "actions": [], "next_observations": [], "dones": []}
    for episode in range(episodes):
        obs, _ = env.reset(seed=episode)
        done = False
        while not done:
            action = int(obs[2] + 0.3 * obs[3] + 0.02 * obs[0] + 0.05 * obs[1] > 0)
            next_obs, _, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
            for name, value in zip(rows, (obs, action, next_obs, done), strict=True):
                rows[name].append(value)
            obs = next_obs
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {name: np.array(values) for name, values in rows.items()}
    np.savez(path, **arrays)


def main(out: Path = Path("runs/gail"), episodes: int = 10, steps: int = 20_000) -> float:
    """Train PPO on GAIL's reward alone; returns the mean length of an episode."""
    write_demonstrations(out / "demos.npz", episodes)
    gail = gd.reward_model("gail", "CartPole-v1", demos=out / "demos.npz", reward_form="positive")
    with gd.PPO("CartPole-v1", reward=gail, num_envs=8, net_arch=(64, 64), n_steps=64, seed=0) as agent:
        before = agent.evaluate(10).length
        agent.learn(steps)
        after = agent.evaluate(10).length
        agent.save(out / "agent")
    print(f"steps before the pole falls: {before:.0f} before training, {after:.0f} after")
    return after


if __name__ == "__main__":
    main()
