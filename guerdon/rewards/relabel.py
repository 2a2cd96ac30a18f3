"""The only place where logits become probabilities, scores become rewards, and these meet env rewards.

A classifier's logits become probabilities by its `Calibration`, and decisions by `fires`. For all models,
`learned_rewards` then maps scores to rewards, and `combine` scales them and joins them with the env's;
`training_rewards` does both. Env rewards are read and never changed. Functions are pure and take arrays of
any one shape: [N] for a step, [T, N] for a rollout, [B] for a sampled batch. `ModelRewards` is a model that
learns and gives rewards while a run goes on.

A control (`reward.control`) is made here too: `verdicts`, `learned_rewards` and `controlled`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from guerdon.config import RewardConfig
from guerdon.config.schema_reward import CombineConfig
from guerdon.core.errors import DataError
from guerdon.core.progress import Notes
from guerdon.core.running_stats import Moments
from guerdon.core.steps import Scores, StepBatch
from guerdon.core.types import BoolArray, FloatArray, fields_of, known_fields
from guerdon.rewards.model import BaseRewardModel, StreamState

CalibrationKind: TypeAlias = Literal["identity", "temperature", "isotonic"]
KINDS: tuple[CalibrationKind, ...] = ("identity", "temperature", "isotonic")
TILT = 0.01
"""Slope (logit per logit) of isotonic calibration where it is flat: the order of frames is never lost."""
MAX_LOGIT = 1000.0
"""Beyond this no logit is looked for."""


def fires(prob_success: ArrayLike, threshold: float) -> BoolArray:
    """Which frames count as success: those whose probability is above the threshold; bool, any shape.

    Both sides are compared as float32, the type of a score: 0.3 as a Python number is a little less than
    0.3 as float32, and the same frame would fire here and not there. NaN (not scored) never fires.
    """
    above: BoolArray = np.asarray(prob_success, np.float32) > np.float32(threshold)
    return above


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A monotone map from logits to success probabilities; it never changes the order of frames."""

    kind: CalibrationKind = "identity"
    temperature: float = 1.0
    """`temperature`: logits are divided by it."""
    knots: tuple[float, ...] = ()
    """`isotonic` [K]: logits, ascending."""
    values: tuple[float, ...] = ()
    """`isotonic` [K]: calibrated logits at the knots, linear between them and flat outside, plus the tilt."""
    held_out_log_loss: Mapping[str, float] = field(default_factory=dict)
    """Cross-validated log loss of each kind that was tried."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DataError(f"Calibration.kind must be one of {KINDS}, not {self.kind!r}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise DataError(f"Calibration.temperature must be positive, not {self.temperature}")
        if self.kind == "isotonic" and not self.knots:
            raise DataError("an isotonic Calibration needs knots")
        knots, values = np.asarray(self.knots, np.float64), np.asarray(self.values, np.float64)
        if knots.shape != values.shape or not bool(np.isfinite([knots, values]).all()):
            raise DataError("Calibration.knots and values must be finite and of one length")
        if bool((np.diff(knots) <= 0).any() or (np.diff(values) < 0).any()):
            raise DataError("Calibration.knots and values must ascend")

    def apply(self, logits: ArrayLike) -> FloatArray:
        """Calibrated success probabilities: float [N] -> float32 [N]."""
        x = np.asarray(logits, np.float64)
        if self.kind == "temperature":
            x = x / self.temperature
        elif self.kind == "isotonic":
            x = np.interp(x, self.knots, self.values) + TILT * x
        return sigmoid(x).astype(np.float32)

    def logit_at(self, prob_success: float) -> float:
        """The logit above which `apply` gives more than `prob_success`, within +-`MAX_LOGIT`."""
        low, high = -MAX_LOGIT, MAX_LOGIT
        while high - low > 1e-9:
            middle = (low + high) / 2
            low, high = (low, middle) if fires(self.apply([middle]), prob_success)[0] else (middle, high)
        return high

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        lists = {"knots": list(self.knots), "values": list(self.values)}
        return {**fields_of(self), **lists, "held_out_log_loss": dict(self.held_out_log_loss)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Calibration:
        """The inverse of `to_dict`."""
        known = known_fields(cls, plain)
        for name in ("knots", "values"):
            known[name] = tuple(known.get(name, ()))
        return cls(**known)


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Elementwise, exact also where it rounds to 0 or 1."""
    result: NDArray[np.float64] = np.exp(-np.logaddexp(0.0, -x))
    return result


def map_rewards(prob_success: NDArray[np.floating], cfg: RewardConfig, threshold: float) -> FloatArray:
    """Learned rewards of scored frames, float32.

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


def scored_frames(done: BoolArray, cfg: RewardConfig) -> BoolArray:
    """Which frames a reward is computed for: every one, or in terminal mode the last one of an episode."""
    return done.copy() if cfg.reward_mode == "terminal" else np.ones(done.shape, np.bool_)


def learned_rewards(
    scores: Scores | NDArray[np.floating], done: BoolArray, cfg: RewardConfig, threshold: float
) -> FloatArray:
    """Learned rewards of steps, float32; in terminal mode zero on all but the last frame of an episode.

    Args:
        scores: what the model said, or its probabilities alone, as buffers keep them. Rewards that a model
            gives itself stay as they are. Where a frame is not scored its value may be NaN.
        done: whether the episode ended with this step; the frame is then its final one.
        cfg: the `reward` section.
        threshold: see `map_rewards`.
    """
    given = scores.values if isinstance(scores, Scores) else scores
    if cfg.control == "off":  # nothing was asked of the model
        return np.zeros(given.shape, np.float32)
    scored = scored_frames(done, cfg)
    bad = int(np.count_nonzero(~np.isfinite(given[scored])))
    if bad:
        raise DataError(f"{bad} scored frames have no finite probability")
    rewards = np.zeros(given.shape, np.float32)
    if isinstance(scores, Scores) and scores.rewards is not None:
        rewards[scored] = given[scored]
    else:
        rewards[scored] = map_rewards(given[scored], cfg, threshold)
    return rewards


def verdicts(prob_success: FloatArray, success: BoolArray, done: BoolArray, cfg: RewardConfig) -> FloatArray:
    """Probabilities as the run has them: the model's, or with `control: env` the environment's success.

    All arrays have one shape; where a frame is not scored the result may be NaN.
    """
    if cfg.control != "env":
        return prob_success
    known: FloatArray = np.where(scored_frames(done, cfg), success.astype(np.float32), np.float32(np.nan))
    return known


def controlled(
    learned: FloatArray, cfg: CombineConfig, env_steps: int, scored: BoolArray | None = None
) -> FloatArray:
    """Learned rewards of a batch as a control has them: zero, or each at the place of another step.

    Which step gets which reward depends on `env_steps` and nothing else. Samples of a replay buffer come in
    random order, so one permutation serves all updates between two steps. A reward that is alone in its batch
    has no other place to go, and would be the learned one: it is zero.

    Args:
        learned: of any shape.
        cfg: has `control`.
        env_steps: of the run so far.
        scored: bool of the same shape; steps whose rewards change places. None: all.
    """
    if cfg.control == "off":
        return np.zeros_like(learned)
    if cfg.control != "shuffled":
        return learned
    places = np.arange(learned.size) if scored is None else np.flatnonzero(scored)
    order = np.random.default_rng(env_steps).permutation(places)
    shuffled = learned.reshape(-1).copy()
    shuffled[order] = shuffled[np.roll(order, 1)] if len(order) > 1 else 0.0  # one cycle: none stays
    return shuffled.reshape(learned.shape)


def ends_are_verdicts(cfg: RewardConfig) -> bool:
    """Whether this is a control of a run in which the model ends episodes: the end alone tells its verdict.

    An end is worth zero. If critics happen to start below that, a policy learns to bring the end about
    without any reward. As a time limit the end is worth what follows, like every other step.
    """
    return cfg.standalone and cfg.control in ("off", "shuffled")


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
        filled: FloatArray = np.where(np.isnan(values) & scored_frames(done, cfg), np.float32(0), values)
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
    scored: BoolArray | None = None,
) -> FloatArray:
    """What the learner trains on, float32: learned rewards, scaled if asked for, and the env's.

    Args:
        env_rewards: what the environment gave.
        learned: of the same shape.
        cfg: `combine_mode` and the weights: the `reward` section, or the `mix` section of the zoo.
        scale: divides the learned rewards; None: they stay as they are.
        env_steps: of the run so far; the weight may change with them.
        scored: see `controlled`.
    """
    if env_rewards.shape != learned.shape:
        raise DataError(
            f"env rewards have shape {list(env_rewards.shape)}, learned ones {list(learned.shape)}"
        )
    learned = controlled(learned, cfg, env_steps, scored)
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
    return combine(env_rewards, learned, cfg, scale, env_steps, scored_frames(done, cfg))


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


class ModelRewards:
    """A reward model while a run goes on: it learns from the policy's steps, and gives them rewards.

    Attributes:
        model: the reward model.
        notes: what it logs.
        weight: its rewards are multiplied by it.
        cooptrain: whether it learns while the policy does.
        reward_mode: `reward.reward_mode`.
        gives_env_rewards: the environment's rewards stand in for the model's (`reward.control: env`).
    """

    model: BaseRewardModel
    notes: Notes
    weight: float
    cooptrain: bool
    reward_mode: Literal["per_step", "terminal"]
    gives_env_rewards: bool

    def __init__(self) -> None:
        self._states: dict[Hashable, StreamState] = {}
        self._iteration = 0

    def learn(self, parts: Sequence[StepBatch]) -> dict[str, float]:
        """Learn from new steps of the policy, [T, N] each; returns what is to be logged."""
        if not self.cooptrain or not parts:
            return {}
        for part in parts:
            self.model.collect_steps(part)
        learned = self.model.train()
        self.model.clear_data(self._iteration)
        self._iteration += 1
        return self.notes.named(learned)

    def rewards(self, steps: StepBatch) -> FloatArray:
        """Weighted rewards of steps [*L], float32, that depend on nothing but the step; changes nothing."""
        return self._mapped(self.model.score(steps), steps)

    def stream_rewards(self, steps: StepBatch, stream: Hashable) -> FloatArray:
        """Weighted rewards of the next steps [T, N] of a stream, float32; its history is carried on."""
        if not self.model.history_dependent:
            return self.rewards(steps)
        state = self._states.get(stream)
        if state is None:
            state = self.model.initial_state(steps.shape[1])
        scores, self._states[stream] = self.model.score_stream(steps, state)
        return self._mapped(scores, steps)

    def _mapped(self, scores: Scores, steps: StepBatch) -> FloatArray:
        if self.gives_env_rewards:
            return np.array(steps.env_rewards.cpu().numpy(), np.float32)
        mapping = replace(self.model.mapping, reward_mode=self.reward_mode)
        learned = learned_rewards(scores, steps.done.cpu().numpy(), mapping, self.model.threshold)
        return np.float32(self.weight) * learned
