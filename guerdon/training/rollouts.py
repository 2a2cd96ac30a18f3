"""Whole episodes of a policy, and of a policy with more and more noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from numpy.typing import NDArray

from guerdon.core.errors import ConfigError
from guerdon.envs.observations import with_final
from guerdon.rewards.model import BaseRewardModel
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.drex import DREX
from guerdon.training.acting import random_actions

MAX_STEPS = 100_000
"""An episode that is longer has no end."""


def play_episodes(
    env: Any, act: Callable[[Any], NDArray[Any]], episodes: int, *, seed: int | None = None
) -> list[StepBatch]:
    """So many whole episodes, [T] each.

    Which ones is settled beforehand (the first of each environment, then the second ...): those that end
    first would be the short ones.

    Args:
        env: vector environments that reset in the same step.
        act: actions as the environments take them, for a batch of observations.
        episodes: how many.
        seed: of the environments' reset; None leaves them as they are.
    """
    if episodes < 1:
        raise ConfigError(f"at least one episode has to be played, not {episodes}")
    wanted = np.full(env.num_envs, episodes // env.num_envs)
    wanted[: episodes % env.num_envs] += 1
    first = int(getattr(env.single_action_space, "start", 0))
    is_box = isinstance(env.single_action_space, Box)
    obs, _ = env.reset(seed=seed)
    steps: list[StepBatch] = []
    ended = np.zeros(env.num_envs, np.int64)
    since_end = 0
    while (ended < wanted).any():
        actions = np.asarray(act(obs))
        if is_box:
            actions = np.clip(actions, env.single_action_space.low, env.single_action_space.high)
        after, env_rewards, terminated, truncated, info = env.step(actions)
        done = np.asarray(terminated) | np.asarray(truncated)
        next_state = with_final(after, info.get("final_obs"), done) if done.any() else after
        steps.append(
            StepBatch(
                obs=torch.from_numpy(np.array(obs, np.float32)),
                actions=torch.from_numpy(np.array(actions, np.float32) if is_box else actions - first),
                next_obs=torch.from_numpy(np.array(next_state, np.float32)),
                env_rewards=torch.from_numpy(np.array(env_rewards, np.float32)),
                terminated=torch.from_numpy(np.array(terminated, np.bool_)),
                truncated=torch.from_numpy(np.array(truncated, np.bool_)),
            )
        )
        since_end = 0 if done[ended < wanted].any() else since_end + 1
        ended += done
        obs = after
        if since_end > MAX_STEPS:
            raise ConfigError(f"no episode ended in {MAX_STEPS} steps: the environment needs a time limit")
    names = steps[0].parts()
    streams = StepBatch(**{name: torch.stack([getattr(each, name) for each in steps]) for name in names})
    found: list[StepBatch] = []
    for number in np.flatnonzero(wanted):
        mine = streams.map(lambda part, number=number: part[:, number])  # type: ignore[misc]
        found += mine.episodes()[: int(wanted[number])]
    return found


def noise_ranked(
    env: Any,
    policy: Callable[[Any], NDArray[Any]],
    noise_levels: Sequence[float],
    episodes: int,
    *,
    seed: int = 0,
) -> dict[float, list[StepBatch]]:
    """Episodes of a policy at each level of noise: that share of its actions is random.

    Args:
        env: vector environments that reset in the same step.
        policy: actions for a batch of observations.
        noise_levels: 0 to 1 each.
        episodes: at each level.
        seed: of the environments and of the noise.
    """
    rng = np.random.default_rng(seed)
    groups: dict[float, list[StepBatch]] = {}
    for number, level in enumerate(noise_levels):

        def act(obs: Any, level: float = level) -> NDArray[Any]:
            chosen = np.asarray(policy(obs))
            drawn = random_actions(env.single_action_space, env.num_envs, rng)
            noisy = rng.random(env.num_envs) < level
            return np.where(noisy.reshape(-1, *[1] * (chosen.ndim - 1)), drawn, chosen)

        groups[float(level)] = play_episodes(env, act, episodes, seed=seed + number)
    return groups


def play_for(model: BaseRewardModel, env: Any, seed: int) -> int:
    """Play what a reward model needs before it can learn; returns the environment steps that it took.

    That is what D-REX ranks by noise, unless it was given rankings.
    """
    if not isinstance(model, DREX) or model.ranked:
        return 0
    clone, first = model.clone(), int(getattr(env.single_action_space, "start", 0))
    groups = noise_ranked(
        env,
        lambda obs: clone(obs) + first if first else clone(obs),
        model.cfg.noise_levels,
        model.cfg.episodes_per_level,
        seed=seed,
    )
    model.load_ranked_data(groups)
    return sum(len(each) for group in groups.values() for each in group)


__all__ = ["noise_ranked", "play_episodes", "play_for"]
