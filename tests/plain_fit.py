"""Fits without warm-up, schedule and augmentation: what tests of a few steps, and of exact losses, use."""

from guerdon.config import AugmentConfig, FitConfig, LRScheduleConfig, OptimConfig


def plain_optim(**settings):
    return OptimConfig(**{"optimizer": "adam", "weight_decay": 0.0, **settings})


def plain_fit(**settings):
    return FitConfig(
        **{
            "global_batch_size": 32,
            "optim": plain_optim(lr=1e-4),
            "lr_sched": LRScheduleConfig(name="constant", warmup_steps=0),
            "augment": AugmentConfig(shift_pixels=0, color=0.0),
            **settings,
        }
    )
