"""Asynchronous against synchronous SAC on an environment whose step takes 3 ms, to the same return.

The environment is Gymnasium's Pendulum. Its step *sleeps* until 3 ms have passed, as it does where a robot or
a simulator in another process is waited for: the core is free meanwhile. `SpinningPendulum` computes for 3 ms
in Python instead and holds the interpreter lock; `python -m benchmarks.bench_async 3 spin` compares it too,
with threads and with Ray's processes, to show what the lock costs (no target).
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.classic_control.pendulum import PendulumEnv

from benchmarks.report import Result, report
from guerdon.cli.train import train
from guerdon.config import load_config

STEP_SECONDS = 0.003
SEEDS = 3
GOOD_RETURN = -200.0
"""Mean return of evaluation episodes that counts as solved; random play has about -1200."""
SETTINGS = [
    "env.train.num_envs=1",
    "env.eval.id=Pendulum-v1",
    "env.eval.num_envs=20",
    "learner.algorithm=sac",
    "learner.total_steps=8192",
    "learner.eval_interval=512",
    "learner.eval_episodes=20",
    "learner.save_interval=1000000",
    "learner.num_threads=1",
    "learner.network.hidden=[256,256]",
    "learner.network.activation=relu",
    "learner.sac.batch_size=128",  # an update then takes about as long as a step: both are worth overlapping
    "learner.sac.learning_starts=512",
    "learner.sac.actor_lr=1e-3",
    "learner.sac.critic_lr=1e-3",
    "learner.sac.alpha_lr=1e-3",
    "runner.logger.backends=[]",
]


class SleepingPendulum(PendulumEnv):
    """A step takes 3 ms, during which the process may do something else."""

    def step(self, action: Any) -> Any:
        """Step, then sleep."""
        until = time.perf_counter() + STEP_SECONDS
        outcome = super().step(action)  # type: ignore[no-untyped-call]
        time.sleep(max(until - time.perf_counter(), 0.0))
        return outcome


class SpinningPendulum(PendulumEnv):
    """A step takes 3 ms of computing in Python."""

    def step(self, action: Any) -> Any:
        """Step, then spin."""
        until = time.perf_counter() + STEP_SECONDS
        outcome = super().step(action)  # type: ignore[no-untyped-call]
        while time.perf_counter() < until:
            pass
        return outcome


for name, env_class in (("Sleeping-v0", SleepingPendulum), ("Spinning-v0", SpinningPendulum)):
    if name not in gym.registry:  # as a program this file is imported twice
        gym.register(name, env_class, max_episode_steps=200)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run: its curve and what it took."""

    seconds: float
    """Of stepping, judging, waiting and updates; evaluations do not count."""
    seconds_to_good: float
    """The same up to the first evaluation with `GOOD_RETURN`; infinite if there is none."""
    env_return: float
    """Mean of the last three evaluations."""
    max_lag: float
    """The largest lag of the policy, 0 in a synchronous run."""
    shares: str
    """Where the time went."""


def play(env: str, seed: int, more: list[str]) -> Outcome:
    """One run; its numbers come from its own `metrics.jsonl`."""
    folder = Path(tempfile.mkdtemp())
    try:
        run = [
            f"env.train.id=benchmarks.bench_async:{env}",
            f"seed={seed}",
            f"runner.logger.log_path={folder}",
        ]
        train(load_config("train", [*SETTINGS, *run, *more]))
        entries = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    finally:
        shutil.rmtree(folder)
    seconds, good, returns, lags, parts = 0.0, float("inf"), [], [0.0], dict[str, float]()
    for entry in entries:
        for name, value in entry.items():
            if name.startswith("time/") and name != "time/steps_per_second":
                seconds += value
                parts[name] = parts.get(name, 0.0) + value
        lags.append(entry.get("async/policy_lag_max", 0.0))
        if "eval/env_return" in entry:
            returns.append(entry["eval/env_return"])
            if returns[-1] >= GOOD_RETURN:
                good = min(good, seconds)
    return Outcome(
        seconds=seconds,
        seconds_to_good=good,
        env_return=float(np.mean(returns[-3:])),
        max_lag=max(lags),
        shares=", ".join(f"{name.removeprefix('time/')} {value:.1f} s" for name, value in parts.items()),
    )


def compare(env: str, seeds: int, kinds: dict[str, list[str]]) -> dict[str, list[Outcome]]:
    """All kinds of runs on each seed, one after the other."""
    outcomes: dict[str, list[Outcome]] = {kind: [] for kind in kinds}
    for seed, (kind, more) in itertools.product(range(seeds), kinds.items()):
        one = play(env, seed, more)
        outcomes[kind].append(one)
        print(
            f"   {env} seed {seed} {kind}: {one.seconds:.1f} s, {one.seconds_to_good:.1f} s to "
            f"{GOOD_RETURN:g}, return {one.env_return:.0f}, lag at most {one.max_lag:g} ({one.shares})",
            flush=True,
        )
    return outcomes


def run(seeds: int, spin: bool) -> list[Result]:
    """Measure."""
    torch.set_num_threads(1)
    fast = ["asynchronous.enabled=true"]
    kinds: dict[str, list[str]] = {"synchronous": [], "asynchronous": fast}
    outcomes = compare("Sleeping-v0", seeds, kinds)
    if spin:
        compare("Spinning-v0", seeds, {**kinds, "asynchronous ray": [*fast, "engine=ray"]})
    slow, quick = outcomes["synchronous"], outcomes["asynchronous"]

    def ratio(name: str) -> float:
        return float(sum(getattr(one, name) for one in quick) / sum(getattr(one, name) for one in slow))

    returns = [np.array([one.env_return for one in ones]) for ones in (slow, quick)]
    noise = float(np.sqrt((returns[0].var() + returns[1].var()) / max(seeds - 1, 1)))
    return [
        Result(
            what=f"3 ms environment: seconds to a return of {GOOD_RETURN:g}, asynchronous / synchronous",
            value=ratio("seconds_to_good"),
            target=0.65,
            at_least=False,
        ),
        Result(
            what="3 ms environment: seconds of the whole run, asynchronous / synchronous",
            value=ratio("seconds"),
            target=0.65,
            at_least=False,
        ),
        Result(
            what="return at the end, synchronous minus asynchronous (target: noise)",
            value=float(returns[0].mean() - returns[1].mean()),
            target=round(2.0 * noise + 20.0, 1),
            at_least=False,
        ),
    ]


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS
    about: dict[str, object] = {"seeds": count, "step": "3 ms of sleep", "threads": 1}
    sys.exit(report("async", about, run(count, "spin" in sys.argv[2:])))
