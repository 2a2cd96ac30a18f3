"""What experts leave: dicts of arrays in pickles, and DI-engine's ranked episodes and checkpoints."""

from __future__ import annotations

import io
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fuzz.engine import Target
from fuzz.targets.files import mutate_dumped
from guerdon.core.errors import GuerdonError
from guerdon.rewards.zoo.demonstrations import RANKED_FILES, read_demonstrations
from guerdon.training.experts import di_engine_policy

_CHECKPOINT = "ckpt_best.pth.tar"


def _columns() -> Any:
    steps = {"observations": np.zeros((4, 2), np.float32), "acts": np.zeros((4, 1), np.float32)}
    marks = {"rewards": [0.0, 1.0, 0.0, 1.0], "timeouts": np.array([0, 1, 0, 1], np.bool_)}
    return [{**steps, **marks}, {**steps, "episode_ends": np.array([2, 4]), "next_obs": np.ones((4, 2))}]


def _episodes() -> Any:
    return [[[np.zeros(3, np.float32)] * 3, np.ones((4, 3), np.float32)], [[np.ones(3)] * 2]]


def _checkpoint() -> Any:
    layers = (("encoder.main.0", 8, 4), ("encoder.main.2", 8, 8), ("head.A.0.0", 8, 8), ("head.A.1.0", 2, 8))
    weights: dict[str, torch.Tensor] = {}
    for name, outputs, inputs in layers:
        weights |= {f"{name}.weight": torch.ones(outputs, inputs), f"{name}.bias": torch.zeros(outputs)}
    return {"model": weights, "last_iter": 3}


def _pickled(record: Any) -> bytes:
    return pickle.dumps(record, protocol=4)


def _saved(record: Any) -> bytes:
    file = io.BytesIO()
    torch.save(record, file)
    return file.getvalue()


def _column_seeds(scratch: Path) -> list[bytes]:
    return [_pickled(_columns()), _pickled(_columns()[0])]


def _ranked_seeds(scratch: Path) -> list[bytes]:
    (scratch / RANKED_FILES[1]).write_bytes(_pickled([[1.0, 2.0], [0.5]]))
    return [_pickled(_episodes())]


def _read(name: str, as_folder: bool, data: bytes, scratch: Path) -> None:
    (scratch / name).write_bytes(data)
    try:
        read_demonstrations(scratch if as_folder else scratch / name)
    except GuerdonError as error:
        assert name in str(error) and "\n" not in str(error), f"{error} names no file, or has several lines"
        raise


def _act(data: bytes, scratch: Path) -> None:
    """A checkpoint is loaded, and asked for the action in an observation of its size."""
    (scratch / _CHECKPOINT).write_bytes(data)
    try:
        di_engine_policy(scratch / _CHECKPOINT)(np.zeros((2, 4), np.float32))
    except GuerdonError as error:
        assert _CHECKPOINT in str(error) and "\n" not in str(error), f"{error} names no file"
        raise


TARGETS = {
    "demonstrations-columns": Target(
        _column_seeds, partial(_read, "own.pkl", False), partial(mutate_dumped, _columns, _pickled)
    ),
    "demonstrations-ranked": Target(
        _ranked_seeds, partial(_read, RANKED_FILES[0], True), partial(mutate_dumped, _episodes, _pickled)
    ),
    "di-engine-policy": Target(
        lambda _: [_saved(_checkpoint())], _act, partial(mutate_dumped, _checkpoint, _saved)
    ),
}
