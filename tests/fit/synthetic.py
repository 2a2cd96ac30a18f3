"""A data set that a tiny network learns in seconds: success is a bright square in the middle."""

import numpy as np
import torch

from guerdon.core.types import Episode
from guerdon.data.store import StoreWriter


def episode(seed, success, steps=12, size=32, cameras=("base_camera",)):
    rng = np.random.default_rng(seed)
    labels = np.zeros(steps, np.float32)
    labels[steps // 2 :] = success
    frames = {}
    for camera in cameras:
        images = rng.integers(40, 90, (steps, size, size, 3), dtype=np.uint8)
        for step in range(steps):
            if labels[step]:
                row, column = size // 2 - 4, size // 2 - 4
            else:
                row, column = rng.choice([0, size - 9], 2)
            images[step, row : row + 8, column : column + 8] = (220, 60, 60)
        frames[camera] = images
    return Episode(
        frames=frames, labels=labels, success=bool(success), source=f"positive/{seed:06d}.npy", seed=seed
    )


def score_rows(model, dataset, rows, batch=256):
    """Logits of frames of a data set -> float64 [n]."""
    model.eval()
    with torch.no_grad():
        parts = [model(dataset.batch(rows[i : i + batch]).frames) for i in range(0, len(rows), batch)]
    return torch.cat(parts).double().numpy()


def write_store(path, count=24, **options):
    with StoreWriter(path) as writer:
        writer.add_many([episode(seed, seed % 2 == 0, **options) for seed in range(count)])
    return path
