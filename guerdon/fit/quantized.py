"""The int8 model of a fitted checkpoint: calibrated on training frames, verified on held-out ones."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from guerdon.core.types import IntArray, display_path
from guerdon.data.datasets.frames import RewardDataset
from guerdon.rewards.image import load_checkpoint
from guerdon.rewards.image.int8 import Int8Model, make_int8
from guerdon.rewards.image.int8_file import int8_path, save_int8

log = logging.getLogger("guerdon")

CALIBRATION_FRAMES = 512
CHECK_FRAMES = 4096


def quantize_checkpoint(
    checkpoint: Path,
    dataset: RewardDataset,
    train_rows: IntArray,
    check_rows: IntArray,
    *,
    threshold: float | None = None,
    seed: int = 0,
) -> Int8Model:
    """Make and keep the int8 model of a checkpoint; raises, and writes nothing, if it is refused.

    Args:
        checkpoint: the file is written beside it.
        dataset: frames that show the model's cameras.
        train_rows: int [n], frames to find the ranges of activations on; at most 512 are taken.
        check_rows: int [m], held-out frames to compare decisions on; at most 4,096 are taken.
        threshold: the probability above which a frame counts as success; None takes the checkpoint's own,
            or 0.5 if it has none.
        seed: decides which frames are taken.
    """
    model, contract, _ = load_checkpoint(checkpoint)
    if threshold is None:
        threshold = 0.5 if contract.threshold is None else contract.threshold
    rng = np.random.default_rng(seed)
    ranges, held_out = (
        dataset.batch(np.sort(rng.permutation(rows)[:count])).frames
        for rows, count in ((train_rows, CALIBRATION_FRAMES), (check_rows, CHECK_FRAMES))
    )
    contract.check_frames(ranges)
    int8 = make_int8(model, ranges, held_out, contract.calibration_map.logit_at(threshold))
    path = int8_path(checkpoint)
    save_int8(path, int8)
    log.info(
        "int8 decides as fp32 does on %.3f%% of %d held-out frames and leaves %.1f%% of them to fp32: %s",
        100 * int8.agreement,
        int8.num_check_frames,
        100 * int8.judged_twice,
        display_path(path),
    )
    return int8
