"""`fit_reward_model`: from labelled episodes to a calibrated reward model whose errors are known."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from guerdon.config import FitConfig, RewardModelConfig
from guerdon.datasets import RewardDataset
from guerdon.datasets.frames import describe, open_store, rows_of, split_store
from guerdon.datasets.pictures import save_training_pictures
from guerdon.datasets.sampling import EpochSampler
from guerdon.errors import DataError
from guerdon.fit.calibrate import Calibration, calibrate
from guerdon.fit.metrics import Scores, summarize
from guerdon.fit.quantized import quantize_checkpoint
from guerdon.fit.threshold import Threshold, choose_threshold
from guerdon.fit.trainer import Trainer, latest_checkpoint
from guerdon.models import Contract, RewardModel, build_model, save_checkpoint
from guerdon.store import EpisodeStore
from guerdon.types import Fault, IntArray, display_path

log = logging.getLogger("guerdon")

STATISTICS_FRAMES = 2048
"""Frames that the input and feature statistics of the contract are taken from."""


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a fit ended with."""

    checkpoint: Path
    """The best model, `best_model/`."""
    contract: Contract
    metrics: Mapping[str, float]
    """On the held-out episodes, at the calibrated threshold."""
    threshold: Threshold
    calibration: Calibration
    train_loss: float
    train_accuracy: float
    num_steps: int
    best_step: int
    faults: tuple[Fault, ...]
    seconds: float


def fit_reward_model(
    model_cfg: RewardModelConfig,
    cfg: FitConfig,
    *,
    folder: Path,
    seed: int = 0,
    resume_dir: Path | None = None,
    tensorboard: bool = True,
) -> FitResult:
    """Fit, validate, calibrate and save.

    Args:
        model_cfg: the `reward.model` section.
        cfg: the `fit` section.
        folder: the run's folder: metrics and, unless `cfg.save_dir` says otherwise, `checkpoints/`.
        seed: decides split, weights, order and augmentation.
        resume_dir: a checkpoint or a folder of checkpoints to go on from.
        tensorboard: whether to log there beside `metrics.jsonl`.
    """
    started = time.perf_counter()
    store, faults = open_data(model_cfg, cfg, folder)
    checkpoints = folder / "checkpoints" if cfg.save_dir is None else Path(cfg.save_dir)
    splits = split_store(store, val_fraction=cfg.data.val_fraction, seed=seed, camera=model_cfg.image_keys[0])
    dataset = RewardDataset(store, cameras=model_cfg.image_keys)
    if cfg.data.debug_save_dir is not None:
        save_training_pictures(dataset, Path(cfg.data.debug_save_dir), rows_of(store, splits["train"]))
    torch.manual_seed(seed)
    model = build_model(model_cfg)
    contract = _contract(model_cfg, model, dataset, rows_of(store, splits["train"]), seed)
    device = torch.device(f"cuda:{cfg.gpu_id}" if torch.cuda.is_available() else "cpu")
    train_rows = rows_of(store, splits["train"])
    sampler = EpochSampler(
        rows=train_rows,
        positive=store.labels[train_rows] >= 0.5,
        episode=store.episode[train_rows],
        num_samples_per_episode=cfg.data.num_samples_per_episode,
        fail_success_ratio=cfg.data.fail_success_ratio,
        seed=seed,
    )
    val_rows = rows_of(store, splits["val"])
    with Trainer(
        model,
        dataset,
        sampler,
        val_rows,
        cfg,
        contract,
        folder=folder,
        checkpoints=checkpoints,
        seed=seed,
        device=device,
        tensorboard=tensorboard,
    ) as trainer:
        if resume_dir is not None:
            trainer.resume(find_checkpoint(resume_dir))
        trainer.run()
        result = _finish(trainer, store, val_rows, tuple(faults), started)
    if model_cfg.precision == "int8":
        try:
            quantize_checkpoint(result.checkpoint, dataset, train_rows, val_rows, seed=seed)
        except DataError as error:
            log.warning("the model is saved, but without an int8 version: %s", error)
    return result


def open_data(model_cfg: RewardModelConfig, cfg: FitConfig, folder: Path) -> tuple[EpisodeStore, list[Fault]]:
    """The labelled episodes; faults and the documents' statistics go to the log."""
    keys = cfg.data.image_keys
    if keys is not None and keys != model_cfg.image_keys:
        raise DataError(
            f"fit.data.image_keys is {list(keys)}, reward.model.image_keys is {list(model_cfg.image_keys)}: "
            "the model must look at the cameras that it is fitted to"
        )
    data = cfg.data
    store, faults = open_store(data.path, data.positive_dir, data.negative_dir, folder / "cache")
    for fault in faults:
        log.warning("not used: %s: %s", display_path(fault.path), fault.reason)
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
    few = np.sort(np.random.default_rng(seed).permutation(rows)[:STATISTICS_FRAMES])
    frames = dataset.batch(few).frames
    store = dataset.store
    return Contract.of(
        model,
        frame_sizes={name: store.cameras[name] for name in dataset.cameras},
        pixel_mean={name: tuple(images.mean(axis=(0, 1, 2)).tolist()) for name, images in frames.items()},
        pixel_std={name: tuple(images.std(axis=(0, 1, 2)).tolist()) for name, images in frames.items()},
        data_hash=store.content_hash,
    )


def _finish(
    trainer: Trainer, store: EpisodeStore, val_rows: IntArray, faults: tuple[Fault, ...], started: float
) -> FitResult:
    """Calibrate the best model on the held-out episodes and save it with all that is known of it."""
    cfg, seed, checkpoints = trainer.cfg, trainer.seed, trainer.checkpoints
    extra = trainer.load_best()
    logits = trainer.score(val_rows)
    labels, episode = store.labels[val_rows], store.episode[val_rows]
    calibration = calibrate(logits, labels, episode, seed=seed)
    numbers, local = np.unique(episode, return_inverse=True)
    scores = Scores(
        prob_success=calibration.apply(logits).astype(np.float32),
        labels=labels,
        episode=local.astype(np.int64),
        step=store.step[val_rows],
        success=store.success[numbers],
    )
    section = cfg.calibration
    threshold = choose_threshold(
        scores,
        target_fpr=section.target_false_positive_rate,
        confidence=section.confidence,
        seed=seed,
        raise_to=0.5,  # a model that separates the classes need not spend its allowance of wrong fires
    )
    if threshold.caveat:
        log.warning("calibration: %s", threshold.caveat)
    positive = store.labels >= 0.5
    first = float(store.step[positive].min()) if positive.any() else math.nan
    metrics = {**summarize(scores, threshold.threshold), "first_success_step": first}
    few = np.sort(np.random.default_rng(seed).permutation(val_rows)[:STATISTICS_FRAMES])
    feature_mean, feature_std = trainer.feature_statistics(few)
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
        faults=faults,
        seconds=time.perf_counter() - started,
    )


def score_rows(model: RewardModel, dataset: RewardDataset, rows: IntArray, batch: int = 256) -> Any:
    """Logits of the model's verdict on frames of a data set -> float64 [n]."""
    model.eval()
    parts = []
    with torch.no_grad():
        for start in range(0, len(rows), batch):
            frames = dataset.batch(rows[start : start + batch]).frames
            parts.append(model(frames).double().cpu().numpy())
    return np.concatenate(parts)
