"""Statistics of features as LeRobot keeps them, of an episode and of several together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from guerdon.core.types import UInt8Array

Stats: TypeAlias = dict[str, NDArray[Any]]
"""min, max, mean, std, count and quantiles of a feature."""

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
MAX_FRAMES = 100
"""Of an episode and camera that are looked at."""
_MAX_SIDE, _SIDE = 300, 150  # larger images are thinned out


def of_numbers(values: NDArray[Any]) -> Stats:
    """Of a column [T, width]; each statistic is [width], and the count [1]."""
    return _stats(values.astype(np.float64), len(values))


def of_frames(frames: UInt8Array) -> Stats:
    """Of a camera uint8 [T, H, W, C]; each statistic is [C, 1, 1], of values in [0, 1]."""
    steps = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), MAX_FRAMES)).astype(int))
    some, side = frames[steps], max(frames.shape[1:3])
    if side >= _MAX_SIDE:
        thin = side // _SIDE
        some = some[:, ::thin, ::thin]
    made = _stats(some.reshape(-1, some.shape[-1]) / 255.0, len(some))
    return {name: value if name == "count" else value.reshape(-1, 1, 1) for name, value in made.items()}


def _stats(rows: NDArray[np.float64], count: int) -> Stats:
    quantiles = np.quantile(rows, list(QUANTILES.values()), axis=0)
    return {
        "min": rows.min(axis=0),
        "max": rows.max(axis=0),
        "mean": rows.mean(axis=0),
        "std": rows.std(axis=0),
        "count": np.array([count]),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


def merged(parts: Sequence[Mapping[str, Any]]) -> Stats:
    """Of several episodes together; quantiles are averaged by count, as LeRobot does."""
    counts = np.array([np.asarray(part["count"], np.float64).reshape(-1)[0] for part in parts])

    def stacked(name: str) -> NDArray[np.float64]:
        return np.stack([np.asarray(part[name], np.float64) for part in parts])

    def averaged(values: NDArray[np.float64]) -> NDArray[np.float64]:
        result: NDArray[np.float64] = np.tensordot(counts / counts.sum(), values, axes=1)
        return result

    means = stacked("mean")
    mean = averaged(means)
    return {
        "min": stacked("min").min(axis=0),
        "max": stacked("max").max(axis=0),
        "mean": mean,
        "std": np.sqrt(averaged(stacked("std") ** 2 + (means - mean) ** 2)),
        "count": np.array([int(counts.sum())]),
        **{name: averaged(stacked(name)) for name in QUANTILES},
    }
