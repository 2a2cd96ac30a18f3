"""`guerdon reward`: score frames, write the reward card, share, recalibrate, make the int8 version."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from guerdon.cli.verb import Result, aligned, next_command, setting
from guerdon.core import strict_json
from guerdon.core.atomic import write_atomic
from guerdon.core.errors import ConfigError
from guerdon.core.types import display_path
from guerdon.data.datasets.frames import RewardDataset, open_store, rows_of, split_store
from guerdon.fit.recalibrate import recalibrate
from guerdon.fit.score import ScoredFrames, score_path
from guerdon.fit.write_back import write_back
from guerdon.monitoring.assess import Precision, assess, load_manager, summarize_scores
from guerdon.monitoring.card import WORDS
from guerdon.monitoring.model_card import evidence_on
from guerdon.monitoring.page import percent, plain
from guerdon.rewards.image import load_checkpoint
from guerdon.rewards.image.int8_file import int8_path, quantize_checkpoint
from guerdon.rewards.image.lerobot_writing import write_lerobot
from guerdon.rewards.image.shared_model import push_shared, save_shared
from guerdon.rewards.relabel import fires
from guerdon.training.trackers import send_files


def score_verb(arguments: argparse.Namespace) -> Result:
    """Success probabilities of a data set, of pictures or of a video."""
    if arguments.write_back is not None:
        return _write_back(arguments)
    result = score(
        arguments.path,
        arguments.checkpoint,
        arguments.out,
        precision=arguments.precision,
        threshold=arguments.threshold,
    )
    lines = [
        f"{result['frames']} frames, {result['fires']} above the threshold of {result['threshold']:.4f}, "
        f"mean probability {result['mean_probability']:.4f}"
    ]
    metrics = result.get("metrics")
    if metrics is not None:
        lines.append(
            f"AUC {plain(metrics['auc'], 4)}, true positives {percent(metrics['true_positive_rate'])}, "
            f"false positives {percent(metrics['false_positive_rate'])}"
        )
    lines.append(f"{result['frames_per_second']:,.0f} frames/s")
    lines += [f"-> {display_path(arguments.out)}"] if arguments.out is not None else []
    return Result(result, lines)


def _write_back(arguments: argparse.Namespace) -> Result:
    if arguments.out is not None:
        raise ConfigError("give --out or --write-back: one writes a table, the other a copy of the data set")
    manager = load_manager(arguments.checkpoint, precision=arguments.precision, threshold=arguments.threshold)
    result = write_back(manager, arguments.path, arguments.write_back, label_at=arguments.label_at)
    where = {"next": "of the next row's frame", "row": "of the row's own frame"}[result["label_at"]]
    lines = [
        f"{result['frames']} frames of {result['episodes']} episodes, {result['fires']} above the threshold "
        f"of {result['threshold']:.4f}",
        f"next.reward and next.success are {where}",
        f"-> {display_path(arguments.write_back)}",
    ]
    return Result(result, lines)


def card_verb(arguments: argparse.Namespace) -> Result:
    """The reward card."""
    found = assess(
        arguments.checkpoint,
        arguments.data,
        arguments.out,
        precision=arguments.precision,
        threshold=arguments.threshold,
    )
    uses = ((each.use, f"{WORDS[each.level]}. {each.reason}") for each in found.verdict.uses)
    lines = [found.verdict.headline, *aligned(uses, 17), *(f"- {step.why}" for step in found.next_steps)]
    commands = [step.command for step in found.next_steps if step.command]
    lines.append(f"-> {display_path(arguments.out)}")
    if arguments.track:
        lines.append(f"-> {', '.join(send_files(arguments.checkpoint, [arguments.out]))}")
    return Result(found.to_dict(), lines, next_steps=commands)


def export_verb(arguments: argparse.Namespace) -> Result:
    """A folder to share, and its upload to the hub."""
    if arguments.to == "lerobot":
        return _export_lerobot(arguments)
    if arguments.out is None and arguments.push is None:
        raise ConfigError("where should the model go? Give --out FOLDER, --push OWNER/NAME, or both")
    manager = load_manager(arguments.checkpoint)
    model, contract = manager.model, manager.contract
    evidence = None if arguments.data is None else evidence_on(manager, arguments.data)
    values: dict[str, Any] = {"out": None, "address": None, "verdict": None, "headline": None}
    lines = ["not assessed: --data DATA puts verdict and curves on the model card"]
    if evidence is not None:
        values |= {"verdict": evidence.level, "headline": evidence.headline}
        lines = [evidence.headline]
    if arguments.out is not None:
        folder = save_shared(arguments.out, model, contract, evidence, name=arguments.push)
        values["out"] = str(folder)
        lines.append(f"-> {display_path(folder)}")
    if arguments.push is not None:
        values["address"] = push_shared(arguments.push, model, contract, evidence, private=arguments.private)
        lines.append(f"-> {values['address']}")
    place = f"hf:{arguments.push}" if arguments.push is not None else str(arguments.out)
    return Result(values, lines, next_steps=[next_command("reward", "score", "DATA", "--checkpoint", place)])


def _export_lerobot(arguments: argparse.Namespace) -> Result:
    if arguments.out is None or arguments.push is not None or arguments.data is not None:
        raise ConfigError("--to lerobot writes a folder: give --out FOLDER, without --push and --data")
    model, contract, _ = load_checkpoint(arguments.checkpoint)
    threshold = write_lerobot(arguments.out, model, contract)
    kept = contract.calibration_map.kind != "isotonic"
    lines = [
        f"success_threshold {threshold:.6g} decides as here"
        + ("" if kept else "; probabilities differ: LeRobot's network cannot hold an isotonic calibration"),
        f"-> {display_path(arguments.out)}",
    ]
    values = {"out": str(arguments.out), "success_threshold": threshold, "same_probabilities": kept}
    return Result(values, lines)


def recalibrate_verb(arguments: argparse.Namespace) -> Result:
    """Another threshold without a refit."""
    found = recalibrate(
        arguments.checkpoint,
        arguments.data,
        fpr=arguments.fpr,
        threshold=arguments.threshold,
        out=arguments.out,
    )
    threshold, before = found.threshold, found.previous_threshold
    values = {
        "checkpoint": str(found.checkpoint),
        "threshold": threshold.threshold,
        "previous_threshold": before,
        "calibration": found.contract.calibration_map.kind,
        "rates": threshold.to_dict(),
    }
    (false_low, false_high), (low, high) = threshold.false_positive_interval, threshold.true_positive_interval
    was = "" if before is None else f" (it was {before:.4f})"
    lines = [
        f"threshold    {threshold.threshold:.4f}{was}",
        f"fires on     {threshold.true_positive_rate:.1%} of success frames ({low:.1%} to {high:.1%})",
        f"and on       {threshold.false_positive_rate:.2%} of failure frames "
        f"({false_low:.2%} to {false_high:.2%})",
        f"-> {display_path(found.checkpoint)}",
    ]
    words = ("--checkpoint", str(found.checkpoint), "--data", str(arguments.data), "--out", "card.html")
    return Result(values, lines, next_steps=[next_command("reward", "card", *words)])


def quantize_verb(arguments: argparse.Namespace) -> Result:
    """The int8 version."""
    result = quantize(arguments.path, arguments.checkpoint, arguments.threshold)
    lines = [
        f"int8 decides as fp32 does on {result['agreement']:.3%} of "
        f"{result['num_check_frames']} held-out frames",
        f"{result['judged_twice']:.1%} of them are near the threshold and scored again in fp32",
        f"-> {display_path(result['file'])}",
    ]
    checkpoint = setting("reward.model.checkpoint_path", arguments.checkpoint)
    words = ("reward.use_reward_model=true", checkpoint, "reward.model.precision=int8")
    return Result(result, lines, next_steps=[next_command("train", *words)])


def score(
    data: Path | str,
    checkpoint: Path | str,
    out: Path | str | None,
    *,
    precision: Precision = "fp32",
    threshold: float | None = None,
) -> dict[str, Any]:
    """Score what is at `data`; with `out`, the probabilities go to a parquet (or `.json`) file."""
    out = None if out is None else Path(out)
    manager = load_manager(checkpoint, precision=precision, threshold=threshold)
    with tempfile.TemporaryDirectory() as copy:
        scored = score_path(manager, Path(data), Path(copy))
        table = _table(scored, manager.threshold)
        if out is not None and out.suffix == ".json":
            write_atomic(out, strict_json.dumps(table.to_pylist()))
        elif out is not None:
            write_atomic(out, lambda file: pq.write_table(table, file))
        summary = summarize_scores(scored, manager.threshold)
    return {**summary, "out": None if out is None else str(out)}


def _table(scored: ScoredFrames, threshold: float) -> pa.Table:
    """One row per frame; labels only where there are some."""
    labels = {} if scored.store is None else {"label": scored.store.labels}
    return pa.table(
        {
            "episode": scored.episode,
            "step": scored.step,
            **labels,
            "prob_success": scored.prob_success,
            "fires": fires(scored.prob_success, threshold),
            "source": pa.array(scored.sources).take(pa.array(scored.episode)),
        }
    )


def card(
    data: Path | str,
    checkpoint: Path | str,
    out: Path | str,
    *,
    precision: Precision = "fp32",
    threshold: float | None = None,
) -> dict[str, Any]:
    """Write the reward card of a checkpoint on a data set; returns what it says in short."""
    return assess(checkpoint, data, out, precision=precision, threshold=threshold).to_dict()


def quantize(data: Path | str, checkpoint: Path | str, threshold: float | None) -> dict[str, Any]:
    """Make the int8 version of a checkpoint: calibrated on one part of the episodes, verified on the rest."""
    if threshold is not None and not 0.0 < threshold < 1.0:
        raise ConfigError(f"the threshold must lie between 0 and 1, not {threshold}")
    checkpoint = Path(checkpoint)
    model = load_checkpoint(checkpoint)[0].config
    cameras = model.image_keys
    with tempfile.TemporaryDirectory() as copy:
        store, _ = open_store(str(data), None, None, Path(copy))
        resting = model.only_at_rest
        splits = split_store(store, val_fraction=0.5, seed=0, camera=cameras[0], only_at_rest=resting)
        made = quantize_checkpoint(
            checkpoint,
            RewardDataset(store, cameras=cameras, num_frames=model.num_frames),
            rows_of(store, splits["train"], only_at_rest=resting),
            rows_of(store, splits["val"], only_at_rest=resting),
            threshold=threshold,
        )
    return {
        "agreement": made.agreement,
        "num_check_frames": made.num_check_frames,
        "judged_twice": made.rescored,
        "margin": made.margin,
        "file": str(int8_path(checkpoint)),
    }
