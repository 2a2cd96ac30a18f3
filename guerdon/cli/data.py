"""`guerdon data`: look at data sets, convert, audit and clean them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from guerdon.cli.common import Verbs, print_result
from guerdon.core.types import DataSummary, Fault, display_path

if TYPE_CHECKING:
    from guerdon.data.datasets.audit import AuditReport

log = logging.getLogger("guerdon")


def add_data(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    """`guerdon data ...`."""
    data = verbs.add_parser("data", help="look at data sets, convert and audit them")
    actions = data.add_subparsers(title="actions", required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", parents=[common], help="what is there")
    inspect.add_argument("path", type=Path)
    inspect.add_argument("--format", help="do not detect the format, take this one")
    inspect.add_argument("--preview", type=Path, metavar="PNG", help="also draw a sheet of frames")
    inspect.set_defaults(handler=_inspect)
    convert = actions.add_parser("convert", parents=[common], help="copy to another format")
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    convert.add_argument("--to", required=True, metavar="FORMAT", help="the format to write")
    convert.add_argument("--format", help="do not detect the format of the source, take this one")
    convert.set_defaults(handler=_convert)
    audit = actions.add_parser("audit", parents=[common], help="labels, balance, duplicates, cameras, NaN")
    audit.add_argument("path", type=Path)
    audit.add_argument("--format", help="do not detect the format, take this one")
    audit.set_defaults(handler=_audit)
    process = actions.add_parser("process", parents=[common], help="clean a robot's data.pkl for training")
    process.add_argument("path", type=Path, metavar="PKL")
    process.add_argument("--to", default="native", metavar="FORMAT", help="the format to write (native)")
    process.add_argument("--keep-stationary", action="store_true", help="keep frames in which nothing moved")
    process.add_argument(
        "--hold-steps", type=int, metavar="N", help="steps at the target that make a success"
    )
    process.add_argument("--out", type=Path, metavar="DIR", help="instead of collected_data/ beside the file")
    process.set_defaults(handler=_process)


def _inspect(arguments: argparse.Namespace) -> int:
    from guerdon.data.summary import inspect

    summary = inspect(arguments.path, arguments.format)
    print_result(arguments, summary.to_dict(), summary_lines(summary))
    if arguments.preview is not None:
        from guerdon.data.datasets.pictures import write_preview

        write_preview(arguments.path, arguments.preview, arguments.format)
        log.info("preview: %s", display_path(arguments.preview))
    return 0


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
    return [f"{name:<13}{value}" for name, value in rows] + _fault_lines(summary.faults)


def _fault_lines(faults: Sequence[Fault]) -> list[str]:
    return [f"  {display_path(fault.path)}: {fault.reason}" for fault in faults]


def _convert(arguments: argparse.Namespace) -> int:
    from guerdon.data.summary import convert

    written, faults = convert(arguments.source, arguments.target, arguments.to, arguments.format)
    return _report_written(arguments, written, faults, arguments.target, arguments.to)


def _process(arguments: argparse.Namespace) -> int:
    from guerdon.data.datasets.cleaning import process

    place = arguments.path.resolve()
    home = place if place.is_dir() else place.parent
    report = process(
        arguments.path,
        arguments.out or home / "collected_data",
        arguments.to,
        keep_stationary=arguments.keep_stationary,
        hold_steps=arguments.hold_steps,
    )
    gone = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items() if count)
    lines = [
        f"{report.num_episodes} episodes -> {display_path(report.path)} ({arguments.to})",
        f"frames    {report.num_frames} kept, {report.num_positive_frames} of them success; "
        f"left out: {gone or 'none'}",
        "split     " + ", ".join(f"{count} {name}" for name, count in report.splits.items()),
    ]
    lines += [f"{len(report.faults)} not used:"] * bool(report.faults) + _fault_lines(report.faults)
    print_result(
        arguments, {**report.to_dict(), "format": arguments.to}, [*lines, *_audit_lines(report.audit)]
    )
    return 0


def _report_written(
    arguments: argparse.Namespace, written: int, faults: Sequence[Fault], target: Path, format: str
) -> int:
    result = {
        "num_episodes": written,
        "path": str(target),
        "format": format,
        "faults": [asdict(fault) for fault in faults],
    }
    lines = [f"{written} episodes -> {display_path(target)} ({format})"]
    lines += [f"{len(faults)} not used:"] * bool(faults) + _fault_lines(faults)
    print_result(arguments, result, lines)
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from guerdon.data.datasets.audit import audit

    report = audit(arguments.path, arguments.format)
    print_result(arguments, report.to_dict(), _audit_lines(report))
    return 0 if report.ok else 1


def _audit_lines(report: AuditReport) -> list[str]:
    lines = [
        f"{len(report.findings)} findings in {report.num_episodes} episodes of {display_path(report.path)}"
    ]
    for finding in report.findings:
        lines.append(f"{finding.level:<8}{finding.check:<12}{finding.message}")
        lines += [f"{'':<20}{example}" for example in finding.examples]
    return lines
