"""imitation's GAIL or AIRL on CartPole-v1, run in imitation's own environment.

python imitation_cartpole.py {gail,airl} DEMONSTRATIONS.npz SEED LIMIT_SECONDS TARGET
"""

import json
import sys
import time
from contextlib import suppress
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from imitation.algorithms.adversarial.airl import AIRL
from imitation.algorithms.adversarial.gail import GAIL
from imitation.data.types import TrajectoryWithRew
from imitation.rewards.reward_nets import BasicRewardNet, BasicShapedRewardNet
from imitation.util.networks import RunningNorm
from imitation.util.util import make_vec_env
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy


class Done(Exception):
    """The target is reached, or the time is up."""


def main() -> None:
    """Train, and print evaluations as they come; the time of evaluations is not counted."""
    algorithm, path, seed, limit, target = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:6])
    torch.set_num_threads(1)
    data = np.load(path)
    ends = np.cumsum(data["lengths"])
    trajectories = []
    for end, length in zip(ends, data["lengths"], strict=True):
        rows = slice(end - length, end)
        obs = np.concatenate([data["obs"][rows], data["next_obs"][end - 1 : end]])
        trajectories.append(
            TrajectoryWithRew(
                obs=obs, acts=data["actions"][rows], infos=None, terminal=True, rews=data["env_rewards"][rows]
            )
        )
    rng = np.random.default_rng(int(seed))
    venv = make_vec_env("CartPole-v1", rng=rng, n_envs=8)
    # Of imitation's own tutorials for this task, but rollouts of 1,024 steps, not 16,384: it learns sooner.
    learner = PPO(
        "MlpPolicy",
        venv,
        n_steps=128,
        batch_size=64,
        ent_coef=0.0,
        learning_rate=0.0004,
        gamma=0.95,
        n_epochs=5,
        seed=int(seed),
    )
    net = (BasicRewardNet if algorithm == "gail" else BasicShapedRewardNet)(
        observation_space=venv.observation_space,
        action_space=venv.action_space,
        normalize_input_layer=RunningNorm,
    )
    trainer = (GAIL if algorithm == "gail" else AIRL)(
        demonstrations=trajectories,
        demo_batch_size=1024 if algorithm == "gail" else 2048,
        gen_replay_buffer_capacity=512,
        n_disc_updates_per_round=8 if algorithm == "gail" else 16,
        venv=venv,
        gen_algo=learner,
        reward_net=net,
        allow_variable_horizon=True,
    )
    measure = gym.make("CartPole-v1")
    begin, measuring = time.perf_counter(), 0.0

    def report(_round: int) -> None:
        nonlocal measuring
        start = time.perf_counter()
        value: Any
        value, _ = evaluate_policy(learner, measure, n_eval_episodes=20, deterministic=True, warn=False)
        measuring += time.perf_counter() - start
        seconds = time.perf_counter() - begin - measuring
        reported = {"env_steps": learner.num_timesteps, "seconds": seconds, "env_return": float(value)}
        print(json.dumps(reported), flush=True)
        if value >= target or seconds > limit:
            raise Done

    with suppress(Done):
        trainer.train(10_000_000, callback=report)


if __name__ == "__main__":
    main()
