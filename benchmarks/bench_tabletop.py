"""How fast the embedded environment steps and renders, on one thread.

Times are the processor's, so that other work on the machine disturbs them little.
"""

# ruff: noqa: E402 - the number of threads must be set before NumPy is loaded
from __future__ import annotations

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import importlib.metadata
import platform
import sys
import time
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from benchmarks.report import Result, report
from guerdon.envs import ScriptedExpert, TabletopVectorEnv

NUM_ENVS, STEPS, RENDERS, ROUNDS = 256, 200, 25, 7
SETTINGS: dict[str, object] = {"num_envs": NUM_ENVS, "threads": 1, "clock": "CPU", "best of": ROUNDS}
# What is rendered -> camera, image size, domain randomization, target in frames per second (0: no target).
VIEWS: dict[str, tuple[str, int, float, float]] = {
    "base_camera 64x64": ("base_camera", 64, 0.0, 10_000.0),
    "base_camera 64x64, domain_randomization=1": ("base_camera", 64, 1.0, 0.0),
    "base_camera 128x128": ("base_camera", 128, 0.0, 0.0),
    "wrist_camera 64x64": ("wrist_camera", 64, 0.0, 0.0),
    "wrist_camera 128x128": ("wrist_camera", 128, 0.0, 0.0),
}


class Stepping:
    """Steps with state observations and random actions; episodes end and begin on the way."""

    def __init__(self) -> None:
        self.env = TabletopVectorEnv(NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
        self.env.reset(seed=0)
        self.actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, NUM_ENVS, 4)).astype(np.float32)

    def measure(self) -> float:
        """Environment steps per second."""
        started = time.process_time()
        for action in self.actions:
            self.env.step(action)
        return STEPS * NUM_ENVS / (time.process_time() - started)


class Rendering:
    """Frames of all environments, taken every other step of an expert's episodes."""

    def __init__(self, camera: str, side: int, randomization: float) -> None:
        self.camera, self.size = camera, (side, side)
        self.env = TabletopVectorEnv(
            NUM_ENVS, autoreset_mode=AutoresetMode.SAME_STEP, domain_randomization=randomization
        )
        self.env.reset(seed=0)
        self.expert = ScriptedExpert(noise=0.3, seed=0)
        self.frames = np.empty((NUM_ENVS, side, side, 3), np.uint8)

    def measure(self) -> float:
        """Frames per second; stepping is not counted."""
        spent = 0.0
        for _ in range(RENDERS):
            for _ in range(2):
                _, _, terminated, truncated, _ = self.env.step(self.expert.act(self.env.state()))
                self.expert.reset(terminated | truncated)
            started = time.process_time()
            self.env.render_frames(self.camera, size=self.size, out=self.frames)
            spent += time.process_time() - started
        return RENDERS * NUM_ENVS / spent


def run() -> dict[str, Any]:
    """Measure everything; the rounds alternate, so that a disturbance cannot hit one number alone.

    Returns:
        `settings`, `versions`, and `results`: what was measured -> `value`, `unit`, `target` and `met`.
    """
    tasks: dict[str, tuple[Stepping | Rendering, str, float]] = {
        "steps with state observations": (Stepping(), "steps/s", 200_000.0)
    }
    for name, (camera, side, randomization, target) in VIEWS.items():
        tasks[f"render {name}"] = Rendering(camera, side, randomization), "frames/s", target
    best = dict.fromkeys(tasks, 0.0)
    for _ in range(ROUNDS):
        for name, (task, _, _) in tasks.items():
            best[name] = max(best[name], task.measure())
    results = {
        name: {"value": best[name], "unit": unit, "target": target, "met": best[name] >= target}
        for name, (_, unit, target) in tasks.items()
    }
    versions = {package: importlib.metadata.version(package) for package in ("numpy", "gymnasium", "guerdon")}
    return {
        "settings": dict(SETTINGS),
        "versions": {"python": platform.python_version(), **versions},
        "results": results,
        "all_targets_met": all(result["met"] for result in results.values()),
    }


def main() -> int:
    """Print the table; 1 if a target is missed."""
    lines = [
        Result(what=name, value=result["value"], target=result["target"], unit=result["unit"])
        for name, result in run()["results"].items()
    ]
    return report("tabletop", SETTINGS, lines)


if __name__ == "__main__":
    sys.exit(main())
