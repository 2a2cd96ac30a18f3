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
from guerdon.core.atomic import storage_error
from guerdon.core.progress import progress
from guerdon.core.types import IntArray
from guerdon.data.datasets.frames import RewardDataset
from guerdon.fit.augment import augment, is_active
from guerdon.fit.team import Team
from guerdon.rewards.image import RewardModel

log = logging.getLogger("guerdon")

ENCODE_BATCH = 256
FILE = "features.f32"
"""In the run's folder; on the second machine of a team `features-{rank}.f32`, in case they share the disk."""


class FeatureCache:
    """Features of all frames of a data set, float32 [views, frames, *feature_shape], in a mapped file.

    View 0 is of the frame as it is; further views are of augmented copies, drawn from at random in training.
    The file lives as long as the fit: it is made anew for each one, since it costs one pass and depends on
    the encoder's weights. The processes of a machine share one file, and the work of filling it.
    """

    def __init__(
        self,
        model: RewardModel,
        dataset: RewardDataset,
        cfg: AugmentConfig,
        folder: Path,
        *,
        seed: int,
        device: torch.device,
        team: Team,
    ) -> None:
        self.num_views = 1 + (cfg.num_views if is_active(cfg) else 0)
        self._path = folder / (f"features-{team.leader}.f32" if team.leader else FILE)
        self._shape = (self.num_views, len(dataset), *model.feature_shape)
        self._team = team
        self._map: NDArray[Any] = team.leaders_first(self._open)
        model.eval()
        with torch.no_grad():
            for view in range(self.num_views):
                self._encode(model, dataset, cfg, view, seed, device)
        team.wait()

    def _open(self) -> NDArray[Any]:
        """Make the file; on all but the first process of a machine, map the one that is there."""
        path = self._path
        try:
            if self._team.local_rank > 0:
                return np.memmap(path, np.float32, mode="r+", shape=self._shape)
            path.parent.mkdir(parents=True, exist_ok=True)
            array: NDArray[Any] = np.memmap(path, np.float32, mode="w+", shape=self._shape)
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, array.nbytes)  # a full disk shows here
            return array
        except OSError as error:
            raise storage_error(path, error) from error

    def _encode(
        self,
        model: RewardModel,
        dataset: RewardDataset,
        cfg: AugmentConfig,
        view: int,
        seed: int,
        device: torch.device,
    ) -> None:
        team, what = self._team, f"encoding view {view + 1}/{self.num_views}"
        mine = range(team.local_rank * ENCODE_BATCH, len(dataset), team.local_size * ENCODE_BATCH)
        for start in progress(mine, what, unit="batch", quiet=not team.first):
            draw = np.random.SeedSequence([seed, view, start]).generate_state(1)
            generator = torch.Generator().manual_seed(int(draw[0]))
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
        if self._team.local_rank == 0:
            self._path.unlink(missing_ok=True)
