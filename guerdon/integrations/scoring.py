"""What all wrappers share: which frames of a step are judged, and what becomes of the verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from guerdon.config import RewardConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.rewards.calibration import fires
from guerdon.rewards.image.manager import RewardManager
from guerdon.rewards.image.scorer import Scores
from guerdon.rewards.image.worker import ImageRewardWorker
from guerdon.rewards.relabel import RewardScale, judged_frames, learned_rewards, training_rewards
from guerdon.training.frames import EpisodeStacks


class FrameScorer(Protocol):
    """What the wrappers need of a `RewardManager`."""

    cfg: RewardConfig
    threshold: float
    image_keys: tuple[str, ...]

    def images(self, observations: Any) -> dict[str, UInt8Array]:
        """The model's cameras -> uint8 [N, H, W, C] each, checked."""

    def score(self, frames: Mapping[str, UInt8Array]) -> Scores:
        """Verdicts on N frames."""


@dataclass(frozen=True, kw_only=True)
class RewardStep:
    """The rewards of one step of N environments."""

    env_reward: FloatArray
    """float32 [N]; what the environment gave."""
    learned_reward: FloatArray
    """float32 [N]; what the model's verdict is worth, before it is scaled or combined."""
    training_reward: FloatArray
    """float32 [N]; what the learner gets."""
    prob_success: FloatArray | None = None
    """float32 [N]; NaN where no frame was judged. None of a model that does not judge frames."""

    def infos(self) -> dict[str, FloatArray]:
        """What the wrappers report beside the reward that they return."""
        known = {"env_reward": self.env_reward, "learned_reward": self.learned_reward}
        return known if self.prob_success is None else {**known, "prob_success": self.prob_success}


class StepScorer:
    """Judges the frames of a step, all environments in one call, and computes its rewards.

    Args:
        manager: a `RewardManager`, or an `ImageRewardWorker` after `init_worker`.
        cfg: the `reward` section; None means the manager's own. Its threshold must be the manager's.
        num_envs: N.
    """

    def __init__(
        self, manager: FrameScorer | ImageRewardWorker, cfg: RewardConfig | None, num_envs: int
    ) -> None:
        self._judge = manager.score
        self._model: FrameScorer = manager.manager if isinstance(manager, ImageRewardWorker) else manager
        self.cfg = self._model.cfg if cfg is None else cfg
        if self.cfg.reward_threshold != self._model.cfg.reward_threshold:
            raise ConfigError(
                f"reward_threshold is {self.cfg.reward_threshold}, but the reward model was loaded with "
                f"{self._model.cfg.reward_threshold}: set it there"
            )
        self.num_envs = num_envs
        self._num_frames = self._model.contract.num_frames if isinstance(self._model, RewardManager) else 1
        if isinstance(self._model, RewardManager) and self._model.contract.only_at_rest:
            raise ConfigError(
                "the reward model judges robots at rest alone (reward.model.only_at_rest), which wrappers "
                "do not know: use `guerdon train`, or fit it to all frames"
            )
        self._stacks = EpisodeStacks(num_envs, self._num_frames)
        self._begun: BoolArray = np.ones(num_envs, np.bool_)  # the next frame is the first of an episode
        self._scale = RewardScale() if self.cfg.normalize else None

    @property
    def cameras(self) -> tuple[str, ...]:
        """The cameras that the model looks at."""
        return self._model.image_keys

    def begin(self, mask: BoolArray | None = None) -> None:
        """New episodes begin in the environments of `mask` (bool [N]), or in all."""
        self._begun[slice(None) if mask is None else mask] = True

    def wanted(self, done: BoolArray, stepped: BoolArray) -> IntArray:
        """Environments whose frames must be seen -> int [n]: judged now, or kept to be judged later.

        Args:
            done: bool [N]; the episode ended with this step.
            stepped: bool [N]; False where the environment only began a new episode.
        """
        return np.flatnonzero(stepped if self._num_frames > 1 else self._judged(done) & stepped)

    def _judged(self, done: BoolArray) -> BoolArray:
        everyone = self.cfg.standalone  # any frame may end the episode
        return np.ones_like(done) if everyone else judged_frames(done, self.cfg)

    def probabilities(
        self, frames: Mapping[str, UInt8Array], env_ids: IntArray, done: BoolArray
    ) -> FloatArray:
        """Judge the frames (camera -> uint8 [n, H, W, C]) of `env_ids` -> float32 [N], NaN for the others.

        Args:
            frames: of the environments `wanted`.
            env_ids: int [n], these.
            done: bool [N]; the episode ended with this step.
        """
        prob = np.full(self.num_envs, np.nan, np.float32)
        if not len(env_ids):
            return prob
        shown = self._model.images(frames)
        if self._num_frames > 1:
            stacks = self._stacks.add(shown, env_ids, self._begun[env_ids])
            env_ids = env_ids[self._judged(done)[env_ids]]
            shown = {name: images[env_ids] for name, images in stacks.items()}
        if len(env_ids):
            prob[env_ids] = self._judge(shown).prob_success
        return prob

    def ends(self, prob_success: FloatArray) -> BoolArray:
        """Episodes that the model's success ends (`standalone`) -> bool [N]."""
        if not self.cfg.standalone:
            return np.zeros(self.num_envs, np.bool_)
        return fires(prob_success, self._model.threshold)

    def rewards(
        self, prob_success: FloatArray, env_rewards: Any, done: BoolArray, stepped: BoolArray
    ) -> RewardStep:
        """Rewards of a step; those of environments that were not `stepped` are zero.

        Args:
            prob_success: float32 [N] from `probabilities`.
            env_rewards: [N].
            done: bool [N]; with the episodes that the model ended.
            stepped: bool [N].
        """
        self._begun = np.where(stepped, done, self._begun)
        env = to_numpy(env_rewards).astype(np.float32)
        if env.shape != (self.num_envs,):
            raise DataError(f"env rewards have shape {list(env.shape)}; expected [{self.num_envs}]")
        prob, threshold = prob_success[stepped], self._model.threshold
        learned, training = np.zeros_like(env), np.zeros_like(env)
        learned[stepped] = learned_rewards(prob, done[stepped], self.cfg, threshold)
        if self._scale is not None and stepped.any():
            self._scale.update(learned[stepped])
        training[stepped] = training_rewards(
            prob, env[stepped], done[stepped], self.cfg, threshold, self._scale
        )
        return RewardStep(
            env_reward=env, learned_reward=learned, prob_success=prob_success, training_reward=training
        )


def rows_from(base: Any, other: Any, mask: BoolArray) -> Any:
    """`base` with the rows of `mask` taken from `other`: arrays [N, ...] or nested mappings of them.

    What only one of them has is kept; the rows that it lacks are zero.
    """
    if isinstance(base, Mapping) or isinstance(other, Mapping):
        first: Mapping[str, Any] = base or {}
        second: Mapping[str, Any] = other or {}
        return {
            key: rows_from(first.get(key), second.get(key), mask) for key in dict.fromkeys([*first, *second])
        }
    present: NDArray[Any] = np.asarray(to_numpy(other if base is None else base))
    merged = np.zeros_like(present) if base is None else present.copy()
    merged[mask] = 0 if other is None else np.asarray(to_numpy(other))[mask]
    return merged
