"""What a model is shown of frames: pixels, augmented for training, or features that were encoded once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from guerdon.config import AugmentConfig
from guerdon.core import portable
from guerdon.core.atomic import storage_errors
from guerdon.core.progress import progress
from guerdon.core.types import IntArray
from guerdon.data.datasets.frames import RewardDataset
from guerdon.data.datasets.sampling import Share
from guerdon.fit.process_group import ProcessGroup
from guerdon.rewards.image import RewardModel

ENCODE_BATCH = 256
FEATURES_FILE = "features.f32"
"""In the run's folder; on a second machine `features-{rank}.f32`, in case they share the disk."""


# Random numbers: they belong to a frame's position in the global batch, not to a process or a pass.


@dataclass
class BatchRandom:
    """What the random numbers of an optimiser step follow from; the trainer advances it."""

    seed: int
    step: int = 0
    share: Share = field(default_factory=lambda: Share.of(np.zeros(0, np.int64)))

    def generator(self, *purpose: int) -> torch.Generator:
        """Random numbers for the step's whole global batch, the same on every rank."""
        sequence = np.random.SeedSequence([self.seed, self.step, *purpose])
        return torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))


class FrameDropout(nn.Module):
    """Dropout whose mask is drawn for the whole global batch, of which this pass takes its rows."""

    def __init__(self, p: float, random: BatchRandom, number: int) -> None:
        super().__init__()
        self.p, self._random, self._number = p, random, number

    def forward(self, x: Tensor) -> Tensor:
        """[n, D] -> [n, D]."""
        if not self.training:
            return x
        share = self._random.share
        generator = self._random.generator(1, self._number)
        mask = torch.empty(share.total, *x.shape[1:]).bernoulli_(1 - self.p, generator=generator)
        return x * (mask[torch.from_numpy(share.positions)] / (1 - self.p)).to(x)


def use_frame_dropout(model: nn.Module, random: BatchRandom) -> None:
    """Let every dropout of `model` draw for the global batch."""
    number = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Dropout) and child.p > 0:
                setattr(parent, name, FrameDropout(child.p, random, number).train(child.training))
                number += 1


# Frames and features


class Inputs:
    """Reads frames of a data set for a model; random changes follow from `random`.

    With a frozen encoder they can be encoded once: features float32 [views, frames, *feature_shape], in a
    mapped file. View 0 is of the frame as it is; further views are of augmented copies, drawn from at random
    in training. The file lives as long as the fit: it costs one pass and depends on the encoder's weights.
    The processes of a machine share one file, and the work of filling it.
    """

    def __init__(
        self, dataset: RewardDataset, changes: AugmentConfig, random: BatchRandom, device: torch.device
    ) -> None:
        self._dataset, self._changes, self._random, self._device = dataset, changes, random, device
        self._features: NDArray[Any] | None = None
        self._file: Path | None = None  # to be removed by this process

    @property
    def encoded(self) -> bool:
        """Whether what is read are features."""
        return self._features is not None

    def encode(self, model: RewardModel, folder: Path, group: ProcessGroup) -> None:
        """Encode all frames; a collective call."""
        path = folder / (f"features-{group.local_main}.f32" if group.local_main else FEATURES_FILE)
        num_views = 1 + (self._changes.num_views if is_active(self._changes) else 0)
        count, is_first = len(self._dataset), group.local_rank == 0
        shape = (num_views, count, *model.feature_shape)
        features = self._features = group.local_main_first(lambda: _map_file(path, shape, new=is_first))
        self._file = path if is_first else None
        mine = range(group.local_rank * ENCODE_BATCH, count, group.local_size * ENCODE_BATCH)
        model.eval()
        for view in range(num_views):
            what = f"encoding view {view + 1}/{num_views}"
            for start in progress(mine, what, unit="batch", quiet=not group.is_main):
                draw = np.random.SeedSequence([self._random.seed, view, start]).generate_state(1)
                generator = torch.Generator().manual_seed(int(draw[0]))
                rows = np.arange(start, min(start + ENCODE_BATCH, count))
                frames = self._frames(rows)
                if view:
                    frames = {name: augment(each, self._changes, generator) for name, each in frames.items()}
                with torch.no_grad():
                    encoded = model.encode(model.preprocess(frames).to(self._device))
                features[view, rows] = encoded.float().cpu().numpy()
        group.barrier()

    def read(self, rows: IntArray, model: RewardModel, *, train: bool) -> Tensor:
        """Features of the frames `rows` (int [n]) where there are some, otherwise pixels for `model`."""
        share = self._random.share
        if self._features is not None:
            views = np.zeros(len(rows), np.int64)
            if train and len(self._features) > 1:
                rng = np.random.default_rng([self._random.seed, self._random.step])
                views = rng.integers(1, len(self._features), share.total)[share.positions]
            return torch.from_numpy(self._features[views, rows]).to(self._device)
        frames = self._frames(rows)
        if train:
            generator, positions = self._random.generator(0), torch.from_numpy(share.positions)
            frames = {
                name: augment(images, self._changes, generator, positions=positions, total=share.total)
                for name, images in frames.items()
            }
        return model.preprocess(frames).to(self._device)

    def _frames(self, rows: IntArray) -> dict[str, Tensor]:
        return {name: torch.from_numpy(images) for name, images in self._dataset.batch(rows).frames.items()}

    def close(self) -> None:
        """Remove the features."""
        self._features = None
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def _map_file(path: Path, shape: tuple[int, ...], *, new: bool) -> NDArray[Any]:
    with storage_errors(path):
        if not new:
            return np.memmap(path, np.float32, mode="r+", shape=shape)
        path.parent.mkdir(parents=True, exist_ok=True)
        array: NDArray[Any] = np.memmap(path, np.float32, mode="w+", shape=shape)
        with path.open("r+b") as file:
            portable.preallocate(file.fileno(), array.nbytes)  # a full disk shows here
        return array


# Augmentation, on whole batches of uint8 images


def is_active(cfg: AugmentConfig) -> bool:
    """Whether any change is switched on."""
    return bool(cfg.shift_pixels or cfg.crop_fraction or cfg.color or cfg.blur)


def augment(
    frames: Tensor,
    cfg: AugmentConfig,
    generator: torch.Generator,
    *,
    positions: Tensor | None = None,
    total: int | None = None,
) -> Tensor:
    """Change each image of a batch in its own way.

    Args:
        frames: uint8 [N, H, W, C], or stacks [N, k, H, W, C], whose frames are changed alike.
        cfg: how strongly.
        generator: where the random numbers come from.
        positions: int [N], places of these images in a larger batch of `total`; the numbers are drawn for
            all of it, so that an image is changed in the same way whoever works on which part.
        total: see `positions`.

    Returns:
        uint8 of the same shape.
    """
    if not is_active(cfg):
        return frames
    stacks = frames if frames.dim() == 5 else frames[:, None]  # the frames of a stack are channels of one
    num_frames, place = stacks.shape[1], slice(None) if positions is None else positions
    count = len(frames) if total is None else total
    flat = stacks.permute(0, 2, 3, 1, 4).flatten(3)
    pixels = flat.permute(0, 3, 1, 2).float()
    if cfg.shift_pixels or cfg.crop_fraction:
        pixels = _move(pixels, cfg, torch.rand(count, 3, generator=generator)[place] * 2 - 1)
    if cfg.color:
        uniform = torch.rand(3, count, 1, 1, 1, generator=generator)[:, place]
        pixels = _recolor(pixels, cfg.color, uniform, num_frames)
    if cfg.blur:
        chosen = torch.rand(count, generator=generator)[place] < cfg.blur
        pixels = torch.where(chosen[:, None, None, None], _blurred(pixels), pixels)
    changed = pixels.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
    return changed.reshape(*flat.shape[:3], num_frames, -1).permute(0, 3, 1, 2, 4).reshape(frames.shape)


def _move(pixels: Tensor, cfg: AugmentConfig, uniform: Tensor) -> Tensor:
    """Shift by whole pixels and zoom into a crop, edges repeated, as one resampling of the batch."""
    count, _, height, width = pixels.shape
    scale = 1 - cfg.crop_fraction * uniform[:, 2].abs()
    shift = torch.round(uniform[:, :2] * cfg.shift_pixels)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = scale
    theta[:, 0, 2] = 2 * shift[:, 0] / width
    theta[:, 1, 2] = 2 * shift[:, 1] / height
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _recolor(pixels: Tensor, strength: float, uniform: Tensor, num_frames: int) -> Tensor:
    """Brightness, contrast and saturation, each by up to `strength`; `uniform` is [3, N, 1, 1, 1]."""
    factors = 1 + strength * (uniform * 2 - 1)
    pixels = pixels * factors[0]
    mean = pixels.mean(dim=(1, 2, 3), keepdim=True)
    pixels = mean + (pixels - mean) * factors[1]
    if num_frames == 1:
        grey = pixels.mean(dim=1, keepdim=True)
    else:  # each frame has a grey of its own
        each = pixels.reshape(len(pixels), num_frames, -1, *pixels.shape[2:]).mean(dim=2)
        grey = each.repeat_interleave(pixels.shape[1] // num_frames, dim=1)
    return grey + (pixels - grey) * factors[2]


def _blurred(pixels: Tensor) -> Tensor:
    """A 3x3 binomial filter."""
    kernel = torch.tensor([1.0, 2.0, 1.0])
    kernel = (kernel[:, None] * kernel[None, :] / 16).expand(pixels.shape[1], 1, 3, 3)
    padded = F.pad(pixels, (1, 1, 1, 1), mode="replicate")
    return F.conv2d(padded, kernel, groups=pixels.shape[1])
