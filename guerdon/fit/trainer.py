"""The one training loop of the image models, for one process and for many that share every global batch.

Everything random follows from the seed, the number of the step or epoch and a frame's place in the global
batch, never from how often a generator was asked before: a run that is interrupted and resumed gives the same
losses to the digit, and one that is shared by several processes gives them up to rounding.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from guerdon.config import FitConfig
from guerdon.core.errors import ConfigError, DataError, RunInterrupted
from guerdon.core.interrupts import Interrupts
from guerdon.core.progress import progress_bar
from guerdon.core.types import FloatArray, IntArray, display_path
from guerdon.data.datasets.frames import RewardDataset
from guerdon.data.datasets.sampling import EpochSampler, Share, global_batches, shares
from guerdon.data.files.bounds import one_line
from guerdon.fit.distributed_model import DistributedModel, strategy_of, trains_batch_norm
from guerdon.fit.inputs import BatchRandom, Inputs, use_frame_dropout
from guerdon.fit.logs import MetricLog
from guerdon.fit.metrics import accuracy, auc, log_loss
from guerdon.fit.process_group import ProcessGroup
from guerdon.fit.state import Checkpoints, Progress, lr_at
from guerdon.rewards.image import Contract, RewardModel, load_checkpoint
from guerdon.rewards.image.base import mean_logit, pool_features

log = logging.getLogger("guerdon")

SCORE_BATCH = 256


class RewardModelTrainer:
    """Fits an image reward model to the training rows of a data set and keeps the best by validation.

    After `start` it has an attribute `distributed`, the model over the processes of the group.

    `sampler` chooses the training rows of each epoch, `val_rows` (int [V]) are validated on. `contract` goes
    into every checkpoint; `folder` gets metrics, TensorBoard, the feature cache and, unless `cfg.save_dir`
    says otherwise, `checkpoints/`. `seed` decides order, dropout and augmentation. Without `group` this
    process is alone; without `interrupts` Ctrl-C stops at once, otherwise after saving.
    """

    distributed: DistributedModel

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
        seed: int = 0,
        device: torch.device | str = "cpu",
        tensorboard: bool = True,
        group: ProcessGroup | None = None,
        interrupts: Interrupts | None = None,
    ) -> None:
        self.model = model.to(device)
        self.cfg, self.contract, self.seed = cfg, contract, seed
        self.checkpoints = folder / "checkpoints" if cfg.save_dir is None else Path(cfg.save_dir)
        self.progress = Progress()
        self.group = group or ProcessGroup()
        self._interrupts, self._stopping = interrupts, False
        self._kept = Checkpoints(self.checkpoints, contract, seed, self.group)
        self._strategy = strategy_of(cfg, self.group.world_size)
        self._dataset, self._sampler, self._val_rows = dataset, sampler, val_rows
        self._device = torch.device(device)
        self._folder, self._tensorboard = folder, tensorboard
        self._logs: MetricLog | None = None
        self._optimizer_state: dict[str, Any] | None = None  # from a checkpoint, until there is an optimiser
        self._random = BatchRandom(seed)
        self._inputs = Inputs(dataset, cfg.augment, self._random, self._device)
        use_frame_dropout(self.model, self._random)
        self._labels: FloatArray = dataset.store.labels
        self._least = 1  # frames that a pass needs
        if trains_batch_norm(self.model):
            self._least = 2  # of one alone BatchNorm learns nothing, and fails on the smallest images
            sizes = {"global_batch_size": cfg.global_batch_size}
            if cfg.micro_batch_size is not None:
                sizes["micro_batch_size"] = cfg.micro_batch_size * self.group.world_size
            for name in (name for name, size in sizes.items() if size == 1):
                raise ConfigError(
                    f"fit.{name} is 1, but the model trains its BatchNorm, which needs frames to compare: "
                    "2 at least"
                )
        batches = list(self._batches(sampler.epoch(0)))  # other epochs may differ a little
        self.total_steps = cfg.epochs * len(batches)

    def _batches(self, rows: IntArray) -> Iterator[IntArray]:
        return global_batches(rows, self.cfg.global_batch_size, least=self._least)

    def close(self) -> None:
        """Remove the feature cache."""
        self._inputs.close()

    # A run

    def run(self) -> Progress:
        """Train to the end, or until validation stops improving."""
        self.start()
        resume_step = self.progress.step or None
        with self._interrupts.deferred() if self._interrupts else nullcontext():
            logs: Any = nullcontext()  # rank 0 keeps the log
            if self.group.is_main:
                logs = MetricLog(self._folder, tensorboard=self._tensorboard, resume_step=resume_step)
            with logs as self._logs:
                self._loop()
            if self.group.sum(np.array([self._asked_to_stop()], np.float64))[0]:  # during the last check
                self._stop()
        return self.progress

    def start(self) -> None:
        """Encode once if the encoder is frozen, distribute the model, make the optimiser."""
        if hasattr(self, "distributed"):
            return
        if self._may_cache():  # with the model still whole
            self._inputs.encode(self.model, self._folder, self.group)
        if self._strategy != "simple":
            count, micro = self.group.world_size, self.cfg.micro_batch_size
            log.info("%s over %d processes, %s", self._strategy, count, self._device.type)
            if micro is not None and trains_batch_norm(self.model):
                log.info(
                    "BatchNorm sees the %d frames that all processes pass forward together: one process with "
                    "fit.micro_batch_size=%d trains the same model",
                    micro * count,
                    micro * count,
                )
        self.distributed = DistributedModel(
            self.model, self._strategy, self.group, self._device, self.cfg.precision
        )
        cfg = self.cfg.optim
        make = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[cfg.optimizer]
        trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = make(trainable, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
        if self._optimizer_state is not None:
            try:
                self.distributed.load_optimizer_state(self._optimizer, self._optimizer_state)
            except Exception as error:  # hostile bytes can fail in any way
                raise DataError(
                    f"the saved state of the optimiser does not fit: {one_line(error)}"
                ) from error
            self._optimizer_state = None

    def load_best(self) -> dict[str, Any]:
        """Take the weights of the best validation, whole and in this process; returns what else was saved."""
        best, _, extra = load_checkpoint(self._kept.best)
        self.model, self.group = best.to(self._device), ProcessGroup()
        self.distributed = DistributedModel(self.model, "simple", self.group, self._device, "fp32")
        return extra

    def _may_cache(self) -> bool:
        """Whether every frame has the same features in every epoch."""
        return self.model.encoder_frozen

    def _loop(self) -> None:
        state = self.progress
        started, frames_seen = time.perf_counter(), 0
        with progress_bar(
            "fitting", total=self.total_steps, unit="step", quiet=not self.group.is_main
        ) as bar:
            bar.update(state.step)
            while state.epoch < self.cfg.epochs:
                rows = self._sampler.epoch(state.epoch)
                for batch in self._batches(rows[state.epoch_frames :]):
                    loss = self._train_step(batch)
                    frames_seen += len(batch)
                    bar.update(1)
                    bar.set_postfix(loss=f"{loss:.4f}", best=f"{state.best_value:.4f}", refresh=False)
                    if state.step % self.cfg.log_interval == 0:
                        rate = frames_seen / (time.perf_counter() - started)
                        self._log({"train/loss": loss, "train/lr": self._lr, "train/frames_per_second": rate})
                    at_end = state.epoch_frames == len(rows)
                    if at_end:
                        state.epoch += 1
                        state.train_accuracy = state.epoch_hits / max(state.epoch_frames, 1)
                        state.epoch_hits = state.epoch_frames = 0
                        self._log({"train/accuracy": state.train_accuracy, "train/epoch": float(state.epoch)})
                    interval = self.cfg.val_check_interval
                    if (at_end if interval is None else state.step % interval == 0) and self._check():
                        return
                    if self._stopping:
                        self._stop()
                    if state.step % self.cfg.save_interval == 0:
                        self.save(self._kept.of_step(state.step))
            if state.best_step == 0:  # no validation fell on a step
                self._check()

    def _stop(self) -> NoReturn:
        place = self._kept.of_step(self.progress.step)
        self.save(place)
        raise RunInterrupted(self.progress.step, display_path(place.parent), "runner.resume_dir")

    def _log(self, values: dict[str, float]) -> None:
        if self._logs is not None:
            self._logs.write(self.progress.step, values)

    def _train_step(self, rows: IntArray) -> float:
        """One optimiser step on one global batch; returns its loss."""
        state, model, group = self.progress, self.distributed, self.group
        self.model.train()
        self._lr = lr_at(state.step, self.total_steps, self.cfg.optim.lr, self.cfg.lr_sched)
        for each in self._optimizer.param_groups:
            each["lr"] = self._lr
        self._optimizer.zero_grad(set_to_none=True)
        self._random.step = state.step
        passes = shares(
            rows, self.cfg.micro_batch_size, rank=group.rank, world_size=group.world_size, least=self._least
        )
        total, hits = 0.0, 0
        for number, share in enumerate(passes, start=1):
            with model.gradient_pass(last=number == len(passes)):
                loss, correct = self._pass(share)
                # Gradients are averaged over the ranks; the loss of a global batch is a sum over them.
                (loss * float(group.world_size)).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            hits += correct
        sums = group.sum(np.array([total, hits, self._asked_to_stop()], np.float64))
        total, state.epoch_hits = float(sums[0]), state.epoch_hits + int(sums[1])
        self._stopping = bool(sums[2])  # all stop after the same step
        state.epoch_frames += len(rows)
        if not math.isfinite(total):
            self._refuse_nan(rows)
        if self.cfg.optim.clip_grad > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.optim.clip_grad)
        self._optimizer.step()
        state.step += 1
        state.train_loss = total
        return total

    def _asked_to_stop(self) -> bool:
        return self._interrupts is not None and self._interrupts.requested

    def _pass(self, share: Share) -> tuple[Tensor, int]:
        """This share's part of the global batch's loss, and how many of its frames are right."""
        self._random.share = share
        labels = torch.from_numpy(self._labels[share.rows]).to(self._device)
        logits = self.logits(share.rows, train=True)
        if not len(share.rows):  # it still takes part in every exchange
            return logits.sum(), 0
        loss = F.binary_cross_entropy_with_logits(logits, labels[:, None].expand_as(logits))
        hits = ((logits.detach().mean(dim=1) > 0) == (labels >= 0.5)).sum()
        return loss * (len(share.rows) / share.total), int(hits)

    def logits(self, rows: IntArray, *, train: bool = False) -> Tensor:
        """Logits of all members for the frames `rows` (int [n]) -> [n, M]; a collective call."""
        inputs = self._inputs.read(rows, self.model, train=train)
        return self.distributed.logits(inputs, encoded=self._inputs.encoded)

    def score(self, rows: IntArray) -> NDArray[np.float64]:
        """Logits of success of the frames `rows`, in evaluation mode -> float64 [n].

        A collective call: every rank scores its share, and all get the whole answer.
        """
        self.model.eval()
        rank, count = self.group.rank, self.group.world_size
        logits = np.zeros(len(rows))
        with torch.no_grad():
            for start in range(0, len(rows), SCORE_BATCH * count):
                part = np.arange(start, min(start + SCORE_BATCH * count, len(rows)))[rank::count]
                logits[part] = mean_logit(self.logits(rows[part])).double().cpu().numpy()
        return self.group.sum(logits)

    def feature_statistics(self, rows: IntArray) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of the encoder's features, pooled over space, to notice drift by."""
        self.model.eval()
        parts = []
        with torch.no_grad():
            for start in range(0, len(rows), SCORE_BATCH):
                inputs = self._inputs.read(rows[start : start + SCORE_BATCH], self.model, train=False)
                parts.append(pool_features(inputs if self._inputs.encoded else self.model.encode(inputs)))
        everything = torch.cat(parts).double()
        return tuple(everything.mean(dim=0).tolist()), tuple(everything.std(dim=0).tolist())

    # Validation

    def _check(self) -> bool:
        """Validate, keep the model if it is the best so far; returns whether it is time to stop.

        All ranks score, rank 0 decides, and the others do as it says.
        """
        logits = self.score(self._val_rows)
        is_best, decided = self.group.on_main(lambda: self._decide(logits))
        vars(self.progress).update(vars(decided))
        if is_best:
            self.save(self._kept.best)
        patience, bad_checks = self.cfg.early_stop.patience, self.progress.bad_checks
        stop = patience is not None and bad_checks >= patience
        if stop:
            log.info("stopped early: %s has not improved for %d checks", self.cfg.best_by, bad_checks)
        return stop

    def _decide(self, logits: NDArray[np.float64]) -> tuple[bool, Progress]:
        """Whether these logits of the validation frames are the best so far, and where the run stands."""
        state, labels = self.progress, self._labels[self._val_rows]
        prob = 1.0 / (1.0 + np.exp(-logits))
        values = {
            "val_auc": auc(prob, labels),
            "val_accuracy": accuracy(prob, labels, 0.5),
            "val_loss": log_loss(prob, labels),
        }
        self._log({name.replace("_", "/", 1): value for name, value in values.items()})
        return state.is_best(values, self.cfg.best_by, self.cfg.early_stop.min_delta), state

    # Checkpoints

    def save(self, path: Path) -> None:
        """Everything that resuming needs, whole; a collective call."""
        self._kept.save(path, self.progress, self.distributed, self._optimizer)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint that `save` wrote, by any number of processes; before `start`."""
        weights, self._optimizer_state, self.progress = self._kept.load(path)
        self.model.load_state_dict(weights)
        log.info("resumed from %s at step %d", display_path(path), self.progress.step)

    def _refuse_nan(self, rows: IntArray) -> NoReturn:
        """Name the batch and its files; the last good state is on disk."""
        store = self._dataset.store
        sources = store.episode_column("source")
        named = sorted({sources[number] or f"episode {number}" for number in store.episode[rows].tolist()})
        good = self._kept.latest()
        if good is None and self.distributed.is_finite():
            good = self._kept.of_step(self.progress.step)
            self.save(good)
        kept = (
            f"the last good checkpoint is {display_path(good)}" if good else "no checkpoint was written yet"
        )
        raise DataError(
            f"the loss is not finite at step {self.progress.step} (lr {self._lr:g}); {kept}. The batch has "
            f"frames of {len(named)} files: {', '.join(named[:3])}{', ...' if len(named) > 3 else ''}"
        )
