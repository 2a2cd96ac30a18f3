"""Rollouts: T steps of N environments, as one policy played them, with what their episodes came to.

`env_rewards` are what the environment gave and stay as they are; `training_rewards` are what learners see.
They start as a copy and are replaced by `Rollout.update_rewards`, before any advantage is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from guerdon.agents.episodes import EpisodeRecord, EpisodeTracker
from guerdon.agents.networks import STATE, Obs, to_obs
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy
from guerdon.core.types import BoolArray, FloatArray, IntArray
from guerdon.data.collect.observations import per_env, with_final

AnyVectorEnv: TypeAlias = VectorEnv[Any, Any, Any]
OnStep: TypeAlias = Callable[[int, AnyVectorEnv, Any, BoolArray, Mapping[str, Any]], None]
"""(t, env, reached observations, done bool [N], info), after each step of the environments. What was reached
is the final observation where an episode ended."""

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


class RolloutPolicy(Protocol):
    """What a collector asks of a policy."""

    def step(self, obs: Obs) -> tuple[NDArray[Any], Tensor, Tensor, Tensor]:
        """-> actions for the environments, actions as chosen, log-probabilities [N], values [N]."""

    def values(self, obs: Obs) -> Tensor:
        """-> float32 [N]."""


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


class RolloutCollector:
    """Plays a policy in vector environments, a fixed number of steps at a time.

    Attributes:
        episodes: follows the episodes; has records of those that ended since the last `pop_episodes`.
        env_steps: steps taken so far, all environments together.
    """

    def __init__(self, env: AnyVectorEnv, num_steps: int, *, keep_next_obs: bool = False) -> None:
        """Set up for rollouts of `num_steps` steps; `env` must auto-reset in the same step.

        `keep_next_obs` also keeps the states that the actions led to.
        """
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.SAME_STEP:
            raise ConfigError(
                f"rollouts need environments with autoreset_mode=SAME_STEP, not {mode}: only these give the "
                "final observation in the step that ends an episode"
            )
        if num_steps < 1:
            raise ConfigError(f"num_steps must be at least 1, not {num_steps}")
        self.env, self.num_steps = env, num_steps
        self.episodes = EpisodeTracker(env.num_envs)
        self.env_steps = 0
        shape = (num_steps, env.num_envs)
        self._env_rewards: FloatArray = np.zeros(shape, np.float32)
        self._terminated: BoolArray = np.zeros(shape, np.bool_)
        self._truncated: BoolArray = np.zeros(shape, np.bool_)
        self._success: BoolArray = np.zeros(shape, np.bool_)
        self._elapsed: IntArray = np.zeros(shape, np.int64)
        self._log_probs, self._values, self._final_values = (torch.zeros(shape) for _ in range(3))
        self._actions: Tensor | None = None
        self._keep_next_obs = keep_next_obs
        self._next_obs: FloatArray | None = None
        self._obs: dict[str, NDArray[Any]] = {}  # [T + 1, N, ...]; the last row is where the next one begins
        self._rows: list[Obs] = []  # views of each of them

    def reset(self, seed: int | None = None) -> None:
        """Begin new episodes everywhere; those that were running are forgotten."""
        observation, _ = self.env.reset(seed=seed)
        first = to_obs(observation)
        if not self._obs:
            self._obs = {
                name: np.zeros((self.num_steps + 1, *part.shape), part.numpy().dtype)
                for name, part in first.items()
            }
            tensors = {name: torch.from_numpy(array) for name, array in self._obs.items()}
            self._rows = [
                {name: tensor[t] for name, tensor in tensors.items()} for t in range(self.num_steps + 1)
            ]
        self._put(self.num_steps, observation)
        self.episodes.reset()

    def collect(self, policy: RolloutPolicy, on_step: OnStep | None = None) -> Rollout:
        """Play `num_steps` steps on from where the last call stopped."""
        if not self._rows:
            raise DataError("the environments have not been reset yet: call reset(seed) first")
        for array in self._obs.values():
            array[0] = array[-1]
        finals: list[tuple[int, NDArray[np.int64], dict[str, NDArray[Any]]]] = []
        for t in range(self.num_steps):
            env_actions, actions, log_probs, values = policy.step(self._rows[t])
            if self._actions is None:
                self._actions = torch.zeros((self.num_steps, *actions.shape), dtype=actions.dtype)
            self._actions[t].copy_(actions)
            self._log_probs[t].copy_(log_probs)
            self._values[t].copy_(values)
            obs, env_rewards, terminated, truncated, info = self.env.step(env_actions)
            self._env_rewards[t] = to_numpy(env_rewards)
            self._terminated[t], self._truncated[t] = to_numpy(terminated), to_numpy(truncated)
            done: BoolArray = self._terminated[t] | self._truncated[t]
            cut = np.flatnonzero(self._truncated[t] & ~self._terminated[t])
            needed = on_step is not None or self._keep_next_obs or len(cut)
            reached = _reached(obs, info, done) if needed else obs
            if len(cut):
                finals.append((t, cut, {name: part[cut] for name, part in _parts(reached).items()}))
            self._put(t + 1, obs)
            self._count(t, done, info)
            if self._keep_next_obs:
                self._put_next(t, _parts(reached)[STATE])
            if on_step is not None:
                on_step(t, self.env, reached, done, info)
        self.env_steps += self.num_steps * self.env.num_envs
        return self._rollout(policy, finals)

    def pop_episodes(self) -> list[EpisodeRecord]:
        """The records of all episodes that ended since the last call."""
        return self.episodes.pop()

    def state_dict(self) -> dict[str, Any]:
        """Statistics in plain containers. Environments are not saved: after loading, `reset` them."""
        return {"env_steps": self.env_steps, "episodes": self.episodes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with saved statistics; those of running episodes hold until `reset`."""
        self.episodes.load_state_dict(state["episodes"])
        self.env_steps = int(state["env_steps"])

    def _put(self, row: int, observation: Any) -> None:
        for name, part in _parts(observation).items():
            np.copyto(self._obs[name][row], part, casting="same_kind")

    def _put_next(self, t: int, states: NDArray[Any]) -> None:
        if self._next_obs is None:
            self._next_obs = np.zeros((self.num_steps, *states.shape), np.float32)
        self._next_obs[t] = states

    def _count(self, t: int, done: BoolArray, info: Mapping[str, Any]) -> None:
        """Bring the episode statistics up to step t."""
        success = per_env(info, "success", self.env.num_envs, done)
        self._success[t] = False if success is None else success
        self._elapsed[t] = self.episodes.lengths
        self.episodes.add(self._env_rewards[t], done, self._success[t])

    def _rollout(
        self, policy: RolloutPolicy, finals: list[tuple[int, NDArray[np.int64], dict[str, NDArray[Any]]]]
    ) -> Rollout:
        """The buffers as a `Rollout`; all final observations are valued in one batch."""
        assert self._actions is not None  # there was at least one step
        self._final_values.zero_()
        if finals:
            names = finals[0][2]
            batch = to_obs({name: np.concatenate([parts[name] for _, _, parts in finals]) for name in names})
            steps = np.concatenate([np.full(len(envs), t) for t, envs, _ in finals])
            envs = np.concatenate([envs for _, envs, _ in finals])
            self._final_values[torch.from_numpy(steps), torch.from_numpy(envs)] = policy.values(batch).cpu()
        env_rewards = torch.from_numpy(self._env_rewards)
        return Rollout(
            obs={name: torch.from_numpy(array[:-1]) for name, array in self._obs.items()},
            actions=self._actions,
            log_probs=self._log_probs,
            values=self._values,
            env_rewards=env_rewards,
            training_rewards=env_rewards.clone(),
            terminated=torch.from_numpy(self._terminated),
            truncated=torch.from_numpy(self._truncated),
            final_values=self._final_values,
            last_values=policy.values(self._rows[-1]).cpu(),
            success=torch.from_numpy(self._success),
            elapsed=torch.from_numpy(self._elapsed),
            next_obs=None if self._next_obs is None else torch.from_numpy(self._next_obs),
        )


def _reached(obs: Any, info: Mapping[str, Any], done: BoolArray) -> Any:
    """What the last actions led to: the final observation where an episode ended."""
    if not done.any():
        return obs
    if info.get("final_obs") is None:
        raise DataError("an episode ended, but the environment's info has no final_obs")
    return with_final(obs, info["final_obs"], done)


def _parts(observation: Any) -> dict[str, NDArray[Any]]:
    """Name -> array [N, ...], with a state vector under `state`."""
    if isinstance(observation, Mapping):
        return {name: to_numpy(part) for name, part in observation.items()}
    return {STATE: to_numpy(observation)}
