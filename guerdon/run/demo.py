"""`guerdon demo`: the workflow on the embedded environment, as far as its stages exist."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from guerdon.collect.run import collect
from guerdon.config import load_config
from guerdon.datasets.audit import audit
from guerdon.datasets.preview import write_preview
from guerdon.store import inspect
from guerdon.store.atomic import write_atomic
from guerdon.types import display_path


def run_demo(output_dir: Path, seed: int = 0) -> tuple[dict[str, Any], list[str]]:
    """Collect, inspect and audit; returns the summary and the lines to print."""
    started = time.perf_counter()
    folder = output_dir / "demo" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data"
    config = load_config("demo")
    result = collect(config.env.train, replace(config.collect, save_dir=str(data)), seed=seed)
    summary = inspect(data)
    report = audit(data)
    preview = folder / "preview.png"
    write_preview(data, preview)
    stage1 = {
        "episodes_success": summary.num_success_episodes,
        "episodes_failure": summary.num_failure_episodes,
        "frames": summary.num_frames,
        "seconds": round(result.seconds, 2),
    }
    outcome = {"stage1": stage1, "audit_ok": report.ok, "seconds": round(time.perf_counter() - started, 2)}
    text = json.dumps(outcome, indent=1).encode()
    write_atomic(folder / "summary.json", lambda file: file.write(text))
    rows = [
        (
            "stage 1: collect",
            f"{summary.num_success_episodes} successes, {summary.num_failure_episodes} failures",
        ),
        ("", f"{summary.num_frames} frames, {summary.num_positive_frames} of them positive"),
        ("", f"{summary.bytes / 1e6:.1f} MB"),
        ("", f"{result.env_steps} steps in {result.seconds:.1f} s"),
        ("audit", "ok" if report.ok else "; ".join(f.message for f in report.findings if f.level == "error")),
        ("data", display_path(data)),
        ("picture", display_path(preview)),
        ("summary", display_path(folder / "summary.json")),
    ]
    return {**outcome, "folder": str(folder)}, [f"{name:<18}{value}" for name, value in rows]
