"""The commands of RLinf's reward workflow on ManiSkill's PickCube, as its pages give them, in order.

    python -m benchmarks.document_commands --work DIR [--budget 0.01] [--only NAME ...]

`--budget` is the share of the configs' environment steps, target episodes and epochs that is used: 1 is what
the configs say, which takes days without a GPU. A command that has been run is not run again: a second call
goes on where the first one stopped. The table has the time of each command, and what came of it.

A policy that has learned for a short time has no successes to show. Where a command collects, the scripted
policy therefore adds `--added` successes (rows of the table) before a model is fitted.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import heading

ROOT = Path(__file__).parent.parent
EMBODIED = ["bash", "examples/embodiment/run_embodiment.sh"]
SIM_FRAMES = "env=maniskill_pickcube"


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of RLinf's pages."""

    name: str
    document: str
    line: list[str]
    run_folder: str | None = None
    """Where its `summary.json` is."""


def commands(budget: float, added: int) -> list[Command]:
    """All of them, in an order in which each finds what it needs."""

    def part(total: int, least: int) -> int:
        return max(least, round(budget * total))

    def steps(total: int, batch: int) -> list[str]:
        count = part(total, batch)
        return [f"learner.total_steps={count}", f"learner.eval_interval={max(count // 4, batch)}"]

    def folder(name: str) -> str:
        return f"runner.logger.log_path=runs/{name}"

    def train(name: str, document: str, config: str, *overrides: str) -> Command:
        line = [*EMBODIED, config, *overrides, folder(name)]
        return Command(name=name, document=document, line=line, run_folder=f"runs/{name}")

    def add(name: str, *overrides: str) -> Command:
        scripted = ["collect.policy=scripted", "collect.policy_noise=0.2", "env.train.num_envs=8"]
        return Command(
            name=name, document="-", line=["guerdon", "collect", SIM_FRAMES, *scripted, *overrides]
        )

    model = "reward.reward_model.checkpoint_path=results/reward-model-training/checkpoints/best_model"
    learned = ["reward.use_reward_model=True", "reward.collect_data=False", model]
    cnn, mlp = steps(1_000_000, 3200), steps(2_000_000, 3200)
    targets = [f"reward_data_collection.target_{kind}={part(5000, 20)}" for kind in ("success", "failure")]
    enough = f"reward.data_collection.max_positive_trajectories={added}"
    none = "reward.data_collection.max_negative_trajectories=0"
    more = f"learner.total_steps={2 * part(2_000_000, 3200)}"
    policy = "maniskill_ppo_mlp_resnet_reward"
    return [
        train("ppo_cnn_collect", "first, second", "maniskill_ppo_cnn",
              "reward.collect_data=True", "reward.use_reward_model=False", *cnn),
        add("add_npy", "reward.collect_data=True", enough, none),
        Command(name="train_reward_model", document="first, second", run_folder=None,
                line=["bash", "examples/embodiment/train_reward_model.sh", "train_reward_model",
                      f"reward.num_epochs={part(100, 3)}", "runner.output_dir=results"]),
        train("ppo_cnn_learned", "first, second", "maniskill_ppo_cnn", *learned, *cnn),
        train("sac_cnn_learned", "second", "maniskill_sac_cnn", *learned, *steps(200_000, 2000)),
        train("collect_reward_data", "third", "maniskill_collect_reward_data", *targets, *mlp,
              "reward_data_collection.save_dir=data"),
        add("add_pkl", "collect.save_dir=data", "collect.format=pkl-episode",
            f"collect.target_success={added}", "collect.target_failure=0"),
        Command(name="train_resnet_reward", document="third",
                line=[*EMBODIED, "maniskill_train_resnet_reward", f"reward_training.epochs={part(100, 3)}",
                      "reward_training.data_path=data", "reward_training.save_dir=logs/reward_checkpoints"]),
        train("ppo_mlp_resnet", "third", policy, *mlp),
        train("ppo_mlp_resumed", "third", policy, "runner.resume_dir=runs/ppo_mlp_resnet", more),
    ]  # fmt: skip


def run(command: Command, work: Path) -> dict[str, object]:
    """Run a command in `work`; its output is kept beside."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    place = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": place}
    started = time.perf_counter()
    with (work / f"{command.name}.log").open("w") as output:
        code = subprocess.call(command.line, cwd=work, env=environment, stdout=output, stderr=output)
    outcome: dict[str, object] = {"minutes": (time.perf_counter() - started) / 60, "code": code}
    summary = None if command.run_folder is None else work / command.run_folder / "summary.json"
    if summary is not None and summary.exists():
        printed = json.loads(summary.read_text())
        outcome |= {name: printed[name] for name in ("reward", "env_steps", "success_once", "success_at_end")}
    return outcome


def row(command: Command, outcome: dict[str, object]) -> str:
    """One row of the table."""

    def cell(name: str) -> str:
        return str(outcome.get(name, "-"))

    ended = "ok" if outcome["code"] == 0 else f"FAILED (code {outcome['code']})"
    line = " ".join(command.line)
    numbers = f"{float(str(outcome['minutes'])):.1f} | {cell('env_steps')} | {cell('success_once')}"
    return f"| {command.document} | `{line}` | {ended} | {numbers} | {cell('success_at_end')} |"


def main() -> int:
    """Run what was not run yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/document_commands"))
    parser.add_argument("--budget", type=float, default=0.01)
    parser.add_argument("--added", type=int, default=40)
    parser.add_argument("--only", nargs="*", default=None)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if not (given.work / "examples").exists():
        (given.work / "examples").symlink_to(ROOT / "examples")
    kept = given.work / "result.json"
    done = json.loads(kept.read_text()) if kept.exists() else {}
    if done.setdefault("budget", [given.budget, given.added]) != [given.budget, given.added]:
        parser.error(f"{given.work} was begun with --budget and --added {done['budget']}; use another --work")
    chosen = [
        each for each in commands(given.budget, given.added) if given.only is None or each.name in given.only
    ]
    for command in chosen:
        if done.get(command.name, {}).get("code") != 0:
            done[command.name] = run(command, given.work)
            kept.write_text(json.dumps(done, indent=1))
    versions = {name: importlib.metadata.version(name) for name in ("mani_skill", "sapien")}
    print(heading("document_commands", {"budget": given.budget, "added": given.added, **versions}))
    print("| document | command | ended | minutes | env steps | success_once | success_at_end |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(row(command, done[command.name]) for command in chosen), flush=True)
    return int(any(done[command.name]["code"] for command in chosen))


if __name__ == "__main__":
    sys.exit(main())
