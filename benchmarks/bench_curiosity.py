"""RND and ICM: rewards of a rollout and one pass of learning over it, in transitions per second.

    benchmarks/peers/setup.sh DIR && python -m benchmarks.bench_curiosity --peers DIR

Ours against rllte-core 1.0.1 on data of the size of CartPole's, 2,048 transitions a round, with its sizes:
a hidden layer of 256, 128 features.
- A round of rllte is `compute(samples, sync=True)`: statistics of observations (RND), rewards of all
  transitions, one epoch over them in shuffled batches of 256 (8 steps of Adam; `update_proportion` is 1, all
  rows count), statistics of rewards.
- A round of ours is what pipelines do with a rollout: `collect_data`, `train` (8 steps of Adam on batches
  of 256, drawn with replacement), `clear_data`, `estimate`; with checks, storing and statistics.

Seconds are those of the process on a core, because the machine may be shared, and both take turns. Without
`--peers` ours is measured alone, against no target.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Result, report
from guerdon.rewards import StepBatch, create_reward_model

STEPS, ENVS, OBS_SIZE, NUM_ACTIONS = 128, 16, 4, 2
BATCH = 256
ROUNDS, WARM_UP = 10, 3
BLOCKS = 3
"""How often ours and rllte take turns."""
TARGET = 2.0
"""Times rllte's transitions per second."""

PEER_SCRIPT = f"""
import sys, time, warnings
warnings.filterwarnings("ignore")
import gymnasium as gym, torch
from rllte.xplore.reward import ICM, RND
torch.set_num_threads(1)
torch.manual_seed(0)
env = gym.make_vec("CartPole-v1", {ENVS}, vectorization_mode="sync")
model = {{"rnd": RND, "icm": ICM}}[sys.argv[1]](env, device="cpu")
lead = ({STEPS}, {ENVS})
samples = dict(observations=torch.randn(*lead, {OBS_SIZE}), next_observations=torch.randn(*lead, {OBS_SIZE}),
    actions=torch.randint({NUM_ACTIONS}, (*lead, 1)), rewards=torch.zeros(lead),
    terminateds=torch.zeros(lead), truncateds=torch.zeros(lead))
if sys.argv[1] == "rnd":
    samples["actions"] = samples["actions"].squeeze(-1)
for number in range(int(sys.argv[2])):
    begin = time.process_time()
    model.compute(samples, sync=True)
    print("seconds", time.process_time() - begin, flush=True)
"""


def rollout(seed: int = 0) -> StepBatch:
    """Random states of the size of CartPole's, in order; an episode ends after 20 steps on average."""
    generator = torch.Generator().manual_seed(seed)
    lead = (STEPS, ENVS)
    states = torch.randn(STEPS + 1, ENVS, OBS_SIZE, generator=generator)
    last = torch.randn(*lead, OBS_SIZE, generator=generator)
    terminated = torch.rand(lead, generator=generator) < 0.05
    return StepBatch(
        obs=states[:-1],
        actions=torch.randint(NUM_ACTIONS, lead, generator=generator),
        next_obs=torch.where(terminated[..., None], last, states[1:]),
        env_rewards=torch.zeros(lead),
        terminated=terminated,
        truncated=torch.zeros(lead, dtype=torch.bool),
    )


def ours(kind: str, rounds: int) -> list[float]:
    """Seconds of each round."""
    settings: dict[str, Any] = {
        "type": kind,
        "obs_shape": OBS_SIZE,
        "action_size": NUM_ACTIONS,
        "hidden": [256],
    }
    settings |= {"feature_size": 128, "batch_size": BATCH, "update_per_collect": STEPS * ENVS // BATCH}
    model: Any = create_reward_model({**settings, "buffer_size": STEPS * ENVS})
    batch, seconds = rollout(), list[float]()
    for number in range(WARM_UP + rounds):
        begin = time.process_time()
        model.collect_data(batch)
        model.train()
        model.clear_data(number)
        model.estimate(batch)
        seconds.append(time.process_time() - begin)
    return seconds[WARM_UP:]


def theirs(python: Path, kind: str, rounds: int) -> list[float]:
    """Seconds of each round of rllte, in its own environment."""
    command = [str(python), "-c", PEER_SCRIPT, kind, str(WARM_UP + rounds)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(f"rllte failed: {answer.stderr[-2000:]}")
    lines = [line.split() for line in answer.stdout.splitlines()]
    return [float(line[1]) for line in lines if line[:1] == ["seconds"]][WARM_UP:]


def main() -> int:
    """Measure both models."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder that peers/setup.sh made")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in each of the blocks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    for kind in ("rnd", "icm"):
        mine, other = list[float](), list[float]()
        for _ in range(BLOCKS):
            mine += ours(kind, given.rounds)
            if given.peers:
                other += theirs(given.peers / "rllte" / "bin" / "python", kind, given.rounds)
        speed = STEPS * ENVS / statistics.median(mine)
        print(f"   {kind}: {speed:,.0f} transitions/s", end="", flush=True)
        if not given.peers:
            print()
            continue
        peer = STEPS * ENVS / statistics.median(other)
        print(f", rllte {peer:,.0f}", flush=True)
        results.append(Result(what=f"{kind}: transitions/s over rllte's", value=speed / peer, target=TARGET))
    settings: dict[str, object] = {
        "steps": STEPS,
        "envs": ENVS,
        "batch": BATCH,
        "rounds": BLOCKS * given.rounds,
        "rllte": "same run" if given.peers else "not measured",
    }
    return report("bench_curiosity", settings, results)


if __name__ == "__main__":
    sys.exit(main())
