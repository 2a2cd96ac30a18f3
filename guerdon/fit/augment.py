"""Random changes of training frames, on whole batches of uint8 images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from guerdon.config import AugmentConfig


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
    if frames.dim() == 5:
        flat = frames.permute(0, 2, 3, 1, 4).flatten(3)
        changed = _augment(flat, cfg, generator, positions, total, frames.shape[1])
        return changed.reshape(*flat.shape[:3], *frames.shape[1::3]).permute(0, 3, 1, 2, 4)
    return _augment(frames, cfg, generator, positions, total, 1)


def _augment(
    frames: Tensor,
    cfg: AugmentConfig,
    generator: torch.Generator,
    positions: Tensor | None,
    total: int | None,
    num_frames: int,
) -> Tensor:
    """uint8 [N, H, W, c] -> the same changed; c are the channels of all frames of a stack."""
    count = len(frames) if total is None else total
    place = slice(None) if positions is None else positions
    pixels = frames.permute(0, 3, 1, 2).float()
    if cfg.shift_pixels or cfg.crop_fraction:
        pixels = _move(pixels, cfg, torch.rand(count, 3, generator=generator)[place] * 2 - 1)
    if cfg.color:
        uniform = torch.rand(3, count, 1, 1, 1, generator=generator)[:, place]
        pixels = _recolor(pixels, cfg.color, uniform, num_frames)
    if cfg.blur:
        chosen = torch.rand(count, generator=generator)[place] < cfg.blur
        pixels = torch.where(chosen[:, None, None, None], _blurred(pixels), pixels)
    return pixels.round_().clamp_(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


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
