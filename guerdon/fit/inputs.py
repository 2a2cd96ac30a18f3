"""What a model is shown of frames: pixels, augmented for training, or features that were encoded once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from guerdon.config import AugmentConfig
from guerdon.core.types import IntArray
from guerdon.data.datasets.frames import RewardDataset
from guerdon.fit.augment import augment
from guerdon.fit.features import FeatureCache
from guerdon.fit.layers import Draws
from guerdon.rewards.image import RewardModel


class Inputs:
    """Reads frames of a data set for a model; random changes follow from `draws`.

    Attributes:
        cache: features of all frames, if the encoder is frozen.
    """

    def __init__(
        self, dataset: RewardDataset, changes: AugmentConfig, draws: Draws, device: torch.device
    ) -> None:
        self.cache: FeatureCache | None = None
        self._dataset, self._changes, self._draws, self._device = dataset, changes, draws, device

    @property
    def encoded(self) -> bool:
        """Whether what is read are features."""
        return self.cache is not None

    def read(self, rows: IntArray, model: RewardModel, *, train: bool) -> Tensor:
        """Features of the frames `rows` (int [n]) where there are some, otherwise pixels for `model`."""
        share = self._draws.share
        if self.cache is not None:
            view = None
            if train and self.cache.num_views > 1:
                views = np.random.default_rng([self._draws.seed, self._draws.step]).integers(
                    1, self.cache.num_views, share.total
                )
                view = views[share.positions]
            return self.cache.read(rows, view).to(self._device)
        frames = {name: torch.from_numpy(images) for name, images in self._dataset.batch(rows).frames.items()}
        if train:
            generator, positions = self._draws.generator(0), torch.from_numpy(share.positions)
            frames = {
                name: augment(images, self._changes, generator, positions=positions, total=share.total)
                for name, images in frames.items()
            }
        return model.preprocess(frames).to(self._device)

    def close(self) -> None:
        """Remove the features."""
        if self.cache is not None:
            self.cache.close()
            self.cache = None
