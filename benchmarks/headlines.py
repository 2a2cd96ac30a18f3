"""The headline runs on Tabletop, each beside its controls: what the READMEs and docs say of them.

    python -m benchmarks.headlines [--folder runs/headlines] [--seeds 3] [--only demo]

Every run is a plain `guerdon` command, which is printed. Data and reward model are those of one
`guerdon demo`; the seeds of the proofs, from 20 and from 30 on, were used for no choice of a setting. What is
finished is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import heading

EPISODES = 200
FIRST_SEED = {"demo": 20, "without demonstrations": 30}
CONFIGS = {"demo": "demo_train", "without demonstrations": "train_without_demonstrations"}
CONTROL_SEEDS = {"demo": 3, "without demonstrations": 1}
"""Name -> seeds of the controls, at most; those of a long run have one."""
AIMS = {"demo": (0.4, 0.95), "without demonstrations": (0.05, 0.5)}
"""Name -> the highest start and the lowest success of a seed that are asked for."""


def guerdon(*arguments: str) -> None:
    """Run a command; its progress is shown."""
    print("guerdon", *arguments, flush=True)
    subprocess.run(
        [sys.executable, "-m", "guerdon.cli.main", *arguments], check=True, stdout=subprocess.DEVNULL
    )


def demo_folder(root: Path) -> Path:
    """Data and reward model; made if they are not there."""
    if not list(root.glob("demo/*/summary.json")):
        guerdon("demo", f"runner.output_dir={root}")
    return next(path.parent for path in sorted(root.glob("demo/*/summary.json")))


def prove(name: str, root: Path, seeds: int, workers: int | None) -> list[dict[str, Any]]:
    """A config beside its controls, then with more seeds if those have fewer -> what `prove.json` has."""
    demo, folder = demo_folder(root), root / f"prove_{name.replace(' ', '_')}"
    model = demo / "reward" / "checkpoints" / "best_model"
    settings = [f"seed={FIRST_SEED[name]}", f"runner.logger.log_path={folder}"]
    settings += [f"reward.model.checkpoint_path={model}", "reward.model.precision=int8"]
    if name == "demo":
        settings.append(f"learner.warm_start.data={demo / 'data'}")
    command = ["prove", "--config-name", CONFIGS[name], f"--episodes={EPISODES}"]
    command += [] if workers is None else [f"--workers={workers}"]
    few = min(seeds, CONTROL_SEEDS[name])
    found = []
    for options in [[f"--seeds={few}"], [f"--seeds={seeds}", "--arms=start,learned"]][: 1 + (few < seeds)]:
        guerdon(*command, *options, *settings)
        found.append(json.loads((folder / "prove.json").read_bytes()))
    return found


def table(name: str, proof: dict[str, Any]) -> str:
    """As it stands in the docs: an arm a row, a seed a column."""
    arms = proof["arms"]
    numbers = [each["seed"] for each in arms["start"]["seeds"]]
    lines = ["| arm | " + " | ".join(f"seed {number}" for number in numbers) + " | env steps | seconds |"]
    lines.append("|---" * (len(numbers) + 3) + "|")
    for arm, found in arms.items():
        rates = " | ".join(f"{each['success']:.1%}" for each in found["seeds"])
        seconds = " to ".join(f"{f(each['seconds'] for each in found['seeds']):.0f}" for f in (min, max))
        lines.append(f"| {arm} | {rates} | {found['env_steps']:,} | {seconds} |")
    highest, lowest = AIMS[name]
    starts, ends = ([each["success"] for each in arms[arm]["seeds"]] for arm in ("start", "learned"))
    met = max(starts) <= highest and min(ends) >= lowest
    asked = f"start at most {highest:.0%}, learned at least {lowest:.0%} in every seed"
    return "\n".join([*lines, "", proof["verdict"], f"Aim: {asked}: {'met' if met else 'MISSED'}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/headlines"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=None, help="runs at a time (one for each core)")
    parser.add_argument("--only", choices=list(CONFIGS), default=None)
    arguments = parser.parse_args()
    print(heading("headline runs", {"seeds": arguments.seeds, "episodes": EPISODES}))
    for name in CONFIGS if arguments.only is None else [arguments.only]:
        for proof in prove(name, arguments.folder, arguments.seeds, arguments.workers):
            print(f"\n{name}\n{table(name, proof)}", flush=True)


if __name__ == "__main__":
    main()
