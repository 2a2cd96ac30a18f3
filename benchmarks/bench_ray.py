"""Ray: what it costs beside one process, what a second env worker gives, what a reward worker scores."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.bench_train import make_checkpoint
from benchmarks.report import Result, report
from guerdon.config import ClusterConfig, RewardConfig, RewardModelConfig, load_config
from guerdon.distributed import make_engine
from guerdon.envs import TabletopVectorEnv
from guerdon.serve import ImageRewardWorker
from guerdon.training.reward_workers import RewardWorkers
from guerdon.training.trainer import EmbodiedRunner

STEP_SECONDS = 0.003
ITERATIONS, BATCHES, BATCH = 5, 12, 256


class Slow(gym.Env[Any, Any]):
    """Steps that take 3 ms in which nothing is computed, like those of a robot."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begin to count."""
        super().reset(seed=seed)
        self._count = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Wait and count."""
        time.sleep(STEP_SECONDS)
        self._count += 1
        return np.full(4, self._count / 50, np.float32), float(action[0]), False, self._count >= 50, {}


if "bench/Slow-v0" not in gym.registry:
    gym.register("bench/Slow-v0", entry_point=Slow)  # type: ignore[arg-type]


def seconds(runners: Sequence[EmbodiedRunner]) -> list[float]:
    """Median time of an iteration of each runner; they take turns, so that other load hits all alike."""
    times: list[list[float]] = [[] for _ in runners]
    for runner in runners:
        runner.loop.reset(0)
        runner.loop.advance(0.0)  # warm-up
    for _ in range(ITERATIONS):
        for runner, mine in zip(runners, times, strict=True):
            started = time.perf_counter()
            metrics = runner.loop.advance(0.0).metrics
            mine.append(time.perf_counter() - started)
            parts = [
                f"{k[5:]} {v:.3f}" for k, v in metrics.items() if k.startswith("time/") and "steps" not in k
            ]
            print(f"   {runner.config.engine:<6} {mine[-1]:.3f} s: {', '.join(parts)}", flush=True)
    for runner in runners:
        runner.envs.close()
        runner.engine.close()
    return [float(np.median(mine)) for mine in times]


def overhead(folder: Path, checkpoint: Path) -> list[Result]:
    """PPO from images on the learned reward, 64 environments, 50 steps: one env worker on Ray over local."""
    shared = [
        "reward.use_reward_model=true",
        f"reward.model.checkpoint_path={checkpoint}",
        "reward.model.precision=int8",
        "monitor.action=off",
    ]
    runners = [
        EmbodiedRunner(load_config("train_rgb", [*shared, f"engine={engine}"]), folder)
        for engine in ("local", "ray")
    ]
    local, remote = seconds(runners)
    what = "engine=ray with one env worker over local, Tabletop images"
    return [Result(what=what, value=remote / local, target=1.15, at_least=False, unit="x")]


def two_workers(folder: Path) -> list[Result]:
    """Steps of a 3 ms environment with two env workers over one, updates included."""
    shared = [
        "engine=ray",
        "env.train.id=benchmarks.bench_ray:bench/Slow-v0",
        "env.train.num_envs=8",
        "learner.ppo.num_steps=64",
        "learner.ppo.update_epochs=1",
        "learner.network.hidden=[16]",
    ]
    times = [
        seconds(
            [
                EmbodiedRunner(
                    load_config("train", [*shared, f"cluster.component_placement.env={env}"]), folder
                )
            ]
        )
        for env in ("0", "0-1")
    ]
    what = f"two env workers over one, {1e3 * STEP_SECONDS:g} ms environment"
    return [Result(what=what, value=times[0][0] / times[1][0], target=1.8, unit="x")]


def scoring(checkpoint: Path) -> list[Result]:
    """Batches of 256 frames of 64x64: through a reward worker over in process."""
    env = TabletopVectorEnv(BATCH, autoreset_mode="Disabled")
    env.reset(seed=1)
    frames = {"base_camera": env.render_frames()}
    results = []
    for precision in ("fp32", "int8"):
        model = RewardModelConfig(checkpoint_path=str(checkpoint), precision=precision)
        cfg = RewardConfig(model=model)
        worker = ImageRewardWorker(cfg)
        worker.init_worker()
        engine = make_engine("ray", ClusterConfig())
        try:
            rewards = RewardWorkers(engine, cfg)
            times: dict[str, list[float]] = {"local": [], "ray": []}
            for _ in range(BATCHES):
                for name, judge in (("local", worker.score), ("ray", rewards.score)):
                    started = time.perf_counter()
                    judge(frames)
                    times[name].append(time.perf_counter() - started)
        finally:
            engine.close()
        local, remote = (float(np.median(times[name][2:])) for name in ("local", "ray"))
        print(f"   {precision}: in process {BATCH / local:,.0f} frames/s, through Ray {BATCH / remote:,.0f}")
        what = f"scoring through a reward worker over in process, {precision}, batch {BATCH}"
        results.append(Result(what=what, value=local / remote, target=0.85, unit="x"))
    return results


def run() -> list[Result]:
    """Measure everything."""
    folder = Path(tempfile.mkdtemp())
    try:
        checkpoint = make_checkpoint(folder)
        return [*overhead(folder, checkpoint), *two_workers(folder), *scoring(checkpoint)]
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    settings: dict[str, object] = {
        "ray": importlib.metadata.version("ray"),
        "threads": torch.get_num_threads(),
        "iterations": ITERATIONS,
    }
    sys.exit(report("ray", settings, run()))
