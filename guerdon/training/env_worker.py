"""The workers that an embodied run is made of: plain classes, which an engine may put anywhere.

`EnvWorker` steps environments and shows what they look like, `RolloutWorker` (in `acting`) chooses actions,
`Actor` learns; the reward worker is in `guerdon.rewards.image`. `EmbodiedRunner` calls them in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from guerdon.agents.agent import OnPolicyAgent
from guerdon.agents.episodes import EpisodeRecord
from guerdon.agents.rollout import Rollout, RolloutArrays, RolloutCollector, RolloutPolicy
from guerdon.config import CollectConfig, EnvConfig, RewardConfig
from guerdon.core.errors import ConfigError
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array, control_mode_of
from guerdon.data.collect import RewardDataCollector
from guerdon.data.collect.observations import FrameSource, per_env, with_final
from guerdon.data.collect.wrapper import VectorDataCollectorWrapper
from guerdon.distributed.engine import Handle, Pending
from guerdon.envs.make import make_vector_env
from guerdon.rewards.calibration import fires
from guerdon.rewards.image.manager import RewardManager
from guerdon.training.acting import (
    DistantPolicy,
    EnvStep,
    PolicyRunner,
    PolicySpec,
    RolloutPolicyWorker,
    RolloutWorker,
    StepChunk,
)
from guerdon.training.frames import RewardFrames
from guerdon.training.interventions import taken_actions
from guerdon.training.loop import frame_row


@dataclass(frozen=True, kw_only=True)
class EnvFacts:
    """What others need to know of the environments of a worker."""

    knows_success: bool
    """Whether they tell success."""
    first_frames: dict[str, UInt8Array]
    """What the cameras show after one step."""
    spaces: tuple[gym.Space[Any], gym.Space[Any]]
    """Of observations and actions of a single one."""
    control_mode: str | None = None
    """What actions mean, where a robot knows several ways."""


@dataclass(frozen=True, kw_only=True)
class WorkerRollout:
    """A rollout of one worker's environments; its frames stay where they are until somebody needs them."""

    start: int
    """The first of its environments, counted over all workers ..."""
    stop: int
    """... and the one after the last."""
    arrays: RolloutArrays
    rows: IntArray
    """Which steps have a frame to be scored, as places in a flat [T * n], ascending."""
    episodes: list[EpisodeRecord]
    """Those that ended in it; environments are numbered through over all workers."""
    policy_version: int
    generator: NDArray[Any] | None
    """Where the policy's random numbers are afterwards; None if the policy is the learner itself."""
    num_rendered: int = 0
    """Frames that were asked of the environments for it."""
    frames: Pending | None = None
    """Camera -> uint8 [len(rows), H, W, C] or stacks, wherever they are; given by `EnvWorkers`."""

    def frames_of(self, t: IntArray, env: IntArray) -> dict[str, UInt8Array]:
        """What was scored of some steps, int [M] each, camera -> [M, ...]; `env` counts over all workers."""
        assert self.frames is not None
        count = self.stop - self.start
        rows = [frame_row(self.rows, place, count) for place in (t * count + env - self.start).tolist()]
        return {name: np.asarray(images[rows]) for name, images in self.frames.result().items()}

    def places(self, num_envs: int) -> IntArray:
        """Where the scored steps lie in the flat [T * N] of all workers."""
        steps, envs = np.divmod(self.rows, self.stop - self.start)
        return steps * num_envs + self.start + envs


class EnvWorker:
    """Owns the training environments: steps them, keeps the frames to be judged, collects labelled data."""

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
    ) -> None:
        """Make the environments.

        Args:
            cfg: the `env.train` section.
            reward: the `reward` section; `collect_data` saves trajectories as the first documents do.
            collect: the `collect` section; `enabled` saves episodes as the second document does.
            cameras: what the reward model looks at; none if there is no reward model.
            num_frames: how many of the latest frames it judges together.
            only_at_rest: whether it judges robots that stand still alone.
            num_steps: steps of each environment in a rollout.
            keep_next_obs: rollouts also hold the states that actions led to.
            first_env: the number of the first of them, where several workers divide the environments.
            total_envs: environments of all workers together; None: `cfg.num_envs`.
        """
        total = cfg.num_envs if total_envs is None else total_envs
        self.first_env, self.share = first_env, (first_env, first_env + cfg.num_envs, total)
        self._policy: RolloutPolicyWorker | None = None
        self._player: PolicyRunner | None = None
        self.env = make_vector_env(cfg, autoreset_mode=AutoresetMode.SAME_STEP, keep_final_frame=False)
        if reward.standalone:
            _end_on_success(self.env.unwrapped, reward)
        self.knows_success, self.first_frames = _probe(self.env, cameras)
        if (collect.enabled or reward.collect_data) and not self.knows_success:
            raise ConfigError(f"{cfg.id} does not tell success in its info: its frames cannot be labelled")
        if collect.enabled:
            self.env = VectorDataCollectorWrapper(
                self.env,
                Path(collect.save_dir),
                collect.target_success,
                collect.target_failure,
                cfg.reward_render_mode,
                cameras=collect.cameras,
                format=collect.format,
                keep_states=collect.keep_states,
                only_at_rest=collect.only_at_rest,
            )
        section = reward.data_collection
        self._collector: RewardDataCollector | None = None
        if reward.collect_data:
            self._collected = FrameSource(self.env, section.image_keys)
            self._collector = RewardDataCollector(
                positive_dir=section.positive_dir,
                negative_dir=section.negative_dir,
                image_keys=section.image_keys,
                max_positive_trajectories=section.max_positive_trajectories,
                max_negative_trajectories=section.max_negative_trajectories,
            )
        self.reward_frames: RewardFrames | None = None
        if cameras:
            self.reward_frames = RewardFrames(self.env, cameras, num_steps, reward, num_frames, only_at_rest)
        self.rollouts = RolloutCollector(self.env, num_steps, keep_next_obs=keep_next_obs)

    @property
    def num_envs(self) -> int:
        """Environments in parallel."""
        return self.env.num_envs

    def describe(self) -> EnvFacts:
        """What others need to know."""
        spaces = (self.env.single_observation_space, self.env.single_action_space)
        return EnvFacts(
            knows_success=self.knows_success,
            first_frames=self.first_frames,
            spaces=spaces,
            control_mode=control_mode_of(str(getattr(self.env.unwrapped, "source", ""))),
        )

    def attach(self, policy: RolloutWorker | PolicySpec | Handle) -> None:
        """Take a policy to act with: the learner's own, a copy made here, or one elsewhere.

        On-policy agents play rollouts, the others chunks.
        """
        if isinstance(policy, PolicySpec):
            learner = policy.make()
            if learner.on_policy:
                self._policy = RolloutWorker(learner, self.share)
            else:
                self._player = PolicyRunner(learner, self.env.single_action_space, self.first_env)
        elif isinstance(policy, Handle):
            self._policy = DistantPolicy(policy, self.share)
        else:
            self._policy = policy

    def reset(self, seed: int) -> None:
        """Begin new episodes for rollouts; environment i of all workers together is seeded with seed + i."""
        self._cut()
        self.rollouts.reset(seed + self.first_env)

    def reset_obs(self, seed: int) -> Any:
        """Begin new episodes in the same way; returns the observations, for stepping by hand."""
        self._cut()
        return self.env.reset(seed=seed + self.first_env)[0]

    def rollout(
        self, version: int, weights: dict[str, Any] | None = None
    ) -> tuple[WorkerRollout, dict[str, UInt8Array]]:
        """Play one rollout with the given weights; also the frames to be judged, camera -> [K, H, W, C]."""
        assert self._policy is not None  # `attach` comes first
        self._policy.sync(version, weights)
        before = self._num_rendered()
        arrays = self.interact(self._policy).arrays()
        rows, frames = (
            (np.zeros(0, np.int64), {}) if self.reward_frames is None else self.reward_frames.gathered()
        )
        episodes = [
            replace(record, env=record.env + self.first_env) for record in self.rollouts.pop_episodes()
        ]
        played = WorkerRollout(
            start=self.share[0],
            stop=self.share[1],
            arrays=arrays,
            rows=rows,
            episodes=episodes,
            policy_version=version,
            generator=self._policy.generator_state(),
            num_rendered=self._num_rendered() - before,
        )
        return played, frames

    def step(self, actions: NDArray[Any]) -> EnvStep:
        """One step of all environments by hand, with the frames to be judged."""
        if self.reward_frames is None:
            return self.step_once(0, actions)
        self.reward_frames.scores_all_first = False
        before = self.reward_frames.num_rendered
        step = self.step_once(0, actions)
        rows, frames = self.reward_frames.gathered()
        return replace(step, rows=rows, frames=frames, num_rendered=self.reward_frames.num_rendered - before)

    def step_once(self, t: int, actions: NDArray[Any]) -> EnvStep:
        """One step of all environments; its frames are kept in `reward_frames` as those of step `t`."""
        obs, env_rewards, terminated, truncated, info = self.env.step(actions)
        terminated, truncated = np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_)
        done = terminated | truncated
        next_obs = with_final(obs, info.get("final_obs"), done)
        told = per_env(info, "success", len(done), done)
        self.on_step(t, self.env, next_obs, done, info)
        return EnvStep(
            obs=obs,
            next_obs=next_obs,
            env_rewards=np.asarray(env_rewards, np.float32),
            terminated=terminated,
            truncated=truncated,
            success=np.zeros(len(done), np.bool_) if told is None else told >= 0.5,
            rows=np.zeros(0, np.int64),
            frames={},
            **taken_actions(info, actions, done),
        )

    def reset_acting(self, seed: int) -> Any:
        """Begin new episodes for `act`; returns the observations."""
        assert self._player is not None  # `attach` comes first
        obs = self.reset_obs(seed)
        self._player.reset(obs, seed)
        return obs

    def act(
        self,
        num_steps: int,
        version: int,
        weights: dict[str, Any] | None,
        random_steps: int = 0,
        progress: float = 0.0,
    ) -> tuple[StepChunk, dict[str, UInt8Array]]:
        """Take some steps alone with weights of `version`, None: those given last; see `PolicyRunner`."""
        assert self._player is not None
        self._player.sync(version, weights)
        before = self._num_rendered()
        chunk, frames = self._player.play(self, num_steps, random_steps, progress, self._take_frames)
        return replace(chunk, num_rendered=self._num_rendered() - before), frames

    def _num_rendered(self) -> int:
        return 0 if self.reward_frames is None else self.reward_frames.num_rendered

    def _gathered(self) -> tuple[IntArray, dict[str, UInt8Array]]:
        return (np.zeros(0, np.int64), {}) if self.reward_frames is None else self.reward_frames.gathered()

    def _take_frames(self, num_steps: int) -> tuple[IntArray, dict[str, UInt8Array]]:
        return (np.zeros(0, np.int64), {}) if self.reward_frames is None else self.reward_frames.take()

    def _cut(self) -> None:
        if self.reward_frames is not None:
            self.reward_frames.reset()
        if self._collector is not None:
            self._collector.truncate_running_episodes()

    def interact(self, policy: RolloutPolicy) -> Rollout:
        """One rollout; the frames to be judged are in `reward_frames` afterwards."""
        return self.rollouts.collect(policy, self.on_step)

    def on_step(
        self,
        t: int,
        env: VectorEnv[Any, Any, Any],
        next_obs: Any,
        done: BoolArray,
        info: Mapping[str, Any],
    ) -> None:
        """What happens after every step of the environments."""
        if self.reward_frames is not None:
            self.reward_frames.add(t, next_obs, done, info)
        if self._collector is not None:
            frames = self._collected.frames(next_obs, done, np.arange(len(done)))
            success = per_env(info, "success", len(done), done)
            env_info = {} if success is None else {"success": success}
            self._collector.add_env_output({"obs": frames, "dones": done}, env_info)

    def close(self) -> None:
        """Finish writing and close the environments."""
        if self.reward_frames is not None and self.reward_frames.streaming is not None:
            self.reward_frames.streaming.close()
        try:
            if self._collector is not None:
                self._collector.close()
        finally:
            self.env.close()


def _probe(env: VectorEnv[Any, Any, Any], cameras: Sequence[str]) -> tuple[bool, dict[str, UInt8Array]]:
    """Take one step: does the environment tell success, and what do its cameras show?"""
    env.reset(seed=0)
    action = getattr(env.unwrapped, "resting_action", env.action_space.sample)()  # a robot is not to jerk
    obs, _, terminated, truncated, info = env.step(action)
    done = np.asarray(terminated, np.bool_) | np.asarray(truncated, np.bool_)
    next_obs = with_final(obs, info.get("final_obs"), done)
    frames = FrameSource(env, cameras).frames(next_obs, done, np.arange(len(done))) if cameras else {}
    return per_env(info, "success", len(done), done) is not None, frames


def _end_on_success(env: Any, reward: RewardConfig) -> None:
    """Have the reward model end the episodes of a robot; its verdict is the one that is learned from."""
    if not hasattr(env, "set_success_detector"):
        raise ConfigError("reward.standalone ends episodes on a robot; use the wrappers for it elsewhere")
    manager = RewardManager(reward)

    def judge(obs: Any) -> bool:
        verdict = manager.score(manager.images(obs))
        return bool(fires(verdict.prob_success, manager.threshold)[0])

    env.set_success_detector(judge)


class Actor:
    """Learns from rollouts. The training rewards come through `update_rewards` and from nowhere else."""

    def __init__(self, learner: OnPolicyAgent) -> None:
        self.learner, self.version = learner, 0
        self._rollout: Rollout | None = None

    def receive(self, rollout: Rollout) -> None:
        """Take a rollout to learn from; until relabelled its training rewards are the env's."""
        self._rollout = rollout

    @property
    def rollout(self) -> Rollout:
        """The rollout at hand."""
        if self._rollout is None:
            raise RuntimeError("the actor has no rollout yet: call receive() first")
        return self._rollout

    def update_rewards(self, training_rewards: FloatArray) -> FloatArray:
        """Replace the training rewards, float32 [T, N]; returns those that it holds now."""
        self.rollout.update_rewards(torch.from_numpy(training_rewards))
        held: FloatArray = self.rollout.training_rewards.numpy()
        return held

    def objective(self) -> NDArray[np.floating]:
        """What the policy is trained on, made of the training rewards as they are now: advantages [T, N]."""
        advantages: NDArray[np.floating] = self.learner.advantages(self.rollout)[0].numpy()
        return advantages

    def update(self, progress: float) -> dict[str, float]:
        """Learn from the rollout; `progress` is the share of the run that is over."""
        metrics = self.learner.update(self.rollout, progress)
        self.version += 1
        return metrics
