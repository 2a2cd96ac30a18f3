"""RND and ICM: rewards of a rollout and one pass of learning over it, in transitions per second.

`python -m benchmarks.bench_curiosity [rounds] [python of an environment with rllte-core 1.0.1]`; data of the
size of CartPole's, networks of rllte's sizes (a hidden layer of 256, 128 features), batches of 256. With the
second argument rllte is measured in the same run; without it, what it did on an idle machine is taken (98,600
and 36,600 transitions per second). Ours includes what the pipeline does around it: checks, storing,
statistics. Seconds are those of the process on a core, because the machine may be shared.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.report import Result, report
from guerdon.rewards import Transitions, create_reward_model

STEPS, ENVS, OBS_SIZE, NUM_ACTIONS = 128, 16, 4, 2
BATCH = 256
ROUNDS, WARM_UP = 10, 3
PEER = {"rnd": 98_600.0, "icm": 36_600.0}
"""Transitions per second of rllte-core 1.0.1 on an idle machine."""
TARGET = 2.0

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


def rollout(seed: int = 0) -> Transitions:
    """Random transitions of the size of CartPole's."""
    generator = torch.Generator().manual_seed(seed)
    lead = (STEPS, ENVS)
    return Transitions(
        obs=torch.randn(*lead, OBS_SIZE, generator=generator),
        actions=torch.randint(NUM_ACTIONS, lead, generator=generator),
        next_obs=torch.randn(*lead, OBS_SIZE, generator=generator),
        env_rewards=torch.zeros(lead),
        terminated=torch.zeros(lead, dtype=torch.bool),
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


def theirs(python: str, kind: str, rounds: int) -> list[float]:
    """Seconds of each round of rllte, in its own environment."""
    answer = subprocess.run(
        [python, "-c", PEER_SCRIPT, kind, str(WARM_UP + rounds)], capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise RuntimeError(f"rllte failed: {answer.stderr[-2000:]}")
    lines = [line.split() for line in answer.stdout.splitlines()]
    return [float(line[1]) for line in lines if line[:1] == ["seconds"]][WARM_UP:]


def main() -> int:
    """Measure both models."""
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    python = sys.argv[2] if len(sys.argv) > 2 else None
    results: list[Result] = []
    for kind, known in PEER.items():
        speed = STEPS * ENVS / statistics.median(ours(kind, rounds))
        peer = STEPS * ENVS / statistics.median(theirs(python, kind, rounds)) if python else known
        print(f"   {kind}: {speed:,.0f} transitions/s, rllte {peer:,.0f}", flush=True)
        results.append(Result(what=f"{kind}: transitions/s over rllte's", value=speed / peer, target=TARGET))
    settings: dict[str, object] = {
        "steps": STEPS, "envs": ENVS, "batch": BATCH, "rounds": rounds,
        "rllte": "same run" if python else "known numbers",
    }  # fmt: skip
    return report("bench_curiosity", settings, results)


if __name__ == "__main__":
    sys.exit(main())
