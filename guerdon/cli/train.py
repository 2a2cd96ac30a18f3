"""`guerdon train` and `guerdon evaluate`: train a policy, or measure a saved one."""

from __future__ import annotations

import argparse
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from guerdon.cli.train_reward import train_reward_verb
from guerdon.cli.verb import Result, aligned, config_of, next_command
from guerdon.config import GuerdonConfig
from guerdon.core.errors import ConfigError
from guerdon.core.types import display_path
from guerdon.training.checkpoints import load_policy
from guerdon.training.evaluation import evaluate
from guerdon.training.folders import run_folder
from guerdon.training.trainer import EmbodiedRunner

log = logging.getLogger("guerdon")


def train_verb(arguments: argparse.Namespace) -> Result | None:
    """Stage 3; a config with `fit.only` fits a reward model instead."""
    config = config_of(arguments)
    if config.fit.only:
        return train_reward_verb(arguments)
    folder, summary = train(config)
    steps = [next_command("evaluate", "--checkpoint", display_path(folder))]
    if config.reward.use_reward_model or config.reward_model:
        steps.append(next_command("prove", *_config_words(arguments)) + "  # the same beside its controls")
    return Result({**summary, "folder": str(folder)}, _train_lines(summary, folder), next_steps=steps)


def _config_words(arguments: argparse.Namespace) -> list[str]:
    """The config and the settings of this command, for another one that takes them."""
    flags = {"--config-name": arguments.config_name, "--config-path": arguments.config_path}
    given = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    return [*given, *arguments.overrides]


def evaluate_verb(arguments: argparse.Namespace) -> Result:
    """Success of a saved policy."""
    if arguments.episodes < 1:
        raise ConfigError(f"--episodes must be at least 1, not {arguments.episodes}")
    result = evaluate_checkpoint(arguments.checkpoint, arguments.episodes, arguments.seed, arguments.env)
    once, at_end = (
        "unknown" if result[name] is None else f"{result[name]:.1%}"
        for name in ("success_once", "success_at_end")
    )
    lines = [
        f"success      {once} of {result['episodes']} episodes, {at_end} at their end",
        f"env return   {result['env_return']:.2f}",
    ]
    return Result(result, lines)


def train(config: GuerdonConfig) -> tuple[Path, dict[str, Any]]:
    """Train as the config says; leaves metrics, checkpoints, videos and `report.html` in the run's folder."""
    if config.fit.enabled:
        log.warning(
            "config: fit.enabled has no effect: `guerdon train` does not fit a reward model, run "
            "`guerdon train-reward` first or set fit.only=true"
        )
    with run_folder(config) as folder:
        return folder, EmbodiedRunner(config, folder).run()


def _train_lines(summary: dict[str, Any], folder: Path) -> list[str]:
    once, at_end = summary["success_once"], summary["success_at_end"]
    success = "unknown: the environment does not tell it" if once is None else f"{once:.1%} of"
    rows = [
        ("reward", summary["reward"]),
        ("success", success if once is None else f"{success} {summary['episodes']} fresh episodes"),
        ("at the end", "unknown" if at_end is None else f"{at_end:.1%}"),
        ("steps", f"{summary['env_steps']} in {summary['seconds']:.0f} s"),
        ("alarms", ", ".join(summary["alarms"]) or "none"),
        ("stopped", summary["stopped"] or "at the end"),
        ("checkpoint", display_path(summary["checkpoint"])),
        ("report", display_path(folder / "report.html")),
    ]
    return aligned(rows)


def evaluate_checkpoint(
    checkpoint: Path, episodes: int, seed: int, env_id: str | None = None
) -> dict[str, Any]:
    """Success of a saved policy on fresh episodes, measured by the environment.

    Args:
        checkpoint: of a run, or the run's folder.
        episodes: how many.
        seed: of the environments.
        env_id: the environment to play in; None: the policy's own, unless a module is imported for it.
    """
    saved = load_policy(checkpoint)
    env = saved.playable_env(env_id, f"name it: --env {saved.env.id}")
    env = replace(env, num_envs=min(saved.env.num_envs, episodes))
    result, _ = evaluate(
        lambda obs: saved.learner.act(obs, deterministic=True), env, episodes=episodes, seed=seed
    )
    return {**asdict(result), "checkpoint": str(checkpoint), "step": saved.step}
