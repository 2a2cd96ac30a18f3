"""`prove`: a training config beside its controls, and what the learned reward did."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from guerdon.config import GuerdonConfig, load_config, to_plain
from guerdon.config.load import ZOO_CONF, load_serial
from guerdon.config.yaml_files import to_yaml
from guerdon.core import strict_json
from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.errors import ConfigError, RunInterrupted
from guerdon.core.types import display_path
from guerdon.monitoring.films import film_files
from guerdon.monitoring.proof import ARMS, Proof, judge
from guerdon.monitoring.proof_page import proof_page
from guerdon.training.arms import Arm, make_arm, run_arms
from guerdon.training.checkpoints import find_policy, load_policy
from guerdon.training.folders import held, new_run_folder
from guerdon.training.replay_run import REPLAY_FILE, check_stored_rewards
from guerdon.training.serial import as_run

log = logging.getLogger("guerdon")

FOLDER_SETTING = "runner.logger.log_path"


def prove(
    config: GuerdonConfig | str | Path,
    overrides: Sequence[str] = (),
    *,
    config_path: str | None = None,
    seeds: int | Sequence[int] = 3,
    arms: Sequence[str] = ARMS,
    episodes: int | None = None,
    workers: int | None = None,
) -> dict[str, Any]:
    """Run a training config beside its controls; leaves `prove.json` and `prove.html` in the proof's folder.

    The folder is `runner.logger.log_path`, or a new one. In a folder that has a part of the same proof,
    finished arms are not run again, and others go on from their last checkpoint.

    Args:
        config: a config, or the name or path of one as `guerdon train` and `guerdon zoo` take it.
        overrides: settings over it (`a.b=c`), for a name or a path.
        config_path: the folder to look in first.
        seeds: how many, from the config's own on; or which.
        arms: which of `start`, `learned`, `off`, `shuffled` and `true`; the first two always run.
        episodes: of each evaluation; None: `learner.eval_episodes`.
        workers: runs at a time; None: one for each core, and one where runs share a robot or a Ray cluster.

    Returns:
        What `prove.json` holds, with `folder`.
    """
    began = time.perf_counter()
    if not isinstance(config, GuerdonConfig):
        config = load(config, overrides, config_path)
    elif overrides:
        raise ConfigError("overrides are for the name of a config: change the config itself")
    first = config.seed
    numbers: Sequence[int] = range(first, first + seeds) if isinstance(seeds, int) else tuple(seeds)
    names, left_out = arms_of(config, arms)
    _check(config, numbers, workers)
    _check_resumed(config, names)
    if episodes is not None:
        config = replace(config, learner=replace(config.learner, eval_episodes=episodes))
    root = _folder(config)
    made = {name: [make_arm(config, root, name, seed) for seed in numbers] for name in names}
    try:
        with held(root):
            _check_same(config, root)
            count = _num_workers(config) if workers is None else workers
            run_arms(made["start"], count)
            trained = [each for name, each in made.items() if name != "start"]
            run_arms([arm for of_seed in zip(*trained, strict=True) for arm in of_seed], count)
    except RunInterrupted as stopped:
        raise RunInterrupted(stopped.step, display_path(root), FOLDER_SETTING) from None
    except KeyboardInterrupt:
        steps = sum(arm.env_steps for each in made.values() for arm in each)
        raise RunInterrupted(steps, display_path(root), FOLDER_SETTING) from None
    return _write(config, root, made, left_out, time.perf_counter() - began)


def load(config: str | Path, overrides: Sequence[str] = (), config_path: str | None = None) -> GuerdonConfig:
    """A training config by its name; those of the zoo too."""
    own = config_path is None and (ZOO_CONF / f"{config}.yaml").is_file()
    if not own:
        return load_config(config, overrides, config_path)
    serial = load_serial(str(config), overrides)
    run = as_run(serial)
    place = serial.output_dir or "runs"
    return replace(run, runner=replace(run.runner, output_dir=place))


def arms_of(config: GuerdonConfig, wanted: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The arms to run, and why others are not."""
    unknown = [name for name in wanted if name not in ARMS]
    if unknown:
        raise ConfigError(f"there is no arm {unknown[0]!r}: choose from {', '.join(ARMS)}")
    left_out = {}
    if config.reward.standalone:
        left_out["true"] = "the reward model ends episodes, and the environment tells no success meanwhile"
    names = [name for name in ARMS if name in ("start", "learned", *wanted) and name not in left_out]
    return names, left_out


def _check(config: GuerdonConfig, seeds: Sequence[int], workers: int | None) -> None:
    if not config.reward.use_reward_model and not config.reward_model:
        raise ConfigError(
            "there is no learned reward to prove: set reward.use_reward_model=true and "
            "reward.model.checkpoint_path, or reward_model.type"
        )
    if config.reward.control != "none":
        raise ConfigError(f"reward.control is {config.reward.control}: prove runs the controls itself")
    if not seeds or len(set(seeds)) < len(seeds) or (workers is not None and workers < 1):
        raise ConfigError("prove needs at least one seed, each once, and at least one worker")


def _check_resumed(config: GuerdonConfig, arms: Sequence[str]) -> None:
    """Raise before anything runs if the arm `true` could not go on from `runner.resume_dir`."""
    place = config.runner.resume_dir
    if place is None or "true" not in arms or not config.reward.use_reward_model:
        return
    saved = load_policy(find_policy(Path(place)))
    if (saved.folder / REPLAY_FILE).is_file():
        try:
            check_stored_rewards("env", saved.state["loop"], saved.folder)
        except ConfigError as error:
            rest = ",".join(name for name in arms if name != "true")
            raise ConfigError(f"the arm `true` cannot run: {error}; or leave it out: --arms {rest}") from None


def _num_workers(config: GuerdonConfig) -> int:
    if config.engine == "ray" or config.env.train.env_type == "robot":
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _folder(config: GuerdonConfig) -> Path:
    place = config.runner.logger.log_path
    if place is not None:
        return make_directory(Path(place))
    return new_run_folder(Path(config.runner.output_dir) / config.runner.experiment_name / "prove")


def _check_same(config: GuerdonConfig, root: Path) -> None:
    """Write the config; raise if the folder has a proof of another one."""
    runner = replace(config.runner, logger=replace(config.runner.logger, log_path=None))
    plain = to_plain(replace(config, runner=runner, seed=0))
    text, path = to_yaml(plain), root / "config.yaml"
    if path.is_file() and path.read_text() != text:
        raise ConfigError(
            f"{display_path(root)} has a proof of other settings (config.yaml): choose another folder "
            f"({FOLDER_SETTING})"
        )
    write_atomic(path, text)


def _write(
    config: GuerdonConfig,
    root: Path,
    made: dict[str, list[Arm]],
    left_out: dict[str, str],
    seconds: float,
) -> dict[str, Any]:
    proof = judge({name: [arm.result() for arm in arms] for name, arms in made.items()}, left_out)
    outcome = {
        "experiment": config.runner.experiment_name,
        "algorithm": config.learner.algorithm,
        "env": config.env.train.id,
        **proof.to_plain(),
        "seconds": round(seconds, 2),
    }
    text = strict_json.dumps(outcome, indent=1)
    write_atomic(root / "prove.json", text)
    write_page(root, proof, f"{config.learner.algorithm} on {config.env.train.id}")
    return {**json.loads(text), "folder": str(root)}


def _films(root: Path) -> dict[str, str]:
    """The first evaluation episode of the first seed in the arms that were filmed: arm -> file."""
    found = {
        name: [path for folder in sorted(root.glob(f"seed_*/{name}")) for path in film_files(folder)]
        for name in ("start", "learned")
    }
    return {name: paths[0].relative_to(root).as_posix() for name, paths in found.items() if paths}


def write_page(root: Path, proof: Proof, title: str) -> Path:
    """Write `prove.html` with links to the reports of the runs."""
    reports = sorted(path.relative_to(root) for path in root.glob("seed_*/*/report.html"))
    links = " · ".join(f'<a href="{path.as_posix()}">{path.parent.as_posix()}</a>' for path in reports)
    page = proof_page(proof, title, f'<p class="note">Reports: {links}</p>' if links else "", _films(root))
    write_atomic(root / "prove.html", page)
    return root / "prove.html"
