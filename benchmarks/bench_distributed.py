"""Sharded fitting: two ranks against one with the same number of threads in all, for DDP and FSDP.

A ratio below 1 is what exchanging gradients and statistics costs. On the cores of one machine little is to be
gained, since one process uses all of them already; several ranks are for several machines or GPUs.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.bench_fit import gather
from benchmarks.report import heading
from guerdon.config import AugmentConfig, DistributedConfig, FitConfig, FitDataConfig, RewardModelConfig
from guerdon.fit import fit_reward_model

THREADS, EPOCHS, BATCH, EPISODES = 2, 2, 64, 60
MODEL = RewardModelConfig(arch="resnet10", width=32, image_size=(3, 64, 64))


def settings_for(data: Path) -> FitConfig:
    return FitConfig(
        epochs=EPOCHS,
        global_batch_size=BATCH,
        log_interval=1,
        save_interval=10**9,
        augment=AugmentConfig(shift_pixels=0, color=0.0),
        data=FitDataConfig(path=str(data)),
    )


def measure(cfg: FitConfig, folder: Path) -> tuple[float, np.ndarray]:
    """Training frames per second without starting up and validating, and the losses."""
    fit_reward_model(MODEL, cfg, folder=folder, tensorboard=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/loss" in line]
    first_epoch = next(line["step"] for line in lines if "train/epoch" in line)
    # The rate counts from the first step on: the last step before the first validation is undisturbed.
    rate = next(line["train/frames_per_second"] for line in steps if line["step"] == first_epoch)
    return rate, np.array([line["train/loss"] for line in steps])


def main() -> int:
    """Print the rates and ratios; returns 1 if the losses disagree."""
    torch.set_num_threads(THREADS)
    folder = Path(tempfile.mkdtemp())
    try:
        data = gather(folder / "data", EPISODES // 2, EPISODES // 2, seed=1)
        cfg = settings_for(data)
        described = {
            "threads in all": THREADS,
            "model": f"{MODEL.arch} width {MODEL.width}",
            "frames": "64x64",
            "global batch": BATCH,
            "communication": "nccl" if torch.cuda.is_available() else "gloo",
        }
        print(heading("distributed", described))
        alone, losses = measure(cfg, folder / "alone")
        print(f"   1 rank           {alone:8.1f} frames/s", flush=True)
        agree = True
        for backend in ("ddp", "fsdp"):
            several = replace(cfg, backend=backend, distributed=DistributedConfig(num_processes=2))
            rate, theirs = measure(several, folder / backend)
            differences = np.abs(theirs / losses - 1)
            # Later ones grow by themselves, as they do after a change of the weights by 1e-7.
            agree &= bool(np.all(differences[:2] < 1e-5))
            print(
                f"   2 ranks, {backend:<8}{rate:8.1f} frames/s, {rate / alone:.2f} of one rank; "
                f"losses differ by {differences[:2].max():.1e} in 2 steps, {differences[:8].max():.1e} in 8",
                flush=True,
            )
    finally:
        shutil.rmtree(folder)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
