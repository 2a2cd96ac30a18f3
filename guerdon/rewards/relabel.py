"""The only place where scores become rewards, and where learned rewards meet env rewards.

The same for all models: first `learned_rewards` maps scores to rewards, then `combine` scales them and joins
them with the env's; `training_rewards` does both. Env rewards are read and never changed. All functions are
pure and take arrays of any one shape: [N] for a step, [T, N] for a rollout, [B] for a sampled batch.

A control (`reward.control`) is made here too: `verdicts`, `learned_rewards` and `controlled`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.config import RewardConfig
from guerdon.config.schema_reward import CombineConfig
from guerdon.core.errors import DataError
from guerdon.core.running_stats import Moments
from guerdon.core.types import BoolArray, FloatArray
from guerdon.rewards.calibration import fires
from guerdon.rewards.model import Scores


def map_rewards(prob_success: NDArray[np.floating], cfg: RewardConfig, threshold: float) -> FloatArray:
    """Learned rewards of judged frames, float32.

    `binary`: `success_reward` where `prob_success > threshold`, else `fail_reward`; `continuous`: the
    probability itself.

    Args:
        prob_success: probabilities.
        cfg: the `reward` section.
        threshold: the checkpoint's own, or the number that `cfg.reward_threshold` gives.
    """
    if cfg.reward_type == "continuous":
        return prob_success.astype(np.float32)
    return np.where(
        fires(prob_success, threshold), np.float32(cfg.success_reward), np.float32(cfg.fail_reward)
    ).astype(np.float32)


def judged_frames(done: BoolArray, cfg: RewardConfig) -> BoolArray:
    """Which frames a reward is computed for: every one, or in terminal mode the last one of an episode."""
    return done.copy() if cfg.reward_mode == "terminal" else np.ones(done.shape, np.bool_)


def learned_rewards(
    scores: Scores | NDArray[np.floating], done: BoolArray, cfg: RewardConfig, threshold: float
) -> FloatArray:
    """Learned rewards of steps, float32; in terminal mode zero on all but the last frame of an episode.

    Args:
        scores: what the model said, or its probabilities alone, as buffers keep them. Rewards that a model
            gives itself stay as they are. Where a frame is not judged its value may be NaN.
        done: whether the episode ended with this step; the frame is then its final one.
        cfg: the `reward` section.
        threshold: see `map_rewards`.
    """
    given = scores.values if isinstance(scores, Scores) else scores
    if cfg.control == "off":  # nothing was asked of the model
        return np.zeros(given.shape, np.float32)
    judged = judged_frames(done, cfg)
    bad = int(np.count_nonzero(~np.isfinite(given[judged])))
    if bad:
        raise DataError(f"{bad} judged frames have no finite probability")
    rewards = np.zeros(given.shape, np.float32)
    if isinstance(scores, Scores) and scores.rewards is not None:
        rewards[judged] = given[judged]
    else:
        rewards[judged] = map_rewards(given[judged], cfg, threshold)
    return rewards


def verdicts(prob_success: FloatArray, success: BoolArray, done: BoolArray, cfg: RewardConfig) -> FloatArray:
    """Probabilities as the run has them: the model's, or with `control: env` the environment's success.

    All arrays have one shape; where a frame is not judged the result may be NaN.
    """
    if cfg.control != "env":
        return prob_success
    told: FloatArray = np.where(judged_frames(done, cfg), success.astype(np.float32), np.float32(np.nan))
    return told


def controlled(
    learned: FloatArray, cfg: CombineConfig, env_steps: int, judged: BoolArray | None = None
) -> FloatArray:
    """Learned rewards of a batch as a control has them: zero, or each at the place of another step.

    Which step gets which reward depends on `env_steps` and nothing else. Samples of a replay buffer come in
    random order, so one permutation serves all updates between two steps.

    Args:
        learned: of any shape.
        cfg: has `control`.
        env_steps: of the run so far.
        judged: bool of the same shape; steps whose rewards change places. None: all.
    """
    if cfg.control == "off":
        return np.zeros_like(learned)
    if cfg.control != "shuffled":
        return learned
    places = np.arange(learned.size) if judged is None else np.flatnonzero(judged)
    order = np.random.default_rng(env_steps).permutation(places)
    shuffled = learned.reshape(-1).copy()
    shuffled[order] = shuffled[np.roll(order, 1)]  # one cycle: no reward stays where it was
    return shuffled.reshape(learned.shape)


def fill_scores(
    values: FloatArray,
    done: BoolArray,
    cfg: RewardConfig,
    *,
    only_at_rest: bool = False,
    last: FloatArray | None = None,
) -> FloatArray:
    """Scores [T, N] with those that were not asked for (NaN): 0 for robots in motion, or the last one.

    Args:
        values: float [T, N].
        done: bool [T, N]; whether the episode ended with this step.
        cfg: the `reward` section.
        only_at_rest: the model scores robots that stand still alone.
        last: float [N], of the step before the first; None: none is missing there.
    """
    if only_at_rest:
        filled: FloatArray = np.where(np.isnan(values) & judged_frames(done, cfg), np.float32(0), values)
        return filled
    return carry_forward(values, last) if cfg.cache_verdicts and cfg.reward_mode == "per_step" else values


def carry_forward(values: FloatArray, last: FloatArray | None = None) -> FloatArray:
    """Scores [T, N] with those that were not given (NaN) taken from the step before; see `fill_scores`."""
    filled = values.copy()
    for t, row in enumerate(filled):
        before = last if t == 0 else filled[t - 1]
        if before is not None:
            row[:] = np.where(np.isnan(row), before, row)
    return filled


def combine(
    env_rewards: NDArray[Any],
    learned: FloatArray,
    cfg: CombineConfig,
    scale: RewardScale | None = None,
    env_steps: int = 0,
    judged: BoolArray | None = None,
) -> FloatArray:
    """What the learner trains on, float32: learned rewards, scaled if asked for, and the env's.

    Args:
        env_rewards: what the environment gave.
        learned: of the same shape.
        cfg: `combine_mode` and the weights: the `reward` section, or the `mix` section of the zoo.
        scale: divides the learned rewards; None: they stay as they are.
        env_steps: of the run so far; the weight may change with them.
        judged: see `controlled`.
    """
    if env_rewards.shape != learned.shape:
        raise DataError(
            f"env rewards have shape {list(env_rewards.shape)}, learned ones {list(learned.shape)}"
        )
    learned = controlled(learned, cfg, env_steps, judged)
    if scale is not None:
        learned = scale.apply(learned)
    if cfg.combine_mode == "replace":
        return learned.copy()
    env = env_rewards.astype(np.float32)
    if cfg.combine_mode == "add":
        return env + learned
    return np.float32(cfg.env_reward_weight) * env + np.float32(cfg.weight_at(env_steps)) * learned


def training_rewards(
    scores: Scores | NDArray[np.floating],
    env_rewards: NDArray[Any],
    done: BoolArray,
    cfg: RewardConfig,
    threshold: float,
    scale: RewardScale | None = None,
    extra: FloatArray | float = 0.0,
    env_steps: int = 0,
) -> FloatArray:
    """From scores to what the learner trains on: map, scale if asked for, combine; float32.

    `extra` is the learned reward of another model, of the same shape, which is added after the mapping.
    """
    learned = learned_rewards(scores, done, cfg, threshold) + np.float32(extra)
    return combine(env_rewards, learned, cfg, scale, env_steps, judged_frames(done, cfg))


@dataclass
class RewardScale:
    """Running deviation of the learned rewards (`reward.normalize`); it changes in `update` alone."""

    count: float = 0.0
    mean: float = 0.0
    spread: float = 0.0
    """Sum of squared distances from the mean."""

    def update(self, learned: FloatArray) -> None:
        """Take new learned rewards into account."""
        mean = float(learned.mean(dtype=np.float64))
        fresh = Moments(float(learned.size), mean, float(np.square(learned - mean, dtype=np.float64).sum()))
        self.count, self.mean, self.spread = Moments(self.count, self.mean, self.spread).merged(fresh)

    def apply(self, learned: FloatArray) -> FloatArray:
        """Learned rewards divided by their deviation so far; as they are while that is zero."""
        deviation = math.sqrt(self.spread / self.count) if self.count else 0.0
        return learned if deviation < 1e-8 else (learned / np.float32(deviation)).astype(np.float32)
