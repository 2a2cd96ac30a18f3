"""What is known of each target: counted, kept in a log to which runs add, and printed as a table."""

from __future__ import annotations

import json
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fuzz.worker import Chunk, Finding

_PACKAGES = (
    "numpy",
    "torch",
    "safetensors",
    "pyarrow",
    "h5py",
    "pillow",
    "PyYAML",
    "omegaconf",
    "hydra-core",
)


@dataclass
class Result:
    """What is known of a target so far."""

    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    """With different signatures, of this run."""
    num_findings: int = 0
    given: int = 0
    """Inputs that were handed out, with those of the log."""
    next: int = 0
    """Number of the next input to hand out."""

    def add(self, chunk: Chunk) -> list[Finding]:
        """Count a chunk; returns the findings that are new."""
        self._count(vars(chunk), len(chunk.findings))
        new: dict[str, Finding] = {}
        known = {finding.signature for finding in self.findings}
        for finding in chunk.findings:
            if finding.signature not in known:
                new.setdefault(finding.signature, finding)
        self.findings += new.values()
        return list(new.values())

    def add_line(self, line: Mapping[str, Any], seed: int) -> None:
        """Count a line of a log; a run with `seed` goes on behind its inputs."""
        self._count(line, len(line["findings"]))
        self.given += line["inputs"]
        if line["seed"] == seed:
            self.next = max(self.next, line["first"] + line["inputs"])

    def _count(self, counted: Mapping[str, Any], num_findings: int) -> None:
        self.inputs += counted["inputs"]
        self.refused += counted["refused"]
        self.seconds += counted["seconds"]
        self.slowest = max(self.slowest, counted["slowest"])
        self.num_findings += num_findings


class Log:
    """A file with a line of JSON for each chunk: a run that ends early, or another seed, only adds to it."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.path, self.seed, self.versions = path, seed, versions()
        self.lines: list[dict[str, Any]] = []
        if path.exists():
            self.lines = [json.loads(line) for line in path.read_text().splitlines()]

    def results(self, names: Sequence[str]) -> dict[str, Result]:
        """Its sums by target."""
        results = {name: Result() for name in names}
        for line in self.lines:
            if line["target"] in results:
                results[line["target"]].add_line(line, self.seed)
        return results

    def append(self, chunk: Chunk, first: int) -> None:
        """Write the line of a chunk whose first input has that number."""
        counted = vars(chunk) | {"findings": [item.signature for item in chunk.findings]}
        self.lines.append({**counted, "first": first, "seed": self.seed, "versions": self.versions})
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")

    def runs(self) -> str:
        """With which seeds and versions how many inputs were run."""
        runs: Counter[str] = Counter()
        for line in self.lines:
            runs[f"seed {line['seed']}, {line['versions']}"] += line["inputs"]
        return "\n".join(f"{inputs:,} inputs: {run}" for run, inputs in runs.items())


def versions() -> str:
    """The commit, and what reads foreign bytes for Guerdon."""
    folder = Path(__file__).parent
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=folder, capture_output=True, text=True, check=False
    )
    packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    return f"commit {git.stdout.strip() or 'unknown'}, Python {platform.python_version()}, {packages}"


def table(results: Mapping[str, Result]) -> str:
    """One line for each target, and their sum."""
    rows: list[tuple[str, ...]] = [("target", "inputs", "refused", "per s", "slowest s", "findings")]
    total = Result()
    for name, item in sorted(results.items()):
        rows.append(_row(name, item))
        total._count(vars(item), item.num_findings)
    rows.append(_row("all", total))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _row(name: str, item: Result) -> tuple[str, ...]:
    rate = f"{item.inputs / item.seconds:.0f}" if item.seconds else "-"
    return name, f"{item.inputs:,}", f"{item.refused:,}", rate, f"{item.slowest:.2f}", str(item.num_findings)
