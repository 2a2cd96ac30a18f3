"""PPO on states with a terminal learned reward, from a checkpoint that succeeds in about 30% of episodes.

    python -m benchmarks.maniskill_terminal_ppo [--work DIR] [--seeds 2] [--control-seeds 1]

The stages are the commands of the last stage of RLinf's workflow on ManiSkill's PickCube, on a CPU:

1. `data`: episodes of the scripted policy, good and bad; every frame is rendered.
2. `model`: a classifier of single frames, cropped around the goal.
3. `start`: a checkpoint of `maniskill_ppo_mlp`, cloned from 120 successes and stopped early.
4. `guerdon prove` on `maniskill_ppo_mlp_resnet_reward` with `runner.resume_dir` and
   `reward.reward_mode=terminal`: the learned reward, a reward of zero, shuffled verdicts, the true success.

Data, model and start are made once, with seed 0, for all arms; the seeds of the proof were used for no choice
of a setting. Every evaluation has 200 fresh episodes, judged by the simulator. What is there already is not
done again. The results are printed and kept in `DIR/result.json` and `DIR/prove/prove.json`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Result, report

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "examples" / "embodiment" / "config"
FRAMES = ["env=maniskill_pickcube", "env.train.num_envs=8", "env.train.init_params.image_size=[128,128]"]
COLLECT = [*FRAMES, "collect.policy=scripted", "collect.cameras=[base_camera@goal]"]
STATES = ["learner.ppo.normalize_obs=false", "learner.ppo.initial_log_std=-2.7", "learner.ppo.gamma=0.99"]
"""Running statistics of states move on with the first rollout, and a cloned policy is then another one."""
# Without a reward the values stay at zero, so that the control `off` does not move the policy.
START = [
    *STATES,
    "learner.warm_start.epochs=50",
    "learner.warm_start.batch_size=128",
    "learner.warm_start.anneal_lr=true",
    "env.train.num_envs=2",
    "learner.total_steps=100",
    "learner.ppo.lr=1e-6",
    "env.train.init_params.reward_mode=none",
]
POLICY = [
    *STATES,
    "reward.reward_mode=terminal",
    "reward.reward_type=continuous",
    "env.train.num_envs=32",
    "env.train.init_params.image_size=[128,128]",
    "env.eval.init_params.image_size=[128,128]",
    "env.train.init_params.reward_mode=sparse",
    "env.eval.init_params.reward_mode=sparse",
    "learner.ppo.gae_lambda=0.97",
    "learner.ppo.lr=3e-5",
    "learner.ppo.update_epochs=8",
    "learner.ppo.minibatch_size=400",
    "learner.ppo.target_kl=0.03",
    "learner.eval_interval=88000",
    "learner.save_interval=16000",
]
EVAL = ["env.eval.num_envs=32", "learner.eval_episodes=32", "runner.logger.backends=[]"]
EPISODES = 200
DATA_SEED, FIRST_SEED = 0, 60
HIGHEST_START, LOWEST_END, NEAR = 40.0, 90.0, 10.0
"""Of success_once, in percent: the start, the learned reward, how far controls may end from the start."""


def guerdon(*arguments: object) -> tuple[dict[str, Any], float]:
    """Run a command with `--json`; returns its result and the seconds it took."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "guerdon.cli.main", *map(str, arguments), "--json"]
    place = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": place}, stdout=subprocess.PIPE, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result, time.perf_counter() - started


class Stages:
    """What was done so far, in `work/result.json`."""

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self._file = work / "result.json"
        self.done: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def stage(self, name: str, *arguments: object) -> dict[str, Any]:
        """Run a command unless it was run before."""
        if name not in self.done:
            result, seconds = guerdon(*arguments)
            self.done[name] = {**result, "minutes": seconds / 60}
            self._file.write_text(json.dumps(self.done, indent=1))
        found: dict[str, Any] = self.done[name]
        return found


def collect_data(stages: Stages, seed: int, data: Path) -> None:
    """The successes to be cloned, and near misses beside them."""
    for number, (noise, good, bad) in enumerate(((0.2, 120, 0), (0.9, 60, 120))):
        place = data / ("shown" if number == 0 else "near")
        targets = f"collect.target_success={good}", f"collect.target_failure={bad}"
        kept = f"collect.save_dir={place}", f"collect.policy_noise={noise}", f"seed={2 * seed + number}"
        stages.stage(place.name, "collect", *COLLECT, *targets, *kept, "--resume")
        stages.stage(f"{place.name}_joined", "data", "convert", place, data / "all", "--to", "native")


def prepare(work: Path) -> tuple[Path, Path]:
    """Data, reward model and start -> the last two."""
    stages, data, model, start = Stages(work), work / "data", work / "model", work / "start"
    collect_data(stages, DATA_SEED, data)
    shape = "reward.model.image_keys=[base_camera@goal]", "reward.model.image_size=[3,64,64]"
    size = "reward.model.arch=resnet10", "reward.model.width=16", "fit.optim.lr=1e-3", "fit.epochs=10"
    where = f"fit.data.path={data / 'all'}", f"runner.logger.log_path={model}", f"seed={DATA_SEED}"
    stages.stage("model", "train-reward", *shape, *size, *where, "runner.logger.backends=[]")
    shown = f"learner.warm_start.data={data / 'shown'}", f"runner.logger.log_path={start}"
    config = "--config-path", CONFIGS, "--config-name", "maniskill_ppo_mlp"
    stages.stage("start", "train", *config, *START, *EVAL, *shown, f"seed={DATA_SEED}")
    minutes = {name: round(each["minutes"], 1) for name, each in stages.done.items()}
    print(f"   minutes: {minutes}", flush=True)
    return model / "checkpoints" / "best_model", start


def prove(work: Path, seeds: int, control_seeds: int, steps: int, workers: int | None) -> list[Result]:
    """All arms with some seeds, `start` and `learned` with more; what is asked for."""
    model, start = prepare(work)
    command = ["prove", "--config-path", CONFIGS, "--config-name", "maniskill_ppo_mlp_resnet_reward"]
    command += ["--episodes", EPISODES, *POLICY, *EVAL, f"seed={FIRST_SEED}", f"learner.total_steps={steps}"]
    command += [f"reward.model.checkpoint_path={model}", f"runner.resume_dir={start}"]
    command += [f"runner.logger.log_path={work / 'prove'}"]
    command += [] if workers is None else ["--workers", workers]
    found, _ = guerdon(*command, "--seeds", control_seeds)
    arms = dict(found["arms"])
    if control_seeds < seeds:
        found, _ = guerdon(*command, "--seeds", seeds, "--arms", "start,learned")
        arms.update(found["arms"])
    print(f"   {found['verdict']}", flush=True)
    once = {name: [100 * each["success"] for each in arm["seeds"]] for name, arm in arms.items()}
    for name, arm in arms.items():
        minutes = [round(each["seconds"] / 60, 1) for each in arm["seeds"]]
        alarms = [each["alarms"] for each in arm["seeds"]]
        print(f"   {name}: {once[name]} % after {arm['env_steps']:,} steps, {minutes} min, {alarms}")
    moved = [abs(once[name][0] - once["start"][0]) for name in ("off", "shuffled")]
    least: dict[str, Any] = {"unit": "%", "at_least": False}
    return [
        Result(what="start, highest seed", value=max(once["start"]), target=HIGHEST_START, **least),
        Result(what="learned, lowest seed", value=min(once["learned"]), target=LOWEST_END, unit="%"),
        Result(what="off and shuffled, distance from the start", value=max(moved), target=NEAR, **least),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/maniskill_terminal_ppo"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--control-seeds", type=int, default=1, help="seeds of off, shuffled and true")
    parser.add_argument("--steps", type=int, default=176_000, help="of PPO in each run")
    parser.add_argument("--workers", type=int, default=None, help="runs at a time (one for each core)")
    given = parser.parse_args()
    settings: dict[str, object] = {
        "seeds": f"{FIRST_SEED} to {FIRST_SEED + given.seeds - 1}",
        "steps": given.steps,
        **{name: importlib.metadata.version(name) for name in ("mani_skill", "sapien")},
    }
    results = prove(given.work.resolve(), given.seeds, given.control_seeds, given.steps, given.workers)
    sys.exit(report("maniskill_terminal_ppo", settings, results))
