"""Encode once: frames pass through a frozen encoder a single time, and epochs run on its mapped output."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guerdon.config import AugmentConfig
from guerdon.datasets import RewardDataset
from guerdon.fit.augment import augment, is_active
from guerdon.models import RewardModel
from guerdon.progress import progress
from guerdon.store.atomic import storage_error
from guerdon.types import IntArray

log = logging.getLogger("guerdon")

ENCODE_BATCH = 256


class FeatureCache:
    """Features of all frames of a data set, float32 [views, frames, *feature_shape], in a mapped file.

    View 0 is of the frame as it is; further views are of augmented copies, drawn from at random in training.
    The file lives as long as the fit: it is made anew for each one, since it costs one pass and depends on
    the encoder's weights.
    """

    def __init__(
        self,
        model: RewardModel,
        dataset: RewardDataset,
        cfg: AugmentConfig,
        path: Path,
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        self.num_views = 1 + (cfg.num_views if is_active(cfg) else 0)
        self._path = path
        self._shape = (self.num_views, len(dataset), *model.feature_shape)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._map: NDArray[Any] = np.memmap(path, np.float32, mode="w+", shape=self._shape)
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, self._map.nbytes)  # a full disk shows here
        except OSError as error:
            raise storage_error(path, error) from error
        model.eval()
        with torch.no_grad():
            for view in range(self.num_views):
                self._encode(model, dataset, cfg, view, seed, device)

    def _encode(
        self,
        model: RewardModel,
        dataset: RewardDataset,
        cfg: AugmentConfig,
        view: int,
        seed: int,
        device: torch.device,
    ) -> None:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + view)
        starts = range(0, len(dataset), ENCODE_BATCH)
        for start in progress(starts, f"encoding view {view + 1}/{self.num_views}", unit="batch"):
            indices = np.arange(start, min(start + ENCODE_BATCH, len(dataset)))
            frames = {
                name: torch.from_numpy(images) for name, images in dataset.batch(indices).frames.items()
            }
            if view:
                frames = {name: augment(images, cfg, generator) for name, images in frames.items()}
            features = model.encode(model.preprocess(frames).to(device))
            self._map[view, indices] = features.float().cpu().numpy()

    def read(self, rows: IntArray, view: IntArray | None = None) -> Tensor:
        """Features of the frames `rows` (int [n]), of the given views ([n]) or as they are -> [n, *shape]."""
        views = np.zeros(len(rows), np.int64) if view is None else view
        return torch.from_numpy(self._map[views, rows])

    def close(self) -> None:
        """Remove the file."""
        del self._map
        self._path.unlink(missing_ok=True)
