"""`guerdon demo`: the workflow on the embedded environment, as far as its stages exist."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from guerdon.collect.run import collect
from guerdon.config import GuerdonConfig, load_config
from guerdon.datasets.audit import audit
from guerdon.datasets.preview import write_preview
from guerdon.fit import FitResult, fit_reward_model
from guerdon.run.judge import card
from guerdon.store import inspect
from guerdon.store.atomic import make_directory, write_atomic
from guerdon.types import display_path

Rows = list[tuple[str, str]]
FIT_BRIEFLY = "fit.epochs=6"


def run_demo(overrides: Sequence[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Collect, audit, fit, and judge the model on fresh episodes; returns the summary and lines to print."""
    started = time.perf_counter()
    config = load_config("demo", overrides)
    fit_config = load_config("train_reward", [FIT_BRIEFLY, *overrides])
    root = Path(config.runner.output_dir) / config.runner.experiment_name
    folder = make_directory(root / time.strftime("%Y%m%d-%H%M%S"))
    stage1, rows = _collect(config, folder)
    stage2, more = _fit(fit_config, folder)
    outcome = {"stage1": stage1, "stage2": stage2, "seconds": round(time.perf_counter() - started, 2)}
    text = json.dumps(outcome, indent=1).encode()
    write_atomic(folder / "summary.json", lambda file: file.write(text))
    rows += [*more, ("summary", display_path(folder / "summary.json"))]
    return {**outcome, "folder": str(folder)}, [f"{name:<18}{value}" for name, value in rows]


def _collect(config: GuerdonConfig, folder: Path) -> tuple[dict[str, Any], Rows]:
    """Stage 1: a noisy expert's episodes, to learn from and (fewer) to judge the model on."""
    data, fresh = folder / "data", folder / "fresh"
    result = collect(config.env.train, replace(config.collect, save_dir=str(data)), seed=config.seed)
    few = replace(
        config.collect,
        save_dir=str(fresh),
        target_success=config.collect.target_success // 2,
        target_failure=config.collect.target_failure // 2,
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
        "seconds": round(result.seconds, 2),
    }
    return stage1, [
        ("stage 1: collect", f"{kinds}, {summary.num_frames} frames in {result.seconds:.0f} s"),
        ("  audit", errors or "ok"),
        ("  data", display_path(data)),
        ("  picture", display_path(folder / "preview.png")),
    ]


def _fit(config: GuerdonConfig, folder: Path) -> tuple[dict[str, Any], Rows]:
    """Stage 2: fit a reward model and judge it on episodes that it has never seen."""
    fit = replace(config.fit, data=replace(config.fit.data, path=str(folder / "data")))
    result: FitResult = fit_reward_model(config.reward.model, fit, folder=folder, seed=config.seed)
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
