"""SAC, TD3 and DQN against those of stable_baselines3: the same budget and settings, in alternation.

`python -m benchmarks.bench_offpolicy [seeds] [task ...]`; one core each, as a run on a shared machine has.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from benchmarks.report import Result, report, silent
from guerdon.agents.agent import OffPolicyAgent
from guerdon.agents.dqn import DQN
from guerdon.agents.networks import ObsSpec
from guerdon.agents.replay import ReplayBuffer
from guerdon.agents.sac import SAC
from guerdon.agents.td3 import TD3
from guerdon.config import DQNConfig, NetworkConfig, SACConfig, TD3Config
from guerdon.core.batches import TrainBatch
from guerdon.envs.observations import with_final

EVAL_EPISODES = 20
SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class Task:
    """An environment with a budget, and settings that both libraries get."""

    env: str
    steps: int
    cfg: SACConfig | TD3Config | DQNConfig
    network: NetworkConfig


# stable_baselines3 has no double targets
_DQN = DQNConfig(lr=2.3e-3, target_interval=50, updates_per_step=0.5, num_n_steps=3, double=False)
_TD3 = TD3Config(actor_lr=1e-3, critic_lr=1e-3, learning_starts=500)
_SAC = SACConfig(actor_lr=1e-3, critic_lr=1e-3, alpha_lr=1e-3, learning_starts=500)
TASKS = (
    Task(
        env="Pendulum-v1",
        steps=5_000,
        cfg=_SAC,
        network=NetworkConfig(activation="relu"),
    ),
    Task(
        env="InvertedPendulum-v5",
        steps=5_000,
        cfg=_SAC,
        network=NetworkConfig(activation="relu"),
    ),
    Task(
        env="Pendulum-v1",
        steps=5_000,
        cfg=_TD3,
        network=NetworkConfig(activation="relu"),
    ),
    Task(
        env="CartPole-v1",
        steps=20_000,
        cfg=_DQN,
        network=NetworkConfig(activation="relu"),
    ),
    Task(
        env="Acrobot-v1",
        steps=20_000,
        cfg=replace(_DQN, lr=6.3e-4, batch_size=128, target_interval=250, updates_per_step=1.0),
        network=NetworkConfig(activation="relu"),
    ),
)


def make(env: str, num_envs: int = 1) -> gym.vector.VectorEnv:
    """Environments that start anew in the step that ends an episode, as the buffer wants it."""
    return gym.make_vec(
        env,
        num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
    )


def make_learner(task: Task, env: Any, seed: int) -> OffPolicyAgent:
    """Ours, for the spaces of an environment."""
    spec, space = ObsSpec.of(env.single_observation_space), env.single_action_space
    agents: dict[type, type[OffPolicyAgent]] = {SACConfig: SAC, TD3Config: TD3, DQNConfig: DQN}
    return agents[type(task.cfg)](spec, space, task.cfg, task.network, seed=seed)


def make_replay(env: gym.vector.VectorEnv, capacity: int, seed: int) -> ReplayBuffer:
    """A buffer for the spaces of an environment."""
    spec, space = ObsSpec.of(env.single_observation_space), env.single_action_space
    discrete = isinstance(space, gym.spaces.Discrete)
    kind: tuple[Any, Any] = ((), np.int64) if discrete else (space.shape, np.float32)
    return ReplayBuffer(spec, *kind, env.num_envs, capacity, seed=seed)


def train(
    task: Task,
    learner: OffPolicyAgent,
    env: gym.vector.VectorEnv,
    *,
    seed: int,
    reward_scale: float = 1.0,
    prior: ReplayBuffer | None = None,
) -> ReplayBuffer:
    """The plain loop: act, store, sample, update. Training rewards are environment rewards, scaled."""
    cfg = task.cfg
    replay = make_replay(env, cfg.buffer_size, seed)
    share = 0.0 if prior is None or learner.prior is None else learner.prior.prior_ratio
    prior_rows = round(cfg.batch_size * share)
    rng = np.random.default_rng(seed)
    obs, _ = env.reset(seed=seed)

    def batch(source: ReplayBuffer, count: int) -> TrainBatch:
        drawn = source.sample(count, gamma=cfg.gamma, num_n_steps=learner.num_n_steps)
        return drawn.train_batch(reward_scale * drawn.env_rewards)

    owed = 0.0
    for step in range(0, task.steps, env.num_envs):
        actions: NDArray[Any]
        space: Any = env.single_action_space
        if step < cfg.learning_starts and isinstance(space, gym.spaces.Box):
            actions = rng.uniform(space.low, space.high, (env.num_envs, *space.shape)).astype(np.float32)
        else:
            actions = learner.act(obs, progress=step / task.steps)
        reached, env_rewards, terminated, truncated, info = env.step(actions)
        final = with_final(reached, info.get("final_obs"), terminated | truncated)
        replay.add(obs, actions, env_rewards, terminated, truncated, final)
        obs = reached
        if step < cfg.learning_starts:
            continue
        owed += cfg.updates_per_step * env.num_envs
        while owed >= 1.0:
            owed -= 1.0
            own = batch(replay, cfg.batch_size - prior_rows)
            both = own if prior is None else TrainBatch.cat([batch(prior, prior_rows), own])
            learner.update(both, prior_rows)
    return replay


def mean_return(task: Task, act: Any, *, seed: int = 10_000, episodes: int = EVAL_EPISODES) -> float:
    """Mean return of `act` (observations -> actions, [N, ...] each) over an episode of each of N."""
    env = make(task.env, episodes)
    obs, _ = env.reset(seed=seed)
    returns, running = np.zeros(episodes), np.ones(episodes, np.bool_)
    while running.any():
        obs, env_rewards, terminated, truncated, _ = env.step(act(obs))
        returns += env_rewards * running
        running &= ~(terminated | truncated)
    env.close()
    return float(returns.mean())


def seconds(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds that pass, and those that are spent on a core: other load adds to the first."""
    wall, core = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - core


def ours(task: Task, seed: int) -> tuple[float, float, float]:
    """(mean return, seconds of training, of these on a core)."""
    env = make(task.env)
    learner = make_learner(task, env, seed)
    spent = seconds(lambda: train(task, learner, env, seed=seed))
    env.close()
    return mean_return(task, lambda obs: learner.act(obs, deterministic=True)), *spent


def theirs(task: Task, seed: int) -> tuple[float, float, float]:
    """The same of stable_baselines3."""
    import stable_baselines3 as sb3
    from stable_baselines3.common.noise import NormalActionNoise

    cfg, widths = task.cfg, list(task.network.hidden)
    shared: dict[str, Any] = {
        "seed": seed,
        "gamma": cfg.gamma,
        "batch_size": cfg.batch_size,
        "buffer_size": cfg.buffer_size,
        "learning_starts": cfg.learning_starts,
        "policy_kwargs": {"net_arch": widths, "activation_fn": torch.nn.ReLU},
        "device": "cpu",
    }
    if isinstance(cfg, SACConfig):
        model: Any = sb3.SAC("MlpPolicy", task.env, learning_rate=cfg.critic_lr, tau=cfg.tau, **shared)
    elif isinstance(cfg, TD3Config):
        size = gym.make(task.env).action_space.shape or (1,)
        model = sb3.TD3(
            "MlpPolicy",
            task.env,
            learning_rate=cfg.critic_lr,
            tau=cfg.tau,
            policy_delay=cfg.policy_delay,
            target_policy_noise=cfg.policy_noise,
            target_noise_clip=cfg.noise_clip,
            action_noise=NormalActionNoise(np.zeros(size), np.full(size, cfg.exploration_noise)),
            **shared,
        )
    else:
        every = round(1 / cfg.updates_per_step)
        model = sb3.DQN(
            "MlpPolicy",
            task.env,
            learning_rate=cfg.lr,
            train_freq=every,
            gradient_steps=1,
            target_update_interval=cfg.target_interval * every,  # counted in steps there
            exploration_fraction=cfg.epsilon_fraction,
            exploration_initial_eps=cfg.epsilon_start,
            exploration_final_eps=cfg.epsilon_end,
            n_steps=cfg.num_n_steps,
            **shared,
        )
    model.set_logger(silent())
    spent = seconds(lambda: model.learn(task.steps))
    return mean_return(task, lambda obs: model.predict(obs, deterministic=True)[0]), *spent


def compare(task: Task, seeds: int) -> list[Result]:
    """Train both on each seed, one after the other."""
    rows = []
    for seed in range(seeds):
        rows.append((*ours(task, seed), *theirs(task, seed)))
        own, other = (
            f"{row[0]:.1f} in {row[1]:.1f} s ({row[2]:.1f})" for row in (rows[-1][:3], rows[-1][3:])
        )
        print(f"   {task.env} seed {seed}: return {own}, stable_baselines3 {other}", flush=True)
    table = np.array(rows)
    mine, others = table[:, 0], table[:, 3]
    noise = float(np.sqrt((mine.var() + others.var()) / max(seeds - 1, 1)))
    allowed = round(2.0 * noise + 0.05 * abs(float(others.mean())), 1)
    wall, core = (table[:, column].sum() / table[:, column + 3].sum() for column in (1, 2))
    return [
        Result(what=f"{task.env}: seconds, ours / theirs", value=wall, target=0.5, at_least=False),
        Result(what=f"{task.env}: seconds on a core, ours / theirs", value=core, target=0.5, at_least=False),
        Result(
            what=f"{task.env}: return, theirs minus ours (target: noise of the seeds)",
            value=float(others.mean() - mine.mean()),
            target=allowed,
            at_least=False,
        ),
    ]


def update_times(batch_size: int = 256, width: int = 256, rounds: int = 200) -> list[Result]:
    """An update of SAC with two critics, against the matrix products that it cannot do without.

    Of products batch x width x width, a pass of a network is one, and its gradient two, or one for the inputs
    alone: 1 + 2 for the targets, 2 + 4 for the critics, 1 + 2 + 2 + 2 for the policy, 16 together.
    """
    network = NetworkConfig(hidden=(width, width), activation="relu")
    learner = SAC(ObsSpec(state_size=17), gym.spaces.Box(-1, 1, (6,)), SACConfig(), network, seed=0)
    generator = torch.Generator().manual_seed(0)
    batch = TrainBatch(
        obs={"state": torch.randn(batch_size, 17, generator=generator)},
        next_obs={"state": torch.randn(batch_size, 17, generator=generator)},
        actions=torch.rand(batch_size, 6, generator=generator) * 2 - 1,
        training_rewards=torch.randn(batch_size, generator=generator),
        not_terminated=torch.ones(batch_size),
        discount=torch.full((batch_size,), 0.99),
    )
    left, right = torch.randn(batch_size, width), torch.randn(width, width)
    updates, products = [], []
    for _ in range(rounds):
        updates.append(seconds(lambda: learner.update(batch))[1])
        products.append(seconds(lambda: [torch.mm(left, right) for _ in range(16)])[1])
    update, product = (1e3 * float(np.median(times)) for times in (updates, products))
    what = f"SAC: an update, batch {batch_size}, two critics of 2 x {width}"
    return [
        Result(what=what, value=update, target=2.5, at_least=False, unit="ms"),
        Result(
            what="SAC: an update / its matrix products", value=update / product, target=1.5, at_least=False
        ),
    ]


def run(seeds: int = SEEDS, names: tuple[str, ...] = ()) -> list[Result]:
    """All tasks, or those named; it is said which ones lack a package."""
    torch.set_num_threads(1)
    results = update_times()
    for task in TASKS:
        if names and task.env not in names:
            continue
        try:
            make(task.env).close()
        except (ImportError, gym.error.DependencyNotInstalled) as error:
            print(f"   {task.env} was left out: {error}", flush=True)
            continue
        results += compare(task, seeds)
    return results


if __name__ == "__main__":
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS
    settings: dict[str, object] = {"seeds": seeds, **{task.env: f"{task.steps} steps" for task in TASKS}}
    sys.exit(report("offpolicy", settings, run(seeds, tuple(sys.argv[2:]))))
