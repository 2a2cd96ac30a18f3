"""`guerdon prove`: a run beside its controls."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from guerdon.cli.verb import Result, aligned, next_command
from guerdon.core.errors import ConfigError
from guerdon.core.types import display_path
from guerdon.monitoring.proof import ARMS, shown
from guerdon.training.prove import prove


def prove_verb(arguments: argparse.Namespace) -> Result:
    """Run a config and its controls, and say what the learned reward did."""
    for name in ("seeds", "episodes", "workers"):
        given = getattr(arguments, name)
        if given is not None and given < 1:
            raise ConfigError(f"--{name} must be at least 1, not {given}")
    outcome = prove(
        arguments.config_name,
        arguments.overrides,
        config_path=arguments.config_path,
        seeds=arguments.seeds,
        arms=arguments.arms.split(",") if arguments.arms else ARMS,
        episodes=arguments.episodes,
        workers=arguments.workers,
    )
    first = outcome["arms"]["learned"]["seeds"][0]["seed"]
    run = display_path(Path(outcome["folder"]) / f"seed_{first}" / "learned")
    return Result(outcome, _lines(outcome), next_steps=[next_command("evaluate", "--checkpoint", run)])


def _lines(outcome: dict[str, Any]) -> list[str]:
    measure, rows = outcome["measure"], []
    for name, arm in outcome["arms"].items():
        low, high = shown(arm["low"], measure), shown(arm["high"], measure)
        seeds = [result["env_return" if measure == "return" else "success"] for result in arm["seeds"]]
        each = ", ".join(shown(value, measure) for value in seeds)
        rows.append((name, f"{shown(arm['mean'], measure):<7}{low} to {high:<7} seeds: {each}"))
    rows += [("note", text) for level, text in outcome["reasons"] if level != "good"]
    rows.append(("page", display_path(Path(outcome["folder"]) / "prove.html")))
    return [*aligned(rows), outcome["verdict"]]
