"""Scorers against the plain eager module: images per second with one thread, batches of 256 uint8 frames.

Times are of the processor, not of the clock on the wall: other processes on the cores change them little.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch

from benchmarks.report import Result, report
from guerdon.core.types import UInt8Array
from guerdon.models import BinaryRewardClassifier, ResNetRewardModel, RewardModel
from guerdon.rewards.image.accelerate import resnet_scorer
from guerdon.rewards.image.int8 import TwoStepScorer, coarse_scorer, processor
from guerdon.rewards.image.quantize import activation_ranges

BATCH, ROUNDS = 256, 5
TWICE = 0.02  # fitted models on Tabletop: 0.5 to 4%
TARGETS = {"AVX2": {"fp32": 1.5, "int8": 3.5}}
OTHER_TARGETS = {"fp32": 1.5, "int8": 4.5}


def models() -> dict[str, RewardModel]:
    """Random weights, with batch norms that have seen some frames."""
    torch.manual_seed(0)
    found: dict[str, RewardModel] = {
        "ResNet10 64x64": BinaryRewardClassifier(arch="resnet10", image_size=(3, 64, 64)),
        "ResNet18 128x128": ResNetRewardModel(arch="resnet18", image_size=(3, 128, 128)),
    }
    for model in found.values():
        model.train()
        with torch.no_grad():
            for seed in range(3):
                model(random_frames(model, 32, seed))
        model.eval()
    return found


def random_frames(model: RewardModel, count: int, seed: int) -> UInt8Array:
    """uint8 [count, H, W, 3]."""
    _, height, width = model.config.image_size
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def seconds_by_round(candidates: dict[str, Callable[[], object]]) -> dict[str, np.ndarray]:
    """CPU seconds of each candidate in each round; they take turns, so that other load hits all of them."""
    for run in candidates.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, run in candidates.items():
            started = time.process_time()
            run()
            times[name].append(time.process_time() - started)
    return {name: np.array(values) for name, values in times.items()}


def measure(name: str, model: RewardModel) -> list[Result]:
    """fp32 and int8 against eager."""
    frames = random_frames(model, BATCH, 3)
    fp32 = resnet_scorer(model, "fp32")
    images = model.images(random_frames(model, BATCH, 4)).flatten(0, 1)
    plain = coarse_scorer(model, activation_ranges(model.resnet, images, *model.scale_shift()))
    # Random weights give all frames nearly the same logit, so the threshold is put where as many frames are
    # scored twice as with fitted models.
    edge = float(np.quantile(plain(frames)[0], 1 - TWICE))
    int8 = TwoStepScorer(plain, fp32, threshold_logit=edge + 1.0, margin=1.0)

    @torch.no_grad()
    def eager() -> object:
        return model(frames)

    candidates: dict[str, Callable[[], object]] = {
        "eager": eager,
        "fp32": lambda: fp32(frames),
        "int8": lambda: int8(frames),
        "int8 alone": lambda: plain(frames),
    }
    times = seconds_by_round(candidates)
    speeds = ", ".join(f"{key} {BATCH / np.median(values):,.0f}" for key, values in times.items())
    again = int8.near(plain(frames)[0]).mean()
    print(f"{name}: images/s {speeds}; int8 has {again:.1%} of the frames scored again in fp32", flush=True)
    return [
        Result(
            what=f"{name}: {key} / eager",
            value=float(np.median(times["eager"] / times[key])),
            target=target,
            unit="x",
        )
        for key, target in TARGETS.get(processor(), OTHER_TARGETS).items()
    ]


def run() -> list[Result]:
    """Measure everything with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [result for name, model in models().items() for result in measure(name, model)]
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    settings = {"processor": processor(), "threads": 1, "batch": BATCH, "rounds": ROUNDS}
    settings |= {name: version(name) for name in ("torch", "onnxruntime", "numpy")}
    sys.exit(report("scoring", settings, run()))
