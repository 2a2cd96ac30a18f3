"""Run all benchmarks and say which targets are met; exit code 1 if one is missed."""

from __future__ import annotations

import os
import subprocess
import sys

ALL = (
    "bench_tabletop",
    "bench_maniskill",
    "bench_collect",
    "bench_store",
    "bench_scoring",
    "bench_fit",
    "bench_distributed",
    "bench_ppo",
    "bench_offpolicy",
    "bench_sac_update",
    "bench_async",
    "bench_ray",
    "scaling",
    "bench_train",
    "bench_monitor",
    "bench_images",
    "bench_curiosity",
)
ALL_CORES = {"bench_maniskill", "bench_train", "bench_monitor", "bench_images"}
"""These are about whole runs; the others compare on one thread."""


def main() -> int:
    """Each benchmark in a process of its own."""
    one = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    codes = [
        subprocess.call(
            [sys.executable, "-m", f"benchmarks.{name}"], env=dict(os.environ) if name in ALL_CORES else one
        )
        for name in sys.argv[1:] or ALL
    ]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
