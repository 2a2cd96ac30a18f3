"""The headline runs on Tabletop, each beside its controls: what the READMEs and docs say of them.

    python -m benchmarks.headlines [--folder runs/headlines] [--seeds 3] [--only demo]

Every run is a plain `guerdon` command, which is printed. Data and reward model are those of one
`guerdon demo`; the policy on images clones demonstrations of its own, in the size that it observes. The
seeds of the proofs, from 20, 30 and 50 on, were used for no choice of a setting. What is finished is not run
again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import heading

EPISODES = 200
CONTROL_MARGIN = 0.1
"""How far a control may end from the start."""
COLLECT_FOR_IMAGES = (
    "collect.cameras=[base_camera,wrist_camera]",
    "env.train.init_params.image_size=[48,48]",
    "collect.policy_noise=0.5",
    "collect.target_success=200",
    "collect.target_failure=0",
    "seed=7",
)


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A config, and what is asked of it."""

    config: str
    first_seed: int
    control_seeds: int
    """Seeds of the controls, at most; those of a long run have one."""
    highest_start: float
    lowest_end: float
    """Of every seed."""
    shows: str | None = None
    """What it clones: the demo's data (`demo`), demonstrations in images (`images`) or nothing."""


HEADLINES = {
    "demo": Headline(
        config="demo_train",
        first_seed=20,
        control_seeds=3,
        highest_start=0.4,
        lowest_end=0.95,
        shows="demo",
    ),
    "without demonstrations": Headline(
        config="train_without_demonstrations",
        first_seed=30,
        control_seeds=1,
        highest_start=0.05,
        lowest_end=0.5,
    ),
    "images": Headline(
        config="train_from_images",
        first_seed=50,
        control_seeds=1,
        highest_start=0.4,
        lowest_end=0.9,
        shows="images",
    ),
}


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


def images_folder(root: Path) -> Path:
    """Demonstrations for policies on images; made if they are not there."""
    folder = root / "demonstrations_in_images"
    if not folder.is_dir():
        guerdon("collect", *COLLECT_FOR_IMAGES, f"collect.save_dir={folder}")
    return folder


def prove(name: str, root: Path, seeds: int, workers: int | None) -> list[dict[str, Any]]:
    """A config beside its controls, then with more seeds if those have fewer -> what `prove.json` has."""
    headline, demo, folder = HEADLINES[name], demo_folder(root), root / f"prove_{name.replace(' ', '_')}"
    model = demo / "reward" / "checkpoints" / "best_model"
    settings = [f"seed={headline.first_seed}", f"runner.logger.log_path={folder}"]
    settings += [f"reward.model.checkpoint_path={model}", "reward.model.precision=int8"]
    if headline.shows is not None:
        shown = images_folder(root) if headline.shows == "images" else demo / "data"
        settings.append(f"learner.warm_start.data={shown}")
    command = ["prove", "--config-name", headline.config, f"--episodes={EPISODES}"]
    command += [] if workers is None else [f"--workers={workers}"]
    few = min(seeds, headline.control_seeds)
    found = []
    for options in [[f"--seeds={few}"], [f"--seeds={seeds}", "--arms=start,learned"]][: 1 + (few < seeds)]:
        guerdon(*command, *options, *settings)
        found.append(json.loads((folder / "prove.json").read_bytes()))
    return found


def rates(proof: dict[str, Any], arm: str) -> list[float]:
    """Success of an arm's seeds."""
    return [each["success"] for each in proof["arms"][arm]["seeds"]]


def table(name: str, proof: dict[str, Any]) -> str:
    """As it stands in the docs: an arm a row, a seed a column; then what was asked for."""
    headline, arms = HEADLINES[name], proof["arms"]
    numbers = [each["seed"] for each in arms["start"]["seeds"]]
    lines = ["| arm | " + " | ".join(f"seed {number}" for number in numbers) + " | env steps | seconds |"]
    lines.append("|---" * (len(numbers) + 3) + "|")
    for arm, found in arms.items():
        shares = " | ".join(f"{rate:.1%}" for rate in rates(proof, arm))
        seconds = " to ".join(f"{f(each['seconds'] for each in found['seeds']):.0f}" for f in (min, max))
        lines.append(f"| {arm} | {shares} | {found['env_steps']:,} | {seconds} |")
    lines += ["", proof["verdict"]]
    starts, ends = rates(proof, "start"), rates(proof, "learned")
    met = max(starts) <= headline.highest_start and min(ends) >= headline.lowest_end
    asked = f"start at most {headline.highest_start:.0%}, learned at least {headline.lowest_end:.0%}"
    lines.append(f"Aim: {asked} in every seed: {'met' if met else 'MISSED'}")
    for arm in (arm for arm in ("off", "shuffled") if arm in arms):
        pairs = zip(starts, rates(proof, arm), strict=True)
        apart = max(abs(end - start) for start, end in pairs)
        within = "met" if apart <= CONTROL_MARGIN else f"MISSED ({100 * apart:.0f} points)"
        lines.append(f"Aim: {arm} within {100 * CONTROL_MARGIN:.0f} points of the start: {within}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/headlines"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=None, help="runs at a time (one for each core)")
    parser.add_argument("--only", choices=list(HEADLINES), default=None)
    arguments = parser.parse_args()
    print(heading("headline runs", {"seeds": arguments.seeds, "episodes": EPISODES}))
    for name in HEADLINES if arguments.only is None else [arguments.only]:
        for proof in prove(name, arguments.folder, arguments.seeds, arguments.workers):
            print(f"\n{name}\n{table(name, proof)}", flush=True)


if __name__ == "__main__":
    main()
