"""The learning rate at every step: linear warm-up, then constant, cosine or in steps."""

from __future__ import annotations

import math

from guerdon.config import LRScheduleConfig


def lr_at(step: int, total_steps: int, peak: float, cfg: LRScheduleConfig) -> float:
    """Learning rate of optimiser step `step`, counted from 0.

    Args:
        step: the step that is about to be taken.
        total_steps: where `cosine` ends.
        peak: the rate after the warm-up.
        cfg: the course.
    """
    if step < cfg.warmup_steps:
        return peak * (step + 1) / cfg.warmup_steps
    after = step - cfg.warmup_steps
    if cfg.name == "cosine":
        done = min(after / max(total_steps - cfg.warmup_steps, 1), 1.0)
        return cfg.min_lr + (peak - cfg.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    if cfg.name == "step":
        return peak * float(cfg.gamma ** (after // cfg.step_size))
    return peak
