"""DI-engine's CartPole configs as they are, trained by Guerdon: seconds and env steps to a return of 195.

    python -m benchmarks.zoo_di_engine FOLDER [--limit 25] [--steps 20000] [--peers DIR]

FOLDER is `dizoo/classic_control/cartpole/config` of a clone of DI-engine, which need not be installed. Each
config runs twice, with one thread and the seed in the file: as it says, and with a reward of zero and nothing
else. Seconds are processor seconds of the whole run, so that other work on the machine does not count, with
evaluations and with what is fitted before the policy, and without imports.

With `--peers DIR`, which `peers/setup.sh DIR` made, DI-engine itself trains afterwards
(`peers/ding_cartpole.py`), also in processor seconds, of which its evaluations are not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import heading

MARK = 195.0
PARTS = ("gail", "gcl", "trex", "drex", "rnd", "icm", "ngu")
"""What the names of configs with a reward model have in them."""
KINDS = ("gail", "gcl", "red", "pwil", "trex", "drex")
"""What `peers/ding_cartpole.py` trains."""
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
    start = time.process_time()
    result = serial_pipeline_reward_model(cfg, env_setting=env, model=model)
    seconds = time.process_time() - start
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
    return text_of(json.loads(done.stdout.splitlines()[-1]))


def text_of(told: dict[str, Any]) -> str:
    """What the table says of a run."""
    if told["solved"]:
        return f"{told['seconds']:.1f} s / {told['env_steps']:,}"
    return f"not in {told['env_steps']:,} steps (best {told['best']:.0f}, {told['seconds']:.1f} s)"


def of_di_engine(kind: str, place: Path, data: Path, limit: float) -> str:
    """The same of DI-engine in its own environment, for at most `limit` processor seconds."""
    script = Path(__file__).parent / "peers" / "ding_cartpole.py"
    code = "import runpy, sys, time; time.perf_counter = time.process_time; sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [place / "ding" / "bin" / "python", "-c", code, script, kind, data, 0, limit, MARK]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    rows = [
        json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '{"env_steps"' in line
    ]
    if not rows:
        return f"failed: {done.stderr.strip().splitlines()[-1]}"
    best = max(row["env_return"] for row in rows)
    return text_of({**rows[-1], "best": best, "solved": best >= MARK})


def print_di_engine(place: Path, limit: float) -> None:
    """Print the table of DI-engine."""
    from benchmarks.bench_zoo import write_demonstrations

    print("\n| model | DI-engine 0.5.3 to 195 |\n|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_demonstrations(Path(folder))
        for kind in KINDS:
            print(f"| {kind} | {of_di_engine(kind, place, Path(folder), limit)} |", flush=True)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=float, default=25.0, help="seconds by the clock, imports included")
    parser.add_argument("--steps", type=int, default=20_000, help="environment steps of a run")
    parser.add_argument("--peers", type=Path, help="folder that peers/setup.sh made")
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
    if given.peers:
        print_di_engine(given.peers, given.limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
