"""Stage 2 as a command: fit a reward model and leave everything about it in the run's folder."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from guerdon.config import GuerdonConfig, to_plain
from guerdon.fit import FitResult, fit_reward_model
from guerdon.fit.distributed import torchrun_team
from guerdon.store.atomic import make_directory, write_atomic
from guerdon.types import display_path


def run_folder(config: GuerdonConfig) -> Path:
    """`runner.logger.log_path`, or a new `<output_dir>/<experiment>/<timestamp>`."""
    if config.runner.logger.log_path is not None:
        return make_directory(Path(config.runner.logger.log_path))
    root = Path(config.runner.output_dir) / config.runner.experiment_name
    return make_directory(root / time.strftime("%Y%m%d-%H%M%S"))


def train_reward(config: GuerdonConfig) -> tuple[Path, FitResult]:
    """Fit as the config says; leaves config, metrics, checkpoints and `summary.json` in the run's folder."""
    resume = config.runner.resume_dir
    with torchrun_team(config.fit) as team:
        folder = team.from_first(lambda: _new_folder(config))
        result = fit_reward_model(
            config.reward.model,
            config.fit,
            folder=folder,
            seed=config.seed,
            resume_dir=None if resume is None else Path(resume),
            tensorboard="tensorboard" in config.runner.logger.backends,
            team=team,
        )
        if team.first:
            summary = json.dumps(fit_summary(result), indent=1).encode()
            write_atomic(folder / "summary.json", lambda file: file.write(summary))
    return folder, result


def _new_folder(config: GuerdonConfig) -> Path:
    """The run's folder with its `config.yaml`."""
    folder = run_folder(config)
    text = OmegaConf.to_yaml(OmegaConf.create(to_plain(config))).encode()
    write_atomic(folder / "config.yaml", lambda file: file.write(text))
    return folder


def fit_summary(result: FitResult) -> dict[str, Any]:
    """The outcome of a fit as plain numbers."""
    return {
        "checkpoint": str(result.checkpoint),
        "threshold": result.threshold.threshold,
        "calibration": result.calibration.kind,
        "val": dict(result.metrics),
        "false_positive_interval": list(result.threshold.false_positive_interval),
        "caveat": result.threshold.caveat,
        "train_loss": result.train_loss,
        "train_accuracy": result.train_accuracy,
        "num_steps": result.num_steps,
        "best_step": result.best_step,
        "faults": [{"path": fault.path, "reason": fault.reason} for fault in result.faults],
        "seconds": round(result.seconds, 2),
    }


def fit_lines(result: FitResult, folder: Path) -> list[str]:
    """The outcome of a fit for people."""
    threshold = result.threshold
    low, high = threshold.false_positive_interval
    return [
        f"AUC          {result.metrics['auc']:.4f} on {result.metrics['num_episodes']:.0f} held-out episodes",
        f"threshold    {threshold.threshold:.4f} ({result.calibration.kind} calibration)",
        f"fires on     {threshold.true_positive_rate:.1%} of success frames",
        f"and on       {threshold.false_positive_rate:.2%} of failure frames ({low:.2%} to {high:.2%})",
        f"checkpoint   {display_path(result.checkpoint)}",
        f"run          {display_path(folder)} ({result.num_steps} steps, {result.seconds:.0f} s)",
    ]
