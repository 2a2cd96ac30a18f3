"""PPO on states with a terminal learned reward, from a checkpoint that succeeds in about 30% of episodes.

    python -m benchmarks.maniskill_terminal_ppo --seed 0 --work DIR [--data DIR --model DIR]

The stages are the commands of the third document on ManiSkill's PickCube, on a CPU:

1. `data`: episodes of the scripted policy, good and bad; every frame is rendered.
2. `model`: a classifier of single frames, cropped around the goal.
3. `start`: a checkpoint of `maniskill_ppo_mlp`, cloned from 120 successes and stopped early.
4. `policy`: `maniskill_ppo_mlp_resnet_reward` with `runner.resume_dir`, `reward.reward_mode=terminal`.
5. 200 fresh episodes of the stock environment for the start and for the end, judged by the simulator.

What is there already is not done again, and stage 4 goes on from its last checkpoint. `--data` and `--model`
take those of an earlier run. The result is printed and kept in `DIR/result.json`.
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
START = [
    *STATES,
    "learner.warm_start.epochs=50",
    "learner.warm_start.batch_size=128",
    "learner.warm_start.anneal_lr=true",
    "env.train.num_envs=2",
    "learner.total_steps=100",
    "learner.ppo.lr=1e-6",
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
    "learner.eval_interval=32000",
    "learner.save_interval=16000",
]
EVAL = ["env.eval.num_envs=32", "learner.eval_episodes=32", "runner.logger.backends=[]"]
EPISODES = 200


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


def latest(folder: Path) -> Path | None:
    """The folder of a run that has a checkpoint to go on from."""
    return folder if any((folder / "checkpoints").glob("step_*/state.pt")) else None


def run(seed: int, work: Path, data: Path | None, model: Path | None, steps: int) -> list[Result]:
    """All stages; those with a result are left out."""
    stages, place = Stages(work), data or work / "data"
    if data is None:
        collect_data(stages, seed, place)
    if model is None:
        shape = "reward.model.image_keys=[base_camera@goal]", "reward.model.image_size=[3,64,64]"
        size = "reward.model.arch=resnet10", "reward.model.width=16", "fit.optim.lr=1e-3", "fit.epochs=10"
        where = f"fit.data.path={place / 'all'}", f"runner.logger.log_path={work / 'model'}", f"seed={seed}"
        stages.stage("model", "train-reward", *shape, *size, *where, "runner.logger.backends=[]")
        model = work / "model" / "checkpoints" / "best_model"
    here = ["train", "--config-path", CONFIGS, "--config-name"]
    shown = f"learner.warm_start.data={place / 'shown'}", f"runner.logger.log_path={work / 'start'}"
    stages.stage("start", *here, "maniskill_ppo_mlp", *START, *EVAL, *shown, f"seed={seed}")
    begun = latest(work / "policy") or work / "start"
    kept = f"runner.resume_dir={begun}", f"runner.logger.log_path={work / 'policy'}", f"seed={seed}"
    judge = f"reward.model.checkpoint_path={model}", f"learner.total_steps={steps}"
    config = "maniskill_ppo_mlp_resnet_reward"
    trained = stages.stage("policy", *here, config, *POLICY, *EVAL, *kept, *judge)
    measure = "--episodes", EPISODES, "--seed", 10_000_019 + seed
    first = stages.stage("start_measured", "evaluate", "--checkpoint", work / "start", *measure)
    last = stages.stage("policy_measured", "evaluate", "--checkpoint", work / "policy", *measure)
    for name, result in (("start", first), ("policy", last)):
        rates = f"success_once {result['success_once']:.3f}, success_at_end {result['success_at_end']:.3f}"
        print(f"   seed {seed}, {name}: {rates} on {result['episodes']} fresh episodes", flush=True)
    minutes = {name: round(each["minutes"], 1) for name, each in stages.done.items()}
    print(f"   {trained['env_steps']} steps, alarms {trained['alarms']}; minutes: {minutes}", flush=True)
    once = Result(what=f"seed {seed}, success_once", value=100 * last["success_once"], target=90.0, unit="%")
    return [once]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=None, help="where everything is kept")
    parser.add_argument("--data", type=Path, default=None, help="`data` of an earlier run")
    parser.add_argument(
        "--model", type=Path, default=None, help="a reward model of single frames around the goal"
    )
    parser.add_argument("--steps", type=int, default=176_000, help="of PPO on the learned reward")
    given = parser.parse_args()
    work = given.work or Path("runs") / f"maniskill_terminal_ppo_{given.seed}"
    settings: dict[str, object] = {
        "seed": given.seed,
        "steps": given.steps,
        **{name: importlib.metadata.version(name) for name in ("mani_skill", "sapien")},
    }
    sys.exit(
        report(
            "maniskill_terminal_ppo", settings, run(given.seed, work, given.data, given.model, given.steps)
        )
    )
