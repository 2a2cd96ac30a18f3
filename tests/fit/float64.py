"""Fits in float64, so that rounding does not decide what a test of equal losses says.

Adam's first steps are the signs of gradients, also of those that are nothing but rounding, and a ReLU near 0
turns a last digit into a gradient that is there or not. In float32 two orders of summation therefore part by
up to 1% within ten steps, more on one processor than on another; in float64 by nine digits less.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from guerdon.fit.state import Checkpoints
from guerdon.fit.trainer import RewardModelTrainer
from guerdon.models import RewardModel

MARK = "FLOAT64"
"""A file of this name in a run's folder asks for float64, in whatever process the fit runs."""


def use_float64() -> Callable[[], None]:
    """Teach this process to heed the mark; returns how to forget it."""
    init, preprocess, read = RewardModelTrainer.__init__, RewardModel.preprocess, Checkpoints._read

    def init_in_float64(
        self: RewardModelTrainer, model: RewardModel, *args: Any, folder: Path, **options: Any
    ) -> None:
        init(self, model.double() if (folder / MARK).exists() else model, *args, folder=folder, **options)

    def pixels_of_the_models_type(self: RewardModel, frames: Any) -> Any:
        return preprocess(self, frames).to(next(self.parameters()).dtype)

    def read_all_digits(self: Checkpoints, path: Path) -> Any:
        weights, extra = read(self, path)  # through a model, which is of float32
        kept = torch.load(path, weights_only=True)["model_state_dict"]
        return {name: kept[name] for name in weights}, extra

    def put(*methods: Any) -> None:
        RewardModelTrainer.__init__, RewardModel.preprocess, Checkpoints._read = methods  # type: ignore[method-assign]

    put(init_in_float64, pixels_of_the_models_type, read_all_digits)
    return lambda: put(init, preprocess, read)
