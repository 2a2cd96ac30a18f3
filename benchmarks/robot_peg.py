"""The whole robot workflow against the simulated robot: record, process, fit, learn by RLPD, measure.

`python -m benchmarks.robot_peg [--faults] [--keep DIR]` runs the steps of RLinf's robot workflow against
`guerdon robot-sim` on loopback, which is a process of its own. Success is what the simulator alone knows:
whether the peg is in the hole. It also counts commands outside the safety box. With `--faults` requests are
dropped and late, the controller gives up and a camera freezes, while recording and while learning. With
`--controls` the policy before learning and runs with every reward zero or shuffled stand beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report import Result, report
from guerdon.cli.main import main as guerdon
from guerdon.config import EnvConfig, load_config
from guerdon.core.types import Episode
from guerdon.data.collect.robot import RobotCollector
from guerdon.envs.robot import RobotEnv
from guerdon.envs.robot.vector import LearnerNames, robot_config
from guerdon.training.checkpoints import load_policy

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "examples" / "embodiment" / "config"
TIME_SCALE = 10.0
EPISODES, EVAL_EPISODES = 20, 50
MAX_MINUTES = 60.0
ARMS = ("start", "learned", "off", "shuffled")
"""With `--controls`; the robot's environment tells no success, so there is no arm on the true reward."""
FAULTS = "drop_rate=0.05,latency_rate=0.01,controller_error_rate=0.0005,freeze_rate=0.0005"
"""With about 40 commands an episode, a controller error in 50 episodes; what is late is so by 200 ms."""


class SimulatedRobot(AbstractContextManager["SimulatedRobot"]):
    """`guerdon robot-sim` in a process of its own."""

    def __init__(self, faults: str = "", seed: int = 0) -> None:
        command = [sys.executable, "-m", "guerdon.cli.main", "robot-sim", "--port", "0", "--json"]
        command += ["--seed", str(seed), "--time-scale", str(TIME_SCALE), "--faults", faults]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = str(json.loads(self._process.stdout.readline())["url"])

    def ask(self, route: str, content: Any | None = None) -> Any:
        """What a route of the simulation answers; with a content it is a POST."""
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + route, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            text = answer.read()
        return json.loads(text) if text[:1] in b"{[" else text.decode()

    def watch(self, box: tuple[Any, Any]) -> None:
        """Count commands outside a box from now on."""
        self.ask("/sim/box", {"low": list(box[0]), "high": list(box[1])})

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait()


class Witness(RobotCollector):
    """Compares every label with the truth."""

    robot_sim: SimulatedRobot

    def _count(self, episode: Episode) -> None:
        super()._count(episode)
        if episode.complete:
            truth = bool(self.robot_sim.ask("/sim/truth")["inserted"])
            self.verdicts = [*getattr(self, "verdicts", []), (episode.success, truth)]


def record(robot: SimulatedRobot, folder: Path, seed: int = 0) -> dict[str, Any]:
    """`EPISODES` episodes of the scripted operator, some of which fail on purpose."""
    overrides = [
        f"env.eval.override_cfg.url={robot.url}",
        f"env.eval.override_cfg.time_scale={TIME_SCALE}",
        "env.eval.operator=scripted",
        "env.eval.operator_params.failure_rate=0.3",
        f"collect.save_dir={folder}",
    ]
    config = load_config("realworld_collect_data", overrides, str(CONFIGS))
    collector = Witness(config.env.eval, config.collect, EPISODES, seed)
    collector.robot_sim = robot
    robot.watch(collector.robot.box)
    reason = collector.run()
    wrong = sum(said != true for said, true in collector.verdicts)
    return {**collector.counts, "reason": reason, "mislabelled": wrong, "steps": collector.steps}


def fit(folder: Path) -> Path:
    """Steps 2 and 3: process the recording, fit a reward model; returns its checkpoint."""
    run("data", "process", str(folder / "data.pkl"))
    run(
        "train-reward", "--config-path", str(ROOT / "examples" / "reward" / "config"),
        "--config-name", "reward_training", f"fit.data.path={folder / 'collected_data'}",
        "data.num_samples_per_episode=0", "data.fail_success_ratio=3.0", "actor.global_batch_size=32",
        "actor.micro_batch_size=16", "runner.max_epochs=30", "runner.val_check_interval=10",
        "runner.save_interval=100", "runner.early_stop.patience=10",
        f"runner.logger.log_path={folder / 'reward'}", *SMALL_MODEL,
    )  # fmt: skip
    return folder / "reward" / "checkpoints" / "best_model"


SMALL_MODEL = [
    "reward.model.arch=resnet10",
    "reward.model.width=16",
    "reward.model.image_size=[3,64,64]",
    "fit.optim.lr=1e-3",
    "fit.augment.shift_pixels=2",
    "fit.augment.color=0.2",
]
"""For a machine without a GPU."""


def learn(
    robot: SimulatedRobot, folder: Path, checkpoint: Path, seed: int, controls: bool, more: list[str]
) -> dict[str, Path]:
    """Step 4: RLPD on the learned reward alone, beside controls if asked for; arm -> the run's folder."""
    place = folder / "policy"
    overrides = [
        f"seed={seed}",
        *(f"env.{name}.override_cfg.url={robot.url}" for name in ("train", "eval")),
        *(f"env.{name}.override_cfg.time_scale={TIME_SCALE}" for name in ("train", "eval")),
        f"learner.sac.prior_data={folder / 'data.pkl'}",
        f"reward.checkpoint_path={checkpoint}",
        f"runner.logger.log_path={place}",
        *more,
    ]
    verb = ["prove", "--arms", ",".join(ARMS), "--seeds", "1", "--workers", "1"] if controls else ["train"]
    config = ["--config-path", str(CONFIGS), "--config-name", "realworld_peginsertion_rlpd_cnn_async"]
    run(*verb, *config, *overrides)
    return {arm: place / f"seed_{seed}" / arm for arm in ARMS} if controls else {"learned": place}


def measure(
    robot: SimulatedRobot, policy: Path, episodes: int = EVAL_EPISODES, seed: int = 10_000
) -> dict[str, float]:
    """Fresh episodes of a saved policy, judged by the simulator: is the peg in the hole at the end?"""
    saved = load_policy(policy)
    cfg: EnvConfig = saved.env
    config = robot_config(cfg, url=robot.url, standalone=False)
    env = LearnerNames(RobotEnv(config))
    inserted, lengths = [], []
    try:
        for episode in range(episodes):
            robot.ask("/sim/reset", {"seed": seed + episode})
            obs, _ = env.reset(seed=seed + episode)
            over, steps = False, 0
            while not over:
                batch = {name: np.array(part)[None] for name, part in obs.items()}
                action = saved.learner.act(batch, deterministic=True)[0]
                obs, _, terminated, truncated, _ = env.step(action)
                over, steps = terminated or truncated, steps + 1
            inserted.append(bool(robot.ask("/sim/truth")["inserted"]))
            lengths.append(steps)
    finally:
        env.close()
    print(f"{sum(inserted)} of {episodes} inserted", file=sys.stderr)
    return {"inserted": float(np.mean(inserted)), "steps": float(np.mean(lengths))}


def run(*arguments: str) -> None:
    """One command of ours, in this process."""
    code = guerdon(list(arguments))
    if code:
        raise SystemExit(f"guerdon {' '.join(arguments[:2])} ended with {code}")


def main() -> int:
    """All steps, timed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", action="store_true", help="with faults injected")
    parser.add_argument("--controls", action="store_true", help="and what it is compared with")
    parser.add_argument("--keep", type=Path, help="where to leave the files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="settings for learning")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    faults = FAULTS if arguments.faults else ""
    with tempfile.TemporaryDirectory() as place, SimulatedRobot(faults, arguments.seed) as robot:
        folder = (arguments.keep or Path(place)).resolve()
        began = time.perf_counter()
        recorded = record(robot, folder, arguments.seed)
        checkpoint = fit(folder)
        runs = learn(robot, folder, checkpoint, arguments.seed, arguments.controls, arguments.overrides)
        minutes = (time.perf_counter() - began) / 60.0
        seen = robot.ask("/sim/record")
        robot.ask("/sim/faults", {name.partition("=")[0]: 0.0 for name in faults.split(",") if name})
        measured = {arm: measure(robot, place) for arm, place in runs.items()}
    print(json.dumps({"recorded": recorded, "measured": measured, "record": seen, "minutes": minutes}))
    settings = {"time_scale": TIME_SCALE, "seed": arguments.seed, "faults": faults or "none"}
    few: dict[str, Any] = {"target": 0.0, "at_least": False}
    results = []
    for arm, found in measured.items():
        aim: dict[str, Any] = {"target": 96.0} if arm == "learned" else {"target": 50.0, "at_least": False}
        what = f"{arm}: peg in the hole, {EVAL_EPISODES} fresh episodes"
        results.append(Result(what=what, value=100 * found["inserted"], unit="%", **aim))
    return report(
        "robot_peg",
        settings,
        [
            *results,
            Result(what="recording to policy", value=minutes, target=MAX_MINUTES, at_least=False, unit="min"),
            Result(what="mislabelled episodes", value=float(recorded["mislabelled"]), **few),
            Result(what="commands outside the safety box", value=float(seen["outside"]), **few),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
