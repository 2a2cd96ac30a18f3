"""`guerdon collect`: run a policy and save labelled episodes. Starts without torch where that is possible."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from guerdon.cli.verb import Result, config_of, next_command, setting
from guerdon.config import GuerdonConfig
from guerdon.config.unused import log_without_effect
from guerdon.data.collect.collector import open_npy_archive
from guerdon.data.collect.run import CollectResult, collect


def collect_verb(arguments: argparse.Namespace) -> Result:
    """Stage 1."""
    config = config_of(arguments)
    log_without_effect(config)
    resume = config.collect.resume or arguments.resume
    result = _collect(replace(config, collect=replace(config.collect, resume=resume)))
    error = (
        f"the targets were not met: {result.reason} with {result.counts}. What was collected is kept; "
        "go on with --resume, or try another collect.policy or collect.policy_noise"
    )
    if not result.complete:
        return Result(asdict(result), [str(result)], error=error)
    fit = next_command("train-reward", setting("fit.data.path", result.save_dir))
    return Result(asdict(result), [str(result)], next_steps=[fit])


def _collect(config: GuerdonConfig) -> CollectResult:
    section = config.collect
    if config.env.eval.env_type == "robot":  # RLinf's configs for robots have theirs in env.eval
        from guerdon.data.collect.robot import collect_robot

        episodes = config.runner.num_data_episodes
        return collect_robot(config.env.eval, section, num_episodes=episodes, seed=config.seed)
    archive = None
    if config.reward.collect_data:  # RLinf's first reward workflow: two directories of .npy files
        place = config.reward.data_collection
        section = replace(
            section,
            format="npy-trajectory",
            cameras=place.image_keys,
            resume=True,
            save_dir=str(Path(place.positive_dir).parent),
        )
        archive = open_npy_archive(
            Path(place.positive_dir),
            Path(place.negative_dir),
            place.max_positive_trajectories,
            place.max_negative_trajectories,
        )
    policy = None
    if section.policy == "checkpoint":
        from guerdon.training.collect_policy import saved_policy  # imports torch

        policy = saved_policy(section, config.env.train, config.seed)
    return collect(config.env.train, section, seed=config.seed, archive=archive, policy=policy)
