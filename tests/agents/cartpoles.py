"""Cart poles, and PPO for them and for others."""

from typing import Any

import gymnasium as gym
from gymnasium.vector import AutoresetMode

from guerdon.agents.networks import ObsSpec
from guerdon.agents.ppo import PPO
from guerdon.config import NetworkConfig, PPOConfig

SAME_STEP = AutoresetMode.SAME_STEP
SMALL = NetworkConfig(hidden=(64, 64))
CARTPOLE = PPOConfig(num_steps=128, gamma=0.98, gae_lambda=0.8, lr=1e-3, update_epochs=10, anneal_lr=True)


def cartpoles(num_envs: int = 8) -> gym.vector.VectorEnv:
    return gym.make_vec(
        "CartPole-v1", num_envs, vectorization_mode="sync", vector_kwargs={"autoreset_mode": SAME_STEP}
    )


def learner(env: gym.vector.VectorEnv, cfg: PPOConfig, seed: int = 0, **network: Any) -> PPO:
    spec = ObsSpec.of(env.single_observation_space)
    return PPO(
        spec, env.single_action_space, cfg, NetworkConfig(**{"hidden": (64, 64), **network}), seed=seed
    )
