"""PPO against that of Stable-Baselines3: the same environments, budget and hyper-parameters, one thread.

The learners take turns, so that other load on the machine meets both. Processor time counts, from the first
step to the last update; afterwards the most likely actions of both are scored in the same episodes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from benchmarks.report import Result, report, silent
from guerdon.agents.networks import ObsSpec
from guerdon.agents.ppo import PPO
from guerdon.config import NetworkConfig, PPOConfig
from guerdon.training.env_worker import RolloutCollector

SEEDS, EVAL_EPISODES = (0, 1, 2), 32


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment, how long to learn in it, and with what settings."""

    env: str
    num_envs: int
    total_steps: int
    ppo: PPOConfig


TASKS = (
    Task(
        env="CartPole-v1",
        num_envs=8,
        total_steps=40_960,
        ppo=PPOConfig(num_steps=128, gamma=0.98, gae_lambda=0.8, lr=1e-3, update_epochs=10),
    ),
    Task(
        env="Pendulum-v1",
        num_envs=8,
        total_steps=98_304,
        ppo=PPOConfig(num_steps=256, gamma=0.9, lr=1e-3, update_epochs=10),
    ),
    Task(
        env="Acrobot-v1",
        num_envs=16,
        total_steps=65_536,
        ppo=PPOConfig(num_steps=256, gae_lambda=0.94, lr=3e-4, update_epochs=4, minibatch_size=64),
    ),
    Task(
        env="InvertedPendulum-v5",
        num_envs=8,
        total_steps=40_960,
        ppo=PPOConfig(num_steps=128, lr=1e-3, update_epochs=10, minibatch_size=128),
    ),
)

Act = Callable[[Any], Any]


def ours(task: Task, seed: int) -> tuple[float, Act]:
    """Processor seconds of learning, and the policy."""
    env = gym.make_vec(
        task.env,
        task.num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )
    spec, network = ObsSpec.of(env.single_observation_space), NetworkConfig(hidden=(64, 64))
    learner = PPO(spec, env.single_action_space, task.ppo, network, seed=seed)
    collector = RolloutCollector(env, task.ppo.num_steps)
    started = time.process_time()
    collector.reset(seed)
    for _ in range(-(-task.total_steps // (task.ppo.num_steps * task.num_envs))):
        learner.update(collector.collect(learner))
    spent = time.process_time() - started
    env.close()
    return spent, lambda obs: learner.act(obs, deterministic=True)


def theirs(task: Task, seed: int) -> tuple[float, Act]:
    """The same by Stable-Baselines3, whose default policy has the same networks."""
    from stable_baselines3 import PPO as OtherPPO
    from stable_baselines3.common.env_util import make_vec_env

    env, cfg = make_vec_env(task.env, task.num_envs, seed=seed), task.ppo
    learner = OtherPPO(
        "MlpPolicy",
        env,
        n_steps=cfg.num_steps,
        batch_size=cfg.minibatch_size,
        n_epochs=cfg.update_epochs,
        learning_rate=cfg.lr,
        gamma=cfg.gamma,
        gae_lambda=cfg.gae_lambda,
        clip_range=cfg.clip_range,
        ent_coef=cfg.entropy_coef,
        vf_coef=cfg.value_coef,
        max_grad_norm=cfg.max_grad_norm,
        seed=seed,
        device="cpu",
    )
    learner.set_logger(silent())
    started = time.process_time()
    learner.learn(task.total_steps)
    spent = time.process_time() - started
    env.close()
    return spent, lambda obs: learner.predict(obs, deterministic=True)[0]


def final_return(task: Task, act: Act) -> float:
    """Mean return of the first episode of each of a number of environments."""
    env = gym.make_vec(task.env, EVAL_EPISODES, vectorization_mode="sync")
    obs, _ = env.reset(seed=10_000)
    running, returns = np.ones(EVAL_EPISODES, np.bool_), np.zeros(EVAL_EPISODES)
    while running.any():
        obs, env_rewards, terminated, truncated, _ = env.step(act(obs))
        returns += env_rewards * running
        running &= ~(terminated | truncated)
    env.close()
    return float(returns.mean())


def env_seconds(task: Task) -> float:
    """What the environments alone would take of a seed's time, whoever learns; from 2,000 random steps."""
    env = gym.make(task.env)
    env.reset(seed=0)
    env.action_space.seed(0)
    started = time.process_time()
    for _ in range(2_000):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    spent = time.process_time() - started
    env.close()
    return spent * task.total_steps / 2_000


def compare(task: Task) -> list[Result]:
    """Speed and final returns over all seeds."""
    seconds, returns = np.zeros((2, len(SEEDS))), np.zeros((2, len(SEEDS)))
    for column, seed in enumerate(SEEDS):
        for row, learn in enumerate((ours, theirs)):
            seconds[row, column], act = learn(task, seed)
            returns[row, column] = final_return(task, act)
    ratio = float(np.median(seconds[0] / seconds[1]))
    means, spread = returns.mean(axis=1), returns.std(axis=1, ddof=1)
    noise = max(float(np.hypot(*spread)) / np.sqrt(len(SEEDS)), 0.01 * float(np.abs(means).max()))
    shortfall = float(means[1] - means[0]) / noise
    print(
        f"   {task.env}: returns {returns[0].round(1).tolist()} in {seconds[0].sum():.1f} s; "
        f"Stable-Baselines3 {returns[1].round(1).tolist()} in {seconds[1].sum():.1f} s; "
        f"the environments alone: about {len(SEEDS) * env_seconds(task):.1f} s",
        flush=True,
    )
    return [
        Result(
            what=f"{task.env}: processor time, Stable-Baselines3 = 1", value=ratio, target=0.5, at_least=False
        ),
        Result(
            what=f"{task.env}: return below that of Stable-Baselines3",
            value=shortfall,
            target=2.0,
            at_least=False,
            unit="std. err.",
        ),
    ]


def run(names: list[str]) -> list[Result]:
    """All tasks, or those of the given environments; says which ones cannot be made here."""
    torch.set_num_threads(1)
    results = []
    for task in TASKS:
        if names and task.env not in names:
            continue
        try:
            gym.make(task.env).close()
        except ImportError as error:
            print(f"   {task.env}: left out, {error}")
            continue
        results += compare(task)
    return results


if __name__ == "__main__":
    settings: dict[str, object] = {"seeds": len(SEEDS), "eval_episodes": EVAL_EPISODES, "hidden": "64x64"}
    sys.exit(report("ppo", settings, run(sys.argv[1:])))
