"""Every model of the zoo: a policy that learns from its reward, over several seeds, with controls and peers.

    python -m benchmarks.bench_zoo                          # all models, five seeds
    python -m benchmarks.bench_zoo fixed_cartpole_gail --seeds 2 --controls
    benchmarks/peers/setup.sh DIR && python -m benchmarks.bench_zoo cartpole_gail cartpole_airl --peers DIR

Where a model imitates, the environment's reward is NaN to the learner. Returns are of fresh episodes,
measured by the environment. `--controls` runs the same with rewards of zero and of noise in the model's
place. Times are those of training without evaluations, one thread; fitting a reward before the policy counts,
for D-REX with cloning and playing, which its peer is spared. A finished seed is kept in `--out` and not run
again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import zoo_adversarial, zoo_exploration, zoo_images, zoo_imitation
from benchmarks.report import heading
from guerdon.envs.wrappers import NanReward
from guerdon.rewards import StepBatch, create_reward_model
from guerdon.rewards.zoo.baselines import BASELINES
from guerdon.rewards.zoo.drex import DREX
from guerdon.training.rollouts import noise_ranked
from guerdon.training.serial import make_env, resolved, serial_pipeline_reward_model, shapes_of

CASES: dict[str, dict[str, Any]] = {
    **zoo_adversarial.CASES,
    **zoo_imitation.CASES,
    **zoo_exploration.CASES,
    **zoo_images.CASES,
}
MARKS = (195.0, 475.0)
"""Returns on CartPole that the time is taken to."""
PEERS = {
    "cartpole_gail": ("imitation", "ding"),
    "cartpole_airl": ("imitation",),
    "cartpole_pwil": ("ding",),
    "cartpole_red": ("ding",),
    "cartpole_gcl": ("ding",),
    "cartpole_trex": ("ding",),
    "cartpole_drex": ("ding",),
}
"""Config -> libraries that have the model and can run it."""


def run(name: str, seed: int, control: str | None) -> dict[str, Any]:
    """One run of ours."""
    case = CASES[name]
    settings = {**case["settings"], "output_dir": None}
    if control is not None:  # a random policy balances a pole now and then: what counts is what stays
        settings["stop_value"] = None
    cfg = resolved(settings)
    env = make_env(cfg)
    if case.get("hidden", True):
        env = NanReward(env)
    section = {**shapes_of(env), "seed": seed, **cfg.reward_model}
    if control is None:
        model = create_reward_model({**section, **case.get("given", dict)()})
        if case["demonstrations"] is not None:
            model.load_expert_data(case["demonstrations"]())
    else:
        model = BASELINES[control]({**shapes_of(env), "seed": seed})
    start = time.perf_counter()
    result = serial_pipeline_reward_model(
        cfg,
        seed=seed,
        env_setting=env,
        model=model,
        pretrain_reward=case["pretrain"] and control is None,
        cooptrain_reward=case.get("cooptrain", True),
    )
    # the pipeline's own clock starts with the policy
    fitting = time.perf_counter() - start - result.seconds if case["pretrain"] else 0.0
    measure = case.get("measure", "env_return")
    values = [float(getattr(each, measure)) for _, _, each in result.evaluations]
    points = [(steps, fitting + seconds) for steps, seconds, _ in result.evaluations]
    reported = [(*point, value) for point, value in zip(points, values, strict=True)]
    return {"env_steps": result.env_steps, "last": values[-1], "best": max(values), "reported": reported}


def peer(library: str, name: str, seed: int, place: Path, data: Path, limit: float) -> dict[str, Any]:
    """One run of another library, in its own environment."""
    kind = name.rpartition("_")[2]
    given = data / "demonstrations.npz" if library == "imitation" else data
    target = MARKS[1] if library == "imitation" else MARKS[0]
    script = Path(__file__).parent / "peers" / f"{library}_cartpole.py"
    command = [place / library / "bin" / "python", script, kind, given, seed, limit, target]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '{"env_steps"' in line]
    if not lines:
        raise SystemExit(f"{library} {kind}: {done.stderr.strip().splitlines()[-1:]}")
    reported = [tuple(json.loads(line).values()) for line in lines]
    best = max(value for _, _, value in reported)
    return {"env_steps": reported[-1][0], "last": reported[-1][2], "best": best, "reported": reported}


def write_demonstrations(folder: Path) -> None:
    """What ours get on CartPole, as the peers read it."""
    _write(folder / "demonstrations.npz", CASES["cartpole_gail"]["demonstrations"]())
    _write(folder / "ranked.npz", CASES["cartpole_trex"]["demonstrations"]())
    poor = CASES["cartpole_drex"]["demonstrations"]()
    _write(folder / "poor.npz", poor)
    cfg = resolved({**CASES["cartpole_drex"]["settings"], "output_dir": None})
    with closing(make_env(cfg)) as env:
        model = DREX({**shapes_of(env), **cfg.reward_model})
        model.load_expert_data(poor)
        played = noise_ranked(env, model.clone(), model.cfg.noise_levels, model.cfg.episodes_per_level)
    noise = [level for level, group in played.items() for _ in group]
    _write(folder / "noisy.npz", [each for group in played.values() for each in group], noise=noise)


def _write(path: Path, episodes: Sequence[StepBatch], **more: Any) -> None:
    """Episodes one after the other, and their lengths."""
    parts = ("obs", "actions", "next_obs", "env_rewards", "done")
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(each, name).numpy() for each in episodes]) for name in parts
    }
    np.savez(path, lengths=np.array([len(each) for each in episodes]), **arrays, **more)


def reached(outcome: dict[str, Any], mark: float) -> tuple[float, float] | None:
    """(environment steps, seconds) of the first evaluation at `mark`."""
    return next(((steps, seconds) for steps, seconds, value in outcome["reported"] if value >= mark), None)


def line(name: str, who: str, outcomes: list[dict[str, Any]], target: float) -> str:
    """A row of the table."""
    last = np.array([item["last"] for item in outcomes])
    met = sum(item["best"] >= target for item in outcomes)
    speed = np.median([item["reported"][-1][0] / max(item["reported"][-1][1], 1e-9) for item in outcomes])
    spread = f"{last.mean():.4g} ({last.min():.4g} to {last.max():.4g})"
    cells = [name, who, spread, f"{met} of {len(outcomes)}", f"{speed:,.0f}"]
    for mark in MARKS if name.startswith("cartpole") else (target, None):
        found = [] if mark is None else [reached(item, mark) for item in outcomes]
        there = [item for item in found if item is not None]
        if len(there) * 2 > len(outcomes):
            steps, seconds = np.median(np.array(there), axis=0)
            cells.append(f"{seconds:.1f} s / {steps:,.0f}")
        else:
            cells.append("-" if mark is None else "not reached")
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="configs; all by default")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=10, help="settings were found with lower ones")
    parser.add_argument("--controls", action="store_true")
    parser.add_argument("--peers", type=Path, help="folder that peers/setup.sh made")
    parser.add_argument("--peer-seeds", type=int, default=2)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that a peer may train")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_zoo.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    unknown = [name for name in given.names if name not in CASES]
    if unknown:
        parser.error(f"there is no case {unknown[0]}; there are {', '.join(CASES)}")
    names = given.names or list(CASES)
    kept: dict[str, Any] = json.loads(given.out.read_text()) if given.out.is_file() else {}

    def keep(key: str, make: Any) -> dict[str, Any]:
        if key not in kept:
            kept[key] = make()
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(kept))
        return kept[key]  # type: ignore[no-any-return]

    print(heading("zoo", {"seeds": given.seeds, "first_seed": given.first_seed, "threads": 1}))
    columns = ("config", "run by", "return: mean (lowest to highest seed)", "seeds at target", "steps/s")
    print("| " + " | ".join((*columns, "to 195 or the target", "to 475")) + " |")
    print("|---" * (len(columns) + 2) + "|", flush=True)
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        if given.peers:
            write_demonstrations(Path(folder))
        for name in names:
            target = float(CASES[name]["target"])
            for who in (None, *(BASELINES if given.controls else ())):
                made = [
                    keep(f"{name}/{who}/{seed}", partial(run, name, seed, who))
                    for seed in range(given.first_seed, given.first_seed + given.seeds)
                ]
                print(line(name, who or "guerdon", made, target), flush=True)
                missed += who is None and any(item["best"] < target for item in made)
            for library in PEERS.get(name, ()) if given.peers else ():
                theirs = partial(peer, library, name, place=given.peers, data=Path(folder), limit=given.limit)
                made = [
                    keep(f"{name}/{library}/{seed}", partial(theirs, seed=seed))
                    for seed in range(given.peer_seeds)
                ]
                print(line(name, library, made, target), flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
