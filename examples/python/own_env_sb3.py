"""Your own Gymnasium environment, Stable-Baselines3, and a reward that is learned from pictures.

The policy observes states. The reward model looks at what `render()` shows. Needs: pip install 'guerdon[sb3]'
"""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3 import SAC
from stable_baselines3.common.vec_env import DummyVecEnv

import guerdon as gd
from guerdon.wrappers import KeepFinalFrame


class Reach(gym.Env[Any, Any]):
    """A dot has to come to the middle of a line and stay there."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, render_mode: str = "rgb_array") -> None:
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin anywhere."""
        super().reset(seed=seed)
        self.place, self.steps = float(self.np_random.uniform(-1, 1)), 0
        return np.array([self.place], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Move, and tell success in the info."""
        self.place = float(np.clip(self.place + 0.2 * action[0], -1, 1))
        self.steps += 1
        success = abs(self.place) < 0.15
        # No reward: the learned one takes its place. `is_success` is used to label frames and to evaluate.
        return np.array([self.place], np.float32), 0.0, False, self.steps >= 20, {"is_success": success}

    def render(self) -> Any:
        """Draw the line from above, uint8 [32, 32, 3]."""
        image = np.full((32, 32, 3), 40, np.uint8)
        column = round((self.place + 1) / 2 * 24)
        image[12:20, column : column + 8] = (220, 80, 40)
        return image


def main(out: Path = Path("runs/own_env"), episodes: int = 20, epochs: int = 8, steps: int = 3_000) -> float:
    """Collect, fit, train with SAC; returns the success rate."""
    rng = np.random.default_rng(0)

    # 1. Labelled episodes: some of a policy that comes to the middle, some of one that stays away.
    def towards(obs: Any) -> Any:
        return np.clip(-5 * obs + rng.normal(0, 1.0, 1), -1, 1).astype(np.float32)

    def away(obs: Any) -> Any:
        return np.sign(obs) * rng.uniform(0, 1, 1).astype(np.float32)

    gd.collect(Reach, towards, successes=episodes, failures=0, out=out / "data")
    data = gd.collect(Reach, away, successes=0, failures=episodes // 2, out=out / "data")

    # 2. A reward model that tells success from a picture.
    reward = gd.fit_reward(data, epochs=epochs, width=8, image_size=(3, 32, 32), out=out / "reward")
    print(reward)

    # 3. SAC of Stable-Baselines3 on the learned reward. KeepFinalFrame renders the end of an episode in time.
    venv = gd.wrap(DummyVecEnv([lambda: KeepFinalFrame(Reach())]), reward, reward_type="continuous")
    model = SAC(
        "MlpPolicy", venv, learning_starts=200, gamma=0.9, policy_kwargs={"net_arch": [32, 32]}, seed=0
    )
    model.learn(steps)

    # 4. Measure it by the environment's own success.
    env, successes = Reach(), 0
    for episode in range(20):
        obs, _ = env.reset(seed=1_000 + episode)
        done = False
        while not done:
            obs, _, _, done, info = env.step(model.predict(obs, deterministic=True)[0])
        successes += info["is_success"]
    print(f"success at the end of {successes} of 20 episodes")
    return successes / 20


if __name__ == "__main__":
    main()
