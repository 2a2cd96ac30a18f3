"""`fit_reward_model`: from labelled episodes to a calibrated reward model whose errors are known."""

from __future__ import annotations

import logging
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from guerdon.config import FitConfig, RewardModelConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.interrupts import Interrupts
from guerdon.core.types import Fault, IntArray, display_path
from guerdon.data.datasets.frames import RewardDataset, describe, open_store, rows_of, split_store
from guerdon.data.datasets.pictures import save_training_pictures
from guerdon.data.datasets.probe import blind_camera_message, probe_store
from guerdon.data.datasets.sampling import EpochSampler
from guerdon.data.store import EpisodeStore
from guerdon.fit.calibrate import calibrate
from guerdon.fit.distributed_model import strategy_of
from guerdon.fit.metrics import LabelledScores, better_recall, round_up, summarize
from guerdon.fit.process_group import ProcessGroup
from guerdon.fit.score import labelled_scores
from guerdon.fit.state import latest_checkpoint
from guerdon.fit.threshold import Threshold, choose_threshold
from guerdon.fit.trainer import RewardModelTrainer
from guerdon.rewards.image import Contract, RewardModel, build_model, save_checkpoint
from guerdon.rewards.image.checkpoint import TORCH_SUFFIXES
from guerdon.rewards.image.int8_file import quantize_checkpoint
from guerdon.rewards.image.quantize import require_int8
from guerdon.rewards.relabel import Calibration

log = logging.getLogger("guerdon")

STATISTICS_FRAMES = 2048
"""Frames that the input and feature statistics of the contract are taken from."""
NO_BETTER = 0.6
"""Up to this area under the curve a model is hardly better than chance, and a warning says so."""


MIN_RECALL = 0.5
"""Below this share of success frames that fire a warning says what to do."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a fit ended with."""

    checkpoint: Path
    """The best model, `best_model/`."""
    contract: Contract = field(repr=False)
    metrics: Mapping[str, float]
    """On the held-out episodes, at the calibrated threshold."""
    threshold: Threshold
    calibration: Calibration = field(repr=False)
    train_loss: float
    train_accuracy: float
    num_steps: int
    best_step: int
    faults: tuple[Fault, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        return {
            "checkpoint": str(self.checkpoint),
            "threshold": self.threshold.threshold,
            "calibration": self.calibration.kind,
            "val": dict(self.metrics),
            "false_positive_interval": list(self.threshold.false_positive_interval),
            "caveat": self.threshold.caveat,
            "train_loss": self.train_loss,
            "train_accuracy": self.train_accuracy,
            "num_steps": self.num_steps,
            "best_step": self.best_step,
            "faults": [asdict(fault) for fault in self.faults],
            "seconds": round(self.seconds, 2),
        }

    def lines(self) -> list[str]:
        """The outcome for people."""
        threshold, (low, high) = self.threshold, self.threshold.false_positive_interval
        episodes = f"{self.metrics['num_episodes']:.0f} held-out episodes"
        return [
            f"AUC          {self.metrics['auc']:.4f} on {episodes}",
            f"threshold    {threshold.threshold:.4f} ({self.calibration.kind} calibration)",
            f"fires on     {threshold.true_positive_rate:.1%} of success frames",
            f"and on       {threshold.false_positive_rate:.2%} of failure frames ({low:.2%} to {high:.2%})",
            f"checkpoint   {display_path(self.checkpoint)}",
        ]

    def __str__(self) -> str:
        return "\n".join([*self.lines(), f"took         {self.num_steps} steps, {self.seconds:.0f} s"])


@dataclass(frozen=True, kw_only=True)
class FitJob:
    """Everything that a process needs to know to take part in a fit."""

    model: RewardModelConfig
    """The `reward.model` section."""
    cfg: FitConfig
    """The `fit` section."""
    folder: Path
    """The run's folder: metrics and, unless `cfg.save_dir` says otherwise, `checkpoints/`."""
    seed: int = 0
    """Decides split, weights, order and augmentation."""
    resume_dir: Path | None = None
    """A checkpoint or a folder of checkpoints to go on from."""
    tensorboard: bool = True
    """Whether to log there beside `metrics.jsonl`."""


def fit_reward_model(
    model_cfg: RewardModelConfig,
    cfg: FitConfig,
    *,
    folder: Path | str,
    seed: int = 0,
    resume_dir: Path | str | None = None,
    tensorboard: bool = True,
    group: ProcessGroup | None = None,
) -> FitResult:
    """Fit, validate, calibrate and save, in as many processes as `cfg.distributed` says.

    The arguments are the fields of `FitJob`; `group` are the processes that do it together, if they are
    connected already: each of them calls this.
    """
    from guerdon.fit.distributed import run_job  # it needs what is here

    for name, given, wanted in (("model_cfg", model_cfg, RewardModelConfig), ("cfg", cfg, FitConfig)):
        if not isinstance(given, wanted):
            raise ConfigError(f"{name} must be a {wanted.__name__}, not {given!r:.80}")
    resume = None if resume_dir is None else Path(resume_dir)
    job = FitJob(
        model=model_cfg, cfg=cfg, folder=Path(folder), seed=seed, resume_dir=resume, tensorboard=tensorboard
    )
    return run_job(job, group)


class FitProcess:
    """One process's part in a fit: data, model and trainer; use it in a `with` block."""

    def __init__(self, job: FitJob, group: ProcessGroup) -> None:
        """Open the data and set up; nothing is trained yet."""
        self._started = time.perf_counter()
        self._job, self._group = job, group
        self._interrupts = Interrupts()
        cfg, seed = job.cfg, job.seed
        strategy_of(cfg, group.world_size)  # a contradiction shows before the data is read
        if job.model.precision == "int8":
            require_int8()
        store, self._faults = group.local_main_first(lambda: open_data(job.model, cfg, job.folder))
        group.require_same("data set (content hash)", store.content_hash)
        usual, model_cfg = RewardModelConfig().image_keys, job.model
        if model_cfg.image_keys == usual and usual[0] not in store.cameras and store.cameras:
            # Cameras of robots have names of their own, which RLinf's real-world workflow does not give.
            first = next(iter(store.cameras))
            log.info("the data has no %s; the model looks at %s (reward.model.image_keys)", usual[0], first)
            model_cfg = replace(model_cfg, image_keys=(first,))
        job = self._job = replace(job, model=model_cfg)
        if group.is_main:  # say it before hours are spent if no camera shows what success is about
            views = {name: probe_store(store, name) for name in job.model.image_keys if name in store.cameras}
            if all(view is not None and view.blind for view in views.values()):
                for camera in views:
                    log.warning("%s", blind_camera_message(camera))
        self._train_rows, self._val_rows, _ = split_rows(store, job.model, cfg, seed)
        self._dataset = RewardDataset(store, cameras=job.model.image_keys, num_frames=job.model.num_frames)
        if cfg.data.debug_save_dir is not None and group.is_main:
            save_training_pictures(self._dataset, Path(cfg.data.debug_save_dir), self._train_rows)
        torch.manual_seed(seed)
        model = build_model(job.model)
        if job.model.precision == "int8":
            require_int8(model.resnet)
        self.trainer = RewardModelTrainer(
            model,
            self._dataset,
            sampler_of(store, self._train_rows, cfg, seed),
            self._val_rows,
            cfg,
            _contract(job.model, model, self._dataset, self._train_rows, seed),
            folder=job.folder,
            seed=seed,
            device=device_of(cfg, group),
            tensorboard=job.tensorboard,
            group=group,
            interrupts=self._interrupts,
        )
        if job.resume_dir is not None:
            place = job.resume_dir
            self.trainer.resume(group.on_main(lambda: find_checkpoint(place)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the feature cache."""
        self.trainer.close()

    def run(self) -> FitResult:
        """Train, then calibrate the best model on rank 0 and save it; every rank gets the result."""
        with self._interrupts:
            self.trainer.run()
        return self._group.on_main(self._finish)

    def _finish(self) -> FitResult:
        job, dataset, rows = self._job, self._dataset, (self._train_rows, self._val_rows)
        result = finish_fit(self.trainer, dataset.store, self._val_rows, self._faults, self._started)
        if job.model.precision == "int8":
            try:
                quantize_checkpoint(result.checkpoint, dataset, *rows, seed=job.seed)
            except DataError as error:
                log.warning("the model is saved, but without an int8 version: %s", error)
        return result


def device_of(cfg: FitConfig, group: ProcessGroup) -> torch.device:
    """`cfg.gpu_id` for a process alone, a GPU for each of several; the CPU where there is none."""
    if not torch.cuda.is_available():
        if cfg.device == "cuda":
            raise ConfigError("fit.device is cuda, and torch finds no GPU here")
        return torch.device("cpu")
    if cfg.device == "cpu":
        return torch.device("cpu")
    number = cfg.gpu_id
    if group.world_size > 1:
        if cfg.distributed.communication == "gloo":
            return torch.device("cpu")
        number = group.local_rank % torch.cuda.device_count()
        if group.local_size > torch.cuda.device_count() > 1:  # one: a launcher shows each process its own
            raise ConfigError(f"{group.local_size} processes, but only {torch.cuda.device_count()} GPUs here")
        torch.cuda.set_device(number)
    return torch.device(f"cuda:{number}")


def split_rows(
    store: EpisodeStore, model: RewardModelConfig, cfg: FitConfig, seed: int
) -> tuple[IntArray, IntArray, int]:
    """Rows to train and to validate on, and how many episodes there are to train on."""
    resting, camera, share = model.only_at_rest, model.image_keys[0], cfg.data.val_fraction
    splits = split_store(store, val_fraction=share, seed=seed, camera=camera, only_at_rest=resting)
    train, val = (rows_of(store, splits[name], only_at_rest=resting) for name in ("train", "val"))
    return train, val, len(splits["train"])


def sampler_of(store: EpisodeStore, rows: IntArray, cfg: FitConfig, seed: int) -> EpochSampler:
    """Draws the training frames of each epoch from `rows`."""
    return EpochSampler(
        rows=rows,
        positive=store.labels[rows] >= 0.5,
        episode=store.episode[rows],
        num_samples_per_episode=cfg.data.num_samples_per_episode,
        fail_success_ratio=cfg.data.fail_success_ratio,
        seed=seed,
    )


def open_data(model_cfg: RewardModelConfig, cfg: FitConfig, folder: Path) -> tuple[EpisodeStore, list[Fault]]:
    """The labelled episodes; faults and the statistics that RLinf shows go to the log."""
    keys = cfg.data.image_keys
    if keys is not None and keys != model_cfg.image_keys:
        raise DataError(
            f"fit.data.image_keys is {list(keys)}, reward.model.image_keys is {list(model_cfg.image_keys)}: "
            "the model must look at the cameras that it is fitted to"
        )
    data = cfg.data
    if data.num_workers:
        log.info("fit.data.num_workers=%d has no effect: frames are mapped, not loaded", data.num_workers)
    store, faults = open_store(data.path, data.positive_dir, data.negative_dir, folder / "cache")
    for line in describe(store):
        log.info("%s", line)
    if not bool(store.labels.size):
        raise DataError("there is no usable episode to fit to")
    return store, faults


def find_checkpoint(place: Path) -> Path:
    """A checkpoint file, or the latest step of a folder of checkpoints or of a run."""
    if place.is_file():
        return place
    for folder in (place, place / "checkpoints"):
        if (folder / "checkpoint.pt").is_file():
            return folder / "checkpoint.pt"
        latest = latest_checkpoint(folder)
        if latest is not None:
            return latest
    raise DataError(f"{display_path(place)} has no checkpoint to resume from (step_N/checkpoint.pt)")


def _contract(
    model_cfg: RewardModelConfig, model: RewardModel, dataset: RewardDataset, rows: IntArray, seed: int
) -> Contract:
    """What a user of the model must match, with the statistics of the frames it was fitted to."""
    store, few = dataset.store, _few(rows, seed)
    frames = {name: store.frames(name, dataset.rows[few]) for name in dataset.cameras}
    return Contract.of(
        model,
        frame_sizes={name: store.cameras[name] for name in dataset.cameras},
        pixel_mean={name: tuple(images.mean(axis=(0, 1, 2)).tolist()) for name, images in frames.items()},
        pixel_std={name: tuple(images.std(axis=(0, 1, 2)).tolist()) for name, images in frames.items()},
        data_hash=store.content_hash,
    )


def _few(rows: IntArray, seed: int) -> IntArray:
    return np.sort(np.random.default_rng(seed).permutation(rows)[:STATISTICS_FRAMES])


def low_recall_message(scores: LabelledScores, threshold: Threshold, checkpoint: Path) -> str:
    """That a threshold lets few success frames fire, and what to do about it."""
    text = (
        f"ATTENTION: at the threshold of {threshold.threshold:.3g} only {threshold.true_positive_rate:.1%} "
        "of the success frames fire: binary rewards will be rare."
    )
    better = better_recall(scores, threshold.threshold, wanted=0.8)
    if better is None:
        return f"{text} No threshold mends that: more failures of the kind that fires are needed."
    return (
        f"{text} With {better.false_positive_rate:.1%} of false fires {better.true_positive_rate:.1%} would: "
        f"train with reward.reward_threshold={better.threshold:.7g}, or write it into the checkpoint: "
        f"guerdon reward recalibrate --checkpoint {shlex.quote(display_path(checkpoint))} --data "
        f"HELD_OUT_EPISODES --fpr {round_up(better.false_positive_rate)}"
    )


def finish_fit(
    trainer: RewardModelTrainer,
    store: EpisodeStore,
    val_rows: IntArray,
    faults: Sequence[Fault],
    started: float,
    known: Mapping[str, Any] | None = None,
) -> FitResult:
    """Calibrate the best model on the held-out episodes and save it with its metrics; some may be `known`."""
    seed, checkpoints, section = trainer.seed, trainer.checkpoints, trainer.cfg.calibration
    extra = trainer.load_best()
    logits = trainer.score(val_rows)
    calibration = calibrate(logits, store.labels[val_rows], store.episode[val_rows], seed=seed)
    scores = labelled_scores(calibration.apply(logits), store, val_rows)
    threshold = choose_threshold(
        scores,
        target_fpr=section.target_false_positive_rate,
        confidence=section.confidence,
        seed=seed,
        raise_to=0.5,  # a model that separates the classes need not spend its allowance of wrong fires
    )
    if threshold.caveat:
        log.warning("calibration: %s", threshold.caveat)
    if threshold.true_positive_rate < MIN_RECALL:
        kept = Path(trainer.cfg.export_path or checkpoints / "best_model")
        log.warning("%s", low_recall_message(scores, threshold, kept))
    positive = store.labels >= 0.5
    first = float(store.step[positive].min()) if positive.any() else math.nan
    metrics = {**summarize(scores, threshold.threshold), "first_success_step": first, **(known or {})}
    if metrics["auc"] <= NO_BETTER:
        log.warning(
            "the model cannot tell success from failure: its AUC on held-out episodes is %.2f (chance: 0.5). "
            "Do the cameras show the goal? Are there enough episodes and passes?",
            metrics["auc"],
        )
    feature_mean, feature_std = trainer.feature_statistics(_few(val_rows, seed))
    contract = replace(
        trainer.contract,
        threshold=threshold.threshold,
        calibration={"map": calibration.to_dict(), "threshold": threshold.to_dict()},
        metrics=metrics,
        feature_mean=feature_mean,
        feature_std=feature_std,
    )
    save_checkpoint(checkpoints / "best_model", trainer.model, contract)
    save_checkpoint(checkpoints / "reward_model_best.pt", trainer.model, contract, extra)
    if (place := trainer.cfg.export_path) is not None:
        as_file = Path(place).suffix in TORCH_SUFFIXES
        save_checkpoint(place, trainer.model, contract, extra if as_file else None)
    return FitResult(
        checkpoint=checkpoints / "best_model",
        contract=contract,
        metrics=metrics,
        threshold=threshold,
        calibration=calibration,
        train_loss=float(extra["train_loss"]),
        train_accuracy=float(extra["train_acc"]),
        num_steps=trainer.progress.step,
        best_step=int(extra["progress"]["best_step"]),
        faults=tuple(faults),
        seconds=time.perf_counter() - started,
    )
