"""The image classifier of stage 2 as the only reward, for `bench_zoo`: random play, a fit, a policy.

Tests run the same (tests/rewards/zoo/test_image_success.py).
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

import guerdon
from guerdon.config import (
    AugmentConfig,
    CollectConfig,
    EnvConfig,
    FitConfig,
    FitDataConfig,
    GuerdonConfig,
    LoggerConfig,
    LRScheduleConfig,
    OptimConfig,
    RewardConfig,
    RewardModelConfig,
    RunnerConfig,
)
from guerdon.data.collect.run import collect
from guerdon.training.fit_run import train_reward

NAME = "point_reach_image_success"
TARGET = 41.2
"""95% of the return of the script, which sees the state and not a picture."""
EPISODES = 100
"""Of random play with a success, and as many without, that the classifier is fitted to."""


def settings() -> dict[str, Any]:
    """What is shipped; the classifier is not."""
    file = Path(guerdon.__file__).parent / "conf" / "zoo" / f"{NAME}.yaml"
    shipped: dict[str, Any] = yaml.safe_load(file.read_text())
    return shipped


def fitted(folder: Path, seed: int = 0) -> tuple[str, float]:
    """Stages 1 and 2 in a folder: the checkpoint, and the area under the curve on held-out episodes."""
    env, data = EnvConfig(id=settings()["env"]["train"]["id"], num_envs=32), str(folder / "data")
    both = CollectConfig(save_dir=data, policy="random", target_success=EPISODES, target_failure=EPISODES)
    collect(env, both, seed=seed)
    model = RewardModelConfig(arch="resnet10", width=8, image_size=(3, 16, 16), hidden_dim=32)
    plain = FitConfig(
        epochs=4,
        global_batch_size=128,
        optim=OptimConfig(optimizer="adam", weight_decay=0.0),
        lr_sched=LRScheduleConfig(name="constant", warmup_steps=0),
        augment=AugmentConfig(shift_pixels=0, color=0.0),  # the pictures have 16 pixels
        data=FitDataConfig(path=data),
    )
    _, result = train_reward(
        GuerdonConfig(
            seed=seed,
            reward=RewardConfig(model=model),
            fit=plain,
            runner=RunnerConfig(logger=LoggerConfig(log_path=str(folder / "fit"), backends=())),
        )
    )
    return str(result.checkpoint), result.metrics["auc"]


@cache
def _kept() -> tuple[tempfile.TemporaryDirectory[str], str]:
    """A classifier for this process, and the folder that goes with it."""
    folder = tempfile.TemporaryDirectory()
    return folder, fitted(Path(folder.name))[0]


CASES: dict[str, dict[str, Any]] = {
    NAME: {
        "settings": settings(),
        "demonstrations": None,
        "target": TARGET,
        "pretrain": False,
        "given": lambda: {"checkpoint_path": _kept()[1]},
    }
}
"""As in the other files; `given` makes further settings of the reward model."""
