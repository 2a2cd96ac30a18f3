"""Short runs from two checkouts on this machine, their metrics compared digit by digit.

    python scripts/compare_curves.py OLD NEW [--only ppo,sac] [--keep DIR]

For refactoring: a run that should not change must log the same numbers before and after. Digits differ
between kinds of processors, so both sides run here and nothing is compared with a stored file. Data and the
reward model are made once, by OLD. Exit 0 if all curves are equal, 1 if one differs or a run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCHER = """
import importlib, sys
try:
    command = importlib.import_module("guerdon.cli.main").main
except ModuleNotFoundError:
    command = importlib.import_module("guerdon.cli").main
sys.exit(command(sys.argv[1:]))
"""
"""The command of a checkout, wherever it keeps it."""
NOT_COMPARED = ("time/",)
"""Metrics that depend on the clock."""

SMALL_ENV = [
    f"{sign}env.{side}.{name}={value}"
    for side in ("train", "eval")
    for sign, name, value in (
        ("", "num_envs", 8),
        ("+", "init_params.image_size", "[24,24]"),
        ("+", "init_params.max_episode_steps", 20),
    )
]
SMALL_RUN = [
    "learner.eval_episodes=8",
    "learner.network.hidden=[16]",
    "learner.total_steps=1600",
    "learner.eval_interval=800",
    "learner.save_interval=800",
    "runner.logger.backends=[]",
]
PPO = ["learner.ppo.num_steps=25", "learner.ppo.minibatch_size=50"]
SAC = [
    "learner.algorithm=sac",
    "learner.sac.learning_starts=200",
    "learner.sac.batch_size=32",
    "learner.sac.updates_per_step=0.1",
    "learner.sac.buffer_size=2000",
]
LEARNED = ["reward.use_reward_model=true", "reward.model.checkpoint_path={work}/reward/model"]
DEMONSTRATIONS = ["learner.warm_start.data={work}/demos", "learner.warm_start.epochs=2"]
PRIOR = ["learner.sac.prior_data={work}/demos"]
RAY = ["engine=ray"]
ZOO = ["learner.total_steps=6000", "output_dir={out}", "stop_value=null"]


@dataclass(frozen=True)
class Scenario:
    """A command whose run folder is to be the same; `{work}` and `{out}` are folders."""

    name: str
    arguments: list[str]


def train(name: str, *parts: list[str], config: str = "train") -> Scenario:
    """A run of `guerdon train`."""
    overrides = [*SMALL_ENV, *SMALL_RUN, *(item for part in parts for item in part)]
    return Scenario(name, ["train", "--config-name", config, *overrides, "runner.logger.log_path={out}"])


SCENARIOS = [
    train("ppo", PPO, LEARNED, DEMONSTRATIONS),
    train("ppo-terminal", PPO, LEARNED, ["reward.reward_mode=terminal", "reward.normalize=true"]),
    train("sac", SAC, LEARNED),
    train("sac-sampling", SAC, LEARNED, ["reward.relabel_at=sampling"]),
    train("rlpd", SAC, LEARNED, DEMONSTRATIONS, PRIOR),
    train("images", PPO, LEARNED, ["learner.network.hidden=[16]"], config="train_rgb"),
    train("ppo-ray", PPO, LEARNED, RAY),
    train("sac-ray", SAC, LEARNED, RAY),
    Scenario(
        "gail",
        [
            "zoo",
            "--config-name",
            "cartpole_gail",
            *ZOO,
            "reward_model.data_path={work}/cartpole.safetensors",
        ],
    ),
    Scenario("rnd", ["zoo", "--config-name", "cartpole_rnd", *ZOO]),
    Scenario("her", ["zoo", "--config-name", "bit_flip_her", *ZOO]),
]


def run(checkout: Path, arguments: list[str], folder: Path) -> None:
    """A command of `checkout` in `folder`; its output is shown only if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LAUNCHER, *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise RuntimeError(
            f"{checkout.name}: guerdon {' '.join(arguments)} ended with {done.returncode}\n{tail}"
        )


def prepare(checkout: Path, work: Path) -> None:
    """Data, a reward model and demonstrations, which both sides use."""
    size = ["+env.train.init_params.image_size=[24,24]", "+env.train.init_params.max_episode_steps=20"]
    cameras = "collect.cameras=[base_camera,wrist_camera]"
    kinds = ["collect.target_success=12", "collect.target_failure=12"]
    run(checkout, ["collect", *size, "collect.save_dir=data", *kinds], work)
    only = ["collect.policy=scripted", "collect.target_success=12", "collect.target_failure=0"]
    run(checkout, ["collect", *size, cameras, "collect.save_dir=demos", *only], work)
    model = ["reward.model.arch=resnet10", "reward.model.width=8", "reward.model.image_size=[3,24,24]"]
    fit = ["fit.data.path=data", "fit.epochs=2", "runner.logger.log_path=fit", "runner.logger.backends=[]"]
    run(checkout, ["train-reward", *model, *fit], work)
    (best,) = work.glob("fit/**/checkpoints/best_model")
    (work / "reward").mkdir()
    best.rename(work / "reward" / "model")
    demos = ["collect-demos", "--env", "CartPole-v1", "--episodes", "5", "--out", "cartpole.safetensors"]
    run(checkout, demos, work)


def curve(folder: Path) -> list[dict[str, Any]]:
    """What a run has logged, without what depends on the clock."""
    (file,) = folder.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(NOT_COMPARED)} for row in rows]


def difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str | None:
    """The first difference of two curves in words; None if there is none."""
    if len(old) != len(new):
        return f"{len(old)} rows and {len(new)}"
    for row, (before, after) in enumerate(zip(old, new, strict=True)):
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                return f"row {row}, {name}: {before.get(name)} and {after.get(name)}"
    return None


def compare(scenario: Scenario, checkouts: list[Path], work: Path) -> str | None:
    """Run a scenario from both checkouts; returns what differs."""
    curves = []
    for side, checkout in zip(("old", "new"), checkouts, strict=True):
        out = work / scenario.name / side
        arguments = [item.format(work=work, out=out) for item in scenario.arguments]
        run(checkout, arguments, out)
        curves.append(curve(out))
    return difference(*curves)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", default="", help="names of scenarios, with commas; all by default")
    parser.add_argument("--keep", type=Path, help="where the runs are left; a temporary folder by default")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.only.split(",") if name]
    unknown = set(wanted) - {item.name for item in SCENARIOS}
    if unknown:
        parser.error(f"no scenario {sorted(unknown)[0]}; there are {', '.join(s.name for s in SCENARIOS)}")
    checkouts = [arguments.old.resolve(), arguments.new.resolve()]
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.keep or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        if not (work / "cartpole.safetensors").is_file():
            prepare(checkouts[0], work)
        for scenario in SCENARIOS:
            if wanted and scenario.name not in wanted:
                continue
            try:
                found = compare(scenario, checkouts, work)
            except RuntimeError as error:
                found = str(error)
            failed += found is not None
            print(f"{scenario.name:<14}{'equal' if found is None else found}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
