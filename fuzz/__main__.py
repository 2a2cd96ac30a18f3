"""`python -m fuzz`: run the targets until the budget is used up; exit 1 if there was a finding."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from fuzz.engine import fuzz
from fuzz.results import Log, Result, table, versions
from fuzz.targets import load


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument(
        "--inputs", type=int, help="in all, with those of the log; 20,000 unless --minutes is given"
    )
    parser.add_argument("--minutes", type=float)
    parser.add_argument(
        "--targets", default="", help="names, or their beginnings, with commas; all by default"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--findings", type=Path, default=Path("runs/fuzz"), help="where they are written to")
    parser.add_argument(
        "--log", type=Path, help="results are added to this file; a run with it goes on where the last ended"
    )
    parser.add_argument(
        "--replay", type=Path, help="run one file in this process, by the one target that is named"
    )
    return parser.parse_args()


def main() -> int:
    """The command."""
    arguments = _arguments()
    targets = load()
    wanted = [part for part in arguments.targets.split(",") if part]
    names = sorted(name for name in targets if not wanted or any(name.startswith(part) for part in wanted))
    if not names:
        print(f"no such target; there are {', '.join(sorted(targets))}", file=sys.stderr)
        return 2
    if arguments.replay is not None:
        with tempfile.TemporaryDirectory() as folder:
            target = targets[names[0]]
            target.seeds(Path(folder))
            target.run(arguments.replay.read_bytes(), Path(folder))
        return 0
    inputs = arguments.inputs
    if inputs is None and arguments.minutes is None:
        inputs = 20_000
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers and their files go with it
    began = time.monotonic()

    def report(results: Mapping[str, Result]) -> None:
        done, found = (
            sum(getattr(item, part) for item in results.values()) for part in ("inputs", "num_findings")
        )
        print(
            f"{time.monotonic() - began:7.0f} s {done:>10,} inputs, {found} findings",
            file=sys.stderr,
            flush=True,
        )

    results = fuzz(
        load,
        names,
        inputs=inputs,
        minutes=arguments.minutes,
        seed=arguments.seed,
        workers=arguments.workers,
        findings=arguments.findings,
        log=arguments.log,
        report=report,
    )
    print(table(results))
    print(versions() if arguments.log is None else Log(arguments.log).runs())
    found = [finding for item in results.values() for finding in item.findings]
    for finding in found:
        last = finding.detail.strip().splitlines()[-1:] or [""]
        print(f"{finding.target}: {finding.kind}: {last[0][:200]}")
    if found:
        print(f"inputs and traces are in {arguments.findings}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
