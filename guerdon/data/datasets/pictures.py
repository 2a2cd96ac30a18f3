"""Training frames as picture files, to look at what a model is shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.progress import progress
from guerdon.core.types import IntArray, UInt8Array
from guerdon.data.datasets.frames import RewardDataset

MAX_PICTURES = 500


def save_picture(path: Path, frame: UInt8Array) -> None:
    """Write one frame (uint8 [H, W, C]) as PNG."""
    picture = Image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame)
    write_atomic(path, lambda file: picture.save(file, format="PNG"))


def save_positive_pictures(dataset: RewardDataset, folder: Path) -> int:
    """All positive frames as `{folder}_{trajectory}_frame{step:03d}.png` (`--visualize-positive`)."""
    store = dataset.store
    rows = np.flatnonzero(store.labels >= 0.5)
    sources = store.episode_column("source")
    make_directory(folder)
    camera = dataset.cameras[0]
    for row in progress(rows.tolist(), "drawing", unit="frame"):
        number = int(store.episode[row])
        place = Path(sources[number])
        name = f"{place.parent.name}_{place.stem}" if place.suffix else f"positive_{number:06d}"
        save_picture(folder / f"{name}_frame{int(store.step[row]):03d}.png", store.frames(camera, [row])[0])
    return len(rows)


def save_training_pictures(dataset: RewardDataset, folder: Path, rows: IntArray) -> int:
    """A sample of the training frames, in `success/` and `fail/` (`data.debug_save_dir`)."""
    store = dataset.store
    count = 0
    for name, wanted in (("success", True), ("fail", False)):
        of_kind = rows[(store.labels[rows] >= 0.5) == wanted]
        few = of_kind[np.linspace(0, len(of_kind) - 1, min(len(of_kind), MAX_PICTURES)).astype(np.int64)]
        make_directory(folder / name)
        for row in few.tolist():
            number, step = int(store.episode[row]), int(store.step[row])
            for camera in dataset.cameras:
                file = folder / name / f"episode{number:06d}_step{step:03d}_{camera.replace('/', '_')}.png"
                save_picture(file, store.frames(camera, [row])[0])
            count += 1
    return count
