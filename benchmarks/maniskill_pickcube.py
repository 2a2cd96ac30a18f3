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
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Result, heading, report
from guerdon.core.atomic import write_atomic

CONFIG = "maniskill_rlpd_learned_reward"
TASK, CONTROL_MODE = "PickCube-v1", "pd_ee_delta_pos"
RECIPE = ("demos", "cloned", "tried", "seen", "joined", "fitted", "trained")
"""The stages that a user runs, and whose time counts."""
EVAL_SEED = 2_000_000
"""First seed of the episodes in the stock environment; nothing is trained or chosen there."""
FILM = 224
"""Pixels of a side of a film."""
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
        self.stage("demos", [*self._collect("demos", 0), demos], makes="demos")
        bare = ("reward.use_reward_model=false", "env.train.init_params.render_mode=null")
        short = ("learner.total_steps=8", "learner.eval_episodes=8")
        self.stage("cloned", self._train(*bare, *short, "log=cloned"), makes="cloned")
        self.stage("tried", self._attempts("cloned", "tried", 2, arguments.attempts), makes="tried")
        noisy = [
            "collect.policy_noise=0.9",
            f"collect.target_success={arguments.reward_data}",
            f"collect.target_failure={2 * arguments.reward_data}",
        ]
        self.stage("seen", [*self._collect("seen", 1), *noisy], makes="seen")
        self.stage("joined", *map(self._convert, ("demos", "tried", "seen")), makes="joined")
        fit = self._guerdon("train-reward", f"seed={self.seed}", "fit.data.path=joined", "log=fitted")
        self.stage("fitted", fit, makes="fitted")
        learned = "reward.model.checkpoint_path=fitted/checkpoints/best_model"
        self.stage("trained", self._train(learned, "log=trained"), makes="trained")
        # What it is compared with.
        self.stage("ceiling", self._train(*bare, "log=ceiling"), makes="ceiling")
        for name in ("trained", "cloned", "ceiling"):
            stock = [sys.executable, "-m", "benchmarks.maniskill_pickcube", "--stock", name]
            self.stage(f"success of {name}", [*stock, "--episodes", str(episodes)])
            if name == "ceiling":
                continue  # its episodes look like those of the others
            held_out = f"held_out_{name}"
            self.stage(held_out, self._attempts(name, held_out, 3, arguments.held_out), makes=held_out)
            score = ["reward", "score", "--checkpoint", "fitted/checkpoints/best_model", held_out, "--json"]
            self.stage(f"reward on {name}", [*self._program(), *score])
        self.stage("judging", [sys.executable, "-m", "benchmarks.maniskill_pickcube", "--judge", "fitted"])
        return self.done

    # The commands

    def _program(self) -> list[str]:
        return [sys.executable, "-m", "guerdon.cli.main"]

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

    def _convert(self, place: str) -> list[str]:
        return [*self._program(), "data", "convert", place, "joined", "--to", "native", "--json"]

    def _train(self, *overrides: str) -> list[str]:
        data = ("learner.warm_start.data=demos", "learner.sac.prior_data=demos")
        return self._guerdon("train", f"seed={self.seed}", *data, *overrides)

    def _attempts(self, name: str, place: str, number: int, count: int) -> list[str]:
        """Episodes of a policy as it explores, the cloned one with more noise, whatever becomes of them."""
        return [
            *self._collect(place, number),
            "collect.policy=checkpoint",
            f"collect.policy_checkpoint={name}",
            f"collect.policy_noise={0.05 if name == 'cloned' else 0.0}",
            f"collect.target_success={count}",
            f"collect.target_failure={count}",
            f"collect.max_episodes={count}",
        ]

    # Stages

    def stage(self, name: str, *commands: Sequence[str], makes: str | None = None) -> None:
        """Run commands unless that was done; `makes` is what they leave, and is removed first."""
        if name in self.done:
            return
        place = None if makes is None else self.folder / makes
        if place is not None and place.is_dir():
            shutil.rmtree(place)
        shown = [_shown(command) for command in commands]
        print(f"\n-- seed {self.seed}: {name}", *shown, sep="\n   ", flush=True)
        parts = [_timed(command, self.folder) for command in commands]
        answer = parts[-1][0]
        spent = {key: sum(part[1][key] for part in parts) for key in ("seconds", "core_seconds")}
        load = parts[0][1]["load"]
        self.done[name] = {**spent, "load_average": load, "commands": shown, "result": answer}
        text = json.dumps(self.done, indent=1).encode()
        write_atomic(self._file, lambda file: file.write(text))
        costs = f"{spent['seconds']:.0f} s, {spent['core_seconds']:.0f} s on a core, load {load:.1f}"
        print(f"   {costs}: {answer}", flush=True)


def _shown(command: Sequence[str]) -> str:
    text = " ".join(command).replace(sys.executable, "python")
    return text.replace("python -m guerdon.cli.main", "guerdon")


def _timed(command: Sequence[str], folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """What a command prints, a JSON object, and what it costs; processes that it started are counted too."""
    before, load, began = _core_seconds(), os.getloadavg()[0], time.perf_counter()
    path = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        printed, _ = process.communicate()
    seconds = time.perf_counter() - began
    limited = any(item.startswith("collect.max_episodes") for item in command)
    if process.returncode and not (
        limited and "gave up after" in printed
    ):  # a policy's episodes are as they are
        raise SystemExit(f"this command ended with {process.returncode}: {_shown(command)}")
    _reap()
    spent = {"seconds": seconds, "core_seconds": _core_seconds() - before, "load": load}
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
    from guerdon.envs.maniskill.vulkan import choose_driver
    from guerdon.training.checkpoints import load_policy

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
    times = [_milliseconds(lambda: worker.score(frames)) for _ in range(rounds + 2)][2:]
    return {"batch": BATCH, "ms": float(np.median(times)), "threads": torch.get_num_threads()}


def film(place: Path, out: Path, seed: int = EVAL_SEED + 1) -> dict[str, Any]:
    """An episode of the trained policy as a GIF, with what the reward model says of it under the picture."""
    from gymnasium.vector import AutoresetMode

    from guerdon.config import RewardConfig, RewardModelConfig, load_config
    from guerdon.envs.make import make_vector_env
    from guerdon.envs.observations import AT_REST_INFO, FrameSource, per_env, with_final
    from guerdon.monitoring.video import write_video
    from guerdon.serve import ImageRewardWorker
    from guerdon.training.checkpoints import load_policy

    policy = load_policy(place / "trained")
    model = RewardModelConfig(checkpoint_path=str(place / "fitted" / "checkpoints" / "best_model"))
    worker = ImageRewardWorker(RewardConfig(model=model))
    worker.init_worker()
    section = replace(load_config(CONFIG).env.eval, num_envs=1)
    env = make_vector_env(section, autoreset_mode=AutoresetMode.SAME_STEP, keep_final_frame=False)
    source, one = FrameSource(env, worker.manager.image_keys), np.zeros(1, np.int64)
    obs, _ = env.reset(seed=seed)
    pictures, prob, success, done = [], [], [], np.zeros(1, np.bool_)
    while not done.any():
        obs, _, terminated, truncated, info = env.step(policy.learner.act(obs, deterministic=True))
        done = terminated | truncated
        reached = with_final(obs, info.get("final_obs"), done)
        rests = per_env(info, AT_REST_INFO, 1, done)
        verdict = worker.score(source.frames(reached, done, one)).prob_success[0]
        prob.append(verdict if rests is None or rests[0] >= 0.5 else 0.0)
        reported = per_env(info, "success", 1, done)
        success.append(reported is not None and bool(reported[0] >= 0.5))
        native: Any = env.unwrapped
        pictures.append(native.render_frames(env_ids=one, size=(FILM, FILM), final=True)[0])
    env.close()
    flags = np.array(success)
    write_video(out, np.stack(pictures), np.array(prob, np.float32), worker.manager.threshold, flags)
    return {"file": str(out), "bytes": out.stat().st_size, "success": bool(flags.any())}


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
    collected = sum(done[name]["result"]["env_steps"] for name in ("demos", "cloned", "tried", "seen"))
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
    ("- attempts of the cloned policy", "seconds_tried", 1.0),
    ("- noisy script", "seconds_seen", 1.0),
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
        values = [_number(factor * each[key]) for each in numbers.values()]
        lines.append(f"| {text} | {' | '.join(values)} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return (
        f"{value:,.0f}"
        if abs(value) >= 100.0
        else f"{value:.3g}"
        if value < 0.9 or value > 1.0
        else f"{value:.4f}"
    )


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
    parser.add_argument(
        "--attempts", type=int, default=60, help="episodes of the cloned policy to learn from"
    )
    parser.add_argument("--reward-data", type=int, default=40, help="noisy successes; twice as many failures")
    parser.add_argument("--stock", type=Path, metavar="RUN", help="only measure this policy")
    parser.add_argument("--judge", type=Path, metavar="RUN", help="only time this reward model")
    parser.add_argument("--film", type=Path, metavar="GIF", help="only film the first seed's policy")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for every command")
    arguments = parser.parse_args()
    if arguments.stock is not None:
        print(json.dumps(stock_success(arguments.stock, arguments.episodes)))
        return 0
    if arguments.judge is not None:
        print(json.dumps(judging_time(arguments.judge)))
        return 0
    if arguments.film is not None:
        print(json.dumps(film(arguments.folder / f"seed_{arguments.seeds[0]}", arguments.film)))
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
