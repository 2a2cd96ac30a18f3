"""`guerdon train-reward`: fit a reward model and leave everything about it in the run's folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from guerdon.cli.verb import Result, config_of, next_command, setting
from guerdon.core.types import display_path
from guerdon.fit import FitResult
from guerdon.fit.process_group import is_main_process
from guerdon.training.fit_run import train_reward


def train_reward_verb(arguments: argparse.Namespace) -> Result | None:
    """Stage 2."""
    config = config_of(arguments)
    folder, result = train_reward(config)
    if not is_main_process():
        return None
    card = ("--checkpoint", display_path(result.checkpoint), "--data", "NEW_EPISODES", "--out", "card.html")
    checkpoint = setting("reward.model.checkpoint_path", result.checkpoint)
    training = next_command("train", "reward.use_reward_model=true", checkpoint)
    steps = [next_command("reward", "card", *card), f"{training}  # and the env of your episodes"]
    return Result({**result.to_dict(), "folder": str(folder)}, _fit_lines(result, folder), next_steps=steps)


def _fit_lines(result: FitResult, folder: Path) -> list[str]:
    run = f"run          {display_path(folder)} ({result.num_steps} steps, {result.seconds:.0f} s)"
    return [*result.lines(), run]
