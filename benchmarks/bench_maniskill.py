"""ManiSkill's PickCube as it comes against our environments: steps and frames per second."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from benchmarks.report import Result, report
from guerdon.envs.maniskill.env import ManiSkillVectorEnv
from guerdon.envs.maniskill.expert import PickCubeExpert

STEPS, FRAMES, ROUNDS = 400, 40, 3
SETTINGS: dict[str, Any] = {"control_mode": "pd_ee_delta_pos", "render_mode": "rgb_array"}


def rate(step: Callable[[], object], count: int) -> float:
    """Calls per second, the best of some rounds."""
    best = 0.0
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(count):
            step()
        best = max(best, count / (time.perf_counter() - started))
    return best


def stock() -> tuple[float, float]:
    """Steps and frames per second of `gym.make`, one environment."""
    import gymnasium as gym
    import mani_skill.envs  # noqa: F401

    env = gym.make(
        "PickCube-v1", num_envs=1, obs_mode="state", sim_backend="cpu", render_backend="cpu",
        human_render_camera_configs={"width": 64, "height": 64, "shader_pack": "minimal"}, **SETTINGS,
    )  # fmt: skip
    env.reset(seed=0)
    env.render()
    action = np.zeros(4, np.float32)
    result = rate(lambda: env.step(action), STEPS), rate(env.render, FRAMES)
    env.close()
    return result


def ours(num_envs: int, num_processes: int) -> tuple[float, float, float]:
    """Steps per second, frames per second, and seconds until the first frame."""
    started = time.perf_counter()
    env = ManiSkillVectorEnv(
        num_envs,
        num_processes=num_processes,
        autoreset_mode=AutoresetMode.SAME_STEP,
        id="PickCube-v1",
        **SETTINGS,
    )
    env.reset(seed=0)
    env.render_frames()
    first = time.perf_counter() - started
    expert = PickCubeExpert()
    result = (
        num_envs * rate(lambda: env.step(expert.act(env.state())), STEPS // num_envs),
        num_envs * rate(env.render_frames, FRAMES // num_envs),
    )
    env.close()
    return (*result, first)


def main() -> int:
    cores = os.cpu_count() or 1
    one_steps, one_frames, first = ours(1, 1)
    all_steps, all_frames, _ = ours(4 * cores, cores)
    stock_steps, stock_frames = stock()
    settings = {"task": "PickCube-v1", "stock_steps_per_second": round(stock_steps), "pixels": 64}
    settings |= {"stock_frames_per_second": round(stock_frames, 1)}
    return report(
        "ManiSkill on a CPU",
        settings,
        [
            Result(what="steps, one process against gym.make", value=one_steps / stock_steps, target=1.05),
            Result(what="steps, all cores", value=all_steps, target=1.5 * stock_steps, unit="steps/s"),
            Result(what="frames, one process against gym.make", value=one_frames / stock_frames, target=0.95),
            Result(what="frames, all cores", value=all_frames, target=stock_frames, unit="frames/s"),
            Result(what="start to first frame", value=first, target=15.0, at_least=False, unit="s"),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
