"""The `fit` section: every setting of reward-model fitting. Intervals are optimiser steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from guerdon.config.build import Checked
from guerdon.config.limits import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Checked):
    """`fit.optim`."""

    optimizer: Literal["adam", "adamw"] = "adam"
    """The optimiser."""
    lr: NonNegativeFloat = 1e-4
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest gradient norm; 0 clips nothing."""


@dataclass(frozen=True, kw_only=True)
class LRScheduleConfig(Checked):
    """`fit.lr_sched`: the learning rate over time."""

    name: Literal["constant", "cosine", "step"] = "constant"
    """The course after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from zero."""
    min_lr: NonNegativeFloat = 0.0
    """Where `cosine` ends."""
    step_size: PositiveInt = 1000
    """`step` multiplies the rate by `gamma` every so many steps."""
    gamma: Fraction = 0.1
    """See `step_size`."""


@dataclass(frozen=True, kw_only=True)
class EarlyStopConfig(Checked):
    """`fit.early_stop`."""

    patience: PositiveInt | None = None
    """Stop after so many validations without improvement; null never stops early."""
    min_delta: NonNegativeFloat = 0.0
    """A smaller gain is no improvement."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig(Checked):
    """`fit.augment`: random changes of training frames; all zero means none."""

    shift_pixels: NonNegativeInt = 0
    """Shift by up to so many pixels."""
    crop_fraction: Fraction = 0.0
    """Cut away up to this share of each side."""
    color: Fraction = 0.0
    """Strength of brightness, contrast and saturation changes."""
    blur: Fraction = 0.0
    """Share of frames that are blurred."""
    num_views: PositiveInt = 4
    """Augmented views of a frame that are encoded once when the encoder is frozen."""


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig(Checked):
    """`fit.calibration`: what the threshold of the fitted model promises."""

    target_false_positive_rate: Fraction = 0.01
    """Share of failure frames that may be taken for success."""
    confidence: Fraction = 0.95
    """Of the interval around it, resampled by episode."""


@dataclass(frozen=True, kw_only=True)
class FitDataConfig(Checked):
    """`fit.data`: the labelled frames. Either `path`, or `positive_dir` and `negative_dir`."""

    path: str | None = None
    """A data set in any format that `guerdon data inspect` knows."""
    positive_dir: str | None = None
    """Trajectories with a success (`npy-trajectory`)."""
    negative_dir: str | None = None
    """Trajectories without one."""
    image_keys: tuple[str, ...] | None = None
    """Cameras to read; null means `reward.model.image_keys`."""
    num_workers: NonNegativeInt = 0
    """RLinf's loader processes; without effect, as frames are mapped and a batch is one gather."""
    num_samples_per_episode: NonNegativeInt = 0
    """Frames drawn from each episode; 0 takes all."""
    fail_success_ratio: NonNegativeFloat | None = None
    """At most so many failure frames per success frame; null keeps all."""
    val_fraction: Fraction = 0.2
    """Share of the episodes held out for validation."""
    debug_save_dir: str | None = None
    """Write training frames there as pictures."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Checked):
    """`fit.distributed`: several processes that share every global batch."""

    num_processes: PositiveInt = 1
    """Processes to start on this machine; under `torchrun` or Ray those that they start count."""
    communication: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto`: NCCL between GPUs, gloo otherwise."""
    timeout_seconds: PositiveFloat = 1800.0
    """A process that keeps the others waiting for longer ends the fit; one that dies ends it at once."""


@dataclass(frozen=True, kw_only=True)
class FitConfig(Checked):
    """`fit`: stage 2, from labelled episodes to a reward model."""

    enabled: bool = False
    """A key of RLinf's workflow. `guerdon train-reward` fits whatever it says; `guerdon train` only reports
    that it does not fit."""
    only: bool = False
    """Fit and end, without touching the environment."""
    backend: Literal["auto", "simple", "ddp", "fsdp"] = "auto"
    """One process (`simple`), or several with a copy of the model (`ddp`) or a shard of it (`fsdp`) each;
    `auto`: `simple` for one, `fsdp` for several."""
    gpu_id: NonNegativeInt = 0
    """The GPU to use where there is one."""
    epochs: PositiveInt = 100
    """Passes over the training frames."""
    global_batch_size: PositiveInt = 32
    """Frames per optimiser step."""
    micro_batch_size: PositiveInt | None = None
    """Frames per forward pass of a process; null means its whole share of the global batch."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward pass while fitting; weights, gradients and their sums stay fp32."""
    log_interval: PositiveInt = 100
    """Steps between log lines."""
    save_interval: PositiveInt = 1000
    """Steps between checkpoints."""
    val_check_interval: PositiveInt | None = None
    """Steps between validations; null validates after every epoch."""
    best_by: Literal["val_auc", "val_accuracy", "val_loss", "train_accuracy"] = "val_auc"
    """What chooses the best model."""
    save_dir: str | None = None
    """Folder of the checkpoints; null means `checkpoints/` in the run's folder."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    lr_sched: LRScheduleConfig = field(default_factory=LRScheduleConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    data: FitDataConfig = field(default_factory=FitDataConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
