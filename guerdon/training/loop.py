"""What an iteration of training leaves to log and to watch; the same for all loops."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from guerdon.core.batches import StepChunk
from guerdon.core.images import latest_frames
from guerdon.core.steps import StepBatch
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.fit.refit import ScoredSteps
from guerdon.monitoring.monitor import ScoredRollout
from guerdon.rewards.image.scorer import ImageScorer, RewardFacts
from guerdon.rewards.relabel import fires
from guerdon.training.reward_workers import FramesLostError, RewardWorkers

log = logging.getLogger("guerdon")

FEATURE_FRAMES = 64
"""Scored frames whose features are compared with those of the training frames."""
_PADDING = {"prob_success": np.nan, "disagreement": np.nan, "done": False, "success": False, "elapsed": 1}
"""What stands where a worker has stored fewer steps than another: a step that means nothing."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one iteration leaves."""

    metrics: dict[str, float]
    for_monitor: ScoredRollout | None = None
    """What the monitor looks at; None without a reward model."""
    scored: ScoredSteps | None = None
    """What refits learn from; None where the environments do not tell success, and without a reward model."""


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """What a callback gets after an iteration."""

    env_steps: int
    """Of the run so far, all environments together."""
    metrics: dict[str, float]
    """As in `metrics.jsonl`: `env/success_once`, `rollout/rewards`, `train/*`; `eval/*` after evaluations."""
    alarms: tuple[str, ...]
    """The monitor's alarms of the run so far."""


Callback: TypeAlias = Callable[[TrainingStep], "bool | None"]
"""Called after each iteration; False ends the training."""


class Loop(Protocol):
    """Collects experience and learns from it, an iteration at a time."""

    env_steps: int
    watches: bool
    """Whether the monitor wants the rewards of a model of the zoo; off-policy this is another look at it."""

    @property
    def num_updates(self) -> int:
        """Updates of the policy so far."""

    def collect_steps(self) -> list[StepBatch]:
        """First steps for a reward model that learns before the policy does."""

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


@dataclass(frozen=True, kw_only=True)
class ScoredPart:
    """The scored frames of some steps of one worker's environments, here or elsewhere."""

    first_step: int
    """Of the iteration."""
    num_steps: int
    first_env: int
    num_envs: int
    rows: IntArray
    """Which of the part's steps have a frame, as places in its flat [num_steps * num_envs], ascending."""
    frames: Any
    """camera -> [len(rows), ...], or a `Pending` of it."""

    def places(self, total_envs: int) -> IntArray:
        """Where these steps lie in the flat [T * N] of the iteration."""
        steps, envs = np.divmod(self.rows, self.num_envs)
        return (self.first_step + steps) * total_envs + self.first_env + envs

    def holds(self, step: int, env: int) -> bool:
        """Whether a step of the iteration is one of this part's."""
        own_env = self.first_env <= env < self.first_env + self.num_envs
        return own_env and self.first_step <= step < self.first_step + self.num_steps

    def frame_row(self, step: int, env: int) -> int:
        """Which frame shows a step: its own, or the last one before it of its environment."""
        place = (step - self.first_step) * self.num_envs + env - self.first_env
        of_env = self.rows % self.num_envs == place % self.num_envs
        return int(np.flatnonzero(of_env & (self.rows <= place))[-1])


@dataclass(frozen=True, kw_only=True)
class ScoredIteration:
    """All steps of an iteration [T, N] with their scores, and the frames that were scored."""

    parts: Sequence[ScoredPart]
    prob_success: FloatArray
    """NaN where nothing was scored; 0 or the last one where that stands in for a score."""
    disagreement: FloatArray
    """NaN where no frame was looked at."""
    done: BoolArray
    success: BoolArray | None
    """None where the environments do not tell."""
    elapsed: IntArray
    """The step within its episode."""
    num_rendered: int
    env_steps: int
    """Of the run before this iteration."""

    def for_monitor(self, rewards: ImageScorer | RewardWorkers) -> ScoredRollout:
        """For the monitor."""
        facts = rewards.facts

        def frame(t: int, env: int) -> UInt8Array:
            shown = self.frames_at(np.array([t]), np.array([env]))[facts.image_keys[0]]
            one: UInt8Array = latest_frames(shown)[0]
            return one

        if facts.gives_rewards:
            seen = self._looked_at()
            return ScoredRollout.of_rewards(
                np.nan_to_num(seen),
                ~np.isnan(seen),
                done=self.done,
                env_success=self.success,
                elapsed=self.elapsed,
                frame=frame,
            )
        return ScoredRollout(
            prob_success=self._looked_at(),
            done=self.done,
            env_success=self.success,
            elapsed=self.elapsed,
            disagreement=self.disagreement if facts.num_members > 1 else None,
            features=self._features(rewards),
            frame=frame,
        )

    def for_refits(self) -> ScoredSteps | None:
        """What refits learn from."""
        if self.success is None:
            return None
        return ScoredSteps(
            prob_success=self._looked_at(),
            success=self.success,
            elapsed=self.elapsed,
            first_step=self.env_steps // self.done.shape[1],
            frames_at=self.frames_at,
        )

    def frames_at(self, t: IntArray, env: IntArray) -> dict[str, UInt8Array]:
        """What was scored of some steps, int [M] each, camera -> [M, ...]."""
        shown: list[dict[str, UInt8Array]] = []
        for step, each in zip(t.tolist(), env.tolist(), strict=True):
            part = next(part for part in self.parts if part.holds(step, each))
            frames = part.frames if isinstance(part.frames, dict) else part.frames.result()
            row = part.frame_row(step, each)
            shown.append({name: images[row] for name, images in frames.items()})
        return {name: np.stack([each[name] for each in shown]) for name in shown[0]} if shown else {}

    def _looked_at(self) -> FloatArray:
        """Scores that come from a look at a frame, NaN for all others; of those there is no disagreement."""
        seen: FloatArray = np.where(np.isnan(self.disagreement), np.float32(np.nan), self.prob_success)
        return seen

    def _features(self, rewards: ImageScorer | RewardWorkers) -> FloatArray | None:
        """Of some of the scored frames; which ones does not depend on who made them."""
        places = [part.places(self.done.shape[1]) for part in self.parts]
        everything = np.sort(np.concatenate(places))
        if not len(everything):
            return None
        order = np.random.default_rng(self.env_steps).permutation(len(everything))
        picked = everything[np.sort(order[:FEATURE_FRAMES])]
        rows = [np.flatnonzero(np.isin(mine, picked)) for mine in places]
        try:
            return rewards.features_of([part.frames for part in self.parts], rows)
        except FramesLostError:
            log.warning("frames of a lost machine are left out of the monitor's check for drift")
            return None

    def metrics(
        self, facts: RewardFacts, env_rewards: NDArray[Any], training: NDArray[Any], learned: NDArray[Any]
    ) -> dict[str, float]:
        """All three rewards, and how the learned one behaves."""
        values = {
            **env_reward_metrics(env_rewards),
            "rollout/rewards": float(np.mean(training)),
            "rollout/learned_rewards": float(np.mean(learned)),
            "reward/frames_rendered": float(self.num_rendered),
            "reward/frames_scored": float(sum(len(part.rows) for part in self.parts)),
        }
        scored = np.isfinite(self.prob_success)
        if not scored.any() or facts.gives_rewards:
            return values
        fired = fires(self.prob_success[scored], facts.threshold)
        values["reward/prob_mean"] = float(self.prob_success[scored].mean())
        values["reward/fire_rate"] = float(fired.mean())
        if self.success is not None:
            values["reward/agreement"] = float((fired == self.success[scored]).mean())
        return values


def episode_metrics(episodes: Sequence[Any]) -> dict[str, float]:
    """Means over episodes that ended, under RLinf's names; what is hidden (NaN) is left out."""
    if not episodes:
        return {}
    named = {
        "env/success_once": float(np.mean([item.success_once for item in episodes])),
        "env/success_at_end": float(np.mean([item.success_at_end for item in episodes])),
        "env/return": float(np.mean([item.env_return for item in episodes])),
        "env/length": float(np.mean([item.length for item in episodes])),
        "env/episodes": float(len(episodes)),
    }
    return {name: value for name, value in named.items() if not np.isnan(value)}


def env_reward_metrics(env_rewards: NDArray[Any], *, trained_on: bool = False) -> dict[str, float]:
    """The mean of what the environments gave, unless they hide it (NaN)."""
    mean = float(np.mean(env_rewards))
    if np.isnan(mean):
        return {}
    return {"rollout/env_rewards": mean, **({"rollout/rewards": mean} if trained_on else {})}


# Of off-policy loops, whose steps come in chunks


@dataclass(frozen=True, kw_only=True)
class StoredChunk:
    """A chunk that was scored and stored; arrays are [K, n]."""

    rank: int
    """Of its env worker."""
    first_env: int
    """The first of its environments, counted over all workers."""
    chunk: StepChunk
    frames: Any
    """Of the scored steps, here or elsewhere."""
    prob_success: FloatArray
    """NaN where nothing was scored, 0 for a robot in motion if the model scores those at rest alone."""
    disagreement: FloatArray
    """NaN where nothing was looked at."""
    elapsed: IntArray
    """The step within its episode."""
    online_rewards: FloatArray | None
    """Of a history-dependent model of the zoo, when the steps came; None: there is none."""
    policy_lag: int
    """Updates between the weights that acted and those of the moment when it was stored."""
    reward_version: str | None
    """Of the reward model that scored it."""

    def value(self, name: str) -> NDArray[Any]:
        """One of the values of each step, [K, n]."""
        array: NDArray[Any] = getattr(self if hasattr(self, name) else self.chunk, name)
        return array


def flat_values(stored: Sequence[StoredChunk], name: str) -> NDArray[Any]:
    """One value of all stored steps, in a row."""
    return np.concatenate([item.value(name).reshape(-1) for item in stored])


def intervention_metrics(stored: Sequence[StoredChunk], num_kept: int) -> dict[str, float]:
    """How much people did of some steps; nothing where nobody can step in."""
    flags = [item.chunk.intervened for item in stored if item.chunk.intervened is not None]
    if not flags:
        return {}
    share = float(np.concatenate([part.reshape(-1) for part in flags]).mean())
    return {"env/intervened": share, "env/interventions_kept": float(num_kept)}


def _side_by_side(
    stored: Sequence[StoredChunk], columns: Sequence[NDArray[Any]], padding: Any, num_envs: int
) -> NDArray[Any]:
    """One value [K, n] of each chunk, those of all env workers side by side, [T, N].

    Where a worker has stored fewer steps than another, `padding` stands for a step that means nothing.
    """
    lengths: Counter[int] = Counter()
    for item in stored:
        lengths[item.rank] += len(item.chunk)
    joined = np.full((max(lengths.values()), num_envs), padding, columns[0].dtype)
    filled: Counter[int] = Counter()
    for item, column in zip(stored, columns, strict=True):
        num_steps, count = column.shape
        at = filled[item.rank]
        joined[at : at + num_steps, item.first_env : item.first_env + count] = column
        filled[item.rank] += num_steps
    return joined


def stored_rewards(
    stored: Sequence[StoredChunk], learned: Sequence[FloatArray], num_envs: int, knows_success: bool
) -> ScoredRollout:
    """Rewards [K, n] that a model gave for each chunk, as the monitor sees them."""

    def joined(name: str) -> NDArray[Any]:
        return _side_by_side(stored, [item.value(name) for item in stored], _PADDING[name], num_envs)

    there = [np.ones(each.shape, np.bool_) for each in learned]
    return ScoredRollout.of_rewards(
        _side_by_side(stored, learned, 0.0, num_envs),
        _side_by_side(stored, there, False, num_envs),
        done=joined("done"),
        elapsed=joined("elapsed"),
        env_success=joined("success") if knows_success else None,
    )


def stored_iteration(
    stored: Sequence[StoredChunk], num_envs: int, env_steps: int, knows_success: bool
) -> ScoredIteration:
    """The chunks of all env workers side by side, [T, N]."""
    joined = {
        name: _side_by_side(stored, [item.value(name) for item in stored], value, num_envs)
        for name, value in _PADDING.items()
    }
    parts: list[ScoredPart] = []
    filled: Counter[int] = Counter()
    for item in stored:
        num_steps, count = item.prob_success.shape
        parts.append(
            ScoredPart(
                first_step=filled[item.rank],
                num_steps=num_steps,
                first_env=item.first_env,
                num_envs=count,
                rows=item.chunk.rows,
                frames=item.frames,
            )
        )
        filled[item.rank] += num_steps
    return ScoredIteration(
        parts=parts,
        prob_success=joined["prob_success"],
        disagreement=joined["disagreement"],
        done=joined["done"],
        success=joined["success"] if knows_success else None,
        elapsed=joined["elapsed"],
        num_rendered=sum(item.chunk.num_rendered for item in stored),
        env_steps=env_steps,
    )
