"""DI-engine's CartPole configs as they are, trained by Guerdon: seconds and env steps to a return of 195.

    python -m benchmarks.zoo_di_engine FOLDER [--limit 25] [--steps 20000]

FOLDER is `dizoo/classic_control/cartpole/config` of a clone of DI-engine, which need not be installed. Each
config runs twice, with one thread and the seed in the file: as it says, and with a reward of zero and nothing
else. Seconds are those of the whole run, with evaluations and with what is fitted before the policy, and
without imports.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import heading

MARK = 195.0
PARTS = ("gail", "gcl", "trex", "drex", "rnd", "icm", "ngu")
"""What the names of configs with a reward model have in them."""
NEEDS_EXPERTS = "cartpole_trex_dqn_config.py"
"""Names the checkpoints of a run before it; here the scripted policy plays instead."""


def run(file: Path, control: bool, steps: int) -> dict[str, Any]:
    """One run in this process, until an evaluation reaches 195 or the steps are over."""
    import torch

    from guerdon.config.load import load_serial
    from guerdon.rewards.zoo.baselines import ZeroReward
    from guerdon.training.serial import make_env, serial_pipeline_reward_model, shapes_of

    torch.set_num_threads(1)
    overrides = [f"stop_value={MARK}", f"learner.total_steps={steps}", "output_dir=null"]
    if file.name == NEEDS_EXPERTS:
        overrides.append("reward_model.expert=scripted")
    if control:
        overrides.append("mix.combine_mode=replace")
    cfg = load_serial(file, overrides)
    env = make_env(cfg)
    model = ZeroReward(shapes_of(env)) if control else None
    start = time.perf_counter()
    result = serial_pipeline_reward_model(cfg, env_setting=env, model=model)
    seconds = time.perf_counter() - start
    return {
        "solved": result.solved,
        "seconds": seconds,
        "env_steps": result.env_steps,
        "best": result.best_return,
    }


def cell(file: Path, control: bool, steps: int, limit: float) -> str:
    """The same in a process of its own, for at most `limit` seconds; returns what the table says."""
    command = [sys.executable, "-m", "benchmarks.zoo_di_engine", str(file), "--one", f"--steps={steps}"]
    command += ["--control"] if control else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"not in {limit:g} s"
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1]}"
    printed = json.loads(done.stdout.splitlines()[-1])
    if printed["solved"]:
        return f"{printed['seconds']:.1f} s / {printed['env_steps']:,}"
    return f"not in {printed['env_steps']:,} steps (best {printed['best']:.0f}, {printed['seconds']:.1f} s)"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=float, default=25.0, help="seconds of a run, imports included")
    parser.add_argument("--steps", type=int, default=20_000, help="environment steps of a run")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(given.folder, given.control, given.steps)))
        return 0
    files = [file for file in sorted(given.folder.glob("*.py")) if any(part in file.name for part in PARTS)]
    if not files:
        parser.error(f"there are no reward-model configs in {given.folder}")
    print(heading("zoo_di_engine", {"limit": given.limit, "steps": given.steps, "threads": 1}))
    print("| config | to 195 | reward of zero |\n|---|---|---|", flush=True)
    for file in files:
        printed = [cell(file, control, given.steps, given.limit) for control in (False, True)]
        name = file.stem.removesuffix("_config")
        print(f"| `{name}` | {' | '.join(printed)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
