"""PickCube end to end on a CPU: demonstrations, reward data, reward model, RLPD on the learned reward alone.

```
python -m benchmarks.maniskill_pickcube --seeds 0 1 2 --folder runs/pickcube
```
Every stage is a plain `guerdon` command, which is printed and timed. Beside the recipe stands what it has to
be compared with: the cloned policy without reinforcement learning, and the same run on the simulator's own
sparse reward. Policies are measured in the stock environment, reward models on episodes of policies. What is
done is in `FOLDER/seed_N.json`; a benchmark that was killed goes on after the last finished stage.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Result, heading, report
from guerdon.store.atomic import write_atomic

CONFIG = "maniskill_rlpd_learned_reward"
TASK, CONTROL_MODE = "PickCube-v1", "pd_ee_delta_pos"
RECIPE = ("demos", "seen", "fitted", "trained")
"""The stages that a user runs, and whose time counts."""
EVAL_SEED = 1_000_000
"""First seed of the episodes in the stock environment; nothing is trained there."""
BATCH = 128
"""Frames that are judged at once when that is timed."""
_SUBREAPER = 36


class Bench:
    """One seed: runs what is not done yet and notes what it measures."""

    def __init__(self, seed: int, folder: Path, arguments: argparse.Namespace) -> None:
        self.seed, self.arguments = seed, arguments
        self.folder = folder / f"seed_{seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"seed_{seed}.json"
        self.done: dict[str, dict[str, Any]] = (
            json.loads(self._file.read_text()) if self._file.is_file() else {}
        )

    def run(self) -> dict[str, dict[str, Any]]:
        """All stages."""
        arguments = self.arguments
        episodes, demos = arguments.episodes, f"collect.target_success={arguments.demos}"
        self.stage("demos", [*self._collect("demos", 0), demos], "demos")
        self.stage(
            "seen",
            [
                *self._collect("seen", 1),
                "collect.policy_noise=0.9",
                f"collect.target_success={arguments.reward_data}",
                f"collect.target_failure={2 * arguments.reward_data}",
            ],
            "seen",
        )
        self.stage("fitted", self._guerdon("train-reward", "fit.data.path=seen", "log=fitted"), "fitted")
        learned = "reward.model.checkpoint_path=fitted/checkpoints/best_model"
        self.stage("trained", self._train(learned, "log=trained"), "trained")
        # What it is compared with.
        bare = ("reward.use_reward_model=false", "env.train.init_params.render_mode=null")
        short = ("learner.total_steps=8", "learner.eval_episodes=8")
        self.stage("cloned", self._train(*bare, *short, "log=cloned"), "cloned")
        self.stage("ceiling", self._train(*bare, "log=ceiling"), "ceiling")
        for name in ("trained", "cloned", "ceiling"):
            stock = [sys.executable, "-m", "benchmarks.maniskill_pickcube", "--stock", name]
            self.stage(f"success of {name}", [*stock, "--episodes", str(episodes)], f"{name}.json")
            if name == "ceiling":
                continue  # its episodes look like those of the others
            held_out = f"held_out_{name}"
            self.stage(held_out, self._attempts(name, held_out), held_out)
            score = ["reward", "score", "--checkpoint", "fitted/checkpoints/best_model", held_out, "--json"]
            self.stage(f"reward on {name}", [*self._program(), *score])
        self.stage("judging", [sys.executable, "-m", "benchmarks.maniskill_pickcube", "--judge", "fitted"])
        return self.done

    # The commands

    def _program(self) -> list[str]:
        return [sys.executable, "-m", "guerdon.cli"]

    def _guerdon(self, verb: str, *overrides: str) -> list[str]:
        """A command of the recipe; `log=NAME` is short for the run's folder."""
        given = [item.replace("log=", "runner.logger.log_path=") for item in overrides]
        return [
            *(*self._program(), verb, "--config-name", CONFIG, *given),
            *("runner.logger.backends=[]", *self.arguments.overrides, "--json"),
        ]

    def _collect(self, place: str, number: int) -> list[str]:
        seed = 1000 * self.seed + number
        return self._guerdon("collect", f"seed={seed}", f"collect.save_dir={place}")

    def _train(self, *overrides: str) -> list[str]:
        data = ("learner.warm_start.data=demos", "learner.sac.prior_data=demos")
        return self._guerdon("train", f"seed={self.seed}", *data, *overrides)

    def _attempts(self, name: str, place: str) -> list[str]:
        """Episodes of a policy as it explores, whatever becomes of them."""
        count = self.arguments.held_out
        return [
            *self._collect(place, 2),
            "collect.policy=checkpoint",
            f"collect.policy_checkpoint={name}",
            f"collect.policy_noise={0.0 if name == 'trained' else 0.1}",
            f"collect.target_success={count}",
            f"collect.target_failure={count}",
            f"collect.max_episodes={count}",
        ]

    # Stages

    def stage(self, name: str, command: Sequence[str], makes: str | None = None) -> None:
        """Run a command unless that was done; `makes` is what it leaves, and is removed first."""
        if name in self.done:
            return
        place = None if makes is None else self.folder / makes
        if place is not None and place.is_dir():
            shutil.rmtree(place)
        print(f"\n-- seed {self.seed}: {name}\n   {_shown(command)}", flush=True)
        answer, spent = _timed(command, self.folder)
        self.done[name] = {**spent, "command": _shown(command), "result": answer}
        text = json.dumps(self.done, indent=1).encode()
        write_atomic(self._file, lambda file: file.write(text))
        print(f"   {spent['seconds']:.0f} s, {spent['core_seconds']:.0f} s on a core: {answer}", flush=True)


def _shown(command: Sequence[str]) -> str:
    text = " ".join(command).replace(sys.executable, "python")
    return text.replace("python -m guerdon.cli", "guerdon")


def _timed(command: Sequence[str], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a command prints, a JSON object, and what it costs; processes that it started are counted too."""
    before, load, began = _core_seconds(), os.getloadavg()[0], time.perf_counter()
    path = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        printed, _ = process.communicate()
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"this command ended with {process.returncode}: {_shown(command)}")
    _reap()
    spent = {
        "seconds": seconds,
        "core_seconds": _core_seconds() - before,
        "load_average": [load, os.getloadavg()[0]],
    }
    return json.loads(printed.strip().splitlines()[-1]), spent


def _core_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _adopt_orphans() -> None:
    """Simulators outlive the command that started them by a moment: let them become ours, and be counted."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _reap(patience: float = 10.0) -> None:
    """Wait for what a command has left running."""
    deadline = time.perf_counter() + patience
    while time.perf_counter() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)
        except ChildProcessError:
            return


# What is measured in a process of its own


def stock_success(place: Path, episodes: int) -> dict[str, Any]:
    """Success of a saved policy, without noise, in the environment as ManiSkill makes it."""
    from guerdon.envs.vulkan import choose_driver
    from guerdon.run.policy_files import load_policy

    choose_driver()
    import gymnasium as gym
    import mani_skill.envs  # noqa: F401 - registers the task

    policy = load_policy(place)
    env = gym.make(TASK, num_envs=1, obs_mode="state", control_mode=CONTROL_MODE, sim_backend="cpu")
    flags = []
    for number in range(episodes):
        obs, _ = env.reset(seed=EVAL_SEED + number)
        seen, truncated = [], False
        while not truncated:
            action = policy.learner.act(np.asarray(obs, np.float32), deterministic=True)
            obs, _, _, cut, info = env.step(action)  # goes on after success
            seen.append(bool(info["success"]))
            truncated = bool(cut)
        flags.append((any(seen), seen[-1], len(seen)))
    env.close()
    once, at_end, steps = np.array(flags).T
    return {
        "episodes": episodes,
        "success_once": float(once.mean()),
        "success_at_end": float(at_end.mean()),
        "steps": int(steps.sum()),
    }


def judging_time(place: Path, rounds: int = 30) -> dict[str, Any]:
    """Milliseconds for a batch of frames, as a reward worker judges it, on all cores that torch takes."""
    import torch

    from guerdon.config import RewardConfig, RewardModelConfig
    from guerdon.serve import ImageRewardWorker

    model = RewardModelConfig(checkpoint_path=str(place / "checkpoints" / "best_model"))
    worker = ImageRewardWorker(RewardConfig(model=model))
    worker.init_worker()
    contract = worker.manager.contract
    rng = np.random.default_rng(0)
    frames = {
        name: rng.integers(0, 256, (BATCH, contract.num_frames, *contract.frame_sizes[name]), np.uint8)
        for name in worker.manager.image_keys
    }
    if contract.num_frames == 1:
        frames = {name: images[:, 0] for name, images in frames.items()}
    times = [_milliseconds(lambda: worker.judge(frames)) for _ in range(rounds + 2)][2:]
    return {"batch": BATCH, "ms": float(np.median(times)), "threads": torch.get_num_threads()}


def _milliseconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - began)


# The report


def step_times(folder: Path) -> dict[str, float]:
    """Milliseconds per environment step of a run, by what they were spent on, and frames per step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "time/rollout" in row]
    steps = max(row["step"] for row in rows)
    sums = {
        name: 1e3 * sum(row.get(f"time/{name}", 0.0) for row in rows) / steps
        for name in ("rollout", "compute_model_rewards", "update")
    }
    return {**sums, "rendered": sum(row.get("reward/frames_rendered", 0.0) for row in rows) / steps}


def summary(bench: Bench) -> dict[str, float]:
    """The numbers of one seed."""
    done = bench.done
    numbers: dict[str, float] = {}
    for name in ("trained", "cloned"):
        metrics = done[f"reward on {name}"]["result"]["metrics"]
        for short, key in (("auc", "auc"), ("fpr", "false_positive_rate"), ("tpr", "true_positive_rate")):
            numbers[f"{short}_{name}"] = metrics[key]
    for name in ("trained", "cloned", "ceiling"):
        for key in ("success_once", "success_at_end"):
            numbers[f"{key}_{name}"] = done[f"success of {name}"]["result"][key]
    numbers["seconds"] = sum(done[name]["seconds"] for name in RECIPE)
    numbers["core_seconds"] = sum(done[name]["core_seconds"] for name in RECIPE)
    for name in RECIPE:
        numbers[f"seconds_{name}"] = done[name]["seconds"]
    collected = sum(done[name]["result"]["env_steps"] for name in ("demos", "seen"))
    numbers["train_steps"] = step_count(bench.folder / "trained")
    numbers["env_steps"] = collected + numbers["train_steps"]
    numbers["judge_ms"] = done["judging"]["result"]["ms"]
    spent = step_times(bench.folder / "trained")
    numbers["model_rewards_ms"] = spent["compute_model_rewards"]
    numbers["rendered"] = spent["rendered"]
    return numbers


def step_count(run: Path) -> int:
    """Environment steps of a training run."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return max(int(json.loads(line)["step"]) for line in lines)


ROWS: tuple[tuple[str, str, float], ...] = (
    ("reward model on episodes of the trained policy: AUC", "auc_trained", 1.0),
    ("- FPR at the calibrated threshold, %", "fpr_trained", 100.0),
    ("- TPR, %", "tpr_trained", 100.0),
    ("reward model on episodes of the cloned policy with noise: AUC", "auc_cloned", 1.0),
    ("- FPR, %", "fpr_cloned", 100.0),
    ("- TPR, %", "tpr_cloned", 100.0),
    ("cloned policy: success_once, %", "success_once_cloned", 100.0),
    ("- success_at_end, %", "success_at_end_cloned", 100.0),
    ("RLPD on the learned reward: success_once, %", "success_once_trained", 100.0),
    ("- success_at_end, %", "success_at_end_trained", 100.0),
    ("RLPD on the true sparse reward: success_once, %", "success_once_ceiling", 100.0),
    ("- success_at_end, %", "success_at_end_ceiling", 100.0),
    ("env steps, demonstrations and reward data included", "env_steps", 1.0),
    ("- of these in RLPD", "train_steps", 1.0),
    ("seconds, all included", "seconds", 1.0),
    ("- demonstrations", "seconds_demos", 1.0),
    ("- reward data", "seconds_seen", 1.0),
    ("- fit", "seconds_fitted", 1.0),
    ("- RLPD", "seconds_trained", 1.0),
    ("seconds on a core, all included", "core_seconds", 1.0),
    ("frames rendered per env step in RLPD", "rendered", 1.0),
    ("`time/compute_model_rewards`, ms per env step", "model_rewards_ms", 1.0),
    (f"judging {BATCH} frames, ms", "judge_ms", 1.0),
)
"""What a row of the table says, where its number stands, and by what it is multiplied."""


def table(numbers: dict[int, dict[str, float]]) -> str:
    """A row for each measure, a column for each seed."""
    head = ["", *(f"seed {seed}" for seed in numbers)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for text, key, factor in ROWS:
        values = [f"{factor * each[key]:,.4g}" for each in numbers.values()]
        lines.append(f"| {text} | {' | '.join(values)} |")
    return "\n".join(lines)


def results(numbers: dict[int, dict[str, float]]) -> list[Result]:
    """The worst seed against the targets."""
    each = list(numbers.values())

    def worst(key: str, target: float, at_least: bool, what: str) -> Result:
        values = [row[key] for row in each]
        value = min(values) if at_least else max(values)
        return Result(what=what, value=value, target=target, at_least=at_least)

    for row in each:
        row["gap"] = row["success_once_ceiling"] - row["success_once_trained"]
        row["gap_at_end"] = row["success_at_end_ceiling"] - row["success_at_end_trained"]
    return [
        worst("auc_trained", 0.99, True, "worst seed: AUC on the trained policy's episodes"),
        worst("fpr_trained", 0.01, False, "worst seed: FPR there"),
        worst("tpr_trained", 0.90, True, "worst seed: TPR there"),
        worst("success_once_trained", 0.95, True, "worst seed: success_once"),
        worst("success_at_end_trained", 0.90, True, "worst seed: success_at_end"),
        worst("gap", 0.03, False, "worst seed: sparse reward minus learned, success_once"),
        worst("gap_at_end", 0.03, False, "worst seed: sparse reward minus learned, success_at_end"),
        worst("env_steps", 50_000, False, "worst seed: env steps, all included"),
        worst("seconds", 900, False, "worst seed: seconds, all included"),
        worst("judge_ms", 50, False, f"worst seed: judging {BATCH} frames, ms"),
    ]


def main() -> int:
    """Measure, or one of the parts that run in a process of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/pickcube"))
    parser.add_argument("--episodes", type=int, default=200, help="in the stock environment, per policy")
    parser.add_argument("--held-out", type=int, default=80, help="episodes of each policy to judge")
    parser.add_argument("--demos", type=int, default=120, help="demonstrations")
    parser.add_argument("--reward-data", type=int, default=60, help="noisy successes; twice as many failures")
    parser.add_argument("--stock", type=Path, metavar="RUN", help="only measure this policy")
    parser.add_argument("--judge", type=Path, metavar="RUN", help="only time this reward model")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for every command")
    arguments = parser.parse_args()
    if arguments.stock is not None:
        print(json.dumps(stock_success(arguments.stock, arguments.episodes)))
        return 0
    if arguments.judge is not None:
        print(json.dumps(judging_time(arguments.judge)))
        return 0
    _adopt_orphans()
    versions = {name: importlib.metadata.version(name) for name in ("mani_skill", "sapien")}
    settings = {**versions, "config": CONFIG, "seeds": arguments.seeds, "episodes": arguments.episodes}
    settings |= {"held_out": arguments.held_out, "overrides": arguments.overrides}
    print(heading("PickCube on a learned reward", settings), flush=True)
    numbers = {}
    for seed in arguments.seeds:
        bench = Bench(seed, arguments.folder.resolve(), arguments)
        bench.run()
        numbers[seed] = summary(bench)
    print(f"\n{table(numbers)}\n", flush=True)
    return report("PickCube on a learned reward", settings, results(numbers))


if __name__ == "__main__":
    sys.exit(main())
