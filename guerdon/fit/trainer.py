"""The one training loop of the image models.

Everything random follows from the seed and the number of the step or epoch, never from how often a generator
was asked before: a run that is interrupted and resumed gives the same losses to the digit.
"""

from __future__ import annotations

import logging
import math
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import Self

from guerdon.config import FitConfig
from guerdon.datasets import RewardDataset
from guerdon.datasets.sampling import EpochSampler, global_batches
from guerdon.errors import DataError
from guerdon.fit.augment import augment
from guerdon.fit.features import FeatureCache
from guerdon.fit.logs import MetricLog
from guerdon.fit.metrics import accuracy, auc, log_loss
from guerdon.fit.schedule import lr_at
from guerdon.models import Contract, RewardModel, load_checkpoint, save_checkpoint
from guerdon.models.base import mean_logit, pool_features
from guerdon.progress import progress_bar
from guerdon.types import FloatArray, IntArray, display_path

log = logging.getLogger("guerdon")

SCORE_BATCH = 256
HIGHER_IS_BETTER = {"val_auc": True, "val_accuracy": True, "val_loss": False, "train_accuracy": True}


@dataclass
class Progress:
    """Where a run stands; saved in every checkpoint."""

    step: int = 0
    epoch: int = 0
    best_value: float = math.nan
    best_step: int = 0
    bad_checks: int = 0
    """Validations since the last improvement."""
    epoch_hits: int = 0
    epoch_frames: int = 0
    """Training accuracy of the running epoch."""
    train_loss: float = math.nan
    train_accuracy: float = math.nan
    """Of the last finished epoch."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the best validation."""


class Trainer:
    """Fits a model to the training rows of a data set and keeps the best by validation."""

    def __init__(
        self,
        model: RewardModel,
        dataset: RewardDataset,
        sampler: EpochSampler,
        val_rows: IntArray,
        cfg: FitConfig,
        contract: Contract,
        *,
        folder: Path,
        checkpoints: Path,
        seed: int = 0,
        device: torch.device | str = "cpu",
        tensorboard: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Set up; nothing is trained yet.

        Args:
            model: what to fit.
            dataset: all frames of the store, in the store's order.
            sampler: chooses the training frames of each epoch.
            val_rows: int [V], frames to validate on.
            cfg: the `fit` section.
            contract: goes into every checkpoint.
            folder: of the run: `metrics.jsonl`, TensorBoard, the feature cache.
            checkpoints: where `step_{N}/` and `best_model/` go.
            seed: decides order, dropout and augmentation.
            device: where to compute.
            tensorboard: whether to log there too.
            rank: this process among `world_size` that share every global batch.
            world_size: how many processes there are.
        """
        self.model = model.to(device)
        self.cfg, self.contract, self.seed = cfg, contract, seed
        self.checkpoints = checkpoints
        self.progress = Progress()
        self._dataset, self._sampler, self._val_rows = dataset, sampler, val_rows
        self._device = torch.device(device)
        self._rank, self._world_size = rank, world_size
        self._folder, self._tensorboard = folder, tensorboard
        self._cache: FeatureCache | None = None
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[cfg.optim.optimizer]
        self._optimizer = make(trainable, lr=cfg.optim.lr, weight_decay=cfg.optim.weight_decay, fused=True)
        self._labels: FloatArray = dataset.store.labels
        self._steps_per_epoch = math.ceil(len(sampler.epoch(0)) / cfg.global_batch_size)
        self.total_steps = cfg.epochs * self._steps_per_epoch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the feature cache."""
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    # A run

    def run(self) -> Progress:
        """Train to the end, or until validation stops improving."""
        if self._may_cache():
            self._cache = FeatureCache(
                self.model,
                self._dataset,
                self.cfg.augment,
                self._folder / "features.f32",
                seed=self.seed,
                device=self._device,
            )
        resume_step = self.progress.step or None
        with MetricLog(self._folder, tensorboard=self._tensorboard, resume_step=resume_step) as logs:
            self._loop(logs)
        return self.progress

    def load_best(self) -> dict[str, Any]:
        """Take the weights of the best validation; returns what was saved beside them."""
        best, _, extra = load_checkpoint(self.checkpoints / "best.pt")
        self.model.load_state_dict(best.state_dict())
        return extra

    def _may_cache(self) -> bool:
        """Whether every frame has the same features in every epoch."""
        return self.model.encoder_frozen

    def _loop(self, logs: MetricLog) -> None:
        state = self.progress
        started, frames_seen = time.perf_counter(), 0
        with progress_bar("fitting", total=self.total_steps, unit="step") as bar:
            bar.update(state.step)
            while state.epoch < self.cfg.epochs:
                rows = self._sampler.epoch(state.epoch)
                batches = list(
                    global_batches(
                        rows, self.cfg.global_batch_size, rank=self._rank, world_size=self._world_size
                    )
                )
                for batch in batches[state.step - state.epoch * self._steps_per_epoch :]:
                    loss = self._train_step(batch)
                    frames_seen += len(batch)
                    bar.update(1)
                    bar.set_postfix(loss=f"{loss:.4f}", best=f"{state.best_value:.4f}", refresh=False)
                    if state.step % self.cfg.log_interval == 0:
                        rate = frames_seen / (time.perf_counter() - started)
                        logs.write(
                            state.step,
                            {"train/loss": loss, "train/lr": self._lr, "train/frames_per_second": rate},
                        )
                    at_end = state.step % self._steps_per_epoch == 0
                    if at_end:
                        self._end_epoch(logs)
                    interval = self.cfg.val_check_interval
                    if (at_end if interval is None else state.step % interval == 0) and self._check(logs):
                        return
                    if state.step % self.cfg.save_interval == 0:
                        self.save(self.checkpoints / f"step_{state.step}" / "checkpoint.pt")
            if state.best_step == 0:  # no validation fell on a step
                self._check(logs)

    def _train_step(self, rows: IntArray) -> float:
        """One optimiser step on one global batch; returns its loss."""
        state = self.progress
        self.model.train()
        self._lr = lr_at(state.step, self.total_steps, self.cfg.optim.lr, self.cfg.lr_sched)
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr
        self._optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(_mix(self.seed, state.step, self._rank))
        size = self.cfg.micro_batch_size or len(rows)
        total = 0.0
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            labels = torch.from_numpy(self._labels[part]).to(self._device)
            logits = self.logits(part, train=True)
            loss = F.binary_cross_entropy_with_logits(logits, labels[:, None].expand_as(logits))
            loss = loss * (len(part) / len(rows))
            total += float(loss.detach())
            loss.backward()  # type: ignore[no-untyped-call]
            hits = ((logits.detach().mean(dim=1) > 0) == (labels >= 0.5)).sum()
            state.epoch_hits += int(hits)
        state.epoch_frames += len(rows)
        if not math.isfinite(total):
            self._refuse_nan(rows)
        if self.cfg.optim.clip_grad > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.optim.clip_grad)
        self._optimizer.step()
        state.step += 1
        state.train_loss = total
        return total

    def logits(self, rows: IntArray, *, train: bool = False) -> Tensor:
        """Logits of all members for the frames `rows` (int [n]) -> [n, M]."""
        return self.model.head(self._features(rows, train))

    def _features(self, rows: IntArray, train: bool) -> Tensor:
        """Features of the frames `rows`, from the cache where there is one -> [n, *feature_shape]."""
        if self._cache is not None:
            view = None
            if train and self._cache.num_views > 1:
                view = np.random.default_rng([self.seed, self.progress.step]).integers(
                    1, self._cache.num_views, len(rows)
                )
            return self._cache.read(rows, view).to(self._device)
        frames = {name: torch.from_numpy(images) for name, images in self._dataset.batch(rows).frames.items()}
        if train:
            generator = torch.Generator().manual_seed(_mix(self.seed, self.progress.step, self._rank))
            frames = {name: augment(images, self.cfg.augment, generator) for name, images in frames.items()}
        return self.model.encode(self.model.preprocess(frames).to(self._device))

    def score(self, rows: IntArray) -> NDArray[np.float64]:
        """Logits of the model's verdict on the frames `rows`, in evaluation mode -> float64 [n]."""
        self.model.eval()
        parts = []
        with torch.no_grad():
            for start in range(0, len(rows), SCORE_BATCH):
                parts.append(
                    mean_logit(self.logits(rows[start : start + SCORE_BATCH])).double().cpu().numpy()
                )
        return np.concatenate(parts)

    def feature_statistics(self, rows: IntArray) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of the encoder's features, pooled over space, to notice drift by."""
        self.model.eval()
        parts = []
        with torch.no_grad():
            for start in range(0, len(rows), SCORE_BATCH):
                features = self._features(rows[start : start + SCORE_BATCH], train=False)
                parts.append(pool_features(features))
        everything = torch.cat(parts).double()
        return tuple(everything.mean(dim=0).tolist()), tuple(everything.std(dim=0).tolist())

    # Validation

    def _end_epoch(self, logs: MetricLog) -> None:
        state = self.progress
        state.epoch += 1
        state.train_accuracy = state.epoch_hits / max(state.epoch_frames, 1)
        state.epoch_hits = state.epoch_frames = 0
        logs.write(state.step, {"train/accuracy": state.train_accuracy, "train/epoch": float(state.epoch)})

    def _check(self, logs: MetricLog) -> bool:
        """Validate, keep the model if it is the best so far; returns whether it is time to stop."""
        state, labels = self.progress, self._labels[self._val_rows]
        logits = self.score(self._val_rows)
        prob = 1.0 / (1.0 + np.exp(-logits))
        values = {
            "val_auc": auc(prob, labels),
            "val_accuracy": accuracy(prob, labels, 0.5),
            "val_loss": log_loss(prob, labels),
        }
        logs.write(state.step, {name.replace("_", "/", 1): value for name, value in values.items()})
        value = {**values, "train_accuracy": state.train_accuracy}[self.cfg.best_by]
        sign = 1.0 if HIGHER_IS_BETTER[self.cfg.best_by] else -1.0
        if math.isnan(state.best_value) or sign * (value - state.best_value) > self.cfg.early_stop.min_delta:
            state.best_value, state.best_step, state.bad_checks = value, state.step, 0
            state.metrics = values
            self.save(self.checkpoints / "best.pt")
        else:
            state.bad_checks += 1
        patience = self.cfg.early_stop.patience
        if patience is not None and state.bad_checks >= patience:
            log.info("stopped early: %s has not improved for %d checks", self.cfg.best_by, state.bad_checks)
            return True
        return False

    # Checkpoints

    def save(self, path: Path) -> None:
        """Everything that resuming needs, in the documents' `.pt` layout."""
        state = self.progress
        extra = {
            "epoch": state.epoch,
            "optimizer_state_dict": self._optimizer.state_dict(),
            "train_loss": state.train_loss,
            "train_acc": state.train_accuracy,
            "progress": asdict(state),
            "seed": self.seed,
        }
        if self._rank == 0:
            save_checkpoint(path, self.model, self.contract, extra)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint that `save` wrote."""
        model, contract, extra = load_checkpoint(path)
        if "progress" not in extra or extra.get("seed") != self.seed:
            raise DataError(
                f"{display_path(path)} cannot be resumed: it has "
                + (
                    "no training state"
                    if "progress" not in extra
                    else f"seed {extra['seed']}, this run {self.seed}"
                )
            )
        if contract.data_hash != self.contract.data_hash:
            raise DataError(
                f"{display_path(path)} was fitted to other data (hash {contract.data_hash}) than is here now "
                f"({self.contract.data_hash})"
            )
        self.model.load_state_dict(model.state_dict())
        self._optimizer.load_state_dict(extra["optimizer_state_dict"])
        self.progress = Progress(**extra["progress"])
        log.info("resumed from %s at step %d", display_path(path), self.progress.step)

    def _refuse_nan(self, rows: IntArray) -> None:
        """Name the batch and its files; the last good state is on disk."""
        store = self._dataset.store
        sources = store.episode_column("source")
        named = sorted({sources[number] or f"episode {number}" for number in store.episode[rows].tolist()})
        good = latest_checkpoint(self.checkpoints)
        finite = all(bool(torch.isfinite(parameter).all()) for parameter in self.model.parameters())
        if good is None and finite:
            good = self.checkpoints / f"step_{self.progress.step}" / "checkpoint.pt"
            self.save(good)
        kept = "no checkpoint was written yet"
        if good is not None:
            kept = f"the last good checkpoint is {display_path(good)}"
        raise DataError(
            f"the loss is not finite at step {self.progress.step} (lr {self._lr:g}); {kept}. The batch has "
            f"frames of {len(named)} files: {', '.join(named[:3])}{', ...' if len(named) > 3 else ''}"
        )


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step in `folder`, or None."""
    found = [
        (int(match[1]), item / "checkpoint.pt")
        for item in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(r"step_(\d+)", item.name)) and (item / "checkpoint.pt").exists()
    ]
    return max(found)[1] if found else None


def _mix(seed: int, step: int, rank: int) -> int:
    """A seed for one step of one rank."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
