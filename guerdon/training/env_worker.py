"""`EnvWorker` steps the training environments: a rollout, a chunk of steps, or one step at a time.

A plain class, which an engine may put anywhere. `LocalEnvs` shows one of this process to the loops as
`EnvWorkers` shows those of other processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from guerdon.agents.agent import OffPolicyAgent
from guerdon.agents.networks import STATE, Obs, to_obs
from guerdon.config import CollectConfig, EnvConfig, RewardConfig
from guerdon.core.batches import Rollout, StepChunk, WorkerRollout
from guerdon.core.episodes import EpisodeRecord, EpisodeTracker
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy
from guerdon.core.types import BoolArray, IntArray, UInt8Array
from guerdon.distributed.engine import Handle
from guerdon.envs.observations import (
    copy_obs,
    next_observations,
    obs_parts,
    stack_obs,
    taken_actions,
    with_final,
)
from guerdon.envs.success import success_of
from guerdon.training.acting import DistantPolicy, PolicyCopy, PolicySpec, RolloutPolicy, random_actions
from guerdon.training.env_setup import EnvFacts, TrajectoryCollector, make_train_env
from guerdon.training.frames import RewardFrames

Frames: TypeAlias = dict[str, UInt8Array]
"""camera -> uint8 [K, H, W, C], or stacks of frames [K, k, H, W, C], of the steps that are to be scored."""
OnStep: TypeAlias = Callable[[int, Any, BoolArray, Mapping[str, Any]], None]
"""(t, next_obs, done bool [N], info), after each step; `next_obs` is final where an episode ended."""
_KEPT: dict[str, Any] = {
    **dict.fromkeys(("env_rewards", "log_probs", "values", "final_values"), np.float32),
    **dict.fromkeys(("terminated", "truncated", "success"), np.bool_),
    "elapsed": np.int64,
}
"""What a rollout holds of each step, [T, N], beside observations and actions."""
Finals: TypeAlias = list[tuple[int, NDArray[np.int64], dict[str, NDArray[Any]]]]
"""(t, the environments that were truncated in this step, their final observations)."""


class RolloutCollector:
    """Plays a policy in vector environments, a fixed number of steps at a time, into buffers of its own.

    Attributes:
        episodes: follows the episodes; has records of those that ended since the last `pop_episodes`.
        env_steps: steps taken so far, all environments together.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], num_steps: int, *, keep_next_obs: bool = False) -> None:
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
        self.episodes, self.env_steps = EpisodeTracker(env.num_envs), 0
        self._kept = {name: np.zeros((num_steps, env.num_envs), dtype) for name, dtype in _KEPT.items()}
        self._keep_next_obs = keep_next_obs
        self._obs: dict[str, NDArray[Any]] = {}  # [T + 1, N, ...]; the last row is where the next one begins
        self._rows: list[Obs] = []  # views of each of them
        self._start: Any = None  # observations of episodes that have just begun

    def reset(self, seed: int | None = None) -> Any:
        """Begin new episodes everywhere, with observations that are returned; running ones are forgotten."""
        self._start, _ = self.env.reset(seed=seed)
        self.episodes.reset()
        return self._start

    def collect(self, policy: RolloutPolicy, on_step: OnStep | None = None) -> Rollout:
        """Play `num_steps` steps on from where the last call stopped."""
        if self._start is not None:
            if not self._obs:
                self._make_room(to_obs(self._start))
            self._put(self.num_steps, self._start)
            self._start = None
        if not self._rows:
            raise DataError("the environments have not been reset yet: call reset(seed) first")
        for array in self._obs.values():
            array[0] = array[-1]
        kept = self._kept
        finals: Finals = []
        for t in range(self.num_steps):
            env_actions, actions, log_probs, values = policy.step(self._rows[t])
            self._keep(t, "actions", actions.cpu().numpy())
            kept["log_probs"][t], kept["values"][t] = log_probs.cpu().numpy(), values.cpu().numpy()
            obs, env_rewards, terminated, truncated, info = self.env.step(env_actions)
            kept["env_rewards"][t] = to_numpy(env_rewards)
            kept["terminated"][t], kept["truncated"][t] = to_numpy(terminated), to_numpy(truncated)
            done: BoolArray = kept["terminated"][t] | kept["truncated"][t]
            ended = np.flatnonzero(kept["truncated"][t] & ~kept["terminated"][t])
            needed = on_step is not None or self._keep_next_obs or len(ended)
            next_obs = next_observations(obs, info, done) if needed else obs
            if len(ended):
                finals.append((t, ended, {name: part[ended] for name, part in obs_parts(next_obs).items()}))
            self._put(t + 1, obs)
            success = success_of(info, self.env.num_envs, done)
            kept["success"][t] = False if success is None else success
            kept["elapsed"][t] = self.episodes.lengths
            self.episodes.add(kept["env_rewards"][t], done, kept["success"][t])
            if self._keep_next_obs:
                self._keep(t, "next_obs", np.asarray(obs_parts(next_obs)[STATE], np.float32))
            if on_step is not None:
                on_step(t, next_obs, done, info)
        self.env_steps += self.num_steps * self.env.num_envs
        return self._rollout(policy, finals)

    def pop_episodes(self) -> list[EpisodeRecord]:
        """The records of all episodes that ended since the last call."""
        return self.episodes.pop()

    def _make_room(self, first: Obs) -> None:
        count = self.num_steps + 1
        tensors = {name: torch.zeros((count, *part.shape), dtype=part.dtype) for name, part in first.items()}
        self._obs = {name: tensor.numpy() for name, tensor in tensors.items()}
        self._rows = [{name: tensor[t] for name, tensor in tensors.items()} for t in range(count)]

    def _put(self, row: int, observation: Any) -> None:
        for name, part in obs_parts(observation).items():
            np.copyto(self._obs[name][row], part, casting="same_kind")

    def _keep(self, t: int, name: str, values: NDArray[Any]) -> None:
        if name not in self._kept:
            self._kept[name] = np.zeros((self.num_steps, *values.shape), values.dtype)
        self._kept[name][t] = values

    def _rollout(self, policy: RolloutPolicy, finals: Finals) -> Rollout:
        """The buffers as a `Rollout`; all final observations are valued in one batch."""
        named: dict[str, Any] = {name: torch.from_numpy(array) for name, array in self._kept.items()}
        named["final_values"].zero_()
        if finals:
            names = finals[0][2]
            batch = to_obs({name: np.concatenate([parts[name] for _, _, parts in finals]) for name in names})
            steps = np.concatenate([np.full(len(envs), t) for t, envs, _ in finals])
            envs = np.concatenate([envs for _, envs, _ in finals])
            self._kept["final_values"][steps, envs] = policy.values(batch).cpu().numpy()
        return Rollout(
            obs={name: torch.from_numpy(array[:-1]) for name, array in self._obs.items()},
            training_rewards=named["env_rewards"].clone(),
            last_values=policy.values(self._rows[-1]).cpu(),
            **named,
        )


class EnvWorker:
    """Owns the training environments: steps them, keeps the frames to be scored, collects labelled data."""

    def __init__(
        self,
        cfg: EnvConfig,
        reward: RewardConfig,
        collect: CollectConfig,
        *,
        cameras: Sequence[str] = (),
        num_frames: int = 1,
        only_at_rest: bool = False,
        num_steps: int = 1,
        keep_next_obs: bool = False,
        first_env: int = 0,
        total_envs: int | None = None,
        env: Any = None,
    ) -> None:
        """Make the environments.

        Args:
            cfg: the `env.train` section.
            reward: the `reward` section; `collect_data` saves trajectories.
            collect: the `collect` section; `enabled` saves episodes.
            cameras: what the reward model looks at; none if there is no reward model.
            num_frames: how many of the latest frames it scores together.
            only_at_rest: whether it scores robots that stand still alone.
            num_steps: steps of each environment in a rollout.
            keep_next_obs: rollouts also hold the states that actions led to.
            first_env: the number of the first of them, where several workers divide the environments.
            total_envs: environments of all workers together; None: those of this one.
            env: vector environments that are there already; None makes those of `cfg`.
        """
        self.env, self.facts = make_train_env(cfg, reward, collect, cameras, env)
        last_env = first_env + self.env.num_envs
        self.first_env, self.share = first_env, (first_env, last_env, total_envs or last_env)
        self._collector = TrajectoryCollector(self.env, reward) if reward.collect_data else None
        self.reward_frames: RewardFrames | None = None
        if cameras:
            self.reward_frames = RewardFrames(self.env, cameras, num_steps, reward, num_frames, only_at_rest)
        self.rollouts = RolloutCollector(self.env, num_steps, keep_next_obs=keep_next_obs)
        self._policy: Any = None
        self._version = -1  # of the weights that a copy acts with
        self._rng = np.random.default_rng(0)
        self._obs: Any = None  # in which the next action is chosen
        self._steps = 0  # since the last reset

    @property
    def num_envs(self) -> int:
        """Environments in parallel."""
        return self.env.num_envs

    def describe(self) -> EnvFacts:
        """What others need to know."""
        return self.facts

    def attach(self, policy: Any) -> None:
        """Take a policy to act with: the agent itself, a copy that is made here, or one elsewhere."""
        if isinstance(policy, PolicySpec):
            agent = policy.make()
            policy = PolicyCopy(agent, self.share) if agent.on_policy else agent
        self._policy = DistantPolicy(policy, self.share) if isinstance(policy, Handle) else policy

    def reset(self, seed: int) -> Any:
        """Begin new episodes; environment i of all workers together is seeded with seed + i.

        Returns:
            The observations, [n, ...].
        """
        if self.reward_frames is not None:
            self.reward_frames.reset()
        if self._collector is not None:
            self._collector.reset()
        self._obs, self._steps = self.rollouts.reset(seed + self.first_env), 0
        if isinstance(self._policy, OffPolicyAgent):
            self._rng = np.random.default_rng([seed, self.first_env])
            self._policy.seed_acting(int(self._rng.integers(1 << 62)))
        return self._obs

    def rollout(self, version: int, weights: dict[str, Any] | None = None) -> tuple[WorkerRollout, Frames]:
        """Play one rollout with the policy after `version` updates; also the frames to be scored.

        A copy of the policy gets the `weights` of that version; None: it has them.
        """
        copied = isinstance(self._policy, PolicyCopy | DistantPolicy)
        if copied:
            self._policy.sync(version, weights)
        before = self.num_rendered
        rollout = self.rollouts.collect(self._policy, self._on_step)
        rows, frames = self._gathered()
        records = self.rollouts.pop_episodes()
        played = WorkerRollout(
            first_env=self.first_env,
            num_envs=self.num_envs,
            arrays=rollout.arrays(),
            rows=rows,
            episodes=[replace(record, env=record.env + self.first_env) for record in records],
            policy_version=version,
            generator=self._policy.generator_state() if copied else None,
            num_rendered=self.num_rendered - before,
        )
        return played, frames

    def step(self, actions: NDArray[Any]) -> tuple[StepChunk, Frames]:
        """One step with these actions, [n, ...]."""
        if self.reward_frames is not None:
            self.reward_frames.scores_all_first = False
        return self._chunk(lambda _: actions, 1)

    def act(
        self,
        num_steps: int,
        version: int,
        weights: dict[str, Any] | None,
        random_steps: int = 0,
        progress: float = 0.0,
    ) -> tuple[StepChunk, Frames]:
        """Take `num_steps` steps alone, the first `random_steps` at random; also the frames to be scored.

        Args:
            num_steps: K.
            version: of the weights that act.
            weights: of that version; None: those given last.
            random_steps: how many of the steps.
            progress: share of the run that is over; exploration may follow from it.
        """
        began, first, policy = time.perf_counter(), self._steps, self._policy
        if weights is not None:
            policy.load_policy(weights)
            self._version = version
        if self._version != version:
            raise RuntimeError(f"asked to act with version {version}, but the weights are of {self._version}")

        def choose(t: int) -> Any:
            if t < random_steps:
                return random_actions(self.env.single_action_space, self.num_envs, self._rng)
            return policy.act(self._obs, progress=progress)

        chunk, frames = self._chunk(choose, num_steps)
        seconds = time.perf_counter() - began
        return replace(chunk, policy_version=version, first_step=first, seconds=seconds), frames

    def _chunk(self, choose: Callable[[int], NDArray[Any]], num_steps: int) -> tuple[StepChunk, Frames]:
        """Steps with actions of `choose(t)`, and their frames, which are not used again here."""
        before, obs, columns = self.num_rendered, [], list[dict[str, Any]]()
        finals: dict[int, Any] = {}
        for t in range(num_steps):
            actions = choose(t)
            obs.append(copy_obs(self._obs))  # environments may reuse their arrays
            self._obs, env_rewards, terminated, truncated, info = self.env.step(actions)
            terminated, truncated = np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_)
            done = terminated | truncated
            next_obs = with_final(self._obs, info.get("final_obs"), done)
            if done.any():
                finals[t] = next_obs
            self._on_step(t, next_obs, done, info)
            success = success_of(info, len(done), done)
            columns.append(
                {
                    "env_rewards": np.asarray(env_rewards, np.float32),
                    "terminated": terminated,
                    "truncated": truncated,
                    "success": np.zeros(len(done), np.bool_) if success is None else success >= 0.5,
                    **taken_actions(info, actions, done),
                }
            )
        self._steps += num_steps
        rows, frames = self._gathered() if self.reward_frames is None else self.reward_frames.take()
        values: dict[str, Any] = {name: np.stack([each[name] for each in columns]) for name in columns[0]}
        return StepChunk(
            obs=stack_obs(obs),
            final_obs=finals,
            last_obs=self._obs,
            rows=rows,
            num_rendered=self.num_rendered - before,
            **values,
        ), frames

    def _on_step(self, t: int, next_obs: Any, done: BoolArray, info: Mapping[str, Any]) -> None:
        """What happens after every step of the environments."""
        if self.reward_frames is not None:
            self.reward_frames.add(t, next_obs, done, info)
        if self._collector is not None:
            self._collector.add(next_obs, done, info)

    @property
    def num_rendered(self) -> int:
        """Frames that were asked of the environments so far."""
        return 0 if self.reward_frames is None else self.reward_frames.num_rendered

    def _gathered(self) -> tuple[IntArray, Frames]:
        return (np.zeros(0, np.int64), {}) if self.reward_frames is None else self.reward_frames.gathered()

    def close(self) -> None:
        """Finish writing and close the environments."""
        if self.reward_frames is not None and self.reward_frames.streaming is not None:
            self.reward_frames.streaming.close()
        try:
            if self._collector is not None:
                self._collector.close()
        finally:
            self.env.close()


class LocalEnvs:
    """One env worker of this process, as the loops ask for it; see `EnvWorkers`."""

    def __init__(self, worker: EnvWorker) -> None:
        self.local, self.num_envs, self.facts = worker, worker.num_envs, worker.facts
        self.parts = [(0, worker.num_envs)]

    def attach(self, policy: PolicySpec, agent: Any) -> None:
        """Act with the agent itself."""
        self.local.attach(agent)

    def reset(self, seed: int, env_steps: int) -> list[Any]:
        """Begin new episodes; returns the observations [n, ...] of each worker."""
        return [self.local.reset(seed)]

    def rollouts(self, version: int, weights: Any, env_steps: int) -> list[WorkerRollout]:
        """A rollout of each worker."""
        played, frames = self.local.rollout(version)
        return [replace(played, frames=frames)]

    def step(self, actions: NDArray[Any], env_steps: int, on_lost: Any) -> tuple[StepChunk, Frames]:
        """One step of all environments."""
        return self.local.step(actions)

    def fault_metrics(self) -> dict[str, float]:
        """Nothing can be lost."""
        return {}

    def close(self, seconds: float = 0.0) -> None:
        """Finish writing and close the environments."""
        self.local.close()
