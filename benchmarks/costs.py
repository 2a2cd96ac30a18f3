"""What the parts of a run cost on one core of this machine, for the model of larger clusters in `scaling`."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bench_train import make_checkpoint
from guerdon.agents.networks import ObsSpec
from guerdon.agents.ppo import PPO
from guerdon.agents.replay import ReplayBuffer
from guerdon.agents.sac import SAC
from guerdon.config import (
    ClusterConfig,
    CollectConfig,
    EnvConfig,
    LearnerConfig,
    NetworkConfig,
    PPOConfig,
    RewardConfig,
    RewardModelConfig,
    SACConfig,
)
from guerdon.core.batches import Rollout, StepChunk
from guerdon.core.episodes import EpisodeTracker
from guerdon.core.streams import EnvStream
from guerdon.distributed import WorkerSpec, make_engine
from guerdon.distributed.ray_actors import Answer
from guerdon.envs import TabletopVectorEnv
from guerdon.serve import ImageRewardWorker
from guerdon.training.env_worker import EnvWorker, RolloutCollector

ENVS, STEPS = 32, 10
FRAMES, CALLS = 512, 300


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, bytes and sizes: those without a value here are measured, the others are assumed."""

    step: float
    """One step of one environment, with its action and its frame, on one core."""
    judge: float
    """PendingScores one frame on one core."""
    update: float
    """Learning from one transition of a rollout (PPO), or one update with its sample (SAC)."""
    insert: float
    """Taking one transition into the learner's memory."""
    message: float
    """A message between processes, one way, whatever is in it; measured on one machine."""
    bytes_per_step: float
    """What travels to the learner for one transition."""
    weight_bytes: int
    """What travels to a node for a new policy."""
    jitter: float = 0.1
    """Deviation of the time of a rollout between workers, as a share."""
    bandwidth: float = 1.25e9
    """Bytes per second of a network card: 10 Gb/s."""
    updates_per_step: float = 1.0
    """SAC: updates for one transition; a setting."""


def measure() -> tuple[Costs, Costs]:
    """Costs of PPO on two cameras, and of SAC on states, on one core of this machine."""
    torch.set_num_threads(1)
    shared: dict[str, Any] = {"judge": verdict_seconds(), "message": message_seconds()}
    return ppo_costs(shared), sac_costs(shared)


def median_seconds(function: Callable[[], object], count: int = 5) -> float:
    """Of `count` calls, after one that does not count."""
    times = []
    for _ in range(count + 1):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return float(np.median(times[1:]))


def verdict_seconds() -> float:
    """PendingScores one frame of 64x64 by a ResNet10 in int8, as a reward worker does it."""
    folder = Path(tempfile.mkdtemp())
    try:
        model = RewardModelConfig(checkpoint_path=str(make_checkpoint(folder)), precision="int8")
        worker = ImageRewardWorker(RewardConfig(model=model), device="cpu")
        worker.init_worker()
    finally:
        shutil.rmtree(folder)
    env = TabletopVectorEnv(FRAMES, autoreset_mode="Disabled")
    env.reset(seed=1)
    frames = {"base_camera": env.render_frames()}
    return median_seconds(lambda: worker.score(frames)) / FRAMES


def message_seconds() -> float:
    """Half the time of asking a Ray actor for next to nothing."""
    engine = make_engine("ray", ClusterConfig())
    try:
        group = engine.group("env", [WorkerSpec(cls=Answer, threads=1)])
        return median_seconds(lambda: group.submit(0, "double", 21).result(), CALLS) / 2
    finally:
        engine.close()


def ppo_costs(shared: dict[str, Any]) -> Costs:
    """Two cameras of 64x64, a CNN."""
    cameras = ("base_camera", "wrist_camera")
    env = TabletopVectorEnv(ENVS, obs_mode="rgb", cameras=cameras, autoreset_mode="SameStep")
    ppo = PPO(
        ObsSpec.of(env.single_observation_space),
        env.single_action_space,
        PPOConfig(num_steps=STEPS, update_epochs=3, minibatch_size=160),
        NetworkConfig(hidden=(256,), activation="relu"),
        seed=0,
    )
    collector = RolloutCollector(env, STEPS)
    collector.reset(0)
    step = median_seconds(lambda: collector.collect(ppo))
    rollout = collector.collect(ppo)
    arrays = rollout.arrays()
    count = rollout.num_transitions
    return Costs(
        step=step / count,
        update=median_seconds(lambda: ppo.update(rollout)) / count,
        insert=median_seconds(lambda: Rollout.join([arrays, arrays], 0)) / (2 * count),
        bytes_per_step=sum(array.nbytes for array in arrays.values()) / count,
        weight_bytes=len(pickle.dumps(ppo.policy_state())),
        **shared,
    )


def sac_costs(shared: dict[str, Any]) -> Costs:
    """States, as an asynchronous run acts, stores and learns."""
    cfg = SACConfig()
    section = EnvConfig(num_envs=ENVS, init_params={"max_episode_steps": 10 * STEPS})
    worker = EnvWorker(section, RewardConfig(), CollectConfig(), num_steps=STEPS)
    spec = ObsSpec.of(worker.env.single_observation_space)
    space: Any = worker.env.single_action_space
    sac = SAC(spec, space, cfg, LearnerConfig().network, seed=0)
    worker.attach(sac)

    def play() -> StepChunk:
        worker.reset(0)
        return worker.act(STEPS, 0, sac.policy_state())[0]

    step, chunk = median_seconds(play), play()
    count = STEPS * ENVS
    kept = {"prob_success": ((), np.float32)}
    replay = ReplayBuffer(spec, (4,), np.float32, ENVS, 100 * count, kept, seed=0)
    stream = EnvStream(0, 0, ENVS, replay, EpisodeTracker(ENVS))
    extras = {"prob_success": np.zeros(chunk.done.shape, np.float32)}
    insert = median_seconds(lambda: stream.store(chunk, extras), 50)

    def update() -> None:
        batch = replay.sample(cfg.batch_size, gamma=cfg.gamma)
        sac.update(batch.train_batch(batch.env_rewards))

    return Costs(
        step=step / count,
        update=median_seconds(update, 20),
        insert=insert / count,
        bytes_per_step=len(pickle.dumps(chunk)) / count,
        weight_bytes=len(pickle.dumps(sac.policy_state())),
        **shared,
    )
