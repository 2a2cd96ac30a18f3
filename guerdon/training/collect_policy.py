"""Collect what a policy of ours does: its own attempts, with the environment's labels.

A reward model that has only seen an expert's episodes is sure of itself where no expert goes, and that is
where a policy ends up that is trained on it. Attempts of the policy, labelled, teach it better.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from guerdon.agents.agent import AnyAgent
from guerdon.agents.cloning import demonstrations
from guerdon.agents.networks import ObsSpec
from guerdon.agents.registry import make_agent
from guerdon.config import CollectConfig, EnvConfig, LearnerConfig
from guerdon.core.types import BoolArray
from guerdon.data.collect.run import CollectResult, collect
from guerdon.envs.make import make_vector_env
from guerdon.training.checkpoints import DESCRIPTION, load_policy


class LearnerPolicy:
    """A learner as a policy to collect with; it explores as it does in training."""

    takes_observations = True

    def __init__(
        self, learner: AnyAgent, action_space: gym.Space[Any], noise: float = 0.0, seed: int = 0
    ) -> None:
        """Act with `learner`; `noise` is added to continuous actions, as a share of half their range."""
        self._learner, self._space, self._noise = learner, action_space, noise
        self._rng = np.random.default_rng(seed)

    def act(self, observations: Any) -> NDArray[Any]:
        """Actions for a batch of observations."""
        actions = self._learner.act(observations, deterministic=False)
        if not self._noise or not isinstance(self._space, gym.spaces.Box):
            return actions
        reach = self._noise * (self._space.high - self._space.low) / 2
        noisy = actions + reach * self._rng.standard_normal(actions.shape, np.float32)
        return np.clip(noisy, self._space.low, self._space.high)

    def reset(self, mask: BoolArray) -> None:
        """Nothing to do: the policy has no memory."""


def saved_policy(cfg: CollectConfig, env: EnvConfig, seed: int) -> LearnerPolicy | None:
    """The policy of a training run that `collect.policy_checkpoint` names; None if it is something else."""
    if cfg.policy != "checkpoint" or cfg.policy_checkpoint is None:
        return None
    place = Path(cfg.policy_checkpoint)
    if not place.is_dir() or ((place / DESCRIPTION).is_file() and (place / "policy.safetensors").is_file()):
        return None  # the plain network that `collect` reads itself
    saved = load_policy(place)
    saved.check_fits((saved.observation_space, saved.action_space), env.init_params.get("control_mode"))
    return LearnerPolicy(saved.learner, saved.action_space, cfg.policy_noise, seed)


def collect_clone(
    learner: LearnerConfig, env: EnvConfig, cfg: CollectConfig, demos: Path, *, seed: int
) -> CollectResult:
    """Clone the successes of a data set into a policy, and collect its attempts as `cfg` says."""
    probe = make_vector_env(replace(env, num_envs=1), autoreset_mode=AutoresetMode.SAME_STEP)
    observations: gym.Space[Any] = probe.single_observation_space
    actions: gym.Space[Any] = probe.single_action_space
    probe.close()
    policy = make_agent(learner, observations, actions, seed)
    section = learner.warm_start
    shown = demonstrations(
        demos, ObsSpec.of(observations), intended=section.intended, num_episodes=section.num_episodes
    )
    policy.clone(shown, section, seed)
    return collect(env, cfg, seed=seed, policy=LearnerPolicy(policy, actions))
