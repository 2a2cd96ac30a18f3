"""Cases of the zoo that learn against the policy: GAIL, AIRL, guided cost learning, an ensemble of GAIL."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from gymnasium.vector import AutoresetMode

import guerdon
from guerdon.config import EnvConfig
from guerdon.envs.experts import scripted_policy
from guerdon.envs.make import make_vector_env
from guerdon.rewards import StepBatch
from guerdon.training.rollouts import play_episodes

TARGETS = {"fixed_cartpole": 190.0, "point_reach": 41.2, "cartpole": 475.0, "pendulum": -208.0}
"""Task -> mean return: 95% of the expert's 200, of its 43.4 and of its 500. Pendulum's returns are negative:
95% of the way from a random policy's -1234 to the script's -154 (means over 2,000 episodes)."""
NAMES = (
    "fixed_cartpole_gail",
    "fixed_cartpole_airl",
    "fixed_cartpole_gcl",
    "fixed_cartpole_ensemble",
    "point_reach_gail",
    "point_reach_airl",
    "point_reach_gcl",
    "cartpole_gail",
    "cartpole_airl",
    "cartpole_gcl",
    "pendulum_gail",
    "pendulum_airl",
)


def settings_of(name: str) -> dict[str, Any]:
    """A config that is shipped."""
    found: dict[str, Any] = yaml.safe_load(
        (Path(guerdon.__file__).parent / "conf" / "zoo" / f"{name}.yaml").read_text()
    )
    return found


def demonstrations(env_id: str, episodes: int = 10, seed: int = 123) -> list[StepBatch]:
    """Whole episodes of the scripted policy, the first of each environment, [T] each."""
    act = scripted_policy(env_id)
    env = make_vector_env(
        EnvConfig(id=env_id, num_envs=episodes),
        autoreset_mode=AutoresetMode.SAME_STEP,
        keep_final_frame=False,
    )
    try:
        return play_episodes(env, act, episodes, seed=seed)
    finally:
        env.close()


def case(name: str) -> dict[str, Any]:
    """What the benchmark runs."""
    settings = settings_of(name)
    shown: Callable[[], list[StepBatch]] = partial(demonstrations, settings["env"]["train"]["id"])
    return {
        "settings": settings,
        "demonstrations": shown,
        "target": TARGETS[name.rpartition("_")[0]],
        "pretrain": False,
    }


CASES: dict[str, dict[str, Any]] = {name: case(name) for name in NAMES}
"""Name of a config -> settings, demonstrations, the return to reach, and whether to pretrain."""
