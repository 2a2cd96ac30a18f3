"""What all wrappers share: from a step of N environments to its rewards.

A wrapper describes the step (`EnvStep`); a `StepScorer` asks the reward model and returns a `RewardStep`. One
kind of scorer shows frames to an image classifier, one shows them to a function, one shows transitions to a
model of the zoo or a plugin. Scores become rewards in `guerdon.rewards.relabel`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

from guerdon.config import RewardConfig
from guerdon.config.schema_zoo import MixConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy
from guerdon.core.types import BoolArray, FloatArray, UInt8Array
from guerdon.envs.observations import images_from
from guerdon.envs.wrappers import GOAL_KEYS, flat_batch
from guerdon.integrations.steps import EnvStep, RewardStep, StepScorer
from guerdon.rewards import BaseRewardModel, StepBatch, ZooModel
from guerdon.rewards.image.function import RewardFunction, call_reward_function, cameras_of, is_function
from guerdon.rewards.image.scorer import RewardManager
from guerdon.rewards.image.scorer import Scores as FrameScores
from guerdon.rewards.image.worker import ImageRewardWorker
from guerdon.rewards.model import Scores
from guerdon.rewards.relabel import fires, learned_rewards, scored_frames
from guerdon.rewards.steps import to_items
from guerdon.training.frames import EpisodeStacks


class FrameScorer(Protocol):
    """What the wrappers need of a `RewardManager`."""

    cfg: RewardConfig
    threshold: float
    image_keys: tuple[str, ...]

    def images(self, observations: Any) -> dict[str, UInt8Array]:
        """The model's cameras -> uint8 [N, H, W, C] each, checked."""

    def score(self, frames: Mapping[str, UInt8Array]) -> FrameScores:
        """Scores of N frames."""


RewardSource: TypeAlias = (
    FrameScorer | ImageRewardWorker | BaseRewardModel | RewardFunction | str | os.PathLike[str]
)
"""A `RewardManager`, an `ImageRewardWorker`, a model of the zoo, a function, or a checkpoint's path."""


def step_scorer(
    source: Any, cfg: RewardConfig | MixConfig | None, num_envs: int, action_space: Any, train_every: int
) -> StepScorer:
    """The scorer for what a wrapper was given; settings of the other kind are refused.

    Args:
        source: a `RewardSource`.
        cfg: the `reward` section; None means the manager's own. For the zoo a `MixConfig`.
        num_envs: N.
        action_space: of a single environment.
        train_every: see `TransitionScorer`.
    """
    if isinstance(source, BaseRewardModel):
        if isinstance(cfg, RewardConfig):
            raise ConfigError("a reward model of the zoo is mixed by a MixConfig, not by a reward section")
        return TransitionScorer(source, cfg or MixConfig(), num_envs, action_space, train_every)
    if is_function(source) and not train_every:
        if isinstance(cfg, RewardConfig):
            return FrameStepScorer(FunctionModel(source, cfg), cfg, num_envs)
        return FunctionStepScorer(source, cfg or MixConfig(), num_envs)
    if isinstance(cfg, MixConfig) or train_every:
        raise ConfigError("MixConfig and train_every are for the zoo; this reward model judges frames")
    if cfg is not None and not isinstance(cfg, RewardConfig):
        raise ConfigError(f"cfg must be a RewardConfig, not {type(cfg).__name__}")
    if isinstance(source, str | os.PathLike):
        section = RewardConfig() if cfg is None else cfg
        model = replace(section.model, checkpoint_path=os.fspath(source))
        source = RewardManager(replace(section, model=model))
    if not (hasattr(source, "score") and hasattr(source, "cfg")):
        raise ConfigError(
            "the reward comes from a RewardManager, an ImageRewardWorker, a reward model of the zoo, a "
            f"function of frames or the path of a checkpoint, not from {type(source).__name__}"
        )
    return FrameStepScorer(source, cfg, num_envs)


class FrameStepScorer(StepScorer):
    """Shows the frames of a step to an image classifier, those of all environments in one call.

    Args:
        manager: a `RewardManager`, or an `ImageRewardWorker` after `init_worker`.
        cfg: the `reward` section; None means the manager's own. Its threshold must be the manager's.
        num_envs: N.
    """

    cfg: RewardConfig

    def __init__(
        self, manager: FrameScorer | ImageRewardWorker, cfg: RewardConfig | None, num_envs: int
    ) -> None:
        self._score = manager.score
        self._model: FrameScorer = manager.manager if isinstance(manager, ImageRewardWorker) else manager
        super().__init__(num_envs, self._model.cfg if cfg is None else cfg)
        if self.cfg.reward_threshold != self._model.cfg.reward_threshold:
            raise ConfigError(
                f"reward_threshold is {self.cfg.reward_threshold}, but the reward model was loaded with "
                f"{self._model.cfg.reward_threshold}: set it there"
            )
        self.cameras, self.standalone = self._model.image_keys, self.cfg.standalone
        contract = self._model.contract if isinstance(self._model, RewardManager) else None
        if contract is not None and contract.only_at_rest:
            raise ConfigError(
                "the reward model judges robots at rest alone (reward.model.only_at_rest), which wrappers "
                "do not know: use `guerdon train`, or fit it to all frames"
            )
        self._num_frames = 1 if contract is None else contract.num_frames
        self._stacks = EpisodeStacks(num_envs, self._num_frames)
        self._first: BoolArray = np.ones(num_envs, np.bool_)  # the next frame is the first of an episode

    def reset(self, obs: Any, mask: BoolArray | None = None) -> None:
        """Start new stacks of frames."""
        self._first[slice(None) if mask is None else mask] = True

    def step(self, step: EnvStep) -> RewardStep:
        """Score the frames that count; with `standalone` success ends the episode."""
        scored = np.ones_like(step.done) if self.standalone else scored_frames(step.done, self.cfg)
        prob = self._probabilities(step, scored)
        ended = fires(prob, self._model.threshold) if self.standalone else np.zeros_like(scored)
        done, stepped = step.done | ended, step.stepped
        self._first = np.where(stepped, done, self._first)
        learned = learned_rewards(prob[stepped], done[stepped], self.cfg, self._model.threshold)
        return self._rewards(step, learned, prob, ended)

    def _probabilities(self, step: EnvStep, scored: BoolArray) -> FloatArray:
        """float32 [N]; NaN where no frame is scored. Stacks need all frames, also those not scored."""
        prob = np.full(self.num_envs, np.nan, np.float32)
        ids = np.flatnonzero(step.stepped if self._num_frames > 1 else scored & step.stepped)
        if not len(ids):
            return prob
        frames = self._model.images(step.frames(ids))
        if self._num_frames > 1:
            stacks = self._stacks.add(frames, ids, self._first[ids])
            ids = ids[scored[ids]]
            frames = {name: images[ids] for name, images in stacks.items()}
        if len(ids):
            prob[ids] = self._score(frames).prob_success
        return prob


class FunctionModel:
    """A function of frames that gives probabilities of success, as a `FrameScorer`."""

    def __init__(self, function: RewardFunction, cfg: RewardConfig) -> None:
        self._function, self.cfg, self.image_keys = function, cfg, cfg.model.image_keys
        threshold = cfg.reward_threshold
        if threshold == "calibrated":
            if cfg.reward_type == "binary" or cfg.standalone:
                raise ConfigError(
                    "a function has no calibrated threshold: give reward_threshold a number, or leave cfg "
                    "out to take what the function returns as rewards"
                )
            threshold = 0.5
        self.threshold = float(threshold)

    def images(self, observations: Any) -> dict[str, UInt8Array]:
        """The frames of its cameras."""
        return images_from(observations, self.image_keys)

    def score(self, frames: Mapping[str, UInt8Array]) -> FrameScores:
        """Scores of N frames."""
        values = call_reward_function(self._function, frames)
        if ((values < 0) | (values > 1)).any():
            raise DataError(
                f"the reward function returned {values.min():g} to {values.max():g}, but probabilities are 0 "
                "to 1: leave cfg out to take them as rewards"
            )
        return FrameScores(prob_success=values)


class FunctionStepScorer(StepScorer):
    """Shows the frames of a step to a function, and takes what it returns as rewards.

    Args:
        function: see `RewardFunction`; its attribute `image_keys` may name other cameras than `base_camera`.
        cfg: how its reward and the environment's are mixed.
        num_envs: N.
    """

    cfg: MixConfig

    def __init__(self, function: RewardFunction, cfg: MixConfig, num_envs: int) -> None:
        super().__init__(num_envs, cfg)
        self._function = function
        self.cameras = cameras_of(function)

    def reset(self, obs: Any, mask: BoolArray | None = None) -> None:
        """Nothing to do: the function looks at single frames."""

    def step(self, step: EnvStep) -> RewardStep:
        """Ask about the frames that count: all, or the last one of each episode."""
        asked = step.stepped & (step.done if self.cfg.reward_mode == "terminal" else True)
        learned = np.zeros(self.num_envs, np.float32)
        if asked.any():
            learned[asked] = call_reward_function(self._function, step.frames(np.flatnonzero(asked)))
        return self._rewards(step, learned[step.stepped], None, np.zeros_like(step.stepped))


class TransitionScorer(StepScorer):
    """Builds the transitions of N environments and shows them to a model of the zoo or a plugin.

    Args:
        model: the reward model.
        cfg: how its reward and the environment's are mixed.
        num_envs: N.
        action_space: of a single environment.
        train_every: after so many steps, all environments together, the model learns from them
            (`collect_data`, `train`, `clear_data`); 0 leaves it as it is.
    """

    def __init__(
        self, model: BaseRewardModel, cfg: MixConfig, num_envs: int, action_space: Any, train_every: int = 0
    ) -> None:
        super().__init__(num_envs, cfg)
        self.model = model
        self._mapping = replace(model.mapping, reward_mode=cfg.reward_mode)
        self.rounds, self._train_every = 0, train_every
        self._discrete = isinstance(action_space, Discrete)
        self._first_action = int(getattr(action_space, "start", 0))
        self._bounds = (action_space.low, action_space.high) if isinstance(action_space, Box) else None
        self._obs: Any = None
        self._running: BoolArray = np.zeros(num_envs, np.bool_)
        self._state = model.initial_state(num_envs)
        self._recent: list[StepBatch] = []

    def reset(self, obs: Any, mask: BoolArray | None = None) -> None:
        """Start new episodes; a history-dependent model needs whole ones."""
        if mask is None:
            self._obs, self._running[:] = self._vectors(obs).copy(), False
            self._state = self.model.initial_state(self.num_envs)
            self._recent = []  # of episodes that nobody ends
            return
        if self.model.history_dependent and (self._running & mask).any():
            raise ConfigError(
                f"{type(self.model).__name__} remembers episodes: none can be reset before its end"
            )
        self._obs = rows_from(self._obs, self._vectors(obs), mask)

    def step(self, step: EnvStep) -> RewardStep:
        """Score the transitions, and train the model if it is time."""
        if self._obs is None:
            raise DataError("the environments have not been reset yet")
        batch = StepBatch(
            obs=torch.from_numpy(self._obs),
            actions=torch.from_numpy(self._actions(step.actions)),
            next_obs=torch.from_numpy(self._vectors(step.next_obs()).copy()),
            env_rewards=torch.from_numpy(to_numpy(step.env_rewards).astype(np.float32)),
            terminated=torch.from_numpy(step.terminated.copy()),
            truncated=torch.from_numpy(step.truncated & ~step.terminated),
        )
        learned, prob_success = np.zeros(0, np.float32), None
        if step.stepped.any():
            scores = self._scores(batch, step.stepped)
            ends = step.done[step.stepped]
            learned = learned_rewards(scores, ends, self._mapping, self.model.threshold)
            if scores.prob_success is not None:
                prob_success = np.full(self.num_envs, np.nan, np.float32)
                prob_success[step.stepped] = scores.prob_success
        rewards = self._rewards(step, learned, prob_success, np.zeros_like(step.stepped))
        self._running = ~step.done
        self._obs = self._vectors(step.obs).copy()
        if self._train_every:
            self._keep(batch, step.stepped)
        return rewards

    def _scores(self, batch: StepBatch, stepped: BoolArray) -> Scores:
        """Of the environments that were `stepped`, [n]."""
        if not self.model.history_dependent:
            return self.model.score(batch[torch.from_numpy(stepped)])
        if not stepped.all():
            raise ConfigError(
                f"{type(self.model).__name__} remembers episodes: make the vector environment with "
                "autoreset_mode SAME_STEP"
            )
        stream = batch.map(lambda part: part.unsqueeze(0))
        scores, self._state = self.model.score_stream(stream, self._state)
        return scores[0]

    def _keep(self, batch: StepBatch, stepped: BoolArray) -> None:
        """Keep the step; when it is time, train the model on all that was kept."""
        if not stepped.all():
            raise ConfigError("train_every needs environments that reset in the same step (SAME_STEP)")
        self._recent.append(batch)
        if len(self._recent) * self.num_envs < self._train_every:
            return
        streams: dict[str, Any] = {
            name: torch.stack([getattr(each, name) for each in self._recent]) for name in batch.parts()
        }
        experience = StepBatch(**streams)
        self._recent = []
        self.rounds += 1
        self.model.collect_data(experience if isinstance(self.model, ZooModel) else to_items(experience))
        self.model.train()
        self.model.clear_data(self.rounds)

    def _vectors(self, obs: Any) -> NDArray[np.float32]:
        """Observations as the model takes them, float32 [N, ...]; of a dict its camera or goals."""
        if isinstance(obs, Mapping):
            key = getattr(self.model, "obs_key", None)
            if key in obs:
                obs = obs[key]
            elif set(GOAL_KEYS) <= obs.keys():
                return flat_batch({name: to_numpy(obs[name]) for name in GOAL_KEYS})
            else:
                raise ConfigError(
                    f"{type(self.model).__name__} takes vectors, images or goal-conditioned observations, "
                    f"not a dict of {', '.join(map(str, obs))}"
                )
        return np.ascontiguousarray(to_numpy(obs), np.float32)

    def _actions(self, actions: Any) -> NDArray[Any]:
        given = to_numpy(actions)
        if self._discrete:
            return given.astype(np.int64) - self._first_action
        if self._bounds is not None:
            given = np.clip(given, *self._bounds)
        return given.astype(np.float32)


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
