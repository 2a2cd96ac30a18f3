"""Frames and models for the scorers' tests."""

import numpy as np
import torch


def random_frames(count, size=(64, 64), channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *size, channels), dtype=np.uint8)


def lively(model, seed=0):
    """Batch norms that have seen frames, so that folding them is not trivial."""
    channels, height, width = model.config.image_size
    model.train()
    with torch.no_grad():
        for number in range(2):
            images = random_frames(8, (height, width), channels, seed + number)
            model(dict.fromkeys(model.config.image_keys, images))
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.5, 0.5)
    return model.eval()


def eager(model, frames):
    with torch.no_grad():
        return model(frames).numpy()
