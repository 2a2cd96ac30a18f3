"""Whole runs from two checkouts on this machine, their processor time compared.

    python scripts/compare_speed.py OLD NEW [--repeats 3] [--only ppo,gail] [--keep DIR]

Prints the processor seconds (user and system, with child processes) of each side and their ratio. The sides
run in turn, so that a machine that gets slower slows both. Data and the reward model are made once, by OLD.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage

from compare_curves import DEMONSTRATIONS, LEARNED, PRIOR, SMALL_ENV, Scenario, prepare, run

TARGET = 1.03
COMMON = [
    *SMALL_ENV,
    "learner.eval_episodes=40",
    "learner.network.hidden=[128,128]",
    "runner.logger.backends=[]",
    "runner.logger.log_path={out}",
]
OFF_POLICY = [
    "learner.algorithm=sac",
    "learner.total_steps=2400",
    "learner.eval_interval=1200",
    "learner.save_interval=1200",
    "learner.sac.learning_starts=400",
    "learner.sac.batch_size=128",
    "learner.sac.updates_per_step=0.5",
    "learner.sac.buffer_size=2400",
]
ON_POLICY = [
    "learner.total_steps=16000",
    "learner.eval_interval=8000",
    "learner.save_interval=8000",
    "learner.ppo.num_steps=50",
    "learner.ppo.minibatch_size=200",
]
ZOO = ["output_dir={out}", "stop_value=null", "reward_model.data_path={work}/cartpole.safetensors"]


def train(name: str, *parts: list[str]) -> Scenario:
    """A run of `guerdon train` on Tabletop."""
    overrides = [item for part in (COMMON, *parts) for item in part]
    return Scenario(name, ["train", "--config-name", "train", *overrides])


SCENARIOS = [
    train("ppo", ON_POLICY, LEARNED),
    train("sac", OFF_POLICY, LEARNED),
    train("rlpd", OFF_POLICY, LEARNED, DEMONSTRATIONS, PRIOR),
    Scenario("gail", ["zoo", "--config-name", "cartpole_gail", "learner.total_steps=20000", *ZOO]),
]


def children_seconds() -> float:
    """Processor seconds of all child processes that have ended."""
    usage = getrusage(RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(scenario: Scenario, checkouts: list[Path], work: Path, repeats: int) -> list[list[float]]:
    """Processor seconds of each checkout, a number for each repeat; the side that goes first changes."""
    seconds: list[list[float]] = [[], []]
    for repeat in range(repeats):
        for side in ((0, 1), (1, 0))[repeat % 2]:
            out = work / scenario.name / f"{side}_{repeat}"
            before = children_seconds()
            run(checkouts[side], [item.format(work=work, out=out) for item in scenario.arguments], out)
            seconds[side].append(children_seconds() - before)
    return seconds


def main() -> int:
    """The command: 1 if a run is slower than before by more than 3% (medians)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="names of runs, with commas; all by default")
    parser.add_argument("--keep", type=Path, help="where the runs are left; a temporary folder by default")
    arguments = parser.parse_args()
    wanted = [name for name in arguments.only.split(",") if name] or [item.name for item in SCENARIOS]
    checkouts, slower = [arguments.old.resolve(), arguments.new.resolve()], 0
    print("| run | before, s | now, s | ratio of medians | ratios |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        work = (arguments.keep or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        if not (work / "cartpole.safetensors").is_file():
            prepare(checkouts[0], work)
        for scenario in SCENARIOS:
            if scenario.name not in wanted:
                continue
            old, new = measure(scenario, checkouts, work, arguments.repeats)
            ratio = statistics.median(new) / statistics.median(old)
            pairs = ", ".join(f"{after / before:.2f}" for before, after in zip(old, new, strict=True))
            texts = [" ".join(f"{each:.1f}" for each in side) for side in (old, new)]
            print(f"| {scenario.name} | {texts[0]} | {texts[1]} | {ratio:.3f} | {pairs} |", flush=True)
            slower += ratio > TARGET
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
