"""Processor seconds of whole runs of each agent: this checkout beside another one, in alternation.

`python -m benchmarks.bench_agents <other checkout> [rounds] [case ...]`. A run is what `guerdon train` does,
without a reward model, so that the agent has as large a share as it ever gets: environments, rollouts or
replay, updates, an evaluation at the end. Each checkout has a process with one thread, and they take turns.
The first commit with `benchmarks/bench_agents.py` deleted gradients that were written out by hand: its parent
is what to compare. On a shared machine runs of the same code differ by a tenth and more: take many rounds.
"""

from __future__ import annotations

import json
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
TARGET = 1.03
SHARED = ["learner.eval_episodes=20", "env.eval.num_envs=20", "learner.eval_interval=1000000"]
CHILD = """
import json, sys, tempfile, time, torch
torch.set_num_threads(1)
from pathlib import Path
from guerdon.config import load_config
from guerdon.training.trainer import EmbodiedRunner
for line in sys.stdin:
    with tempfile.TemporaryDirectory() as folder:
        runner = EmbodiedRunner(load_config("train", json.loads(line)), Path(folder))
        began = time.process_time()
        runner.run()
        print("seconds", time.process_time() - began, flush=True)
"""


class Checkout:
    """A process that runs what it is told with the package of a checkout."""

    def __init__(self, root: Path, folder: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env=environment, cwd=folder, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def seconds(self, overrides: list[str]) -> float:
        """Processor seconds of a run."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([*SHARED, *overrides]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("seconds "):
                return float(line.split()[1])
        raise RuntimeError("the process has ended; its errors are above")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def run(other: Path, rounds: int, names: tuple[str, ...] = ()) -> list[Result]:
    """All cases, or those whose name begins with one of `names`; a ratio is the median over rounds."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        checkouts = [Checkout(root, folder) for root in (Path.cwd(), other)]
        for name, overrides in CASES.items():
            if names and not name.startswith(names):
                continue
            for each in checkouts:  # imports, first allocations
                each.seconds(overrides)
            rows = np.array([[each.seconds(overrides) for each in checkouts] for _ in range(rounds)])
            ratios = rows[:, 0] / rows[:, 1]
            here, there = np.median(rows, 0)
            spread = f"{ratios.min():.2f} to {ratios.max():.2f}"
            print(f"   {name}: here {here:.2f} s, there {there:.2f} s, ratios {spread}", flush=True)
            what = f"{name}: processor seconds, here / there"
            results.append(Result(what=what, value=float(np.median(ratios)), target=TARGET, at_least=False))
        for each in checkouts:
            each.close()
    return results


if __name__ == "__main__":
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    found = run(Path(sys.argv[1]).resolve(), rounds, tuple(sys.argv[3:]))
    sys.exit(report("agents", {"rounds": rounds, "other": sys.argv[1]}, found))
