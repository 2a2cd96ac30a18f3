"""PickCube from a weak start beside its controls: few demonstrations, then `guerdon prove`.

    python -m benchmarks.maniskill_proof [--folder runs/pickcube_proof] [--seeds 3] [--control-seeds 1]

Every stage is a plain `guerdon` command, which is printed. Demonstrations, attempts of their clone, the noisy
script and the reward model are made once, with seed 10, and serve all arms and seeds. The seeds of the proof,
from 40 on, were used for no choice of a setting. What is finished is not done again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import heading
from guerdon.core.atomic import write_atomic
from guerdon.monitoring.proof import SeedResult, judge

CONFIG = "maniskill_rlpd_learned_reward"
EPISODES = 200
DATA_SEED, FIRST_SEED = 10, 40
DEMOS, ATTEMPTS, NOISY_SUCCESSES, NOISY_FAILURES = 30, 48, 20, 40
WEAK = (
    "learner.sac.bc_scaled=false",
    "learner.sac.bc_coef=100",
    "learner.sac.actor_lr=1e-4",
    "learner.sac.actor_ema=0.995",
    "learner.sac.batch_size=128",
    "learner.sac.learning_starts=2560",
    "learner.sac.num_critic_only_updates=1500",
    "learner.sac.target_entropy=-16",
)
"""What differs from the config, which is for a clone that is good already. They are not good yet: on the true
reward they keep what was cloned, and add nothing to it; docs/tutorials/maniskill.md tells what was tried."""
HIGHEST_START, LOWEST_ONCE, LOWEST_AT_END, MOST_STEPS, MOST_MINUTES = 0.5, 0.95, 0.9, 50_000, 20.0


class Stages:
    """What is made once, with what each command printed in `NAME.json`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, *commands: Sequence[str]) -> dict[str, Any]:
        """What the last command printed; run if that is not known yet. They leave the folder `name`."""
        file, place = self.root / f"{name}.json", self.root / name
        if not file.is_file():
            if place.is_dir():  # of a command that was killed
                shutil.rmtree(place)
            began = time.perf_counter()
            answers = [guerdon(*command) for command in commands]
            made = {**answers[-1], "wall_seconds": time.perf_counter() - began}
            write_atomic(file, json.dumps(made, indent=1))
        found: dict[str, Any] = json.loads(file.read_bytes())
        return found

    def collect(self, name: str, number: int, successes: int, failures: int, *more: str) -> dict[str, Any]:
        """Episodes in the folder `name`."""
        return self.run(
            name,
            settings(
                "collect",
                f"seed={1000 * DATA_SEED + number}",
                f"collect.save_dir={self.root / name}",
                f"collect.target_success={successes}",
                f"collect.target_failure={failures}",
                *more,
            ),
        )

    def make(self) -> int:
        """All data and the reward model; returns the env steps of the data."""
        demos = self.collect("demos", 0, DEMOS, 0)
        bare = ("reward.use_reward_model=false", "env.train.init_params.render_mode=null")
        short = ("learner.total_steps=8", "learner.eval_episodes=8")
        cloned = f"runner.logger.log_path={self.root / 'cloned'}"
        self.run("cloned", settings("train", f"seed={DATA_SEED}", *self.shown(), *bare, *short, cloned))
        tried = self.collect(
            "tried",
            2,
            ATTEMPTS,
            ATTEMPTS,
            "collect.policy=checkpoint",
            f"collect.policy_checkpoint={self.root / 'cloned'}",
            "collect.policy_noise=0.05",
            f"collect.max_episodes={ATTEMPTS}",  # whatever becomes of them
        )
        seen = self.collect("seen", 1, NOISY_SUCCESSES, NOISY_FAILURES, "collect.policy_noise=0.9")
        joined = self.root / "joined"
        places = [str(self.root / name) for name in ("demos", "tried", "seen")]
        self.run("joined", *(("data", "convert", place, str(joined), "--to", "native") for place in places))
        log = f"runner.logger.log_path={self.root / 'fitted'}"
        self.run("fitted", settings("train-reward", f"seed={DATA_SEED}", f"fit.data.path={joined}", log))
        return sum(int(made["env_steps"]) for made in (demos, tried, seen))

    def shown(self) -> tuple[str, str]:
        """Settings that give the demonstrations, to clone and to sample."""
        demos = self.root / "demos"
        return f"learner.warm_start.data={demos}", f"learner.sac.prior_data={demos}"

    def prove(self, seeds: int, control_seeds: int, workers: int | None) -> dict[str, Any]:
        """All arms with some seeds, `start` and `learned` with more -> what `prove.json` has, of both."""
        model = self.root / "fitted" / "checkpoints" / "best_model"
        command = ["prove", "--config-name", CONFIG, f"--episodes={EPISODES}"]
        command += [] if workers is None else [f"--workers={workers}"]
        given = [*self.shown(), *WEAK, f"reward.model.checkpoint_path={model}", f"seed={FIRST_SEED}"]
        given += [f"runner.logger.log_path={self.root / 'prove'}", "runner.logger.backends=[]"]
        found = guerdon(*command, f"--seeds={control_seeds}", *given)
        if control_seeds < seeds:
            more = guerdon(*command, f"--seeds={seeds}", "--arms=start,learned", *given)
            results = {
                name: [SeedResult(**each) for each in arm["seeds"]]
                for name, arm in {**found["arms"], **more["arms"]}.items()
            }
            found = judge(results).to_plain()
        write_atomic(self.root / "proof.json", json.dumps(found, indent=1))
        return found


def settings(verb: str, *overrides: str) -> list[str]:
    """A command on the config."""
    return [verb, "--config-name", CONFIG, *overrides, "runner.logger.backends=[]"]


def guerdon(*arguments: str) -> dict[str, Any]:
    """Run a command with `--json` -> what it prints; its progress is shown."""
    print("guerdon", *arguments, flush=True)
    command = [sys.executable, "-m", "guerdon.cli.main", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    limited = any(item.startswith("collect.max_episodes") for item in arguments)
    if done.returncode and not (limited and b"gave up after" in done.stdout):
        raise SystemExit(f"guerdon {arguments[0]} ended with {done.returncode}")
    printed: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return printed


def table(proof: dict[str, Any], root: Path, data_steps: int) -> str:
    """An arm a row, a seed a column: success once, and at the end; the verdict; each aim."""
    arms = proof["arms"]
    seeds = [each["seed"] for each in arms["learned"]["seeds"]]
    lines = ["| arm | " + " | ".join(f"seed {seed}" for seed in seeds) + " | env steps | minutes |"]
    lines.append("|---" * (len(seeds) + 3) + "|")
    once, at_end = dict[str, list[float]](), dict[str, list[float]]()
    for arm, found in arms.items():
        known = {each["seed"]: each for each in found["seeds"]}
        runs = {
            seed: json.loads((root / "prove" / f"seed_{seed}" / arm / "summary.json").read_bytes())
            for seed in known
        }
        once[arm] = [runs[seed]["success_once"] for seed in runs]
        at_end[arm] = [runs[seed]["success_at_end"] for seed in runs]
        cells = [
            f"{runs[seed]['success_once']:.1%}, {runs[seed]['success_at_end']:.1%}" if seed in runs else ""
            for seed in seeds
        ]
        minutes = [each["seconds"] / 60 for each in known.values()]
        spent = " to ".join(f"{value:.1f}" for value in sorted({min(minutes), max(minutes)}))
        lines.append(f"| {arm} | {' | '.join(cells)} | {found['env_steps']:,} | {spent} |")
    steps = data_steps + arms["learned"]["env_steps"]
    longest = max(each["seconds"] for each in arms["learned"]["seeds"]) / 60
    moved = [
        abs(each["success"] - start["success"])
        for arm in ("off", "shuffled")
        for each in arms.get(arm, {"seeds": ()})["seeds"]
        for start in arms["start"]["seeds"]
        if start["seed"] == each["seed"]
    ]
    aims = [
        (f"start at most {HIGHEST_START:.0%}", max(once["start"]) <= HIGHEST_START),
        (f"success_once at least {LOWEST_ONCE:.0%} in every seed", min(once["learned"]) >= LOWEST_ONCE),
        (f"success_at_end at least {LOWEST_AT_END:.0%}", min(at_end["learned"]) >= LOWEST_AT_END),
        (f"at most {MOST_STEPS:,} env steps, data included: {steps:,}", steps <= MOST_STEPS),
        (f"at most {MOST_MINUTES:.0f} minutes: {longest:.1f}", longest <= MOST_MINUTES),
        ("off and shuffled within 10 points of the start", bool(moved) and max(moved) <= 0.1),
    ]
    verdicts = [f"- {text}: {'met' if met else 'MISSED'}" for text, met in aims]
    return "\n".join([*lines, "", proof["verdict"], "", *verdicts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/pickcube_proof"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--control-seeds", type=int, default=1, help="seeds of off, shuffled and true")
    parser.add_argument("--workers", type=int, default=None, help="runs at a time (one for each core)")
    arguments = parser.parse_args()
    versions = {name: importlib.metadata.version(name) for name in ("mani_skill", "sapien")}
    print(heading("PickCube from a weak start", {**versions, "config": CONFIG, "episodes": EPISODES}))
    stages = Stages(arguments.folder.resolve())
    data_steps = stages.make()
    proof = stages.prove(arguments.seeds, arguments.control_seeds, arguments.workers)
    print(f"\n{table(proof, stages.root, data_steps)}", flush=True)


if __name__ == "__main__":
    main()
