"""Processor seconds of whole runs of each agent: this checkout beside another one, in alternation.

`python -m benchmarks.bench_agents <other checkout> [rounds] [case ...]`. A run is what `guerdon train` does,
without a reward model, so that the agent has as large a share as it ever gets: environments, rollouts or
replay, updates, an evaluation at the end. Each is a process of its own with one thread. The first commit with
`benchmarks/bench_agents.py` deleted gradients that were written out by hand: its parent is what to compare.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.report import Result, report

CASES: dict[str, list[str]] = {
    "PPO, tabletop, 2 x 128": ["learner.total_steps=19200", "learner.eval_interval=19200"],
    "PPO, CartPole, 2 x 64": [
        "env.train.id=CartPole-v1",
        "env.eval.id=CartPole-v1",
        "env.train.num_envs=8",
        "learner.total_steps=16384",
        "learner.ppo.num_steps=128",
        "learner.ppo.minibatch_size=256",
        "learner.ppo.update_epochs=10",
        "learner.network.hidden=[64,64]",
    ],
    "SAC, tabletop, 2 x 256": [
        "learner.algorithm=sac",
        "env.train.num_envs=8",
        "learner.total_steps=1024",
        "learner.sac.learning_starts=512",
        "learner.network.hidden=[256,256]",
    ],
    "SAC, Pendulum, 2 x 256": [
        "learner.algorithm=sac",
        "env.train.id=Pendulum-v1",
        "env.eval.id=Pendulum-v1",
        "env.train.num_envs=1",
        "learner.total_steps=1024",
        "learner.sac.learning_starts=512",
        "learner.network.hidden=[256,256]",
        "learner.network.activation=relu",
    ],
    "DQN, CartPole, 2 x 256": [
        "learner.algorithm=dqn",
        "env.train.id=CartPole-v1",
        "env.eval.id=CartPole-v1",
        "env.train.num_envs=1",
        "learner.total_steps=4096",
        "learner.network.hidden=[256,256]",
    ],
}
SHARED = ["learner.eval_episodes=20", "env.eval.num_envs=20", "learner.eval_interval=1000000"]
CHILD = """
import sys, time, tempfile, logging, torch
torch.set_num_threads(1)
from pathlib import Path
from guerdon.config import load_config
from guerdon.training.trainer import EmbodiedRunner
with tempfile.TemporaryDirectory() as folder:
    runner = EmbodiedRunner(load_config("train", sys.argv[1:]), Path(folder))
    began = time.process_time()
    runner.run()
    print("seconds", time.process_time() - began)
"""


def seconds(checkout: Path, overrides: list[str]) -> float:
    """Processor seconds of a run with the package of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *SHARED, *overrides],
            env=environment, cwd=folder, capture_output=True, text=True, check=False,
        )  # fmt: skip
    told = [line for line in done.stdout.splitlines() if line.startswith("seconds ")]
    if not told:
        raise RuntimeError(done.stderr[-2_000:])
    return float(told[-1].split()[1])


def run(other: Path, rounds: int, names: tuple[str, ...] = ()) -> list[Result]:
    """All cases, or those whose name begins with one of `names`."""
    results = []
    for name, overrides in CASES.items():
        if names and not name.startswith(names):
            continue
        rows = [[seconds(root, overrides) for root in (Path.cwd(), other)] for _ in range(rounds)]
        here, there = np.array(rows).sum(0)
        print(f"   {name}: here {np.round(rows, 2).tolist()} there (s)", flush=True)
        what = f"{name}: processor seconds, here / there"
        results.append(Result(what=what, value=float(here / there), target=1.3, at_least=False))
    return results


if __name__ == "__main__":
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    found = run(Path(sys.argv[1]).resolve(), rounds, tuple(sys.argv[3:]))
    sys.exit(report("agents", {"rounds": rounds, "other": sys.argv[1]}, found))
