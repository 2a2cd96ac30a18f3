"""What collecting costs: the same steps and renders with and without a recorder, in alternation."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

import guerdon.envs  # noqa: F401 - registers the environment
from benchmarks.report import Result, report
from guerdon.collect import DataCollectorWrapper
from guerdon.envs import ScriptedExpert

NUM_ENVS, STEPS, ROUNDS = 64, 200, 21


def make() -> Any:
    """64 environments whose observations hold state and images, so that frames are rendered either way."""
    return gym.make_vec(
        "guerdon/Tabletop-v0",
        NUM_ENVS,
        vectorization_mode="vector_entry_point",
        autoreset_mode=AutoresetMode.SAME_STEP,
        obs_mode="state+rgb",
    )


def seconds(env: Any, expert: ScriptedExpert, obs: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds inside `env.step` for a number of steps; choosing actions does not count."""
    spent = 0.0
    for _ in range(STEPS):
        action = expert.act(obs["state"])
        started = time.perf_counter()
        obs, _, terminated, truncated, _ = env.step(action)
        spent += time.perf_counter() - started
        expert.reset(terminated | truncated)
    return spent, obs


def run(format: str = "native") -> list[Result]:
    """The median ratio over rounds that alternate between the two."""
    folder = Path(tempfile.mkdtemp())
    try:
        plain, recorded = make(), DataCollectorWrapper(make(), folder / "data", format=format)
        state: list[list[Any]] = []
        for env in (plain, recorded):
            obs, _ = env.reset(seed=0)
            expert = ScriptedExpert(noise=0.3, seed=0)
            _, obs = seconds(env, expert, obs)  # warm-up
            state.append([env, expert, obs])
        ratios = []
        for _ in range(ROUNDS):
            times = []
            for item in state:
                spent, item[2] = seconds(*item)
                times.append(spent)
            ratios.append(times[1] / times[0])
        recorded.close()
        plain.close()
        overhead = float(np.median(ratios)) - 1.0
        what = f"collecting to {format}: added to stepping and rendering"
        return [Result(what=what, value=100 * overhead, target=5.0, at_least=False, unit="%")]
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    settings: dict[str, object] = {"num_envs": NUM_ENVS, "steps": STEPS, "rounds": ROUNDS, "image": "64x64x3"}
    sys.exit(report("collect", settings, run()))
