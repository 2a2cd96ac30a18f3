"""Random changes of training frames, on whole batches of uint8 images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from guerdon.config import AugmentConfig


def is_active(cfg: AugmentConfig) -> bool:
    """Whether any change is switched on."""
    return bool(cfg.shift_pixels or cfg.crop_fraction or cfg.color or cfg.blur)


def augment(frames: Tensor, cfg: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Change each image of a batch in its own way.

    Args:
        frames: uint8 [N, H, W, C].
        cfg: how strongly.
        generator: where the random numbers come from.

    Returns:
        uint8 [N, H, W, C].
    """
    if not is_active(cfg):
        return frames
    pixels = frames.permute(0, 3, 1, 2).float()
    if cfg.shift_pixels or cfg.crop_fraction:
        pixels = _move(pixels, cfg, generator)
    if cfg.color:
        pixels = _recolor(pixels, cfg.color, generator)
    if cfg.blur:
        chosen = torch.rand(len(pixels), generator=generator) < cfg.blur
        pixels = torch.where(chosen[:, None, None, None], _blurred(pixels), pixels)
    return pixels.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def _move(pixels: Tensor, cfg: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Shift by whole pixels and zoom into a crop, edges repeated, as one resampling of the batch."""
    count, _, height, width = pixels.shape
    uniform = torch.rand(count, 3, generator=generator) * 2 - 1
    scale = 1 - cfg.crop_fraction * uniform[:, 2].abs()
    shift = torch.round(uniform[:, :2] * cfg.shift_pixels)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = scale
    theta[:, 0, 2] = 2 * shift[:, 0] / width
    theta[:, 1, 2] = 2 * shift[:, 1] / height
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _recolor(pixels: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Brightness, contrast and saturation, each by up to `strength`."""
    factors = 1 + strength * (torch.rand(3, len(pixels), 1, 1, 1, generator=generator) * 2 - 1)
    pixels = pixels * factors[0]
    mean = pixels.mean(dim=(1, 2, 3), keepdim=True)
    pixels = mean + (pixels - mean) * factors[1]
    grey = pixels.mean(dim=1, keepdim=True)
    return grey + (pixels - grey) * factors[2]


def _blurred(pixels: Tensor) -> Tensor:
    """A 3x3 binomial filter."""
    kernel = torch.tensor([1.0, 2.0, 1.0])
    kernel = (kernel[:, None] * kernel[None, :] / 16).expand(pixels.shape[1], 1, 3, 3)
    padded = F.pad(pixels, (1, 1, 1, 1), mode="replicate")
    return F.conv2d(padded, kernel, groups=pixels.shape[1])
