"""`guerdon demo`: all three stages on the embedded environment, then the report."""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from guerdon.cli.reward import card
from guerdon.cli.verb import Result, aligned, next_command
from guerdon.config import GuerdonConfig, LearnerConfig, load_config
from guerdon.core import strict_json
from guerdon.core.atomic import write_atomic
from guerdon.core.errors import RunInterrupted
from guerdon.core.types import display_path
from guerdon.data.collect.run import collect
from guerdon.data.datasets.audit import audit
from guerdon.data.datasets.pictures import write_preview
from guerdon.data.summary import inspect
from guerdon.fit import FitResult, fit_reward_model
from guerdon.rewards.image.int8_file import int8_path
from guerdon.training.collect_policy import collect_clone
from guerdon.training.folders import held, new_run_folder
from guerdon.training.prove import prove

log = logging.getLogger("guerdon")

Rows = list[tuple[str, str]]
CONTROLS = ("off", "true")
"""What runs beside the training on the learned reward; see `guerdon prove`."""


def demo_verb(arguments: argparse.Namespace) -> Result:
    """All three stages."""
    values, lines = run_demo(arguments.overrides)
    steps = [
        next_command("evaluate", "--checkpoint", display_path(values["stage3"]["run"])),
        next_command("data", "inspect", display_path(Path(values["folder"]) / "data")),
        next_command("--help") + "  # every verb, by stage",
    ]
    return Result(values, lines, next_steps=steps)


def run_demo(overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Collect, fit and judge a reward model, train a policy on it; returns the summary and lines to print."""
    started = time.perf_counter()
    config = load_config("demo", overrides)
    fit_config = load_config("demo_fit", overrides)
    train_config = load_config("demo_train", overrides)
    root = Path(config.runner.output_dir) / config.runner.experiment_name
    folder = new_run_folder(root)
    try:
        with held(folder):
            stage1, rows = collect_for_demo(config, train_config.learner, folder)
            stage2, more = _fit(fit_config, folder)
            stage3, last = _train(train_config, folder)
    except RunInterrupted as stopped:  # the demo's stages have no settings of their own to go on with
        log.warning("%s keeps what there is; the demo starts over every time", display_path(folder))
        raise KeyboardInterrupt from stopped
    seconds = round(time.perf_counter() - started, 2)
    outcome = {"stage1": stage1, "stage2": stage2, "stage3": stage3, "seconds": seconds}
    write_atomic(folder / "summary.json", strict_json.dumps(outcome, indent=1))
    rows += [*more, *last, ("summary", f"{display_path(folder / 'summary.json')}, {seconds:.0f} s")]
    return {**outcome, "folder": str(folder)}, aligned(rows, 18)


def collect_for_demo(
    config: GuerdonConfig, learner: LearnerConfig, folder: Path
) -> tuple[dict[str, Any], Rows]:
    """Stage 1: episodes of a noisy expert and of a policy that imitates it, and fresh ones to judge by."""
    data, fresh = folder / "data", folder / "fresh"
    section = replace(config.collect, save_dir=str(data))
    result = collect(config.env.train, section, seed=config.seed)
    good, bad = section.target_success // 2, section.target_failure // 2
    attempts = replace(section, target_success=good, target_failure=bad, max_episodes=4 * (good + bad) + 1)
    # a clone of all successes: it holds the cube close to the goal, on either side of the tolerance
    learner = replace(learner, warm_start=replace(learner.warm_start, num_episodes=None))
    own = collect_clone(learner, replace(config.env.train, num_envs=64), attempts, data, seed=config.seed)
    seconds = result.seconds + own.seconds
    few = replace(
        config.collect,
        save_dir=str(fresh),
        target_success=config.collect.target_success // 5,
        target_failure=config.collect.target_failure // 5,
    )
    collect(config.env.train, few, seed=config.seed + 1)
    summary, report = inspect(data), audit(data)
    write_preview(data, folder / "preview.png")
    errors = "; ".join(finding.message for finding in report.findings if finding.level == "error")
    kinds = f"{summary.num_success_episodes} successes, {summary.num_failure_episodes} failures"
    stage1 = {
        "episodes_success": summary.num_success_episodes,
        "episodes_failure": summary.num_failure_episodes,
        "frames": summary.num_frames,
        "audit_ok": report.ok,
        "seconds": round(seconds, 2),
    }
    return stage1, [
        ("stage 1: collect", f"{kinds}, {summary.num_frames} frames in {seconds:.0f} s"),
        ("  audit", errors or "ok"),
        ("  data", display_path(data)),
        ("  picture", display_path(folder / "preview.png")),
    ]


def _fit(config: GuerdonConfig, folder: Path) -> tuple[dict[str, Any], Rows]:
    """Stage 2: fit a reward model and judge it on episodes that it has never seen."""
    fit = replace(config.fit, data=replace(config.fit.data, path=str(folder / "data")))
    model = replace(config.reward.model, precision=_precision())
    result: FitResult = fit_reward_model(model, fit, folder=folder / "reward", seed=config.seed)
    verdict = card(folder / "fresh", result.checkpoint, folder / "card.html", precision="fp32")
    metrics = verdict["metrics"]
    stage2 = {
        "val_auc": result.metrics["auc"],
        "threshold": result.threshold.threshold,
        "false_positive_rate": result.threshold.false_positive_rate,
        "fresh_auc": metrics["auc"],
        "fresh_true_positive_rate": metrics["true_positive_rate"],
        "fresh_false_positive_rate": metrics["false_positive_rate"],
        "seconds": round(result.seconds, 2),
    }
    fresh = f"{metrics['num_episodes']:.0f} fresh episodes: AUC {metrics['auc']:.4f}"
    return stage2, [
        ("stage 2: fit", f"AUC {result.metrics['auc']:.4f} on held-out episodes, {result.seconds:.0f} s"),
        ("  threshold", f"{result.threshold.threshold:.3f}, {result.calibration.kind} calibration"),
        ("  on", fresh),
        ("  fires on", f"{metrics['true_positive_rate']:.1%} of success frames"),
        ("  and on", f"{metrics['false_positive_rate']:.2%} of failure frames"),
        ("  checkpoint", display_path(result.checkpoint)),
        ("  reward card", display_path(folder / "card.html")),
    ]


def _precision() -> Literal["fp32", "int8"]:
    """int8 where its packages are installed; it is several times faster and decides the same."""
    if find_spec("onnx") is not None and find_spec("onnxruntime") is not None:
        return "int8"
    log.info("scoring in fp32: int8 needs pip install 'guerdon[serve]'")
    return "fp32"


def _train(config: GuerdonConfig, folder: Path) -> tuple[dict[str, Any], Rows]:
    """Stage 3: imitate a few successes, then train on the learned reward alone, beside the controls."""
    checkpoint = folder / "reward" / "checkpoints" / "best_model"
    precision: Literal["fp32", "int8"] = "int8" if int8_path(checkpoint).is_file() else "fp32"
    model = replace(config.reward.model, checkpoint_path=str(checkpoint), precision=precision)
    warm_start = replace(config.learner.warm_start, data=str(folder / "data"))
    logger = replace(config.runner.logger, log_path=str(folder / "train"))
    config = replace(
        config,
        env=replace(config.env, eval=replace(config.env.train, num_envs=config.env.eval.num_envs)),
        reward=replace(config.reward, model=model),
        learner=replace(config.learner, warm_start=warm_start),
        runner=replace(config.runner, logger=logger),
    )
    proof = prove(config, seeds=1, arms=CONTROLS)
    run = Path(proof["folder"]) / f"seed_{config.seed}" / "learned"
    summary = json.loads((run / "summary.json").read_bytes())
    rates = {name: arm["mean"] for name, arm in proof["arms"].items()}
    names = ("success_rate", "success_at_end", "episodes", "env_steps", "seconds", "reward", "alarms")
    stage3 = {
        "start_success_rate": rates["start"],
        "off_success_rate": rates["off"],
        "true_success_rate": rates["true"],
        **{name: summary[name] for name in names},
        "run": str(run),
    }
    shown = warm_start.num_episodes or "all"
    steps = f"{summary['env_steps']} steps in {summary['seconds']:.0f} s"
    return stage3, [
        ("stage 3: train", f"PPO on the learned reward alone, {steps}"),
        ("  before", f"{rates['start']:.1%}: a clone of {shown} demonstrations"),
        ("  after", f"{_success(summary)}, by the environment's own judgement"),
        ("  without it", f"{rates['off']:.1%}: the same training, every reward zero"),
        ("  true reward", f"{rates['true']:.1%}: the same training on the environment's own success"),
        ("  alarms", ", ".join(dict.fromkeys(summary["alarms"])) or "none"),
        ("  policy", display_path(summary["checkpoint"])),
        ("  report", display_path(run / "report.html")),
        ("  controls", display_path(Path(proof["folder"]) / "prove.html")),
    ]


def _success(summary: dict[str, Any]) -> str:
    return f"{summary['success_rate']:.1%} of {summary['episodes']} fresh episodes"
