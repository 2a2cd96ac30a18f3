"""A policy that sees images alone and is trained on the learned reward alone, from collecting to evaluating.

The three stages are those of the demo; the policy imitates the collected successes, then PPO goes on.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.report import Result, report
from guerdon.cli.demo import collect_for_demo
from guerdon.config import load_config
from guerdon.fit import fit_reward_model
from guerdon.training.trainer import EmbodiedRunner

FIT_BRIEFLY = (
    "fit.epochs=6",
    "fit.data.num_samples_per_episode=18",
    "fit.calibration.target_false_positive_rate=0.002",
)
CAMERAS = "[base_camera,wrist_camera]"
EPISODES = ("collect.target_success=300", "collect.target_failure=300")
"""Twice as many as in the demo: imitating from images takes more."""
MINUTES = 15.0


def train(seed: int, folder: Path) -> tuple[float, float]:
    """Success on fresh episodes, and the minutes that stage 3 took."""
    started = time.perf_counter()
    collecting = load_config("demo", [f"seed={seed}", f"collect.cameras={CAMERAS}", *EPISODES])
    collect_for_demo(collecting, load_config("train").learner, folder)
    section = load_config("train_reward", [*FIT_BRIEFLY, f"fit.data.path={folder / 'data'}"])
    model = replace(section.reward.model, precision="int8")
    fitted = fit_reward_model(model, section.fit, folder=folder / "reward", seed=seed, tensorboard=False)
    middle = time.perf_counter()
    config = load_config(
        "train_rgb",
        [
            "+env.train.init_params.reward=none",  # the policy could not see the env's reward
            f"seed={seed}",
            "reward.use_reward_model=true",
            f"reward.model.checkpoint_path={fitted.checkpoint}",
            "reward.model.precision=int8",
            f"learner.warm_start.data={folder / 'data'}",
            "learner.eval_episodes=200",
        ],
    )
    runner = EmbodiedRunner(config, folder)
    summary = runner.run()
    minutes = (time.perf_counter() - middle) / 60
    print(
        f"   seed {seed}: success {summary['success_rate']:.3f} on {summary['episodes']} fresh episodes, "
        f"alarms {summary['alarms']}; stages 1 and 2 in {(middle - started) / 60:.1f} min",
        flush=True,
    )
    return summary["success_rate"], minutes


def run(seeds: list[int]) -> list[Result]:
    """All seeds, one after the other."""
    results = []
    for seed in seeds:
        folder = Path(tempfile.mkdtemp())
        try:
            success, minutes = train(seed, folder)
        finally:
            shutil.rmtree(folder)
        results += [
            Result(what=f"seed {seed}, success", value=100 * success, target=90.0, at_least=True, unit="%"),
            Result(what=f"seed {seed}, stage 3", value=minutes, target=MINUTES, at_least=False, unit="min"),
        ]
    return results


if __name__ == "__main__":
    chosen = [int(seed) for seed in sys.argv[1:]] or [0, 1, 2]
    settings: dict[str, object] = {"threads": torch.get_num_threads(), "seeds": chosen}
    sys.exit(report("images", settings, run(chosen)))
