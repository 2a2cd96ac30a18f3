"""`guerdon data`: look at data sets, convert, audit and clean them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from guerdon.cli.verb import Result, aligned, next_command, setting
from guerdon.core.types import DataSummary, Fault, display_path
from guerdon.data.datasets.audit import AuditReport, audit
from guerdon.data.datasets.pictures import write_preview
from guerdon.data.formats import Format, find_format, get_format
from guerdon.data.summary import convert, inspect

log = logging.getLogger("guerdon")


def inspect_verb(arguments: argparse.Namespace) -> Result:
    """What is there."""
    kind = format_to_read(arguments, arguments.path)
    summary = inspect(arguments.path, kind)
    if arguments.preview is not None:
        write_preview(arguments.path, arguments.preview, kind)
        log.info("preview: %s", display_path(arguments.preview))
    return Result(summary.to_dict(), summary_lines(summary))


def format_to_read(arguments: argparse.Namespace, path: Path) -> Format | None:
    """The format of a data set with the settings that were given; None: detected, with none."""
    given = _given(arguments, ("label_at", "label_from", "outcomes"))
    if not given:
        return None if arguments.format is None else get_format(arguments.format)
    return find_format(path, arguments.format).configured(**given)


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def convert_verb(arguments: argparse.Namespace) -> Result:
    """Copy to another format."""
    kind = format_to_read(arguments, arguments.source)
    to = get_format(arguments.to).configured(**_given(arguments, ("videos", "fps", "task")))
    written, faults = convert(arguments.source, arguments.target, to, kind, resume=arguments.resume)
    values = {
        "num_episodes": written,
        "path": str(arguments.target),
        "format": arguments.to,
        "faults": [asdict(fault) for fault in faults],
    }
    line = f"{written} episodes -> {display_path(arguments.target)} ({arguments.to})"
    steps = [next_command("data", "audit", display_path(arguments.target))]
    return Result(values, [line, *_not_used(faults)], next_steps=steps)


def process_verb(arguments: argparse.Namespace) -> Result:
    """Clean a robot's recording."""
    from guerdon.data.datasets.cleaning import process  # imports Gymnasium, which the others do without

    place = arguments.path.resolve()
    home = place if place.is_dir() else place.parent
    report = process(
        arguments.path,
        arguments.out or home / "collected_data",
        arguments.to,
        keep_stationary=arguments.keep_stationary,
        hold_steps=arguments.hold_steps,
    )
    left_out = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items() if count)
    lines = [
        f"{report.num_episodes} episodes -> {display_path(report.path)} ({arguments.to})",
        f"frames    {report.num_frames} kept, {report.num_positive_frames} of them success; "
        f"left out: {left_out or 'none'}",
        "split     " + ", ".join(f"{count} {name}" for name, count in report.splits.items()),
        *_not_used(report.faults),
        *_audit_lines(report.audit),
    ]
    steps = [next_command("train-reward", setting("fit.data.path", report.path))]
    return Result({**report.to_dict(), "format": arguments.to}, lines, next_steps=steps)


def audit_verb(arguments: argparse.Namespace) -> Result:
    """Labels, balance, duplicates, cameras, NaN."""
    report = audit(arguments.path, format_to_read(arguments, arguments.path))
    steps = [next_command("train-reward", setting("fit.data.path", arguments.path))] if report.ok else []
    return Result(report.to_dict(), _audit_lines(report), ok=report.ok, next_steps=steps)


def summary_lines(summary: DataSummary) -> list[str]:
    """A data set in a few aligned lines."""
    good, bad, cut = (
        summary.num_success_episodes,
        summary.num_failure_episodes,
        summary.num_incomplete_episodes,
    )
    share = summary.num_positive_frames / max(summary.num_frames, 1)
    cameras = ", ".join(f"{name} {shape[0]}x{shape[1]}x{shape[2]}" for name, shape in summary.cameras.items())
    rows = [
        ("path", display_path(summary.path)),
        ("format", summary.format),
        ("episodes", f"{summary.num_episodes} ({good} success, {bad} failure, {cut} unfinished)"),
        ("frames", f"{summary.num_frames} ({summary.num_positive_frames} positive, {share:.1%})"),
        ("cameras", cameras or "none"),
        ("size", f"{summary.bytes / 1e6:.1f} MB"),
    ]
    if summary.content_hash is not None:
        rows.append(("content hash", summary.content_hash))
    rows.append(("faults", str(len(summary.faults)) if summary.faults else "none"))
    return aligned(rows) + _fault_lines(summary.faults)


def _fault_lines(faults: Sequence[Fault]) -> list[str]:
    return [f"  {display_path(fault.path)}: {fault.reason}" for fault in faults]


def _not_used(faults: Sequence[Fault]) -> list[str]:
    return [f"{len(faults)} not used:", *_fault_lines(faults)] if faults else []


def _audit_lines(report: AuditReport) -> list[str]:
    lines = [
        f"{len(report.findings)} findings in {report.num_episodes} episodes of {display_path(report.path)}"
    ]
    for finding in report.findings:
        lines.append(f"{finding.level:<8}{finding.check:<12}{finding.message}")
        lines += [f"{'':<20}{example}" for example in finding.examples]
    return lines
