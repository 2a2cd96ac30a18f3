"""The workers that an embodied run is made of: plain classes, which an engine may put anywhere.

`EnvWorker` steps environments and shows what they look like, `RolloutWorker` chooses actions, `Actor` learns;
the reward worker is in `guerdon.serve`. `EmbodiedRunner` calls them in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from guerdon.collect import RewardDataCollector
from guerdon.collect.observations import FrameSource, per_env, with_final
from guerdon.collect.wrapper import VectorDataCollectorWrapper
from guerdon.config import CollectConfig, EnvConfig, RewardConfig
from guerdon.envs.make import make_vector_env
from guerdon.errors import ConfigError
from guerdon.learn.ppo import PPO
from guerdon.learn.rollout import Rollout, RolloutCollector
from guerdon.serve.relabel import judged_frames
from guerdon.types import BoolArray, FloatArray, IntArray, UInt8Array


class JudgedFrames:
    """The frames of some steps that the reward model will look at, and no others: render on demand."""

    def __init__(
        self, env: VectorEnv[Any, Any, Any], cameras: Sequence[str], num_steps: int, cfg: RewardConfig
    ) -> None:
        """Make room for `num_steps` steps of `env`; `cfg` says which frames are judged."""
        self._source = FrameSource(env, cameras)
        self._cameras, self._cfg = tuple(cameras), cfg
        self._shape = (num_steps, env.num_envs)
        self._every = cfg.reward_mode == "per_step"
        self._all: dict[str, UInt8Array] = {}
        self._some: list[tuple[int, IntArray, dict[str, UInt8Array]]] = []
        self.num_rendered = 0

    def add(self, t: int, reached_obs: Any, done: BoolArray) -> None:
        """Take the frames that step `t` led to; of ended episodes the final ones."""
        if t == 0:
            self._some = []
        env_ids = np.flatnonzero(judged_frames(done, self._cfg))
        if len(env_ids) == 0:
            return
        frames = self._source.frames(reached_obs, done, env_ids)
        self.num_rendered += len(env_ids)
        if not self._every:
            self._some.append((t, env_ids, frames))
            return
        for name, images in frames.items():
            if name not in self._all:
                self._all[name] = np.empty((*self._shape, *images.shape[1:]), np.uint8)
            self._all[name][t] = images

    def gathered(self) -> tuple[IntArray, dict[str, UInt8Array]]:
        """Which steps were judged, as places in a flat [T * N], and their frames, camera -> [K, H, W, C]."""
        if self._every:
            flat = {name: images.reshape(-1, *images.shape[2:]) for name, images in self._all.items()}
            return np.arange(self._shape[0] * self._shape[1]), flat
        if not self._some:
            return np.zeros(0, np.int64), {}
        rows = np.concatenate([t * self._shape[1] + env_ids for t, env_ids, _ in self._some])
        return rows, {name: np.concatenate([part[2][name] for part in self._some]) for name in self._cameras}

    def frame(self, t: int, env: int) -> UInt8Array:
        """The first camera's frame of one judged step."""
        if self._every:
            whole: UInt8Array = self._all[self._cameras[0]][t, env]
            return whole
        _, env_ids, frames = next(item for item in self._some if item[0] == t and env in item[1])
        one: UInt8Array = frames[self._cameras[0]][int(np.flatnonzero(env_ids == env)[0])]
        return one


class EnvWorker:
    """Owns the training environments: steps them, keeps the frames to be judged, collects labelled data."""

    def __init__(
        self,
        cfg: EnvConfig,
        reward: RewardConfig,
        collect: CollectConfig,
        *,
        cameras: Sequence[str] = (),
        num_steps: int = 1,
    ) -> None:
        """Make the environments.

        Args:
            cfg: the `env.train` section.
            reward: the `reward` section; `collect_data` saves trajectories as the first documents do.
            collect: the `collect` section; `enabled` saves episodes as the second document does.
            cameras: what the reward model looks at; none if there is no reward model.
            num_steps: steps of each environment in a rollout.
        """
        self.env = make_vector_env(cfg, autoreset_mode=AutoresetMode.SAME_STEP, keep_final_frame=False)
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
        self.judged = JudgedFrames(self.env, cameras, num_steps, reward) if cameras else None
        self.rollouts = RolloutCollector(self.env, num_steps)

    @property
    def num_envs(self) -> int:
        """Environments in parallel."""
        return self.env.num_envs

    def reset(self, seed: int) -> None:
        """Begin new episodes in all environments, for rollouts."""
        self._cut()
        self.rollouts.reset(seed)

    def first_obs(self, seed: int) -> Any:
        """Begin new episodes in all environments; returns their observations, for stepping by hand."""
        self._cut()
        return self.env.reset(seed=seed)[0]

    def _cut(self) -> None:
        if self._collector is not None:
            self._collector.cut()

    def interact(self, policy: RolloutWorker) -> Rollout:
        """One rollout; the frames to be judged are in `judged` afterwards."""
        return self.rollouts.collect(policy, self.on_step)

    def on_step(
        self,
        t: int,
        env: VectorEnv[Any, Any, Any],
        reached_obs: Any,
        done: BoolArray,
        info: Mapping[str, Any],
    ) -> None:
        """What happens after every step of the environments."""
        if self.judged is not None:
            self.judged.add(t, reached_obs, done)
        if self._collector is not None:
            frames = self._collected.frames(reached_obs, done, np.arange(len(done)))
            success = per_env(info, "success", len(done), done)
            env_info = {} if success is None else {"success": success}
            self._collector.add_env_output({"obs": frames, "dones": done}, env_info)

    def close(self) -> None:
        """Finish writing and close the environments."""
        try:
            if self._collector is not None:
                self._collector.close()
        finally:
            self.env.close()


def _probe(env: VectorEnv[Any, Any, Any], cameras: Sequence[str]) -> tuple[bool, dict[str, UInt8Array]]:
    """Take one step: does the environment tell success, and what do its cameras show?"""
    env.reset(seed=0)
    obs, _, terminated, truncated, info = env.step(env.action_space.sample())
    done = np.asarray(terminated, np.bool_) | np.asarray(truncated, np.bool_)
    reached = with_final(obs, info.get("final_obs"), done)
    frames = FrameSource(env, cameras).frames(reached, done, np.arange(len(done))) if cameras else {}
    return per_env(info, "success", len(done), done) is not None, frames


class RolloutWorker:
    """Chooses actions with the weights it was given last."""

    def __init__(self, learner: PPO) -> None:
        self.learner, self.version = learner, 0

    def sync(self, version: int) -> None:
        """Take the actor's weights; in one process they are the same, and the version is noted."""
        self.version = version

    def step(self, obs: Any) -> tuple[NDArray[Any], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Actions for the environments, and as the learner needs them: actions, log-probabilities, values."""
        return self.learner.step(obs)

    def values(self, obs: Any) -> torch.Tensor:
        """Values of observations, [N]."""
        return self.learner.values(obs)


class Actor:
    """Learns from rollouts. The training rewards come through `update_rewards` and from nowhere else."""

    def __init__(self, learner: PPO) -> None:
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
