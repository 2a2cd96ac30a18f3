"""Demonstrations that an expert plays before a run: a script, a saved policy or one of DI-engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from guerdon.config import EnvConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import display_path
from guerdon.data.files.safe_pickle import load_torch
from guerdon.envs.experts import scripted_policy
from guerdon.envs.make import make_vector_env
from guerdon.rewards.model import BaseRewardModel
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.base import ZooModel
from guerdon.rewards.zoo.drex import DREX
from guerdon.rewards.zoo.trex import TREX
from guerdon.training.checkpoints import load_policy
from guerdon.training.rollouts import noise_ranked

log = logging.getLogger("guerdon")

SCRIPTED = "scripted"
RANKED_NOISE = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of random actions at which one expert is played for T-REX, which needs better and worse episodes."""
CHECKPOINT_SUFFIX = ".pth.tar"
"""Of DI-engine's checkpoints."""

Policy = Callable[[Any], NDArray[Any]]


def play_expert(
    model: BaseRewardModel,
    env: EnvConfig,
    *,
    expert: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    expert_episodes: int,
    expert_noise: Sequence[float] | None,
    seed: int,
) -> None:
    """Give a reward model the demonstrations of an expert, if one is named; keys of `reward_model`.

    Args:
        model: a reward model.
        env: what to play in.
        expert: `scripted`, a saved policy, a checkpoint of DI-engine, or a list of those; None: nothing is
            played.
        expert_episodes: of each.
        expert_noise: shares of random actions at which they are played; None: as the model needs it.
        seed: of the environments and of the noise.
    """
    if expert is None or not isinstance(model, ZooModel) or not model.needs_experts or model.experts:
        return
    several = (expert,) if isinstance(expert, str | os.PathLike) else tuple(expert)
    experts = [os.fspath(each) for each in several]
    episodes, noise = int(expert_episodes), expert_noise
    if noise is None:
        ranked = isinstance(model, TREX) and not isinstance(model, DREX) and len(experts) == 1
        noise = RANKED_NOISE if ranked else (0.0,)
    if not experts or not all(0.0 <= level <= 1.0 for level in noise):
        raise ConfigError("reward_model.expert names a policy, and expert_noise has shares from 0 to 1")
    env = replace(env, num_envs=min(env.num_envs, episodes))
    played: list[StepBatch] = []
    mode = AutoresetMode.SAME_STEP
    with closing(make_vector_env(env, autoreset_mode=mode, keep_final_frame=False)) as vector_env:
        for number, name in enumerate(experts):
            act = expert_policy(name, env.id)
            groups = noise_ranked(vector_env, act, noise, episodes, seed=seed + 1000 * number)
            played += [each for group in groups.values() for each in group]
    shown = ", ".join(display_path(Path(name)) if name != SCRIPTED else name for name in experts)
    log.info("demonstrations: %d episodes of %s", len(played), shown)
    model.load_expert_data(played)


def expert_policy(name: str, env_id: str) -> Policy:
    """Actions for batches of observations: of a script, a saved policy or a checkpoint of DI-engine."""
    if name == SCRIPTED:
        return scripted_policy(env_id)
    path = Path(name)
    if not path.exists():
        raise DataError(
            f"there is no expert at {display_path(path)}: name a saved policy with reward_model.expert, or "
            f"{SCRIPTED!r} where the environment has a script, or demonstrations with reward_model.data_path"
        )
    if path.name.endswith(CHECKPOINT_SUFFIX):
        return di_engine_policy(path)
    saved = load_policy(path)
    return lambda obs: saved.learner.act(obs, deterministic=True)


def di_engine_policy(path: Path) -> Policy:
    """The greedy policy of a checkpoint of DI-engine: DQN, dueling or not, or PPO on discrete actions.

    Its networks are fully connected: an encoder with a ReLU after each layer, and a head with one after each
    layer but the last. Of a dueling head the advantages decide.
    """
    content = load_torch(path)
    weights = content.get("model") if isinstance(content, Mapping) else None
    if not isinstance(weights, Mapping):
        raise DataError(f"{display_path(path)} is no checkpoint of DI-engine: it has no `model`")
    encoder = _layers(weights, ("encoder.", "actor_encoder."), path)
    head = _layers(weights, ("head.A.", "head.Q.", "actor_head.Q."), path)
    layers = [*encoder, *head]
    for (before, _), (after, _) in pairwise(layers):
        if before.shape[0] != after.shape[1]:
            raise DataError(f"{display_path(path)} has layers that do not fit together")

    @torch.no_grad()
    def act(obs: Any) -> NDArray[Any]:
        values = torch.from_numpy(np.array(obs, np.float32)).flatten(1)
        if values.shape[1] != layers[0][0].shape[1]:
            raise DataError(
                f"{display_path(path)} is a policy for observations of {layers[0][0].shape[1]} numbers, "
                f"not {values.shape[1]}"
            )
        for number, (weight, bias) in enumerate(layers):
            values = torch.nn.functional.linear(values, weight, bias)
            if number < len(layers) - 1:
                values = values.relu()
        actions: NDArray[Any] = values.argmax(1).numpy()
        return actions

    return act


def _layers(
    weights: Mapping[Any, Any], prefixes: Sequence[str], path: Path
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weight and bias of the linear layers below the first of these prefixes that is there, in order."""
    for prefix in prefixes:
        names = [str(name) for name in weights if str(name).startswith(prefix)]
        if not names:
            continue
        found = []
        for name in (each for each in names if each.endswith(".weight")):
            weight, bias = weights[name], weights.get(name.removesuffix("weight") + "bias")
            if not isinstance(weight, torch.Tensor) or not isinstance(bias, torch.Tensor):
                raise DataError(f"{display_path(path)} has no bias for {name}")
            if weight.ndim != 2 or bias.shape != weight.shape[:1]:
                raise DataError(f"{display_path(path)}: {name} is no fully connected layer")
            found.append((weight.float(), bias.float()))
        if found:
            return found
    raise DataError(
        f"{display_path(path)} has no layers {' or '.join(prefixes)}: fully connected DQN and PPO are read"
    )
