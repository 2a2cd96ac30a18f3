"""What env workers deliver and what agents learn from.

An env worker delivers a `Rollout` (on-policy) or a `StepChunk`, which goes to a replay buffer. From that a
`ReplayBatch` is sampled; it has env rewards, and whatever else was kept of each step. A learned reward is
put in their place on the way to a `TrainBatch`, which is all that an off-policy agent sees. Their `steps` are
the `StepBatch` that reward models see of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guerdon.core.episodes import EpisodeRecord
from guerdon.core.errors import DataError
from guerdon.core.steps import StepBatch
from guerdon.core.types import BoolArray, FloatArray, IntArray

STATE = "state"
"""The observation that is a vector, beside those of cameras."""
OBS = ("obs", "next_obs")
Obs: TypeAlias = dict[str, Tensor]
"""`state` -> float32 [N, S], camera -> uint8 [N, H, W, C]."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """What a learner takes: one reward, whatever it was mixed from."""

    obs: Obs
    """`state` -> float32 [B, S], camera -> uint8 [B, H, W, C]."""
    actions: Tensor
    """[B, A] of a continuous, int64 [B] of a discrete action space."""
    training_rewards: Tensor
    """float32 [B]; summed and discounted over the steps up to `next_obs`."""
    next_obs: Obs
    """As `obs`; the final observation where the episode ended."""
    not_terminated: Tensor
    """float32 [B]; 0 where there is no future. A truncated episode has one."""
    discount: Tensor
    """float32 [B]; gamma ** k for `next_obs` k steps ahead."""

    def __post_init__(self) -> None:
        wanted = (len(self.actions),)
        for name in ("training_rewards", "not_terminated", "discount"):
            shape = tuple(getattr(self, name).shape)
            if shape != wanted:
                raise DataError(f"TrainBatch.{name} must have shape {list(wanted)}, not {list(shape)}")

    def __len__(self) -> int:
        return len(self.actions)

    @classmethod
    def cat(cls, parts: Sequence[TrainBatch]) -> TrainBatch:
        """One batch of several, in order; demonstrations go first."""
        return cls(**{item.name: _joined(parts, item.name) for item in fields(cls)})

    def to(self, device: torch.device | str) -> TrainBatch:
        """The same on another device."""
        parts = {item.name: getattr(self, item.name) for item in fields(self)}
        for name, part in parts.items():
            parts[name] = {k: v.to(device) for k, v in part.items()} if name in OBS else part.to(device)
        return TrainBatch(**parts)


def _joined(parts: Sequence[Any], name: str) -> Any:
    """One part of several batches, one after another: a tensor, or a dict of them."""
    first = getattr(parts[0], name)
    if isinstance(first, dict):
        return {key: torch.cat([getattr(part, name)[key] for part in parts]) for key in first}
    return torch.cat([getattr(part, name) for part in parts])


@dataclass(frozen=True, kw_only=True)
class ReplayBatch:
    """A sample of B stretches of up to n steps; n is 1 unless more were asked for."""

    obs: Obs
    """In which the first action was chosen; [B, ...]."""
    actions: Tensor
    """The first action; [B, ...]."""
    env_rewards: Tensor
    """float32 [B, n]; 0 where `mask` is."""
    mask: Tensor
    """float32 [B, n]; 0 from where the episode ended or the data do."""
    next_obs: Obs
    """After the last step that counts."""
    terminated: Tensor
    """bool [B]; of the last step that counts."""
    truncated: Tensor
    """bool [B]; of the last step that counts."""
    discount: Tensor
    """float32 [B]; gamma ** (number of steps that count)."""
    gamma: float
    """Of the steps."""
    rows: NDArray[np.int64]
    """int64 [B, n]; where each step lies in the buffer. Masked steps repeat the last one."""
    extras: dict[str, Tensor] = field(default_factory=dict)
    """name -> [B, n, ...]; masked steps repeat the last one."""

    def __len__(self) -> int:
        return len(self.mask)

    @classmethod
    def cat(cls, parts: Sequence[ReplayBatch]) -> ReplayBatch:
        """One batch of several, in order; `rows` then refer to the buffer of each part."""
        if len(parts) == 1:
            return parts[0]
        rows, gamma = np.concatenate([part.rows for part in parts]), parts[0].gamma
        tensors = [item.name for item in fields(cls) if item.name not in ("rows", "gamma")]
        return cls(rows=rows, gamma=gamma, **{name: _joined(parts, name) for name in tensors})

    def steps(self, action_space: gym.Space[Any]) -> StepBatch:
        """Single steps as reward models see them, [B]."""
        return StepBatch(
            obs=self.obs[STATE],
            actions=model_actions(self.actions, action_space),
            next_obs=self.next_obs[STATE],
            env_rewards=self.env_rewards[:, 0],
            terminated=self.terminated,
            truncated=self.truncated,
        )

    def scored_ends(self) -> BoolArray:
        """Whether each of the steps [B, n] ended its episode with a frame that was scored.

        Only the last step that counts can. An episode that a checkpoint cut off is truncated in the buffer,
        but nobody scored its last frame.
        """
        mask = self.mask.numpy() > 0
        last = mask & ~np.append(mask[:, 1:], np.zeros((len(mask), 1), np.bool_), axis=1)
        ended: BoolArray = (self.terminated | self.truncated).numpy()
        scored: BoolArray = np.isfinite(self.extras["prob_success"].numpy())
        return last & ended[:, None] & scored

    def train_batch(self, training_rewards: Tensor) -> TrainBatch:
        """For the learner, with the rewards of each step, float32 [B, n]."""
        return TrainBatch(
            obs=self.obs,
            actions=self.actions,
            training_rewards=n_step_return(training_rewards, self.mask, self.gamma),
            next_obs=self.next_obs,
            not_terminated=(~self.terminated).float(),
            discount=self.discount,
        )


def n_step_return(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Discounted sum of the steps that count: [B, n], [B, n] -> [B]."""
    if rewards.shape != mask.shape:
        raise DataError(f"rewards of shape {list(rewards.shape)} do not fit steps of {list(mask.shape)}")
    if mask.shape[1] == 1:  # the first step always counts
        return rewards[:, 0]
    powers = gamma ** torch.arange(mask.shape[1], dtype=torch.float32, device=rewards.device)
    return torch.where(mask > 0, rewards, 0.0) @ powers


# Of env workers

RolloutArrays: TypeAlias = dict[str, NDArray[Any]]
"""A rollout on its way between processes; observations under `obs/<name>`."""
OBS_PREFIX = "obs/"
_ARRAYS = (
    "actions",
    "log_probs",
    "values",
    "env_rewards",
    "terminated",
    "truncated",
    "final_values",
    "last_values",
    "success",
    "elapsed",
)


@dataclass(kw_only=True)
class Rollout:
    """Valid until its collector collects the next one: the tensors are the collector's own buffers."""

    obs: Obs
    """`state` float32 [T, N, S], camera uint8 [T, N, H, W, C]; what the actions were chosen in."""
    actions: Tensor
    """float32 [T, N, A] as drawn, before any clipping; int64 [T, N] where actions are discrete."""
    log_probs: Tensor
    """float32 [T, N], of `actions`."""
    values: Tensor
    """float32 [T, N], of `obs`."""
    env_rewards: Tensor
    """float32 [T, N]; never overwritten."""
    training_rewards: Tensor
    """float32 [T, N]; `env_rewards` until `update_rewards`."""
    terminated: Tensor
    """bool [T, N]."""
    truncated: Tensor
    """bool [T, N]."""
    final_values: Tensor
    """float32 [T, N]; value of the final observation where an episode was truncated, else 0."""
    last_values: Tensor
    """float32 [N]; values of the observations after the last step."""
    success: Tensor
    """bool [T, N]; whether the step led to success, all False if the environment does not say."""
    elapsed: Tensor
    """int64 [T, N]; the step within its episode, from 0."""
    policy_version: int = 0
    """Updates of the policy that played it."""
    next_obs: Tensor | None = None
    """float32 [T, N, S]; states that the actions led to, the final ones where an episode ended, if the
    collector keeps them."""
    reward_version: str | None = None
    """The reward model that `training_rewards` come from; None: they are the environment's."""

    @property
    def num_transitions(self) -> int:
        """T * N."""
        return self.env_rewards.numel()

    def arrays(self) -> RolloutArrays:
        """All that was played, without copies; `join` makes a rollout of it again."""
        named = {name: getattr(self, name).numpy() for name in _ARRAYS}
        if self.next_obs is not None:
            named["next_obs"] = self.next_obs.numpy()
        return {**named, **{f"{OBS_PREFIX}{name}": part.numpy() for name, part in self.obs.items()}}

    @classmethod
    def join(cls, parts: Sequence[RolloutArrays], policy_version: int) -> Rollout:
        """Put rollouts of different environments side by side; a single one is not copied if it may be used.

        Arrays from shared memory are read-only, which torch does not take: these are copied.
        """
        joined: dict[str, Tensor] = {}
        for name in parts[0]:
            several = [part[name] for part in parts]
            if len(several) == 1:
                array = several[0] if several[0].flags.writeable else several[0].copy()
            else:
                array = np.concatenate(several, axis=0 if name == "last_values" else 1)
            joined[name] = torch.from_numpy(array)
        named: dict[str, Any] = {name: joined[name] for name in _ARRAYS}
        return cls(
            obs={
                name[len(OBS_PREFIX) :]: part for name, part in joined.items() if name.startswith(OBS_PREFIX)
            },
            next_obs=joined.get("next_obs"),
            training_rewards=joined["env_rewards"].clone(),
            policy_version=policy_version,
            **named,
        )

    def steps(self, action_space: gym.Space[Any]) -> StepBatch:
        """As reward models see them, [T, N]; of a rollout whose collector kept `next_obs`."""
        assert self.next_obs is not None
        return StepBatch(
            obs=self.obs[STATE],
            actions=model_actions(self.actions, action_space),
            next_obs=self.next_obs,
            env_rewards=self.env_rewards,
            terminated=self.terminated,
            truncated=self.truncated,
            log_probs=self.log_probs,
        )

    def update_rewards(self, training_rewards: Tensor | FloatArray) -> None:
        """Replace the training rewards by others, float [T, N]; `env_rewards` stay."""
        given = torch.as_tensor(training_rewards, dtype=torch.float32)
        if given.shape != self.env_rewards.shape:
            raise DataError(
                f"training_rewards must have shape {list(self.env_rewards.shape)}, not {list(given.shape)}"
            )
        if not bool(torch.isfinite(given).all()):
            raise DataError("training_rewards must be finite numbers")
        self.training_rewards = given.detach().clone()


@dataclass(frozen=True, kw_only=True)
class StepChunk:
    """K steps of one worker's n environments."""

    obs: Any
    """In which the actions were chosen, [K, n, ...]; an array or a mapping."""
    actions: NDArray[Any]
    """[K, n, ...]; those that were taken, the policy's or a person's."""
    env_rewards: FloatArray
    """float32 [K, n]."""
    terminated: BoolArray
    """bool [K, n]."""
    truncated: BoolArray
    """bool [K, n]."""
    success: BoolArray
    """bool [K, n]."""
    final_obs: dict[int, Any]
    """Step -> observations [n, ...] that its actions led to, of steps with which an episode ended."""
    last_obs: Any
    """Observations [n, ...] after the last step."""
    rows: IntArray
    """Which steps have a frame to be scored, as places in a flat [K * n], ascending."""
    num_rendered: int = 0
    """Frames that were asked of the environments for it."""
    policy_version: int = -1
    """Of the weights that acted; -1: the actions came from elsewhere."""
    first_step: int = 0
    """Steps that the worker had taken since its last reset."""
    seconds: float = 0.0
    """That acting took."""
    intervened: BoolArray | None = None
    """bool [K, n]; where a person chose the action. None: nobody can."""

    def __len__(self) -> int:
        return len(self.env_rewards)

    @property
    def done(self) -> BoolArray:
        """Bool [K, n]; whether the episode ended with the step."""
        return self.terminated | self.truncated

    def obs_at(self, step: int) -> Any:
        """Observations [n, ...] of one step."""
        if isinstance(self.obs, dict):
            return {name: part[step] for name, part in self.obs.items()}
        return self.obs[step]

    def obs_after(self, step: int) -> Any:
        """Observations [n, ...] after one step; those of a new episode where one ended."""
        return self.last_obs if step == len(self) - 1 else self.obs_at(step + 1)

    def steps(self, action_space: gym.Space[Any]) -> StepBatch:
        """As reward models see them, [K, n]."""
        next_obs = [_state(self.final_obs.get(t, self.obs_after(t))) for t in range(len(self))]
        return StepBatch(
            obs=_state(self.obs),
            actions=model_actions(torch.from_numpy(np.array(self.actions)), action_space),
            next_obs=torch.stack(next_obs),
            env_rewards=torch.from_numpy(np.array(self.env_rewards, np.float32)),
            terminated=torch.from_numpy(np.array(self.terminated)),
            truncated=torch.from_numpy(np.array(self.truncated)),
        )


def _state(obs: Any) -> Tensor:
    return torch.from_numpy(np.array(obs[STATE] if isinstance(obs, Mapping) else obs, np.float32))


def model_actions(actions: Tensor, space: gym.Space[Any]) -> Tensor:
    """Actions as the environments took them: within their bounds, or counted from 0."""
    if isinstance(space, gym.spaces.Discrete):
        return actions - int(space.start)
    assert isinstance(space, gym.spaces.Box)
    return actions.clamp(torch.from_numpy(space.low), torch.from_numpy(space.high))


@dataclass(frozen=True, kw_only=True)
class WorkerRollout:
    """A rollout of one worker's n environments; its frames stay where they are until somebody needs them."""

    first_env: int
    """The first of its environments, counted over all workers."""
    num_envs: int
    """n."""
    arrays: RolloutArrays
    rows: IntArray
    """Which steps have a frame to be scored, as places in a flat [T * n], ascending."""
    episodes: list[EpisodeRecord]
    """Those that ended in it; environments are numbered through over all workers."""
    policy_version: int
    generator: NDArray[Any] | None
    """Where the policy's random numbers are afterwards; None if the policy is the agent itself."""
    num_rendered: int = 0
    """Frames that were asked of the environments for it."""
    frames: Any = None
    """Camera -> uint8 [len(rows), H, W, C] or stacks, here or elsewhere (`Pending`)."""

    def places(self, total_envs: int) -> IntArray:
        """Where the scored steps lie in the flat [T * N] of all workers."""
        steps, envs = np.divmod(self.rows, self.num_envs)
        return steps * total_envs + self.first_env + envs
