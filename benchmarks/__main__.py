"""Run all benchmarks and say which targets are met; exit code 1 if one is missed."""

from __future__ import annotations

import os
import subprocess
import sys

ALL = (
    "bench_tabletop",
    "bench_collect",
    "bench_store",
    "bench_scoring",
    "bench_fit",
    "bench_ppo",
    "bench_offpolicy",
    "bench_async",
    "bench_ray",
)


def main() -> int:
    """Each benchmark in a process of its own, on one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    names = sys.argv[1:] or ALL
    codes = [subprocess.call([sys.executable, "-m", f"benchmarks.{name}"], env=environment) for name in names]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
