"""Data sets of Minari: HDF5 with rewards, ends and images, some of them as JPEG."""

from __future__ import annotations

import io
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from fuzz.worker import Target
from guerdon.core.types import Episode, Fault
from guerdon.data.formats import h5_process
from guerdon.data.formats.minari_h5 import FILE, Minari

STEPS, SIDE = 2, 32


def _jpeg(rng: np.random.Generator) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    content = io.BytesIO()
    Image.fromarray(np.full((SIDE, SIDE, 3), rng.integers(0, 255, 3), np.uint8)).save(content, "JPEG")
    return np.frombuffer(content.getvalue(), np.uint8)


def _seeds(scratch: Path) -> list[bytes]:
    rng = np.random.default_rng(0)
    made = []
    for libver in ("earliest", "latest"):
        path = scratch / f"{libver}.hdf5"
        with h5py.File(path, "w", libver=libver) as file:
            for number in range(2):
                group = file.create_group(f"episode_{number}")
                group["actions"], group["rewards"] = rng.random((STEPS, 3), np.float32), rng.random(STEPS)
                group["terminations"] = group["truncations"] = np.array([False, True])
                group["infos/success"] = np.array([False, False, True])
                group["observations/joints"] = rng.random((STEPS + 1, 2))
                pictures = group.create_dataset(
                    "observations/front", (STEPS + 1,), h5py.vlen_dtype(np.uint8), chunks=True
                )
                for step in range(STEPS + 1):
                    pictures[step] = _jpeg(rng)
                frames = np.zeros((STEPS + 1, SIDE, SIDE, 1), np.uint8)
                group.create_dataset("observations/wrist", data=frames, compression="gzip")
        made.append(path.read_bytes())
    h5_process.IDLE_SECONDS = 3600.0
    _read(made[0], scratch)  # starts the process that reads, now and not while an input is run
    return made


def _read(data: bytes, scratch: Path) -> int:
    (scratch / FILE).write_bytes(data)
    items = list(Minari().read(scratch))
    assert items, "neither an episode nor a fault"
    for item in items:
        if isinstance(item, Fault):
            item.reason.encode()
    return sum(
        images.nbytes for item in items if isinstance(item, Episode) for images in item.frames.values()
    )


TARGETS: dict[str, Target] = {"minari": Target(_seeds, _read)}
