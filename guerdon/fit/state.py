"""Where a fit stands: its progress, its learning rate, and the checkpoints that a run goes on from."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from guerdon.config import LRScheduleConfig
from guerdon.core.errors import DataError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line
from guerdon.data.files.checksums import check_archive
from guerdon.fit.distributed_model import DistributedModel
from guerdon.fit.process_group import ProcessGroup
from guerdon.rewards.image import Contract, load_checkpoint, save_checkpoint

log = logging.getLogger("guerdon")

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
    """Frames of the running epoch so far, and those that were classified correctly."""
    train_loss: float = math.nan
    train_accuracy: float = math.nan
    """Of the last finished epoch."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the best validation."""

    @classmethod
    def of(cls, plain: Any, source: str) -> Progress:
        """What `asdict` made of one; a `DataError` that names `source` if it is something else."""
        try:
            state = cls(**plain)
            for item in fields(cls):
                value, kind = getattr(state, item.name), type(getattr(cls(), item.name))
                if not isinstance(value, kind) or (kind is int and value < 0):
                    raise TypeError(f"{item.name} is {one_line(value, 60)}")
        except TypeError as error:
            raise DataError(f"{source}: the state of the fit is damaged: {error}") from error
        return state

    def is_best(self, values: Mapping[str, float], best_by: str, min_delta: float) -> bool:
        """Count a validation that gave `values`; whether it is the best so far.

        Few held-out episodes often give the same AUC or accuracy many times: the lower loss then decides,
        which is no improvement for early stopping.
        """
        value = {**values, "train_accuracy": self.train_accuracy}[best_by]
        sign = 1.0 if HIGHER_IS_BETTER[best_by] else -1.0
        if math.isnan(self.best_value) or sign * (value - self.best_value) > min_delta:
            self.best_value, self.best_step, self.bad_checks = value, self.step, 0
            self.metrics = dict(values)
            return True
        self.bad_checks += 1
        if value == self.best_value and values["val_loss"] < self.metrics.get("val_loss", math.inf):
            self.best_step, self.metrics = self.step, dict(values)
            return True
        return False


def lr_at(step: int, total_steps: int, peak: float, cfg: LRScheduleConfig) -> float:
    """Learning rate of optimiser step `step` of `total_steps`, counted from 0; `peak` after the warm-up."""
    if step < cfg.warmup_steps:
        return peak * (step + 1) / cfg.warmup_steps
    after = step - cfg.warmup_steps
    if cfg.name == "cosine":
        done = min(after / max(total_steps - cfg.warmup_steps, 1), 1.0)
        return cfg.min_lr + (peak - cfg.min_lr) * 0.5 * (1 + math.cos(math.pi * done))
    if cfg.name == "step":
        return peak * float(cfg.gamma ** (after // cfg.step_size))
    return peak


class Checkpoints:
    """The checkpoints of one fit in the `.pt` layout of RLinf's reward workflow; rank 0 has the files."""

    def __init__(self, folder: Path, contract: Contract, seed: int, group: ProcessGroup) -> None:
        """`step_{N}/` and `best.pt` go to `folder`."""
        self.folder, self.best = folder, folder / "best.pt"
        self._contract, self._seed, self._group = contract, seed, group

    def of_step(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"step_{step}" / "checkpoint.pt"

    def latest(self) -> Path | None:
        """The file of the highest step that was saved; the same on all ranks, a collective call."""
        return self._group.on_main(lambda: latest_checkpoint(self.folder))

    def save(
        self, path: Path, state: Progress, model: DistributedModel, optimizer: torch.optim.Optimizer
    ) -> None:
        """Everything that resuming needs; a collective call."""
        weights = model.weights()
        extra = {
            "epoch": state.epoch,
            "optimizer_state_dict": model.optimizer_state(optimizer),
            "train_loss": state.train_loss,
            "train_acc": state.train_accuracy,
            "progress": asdict(state),
            "seed": self._seed,
        }
        self._group.on_main(lambda: save_checkpoint(path, weights, self._contract, extra))

    def load(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any], Progress]:
        """Weights, state of the optimiser and progress that `save` wrote, by any number of processes.

        The best model so far comes along; without it, the search for the best starts again.
        """
        weights, extra = self._group.on_main(lambda: self._read(path))
        state = Progress.of(extra["progress"], display_path(path))
        if state.best_step and not self._group.on_main(lambda: self._bring_best(path, state.best_step)):
            log.warning(
                "the best model so far is not beside %s: the search for the best starts again",
                display_path(path),
            )
            state.best_value, state.best_step, state.bad_checks = math.nan, 0, 0
        return weights, extra["optimizer_state_dict"], state

    def _read(self, path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Weights and training state of a checkpoint of this very fit."""
        try:
            model, contract, extra = load_checkpoint(path)
        except DataError as error:
            raise DataError(f"{error}; {_way_out(path)}") from error
        if "progress" not in extra:
            raise DataError(f"{display_path(path)} cannot be resumed: it has no training state")
        if extra.get("seed") != self._seed:
            seeds = f"it has seed {extra.get('seed')}, this run {self._seed}"
            raise DataError(f"{display_path(path)} cannot be resumed: {seeds}")
        if contract.data_hash != self._contract.data_hash:
            raise DataError(
                f"{display_path(path)} was fitted to other data (hash {contract.data_hash}) than is here now "
                f"({self._contract.data_hash})"
            )
        return model.state_dict(), extra

    def _bring_best(self, path: Path, best_step: int) -> bool:
        """Take along the best model that the checkpoint at `path` knows of, if it is still there."""
        if self.best.is_file():  # the run goes on in its own folder
            return True
        for place in (path.parent.parent / "best.pt", path.with_name("best.pt"), path):
            if not place.is_file():
                continue
            model, contract, extra = load_checkpoint(place)
            if extra.get("progress", {}).get("step") == best_step:
                save_checkpoint(self.best, model, contract, extra)
                return True
        return False


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the highest step in `folder`, or None."""
    return next(iter(_newest_first(folder)), None)


def _newest_first(folder: Path) -> list[Path]:
    found = [
        (int(match[1]), item / "checkpoint.pt")
        for item in (folder.iterdir() if folder.is_dir() else ())
        if (match := re.fullmatch(r"step_([0-9]{1,18})", item.name)) and (item / "checkpoint.pt").exists()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def _way_out(path: Path) -> str:
    """How to go on if the checkpoint at `path` is damaged: from the newest whole one before it."""
    found = _newest_first(path.parent.parent)
    for other in found[found.index(path) + 1 :] if path in found else ():
        try:
            check_archive(other)
        except DataError as error:
            log.warning("%s", error)
            continue
        return f"the checkpoint before it is whole: go on with runner.resume_dir={display_path(other)}"
    return "there is no whole checkpoint before it"
