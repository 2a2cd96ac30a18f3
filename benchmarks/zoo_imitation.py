"""Cases of the zoo's benchmark: imitation by transport, distillation and density, and learning from rankings.

Tests run the same ones (tests/rewards/zoo/test_imitation_outcomes.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml  # type: ignore[import-untyped]
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

import guerdon
import guerdon.envs  # registers the tasks
from guerdon.config import EnvConfig
from guerdon.envs.experts import scripted_policy
from guerdon.envs.make import make_vector_env
from guerdon.rewards.steps import StepBatch
from guerdon.training.rollouts import noise_ranked, play_episodes

CONFIGS = Path(guerdon.__file__).parent / "conf" / "zoo"
TASKS = {
    "fixed_cartpole": "guerdon/FixedCartPole-v0",
    "point_reach": "guerdon/PointReach-v0",
    "cartpole": "CartPole-v1",
    "pendulum": "Pendulum-v1",
}
RANKED_NOISE = (0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of random actions in T-REX's demonstrations, 20 of each."""
BEST_RANKED = {"fixed_cartpole": 120.0, "cartpole": 120.0, "point_reach": 30.0, "pendulum": -500.0}
"""The highest return among them; better ones are left out."""
POOR_NOISE = 0.7
"""Share of random actions in D-REX's demonstrations on PointReach."""
ABOVE_POOR = {"drex": 29.0, "trex": 31.5}
"""What has to be reached there: the best demonstrations of D-REX have a return of 27.6, of T-REX 29.8."""


def demonstrations(task: str, kind: str = "expert", seed: int = 123) -> list[StepBatch]:
    """Episodes of the task.

    Args:
        task: one of `TASKS`.
        kind: `expert`, 10 of the script; `poor`, 10 of it that are no good: it gives up early, or on
            PointReach `POOR_NOISE` of its actions are random; `ranked`, up to 100 with more and more random
            actions, none better than `BEST_RANKED`. Env rewards are needed for `ranked` alone.
        seed: of starts and noise.
    """
    script = scripted_policy(TASKS[task])
    num_envs = 20 if kind == "ranked" else 10
    cfg = EnvConfig(id=TASKS[task], num_envs=num_envs)
    env = make_vector_env(cfg, autoreset_mode=AutoresetMode.SAME_STEP, keep_final_frame=False)
    try:
        if kind == "expert":
            return play_episodes(env, script, num_envs, seed=seed)
        if kind == "poor" and task == "point_reach":
            return noise_ranked(env, script, (POOR_NOISE,), num_envs, seed=seed)[POOR_NOISE]
        if kind == "poor":
            return play_episodes(env, _gives_up(script, num_envs, seed), num_envs, seed=seed)
        groups = noise_ranked(env, script, RANKED_NOISE, num_envs, seed=seed)
        found = [episode for group in groups.values() for episode in group]
        return [each for each in found if float(each.env_rewards.sum()) <= BEST_RANKED[task]]
    finally:
        env.close()


def _gives_up(script: Callable[[Any], NDArray[Any]], count: int, seed: int) -> Callable[[Any], NDArray[Any]]:
    """The script, and from some step on, another one in each environment, random actions."""
    rng = np.random.default_rng(seed)
    last, step = rng.integers(40, 110, count), itertools.count()
    return lambda obs: np.where(next(step) < last, script(obs), rng.integers(2, size=count))


KINDS = {"pwil": "expert", "red": "expert", "pdeil": "expert", "trex": "ranked", "drex": "poor"}
"""Which demonstrations a model gets."""
FITTED_BEFORE = ("red", "trex", "drex")
"""Models that are fitted before the policy, and not again."""


def settings(name: str) -> dict[str, Any]:
    """What is shipped under that name."""
    shipped: dict[str, Any] = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return shipped


def _case(task: str, model: str) -> dict[str, Any]:
    shipped = settings(f"{task}_{model}")
    make: Callable[[], list[StepBatch]] = partial(demonstrations, task, KINDS[model])
    return {
        "settings": shipped,
        "demonstrations": make,
        "target": shipped.get("stop_value") or ABOVE_POOR[model],
        "pretrain": model in FITTED_BEFORE,
        "cooptrain": model not in FITTED_BEFORE,
    }


NOT_LEARNED = (("fixed_cartpole", "drex"), ("pendulum", "drex"), ("pendulum", "pdeil"))
"""Where no settings were found with which a policy gets there, whatever the seed; none were looked for with
D-REX on Pendulum."""
CASES: dict[str, dict[str, Any]] = {
    f"{task}_{model}": _case(task, model)
    for task in TASKS
    for model in KINDS
    if (task, model) not in NOT_LEARNED
}
"""Name of a shipped config -> how to run it, and the mean return that an evaluation has to reach."""
