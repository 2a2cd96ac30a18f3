"""The arms of `guerdon prove`: the runs of a config and of its controls, each a run with a folder of its own.

All arms of a seed go on from the policy that its `start` saved: what is cloned, resumed or pretrained is made
once. Arms run one after another in this process, or side by side in processes of their own.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from guerdon.config import GuerdonConfig, load_config
from guerdon.core.atomic import make_directory, storage_errors
from guerdon.core.errors import GuerdonError, RunInterrupted, WorkerError
from guerdon.core.parent_watch import end_with
from guerdon.core.progress import progress_bar
from guerdon.core.types import display_path
from guerdon.monitoring.proof import SeedResult
from guerdon.monitoring.run_files import read_run
from guerdon.training.checkpoints import find_policy
from guerdon.training.folders import CHECKPOINTS, SUMMARY, held, write_config
from guerdon.training.trainer import EmbodiedRunner

log = logging.getLogger("guerdon")

CONTROLS: dict[str, Literal["none", "off", "shuffled", "env"]] = {
    "start": "none",
    "learned": "none",
    "off": "off",
    "shuffled": "shuffled",
    "true": "env",
}
"""Arm -> `reward.control`."""
LOG_FILE = "log.txt"
POLL_SECONDS = 0.2
STOP_SECONDS = 60.0
"""How long an interrupted arm may take to save its state."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run: an arm with a seed."""

    name: str
    seed: int
    folder: Path
    config: GuerdonConfig

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        """Whether its run came to its end."""
        return (self.folder / SUMMARY).is_file()

    @property
    def env_steps(self) -> int:
        """Steps that its metrics tell of so far."""
        try:
            lines = (self.folder / "metrics.jsonl").read_bytes()[-20_000:].splitlines()
        except FileNotFoundError:
            return 0
        for line in reversed(lines):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError):
                continue  # cut off in the middle, or being written
        return 0

    def result(self) -> SeedResult:
        """What came of it."""
        run = read_run(self.folder)
        with storage_errors(self.folder / "summary.json"):
            summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_bytes())
        once = summary["success_once"]
        name = "eval/env_return" if once is None else "eval/success_once"
        points = zip(*run.series[name], strict=True) if name in run.series else ()
        return SeedResult(
            seed=self.seed,
            episodes=int(summary["episodes"]),
            success=once,
            env_return=float(summary["env_return"]),
            env_steps=int(summary["env_steps"]),
            curve=tuple((float(step), float(value)) for step, value in points),
            alarms=tuple(summary["alarms"]),
            stopped=None if self.name == "start" else summary["stopped"],
            seconds=float(summary["seconds"]),
        )


def make_arm(config: GuerdonConfig, root: Path, name: str, seed: int) -> Arm:
    """An arm of the proof in `root`."""
    folder = root / f"seed_{seed}" / name
    logger = replace(config.runner.logger, log_path=str(folder))
    config = replace(
        config,
        seed=seed,
        reward=replace(config.reward, control=CONTROLS[name]),
        runner=replace(config.runner, logger=logger),
        learner=replace(config.learner, stop_return=None, save_best=False),  # all have the same budget
    )
    return Arm(name=name, seed=seed, folder=folder, config=config)


def run_arm(arm: Arm, start: Path) -> dict[str, Any]:
    """Run an arm from the policy in `start`, or from where it was interrupted; returns its summary."""
    config, begins = arm.config, arm.name == "start"
    if not begins:
        begun = any((arm.folder / CHECKPOINTS).glob("step_*"))
        place = find_policy(arm.folder if begun else start)
        config = replace(config, runner=replace(config.runner, resume_dir=str(place)))
    make_directory(arm.folder)
    return EmbodiedRunner(config, arm.folder, max_updates=0 if begins else None).run()


def _run_in(folder: Path, arm: Arm | None = None) -> None:
    """Run the arm of a proof, by itself in its folder; None: what its `config.yaml` says."""
    if arm is None:
        config = load_config(folder / "config.yaml")
        arm = Arm(name=folder.name, seed=config.seed, folder=folder, config=config)
    with held(folder):
        run_arm(arm, folder.parent / "start")


def run_arms(arms: Sequence[Arm], workers: int) -> None:
    """Run those that are not finished, `workers` at a time; what is shown are whole arms and their steps."""
    waiting = [arm for arm in arms if not arm.finished]
    for arm in waiting:
        make_directory(arm.folder)
        write_config(arm.folder, arm.config)
    count, began = len(arms) - len(waiting), time.perf_counter()

    def on_finished(arm: Arm) -> None:
        nonlocal count
        count += 1
        found, seconds = arm.result(), time.perf_counter() - began
        value = f"return {found.env_return:.4g}" if found.success is None else f"{found.success:.1%}"
        words = (arm, value, found.episodes, count, len(arms), seconds)
        log.info("%s: %s of %d episodes (%d of %d runs, %.0f s)", *words)

    if workers > 1 and len(waiting) > 1:
        _side_by_side(waiting, workers, on_finished)
        return
    for arm in waiting:
        _run_in(arm.folder, arm)
        on_finished(arm)


def _side_by_side(arms: Sequence[Arm], workers: int, on_finished: Callable[[Arm], None]) -> None:
    waiting, running = list(arms), list[tuple[Arm, subprocess.Popen[bytes]]]()
    threads = str(max((os.cpu_count() or 1) // workers, 1))
    total = sum(arm.config.learner.total_steps for arm in arms if arm.name != "start")
    finished_steps = 0
    try:
        with progress_bar("arms", total=total, unit="step") as bar:
            while waiting or running:
                while waiting and len(running) < workers:
                    arm = waiting.pop(0)
                    running.append((arm, _start(arm, threads)))
                for arm, process in list(running):
                    if process.poll() is not None:
                        running.remove((arm, process))
                        _check_ended(arm, process.returncode)
                        finished_steps += arm.config.learner.total_steps * (arm.name != "start")
                        on_finished(arm)
                bar.update(finished_steps + sum(arm.env_steps for arm, _ in running) - bar.n)
                time.sleep(POLL_SECONDS)
    except BaseException as error:
        _stop([process for _, process in running], gently=isinstance(error, KeyboardInterrupt))
        raise


def _start(arm: Arm, threads: str) -> subprocess.Popen[bytes]:
    """A process of its own session: Ctrl-C reaches it through us, once."""
    code = f"from guerdon.training.arms import main; main({str(arm.folder)!r}, {os.getpid()})"
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    with storage_errors(arm.folder / LOG_FILE), (arm.folder / LOG_FILE).open("ab") as log_file:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=log_file,
            stderr=log_file,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )


def _check_ended(arm: Arm, code: int) -> None:
    if code == 0 and arm.finished:
        return
    written = (arm.folder / LOG_FILE).read_text(errors="replace").strip().splitlines()
    last = written[-1] if written else "it left no message"
    raise WorkerError(f"the arm {arm} failed: {last} ({display_path(arm.folder / LOG_FILE)})")


def _stop(processes: Sequence[subprocess.Popen[bytes]], *, gently: bool) -> None:
    """Let interrupted arms save what they have; after an error, or if that takes too long, end them."""
    for process in processes:
        process.send_signal(signal.SIGINT if gently else signal.SIGTERM)
    until = time.monotonic() + STOP_SECONDS
    for process in processes:
        try:
            process.wait(max(until - time.monotonic(), 0.1))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


def main(folder: str, parent: int) -> None:
    """The process of an arm."""
    end_with(parent)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s", force=True)
    try:
        _run_in(Path(folder))
    except RunInterrupted as stopped:
        sys.exit(str(stopped))
    except GuerdonError as error:
        sys.exit(f"{type(error).__name__}: {error}")
