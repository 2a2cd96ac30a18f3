"""What the on-policy and the off-policy loop have in common."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from guerdon.config import RewardConfig
from guerdon.core.types import BoolArray, FloatArray, IntArray
from guerdon.fit.refit import ScoredSteps
from guerdon.monitoring.monitor import Watched
from guerdon.rewards.calibration import fires
from guerdon.rewards.relabel import judged_frames

FEATURE_FRAMES = 64
"""Judged frames whose features are compared with those of the training frames."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one iteration leaves to log and to watch."""

    metrics: dict[str, float]
    watched: Watched | None = None
    """None without a reward model."""
    judged: ScoredSteps | None = None
    """What refits learn from; None where the environments do not tell success, and without a reward model."""


class Loop(Protocol):
    """Collects experience and learns from it, an iteration at a time."""

    env_steps: int

    def knows_success(self) -> bool:
        """Whether the environments tell success."""

    def reset(self, seed: int) -> None:
        """Begin new episodes."""

    def advance(self, progress: float) -> Iteration:
        """One iteration; `progress` is the share of the run that is over."""

    def state_dict(self, folder: Path) -> dict[str, Any]:
        """What resuming needs; large arrays go to files in `folder`."""

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Go on from `state_dict`."""


@dataclass
class Stopwatch:
    """Seconds by name, for `time/*`."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """The time since the last lap was spent on `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self, env_steps: int) -> dict[str, float]:
        """`time/<name>` and the rate of environment steps."""
        total = sum(self.seconds.values())
        named = {f"time/{name}": value for name, value in self.seconds.items()}
        return {**named, "time/steps_per_second": env_steps / total}


def episode_metrics(episodes: Sequence[Any]) -> dict[str, float]:
    """Means over episodes that ended, under RLinf's names; nothing if none did."""
    if not episodes:
        return {}
    return {
        "env/success_once": float(np.mean([item.success_once for item in episodes])),
        "env/success_at_end": float(np.mean([item.success_at_end for item in episodes])),
        "env/return": float(np.mean([item.env_return for item in episodes])),
        "env/length": float(np.mean([item.length for item in episodes])),
        "env/episodes": float(len(episodes)),
    }


def reward_metrics(
    prob_success: FloatArray,
    env_rewards: NDArray[Any],
    training: NDArray[Any],
    learned: NDArray[Any],
    success: BoolArray | None,
    threshold: float,
) -> dict[str, float]:
    """All three rewards, and how the learned one behaves; `prob_success` is NaN where nothing was judged."""
    values = {
        "rollout/rewards": float(np.mean(training)),
        "rollout/env_rewards": float(np.mean(env_rewards)),
        "rollout/learned_rewards": float(np.mean(learned)),
    }
    judged = np.isfinite(prob_success)
    if not judged.any():
        return values
    fired = fires(prob_success[judged], threshold)
    values |= {
        "reward/prob_mean": float(prob_success[judged].mean()),
        "reward/fire_rate": float(fired.mean()),
    }
    if success is not None:
        values["reward/agreement"] = float((fired == success[judged]).mean())
    return values


def frame_metrics(num_rendered: int, num_judged: int) -> dict[str, float]:
    """Frames that were asked of the environments, and those that the reward model judged."""
    return {"reward/frames_rendered": float(num_rendered), "reward/frames_judged": float(num_judged)}


def feature_rows(count: int, seed: int) -> IntArray:
    """Which of `count` judged frames are compared with the training frames, ascending."""
    return np.sort(np.random.default_rng(seed).permutation(count)[:FEATURE_FRAMES])


def fill_scores(
    values: FloatArray,
    done: BoolArray,
    cfg: RewardConfig,
    *,
    only_at_rest: bool = False,
    last: FloatArray | None = None,
) -> FloatArray:
    """Verdicts [T, N] with those that were not asked for (NaN): 0 for robots in motion, or the last one.

    Args:
        values: float [T, N].
        done: bool [T, N]; whether the episode ended with this step.
        cfg: the `reward` section.
        only_at_rest: the model judges robots that stand still alone.
        last: float [N], of the step before the first; None: none is missing there.
    """
    if only_at_rest:
        filled: FloatArray = np.where(np.isnan(values) & judged_frames(done, cfg), np.float32(0), values)
        return filled
    return carry_forward(values, last) if cfg.cache_verdicts and cfg.reward_mode == "per_step" else values


def scored_frames_only(prob_success: FloatArray, disagreement: FloatArray) -> FloatArray:
    """Verdicts that come from a look at a frame, NaN for all others; of those there is no disagreement."""
    seen: FloatArray = np.where(np.isnan(disagreement), np.float32(np.nan), prob_success)
    return seen


def carry_forward(values: FloatArray, last: FloatArray | None = None) -> FloatArray:
    """Verdicts [T, N] with those that were not given (NaN) taken from the step before.

    Args:
        values: float [T, N].
        last: float [N], of the step before the first; None: none is missing there.
    """
    filled = values.copy()
    for t, row in enumerate(filled):
        before = last if t == 0 else filled[t - 1]
        if before is not None:
            row[:] = np.where(np.isnan(row), before, row)
    return filled


def frame_row(rows: IntArray, place: int, num_envs: int) -> int:
    """Which of the judged frames shows a step: its own, or the last one before it of its environment.

    Args:
        rows: int [K], places of the judged frames in a flat [T * N], ascending.
        place: of the step.
        num_envs: N.
    """
    of_env = np.flatnonzero((rows % num_envs == place % num_envs) & (rows <= place))
    return int(of_env[-1])
