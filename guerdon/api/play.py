"""A policy that acts: `predict`, `play`, and an agent that was saved and does not learn."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from guerdon.api.envs import AnyVectorEnv, EnvGiven, vector_env
from guerdon.api.settings import check_count, check_seed, shown
from guerdon.config import EnvConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy
from guerdon.core.types import display_path
from guerdon.envs.wrappers import GOAL_KEYS, flat_batch
from guerdon.training.checkpoints import SavedPolicy, space_text
from guerdon.training.evaluation import Act, Evaluation, evaluate


class LoadedAgent:
    """A saved policy that acts and can be measured; `load_agent` makes it where no `env` is given."""

    def __init__(self, saved: SavedPolicy) -> None:
        self.saved, self.policy, self.num_steps = saved, saved.learner, saved.step

    def predict(
        self, obs: Any, state: None = None, episode_start: Any = None, deterministic: bool = False
    ) -> tuple[NDArray[Any], None]:
        """Actions; see `Agent.predict`."""
        return predict(self.policy, self.saved.observation_space, obs, deterministic)

    def evaluate(
        self, episodes: int = 50, *, env: EnvGiven | None = None, seed: int = 0, progress: bool = True
    ) -> Evaluation:
        """Measure the policy on fresh episodes, in its own environment unless `env` is given."""
        check_count("episodes", episodes)
        check_seed(seed)
        with shown(progress):
            return self._evaluate(episodes, env, seed)

    def _evaluate(self, episodes: int, env: EnvGiven | None, seed: int) -> Evaluation:
        if env is not None:
            spaces = self.saved.observation_space, self.saved.action_space
            return play(self.policy, env, episodes, seed, spaces)
        name = self.saved.env.id
        if self.saved.env.env_type == "gymnasium" and ":" not in name and name not in gym.registry:
            raise ConfigError(f"env is missing: the agent was trained in an environment of your own, {name}")
        section = self.saved.playable_env(None, f"give it: evaluate(env={name!r})")
        section = replace(section, num_envs=min(section.num_envs, episodes))
        return evaluate(_best(self.policy), section, episodes=episodes, seed=seed)[0]

    def __repr__(self) -> str:
        return f"LoadedAgent({display_path(self.saved.folder)}, steps={self.num_steps})"


Spaces: TypeAlias = tuple[gym.Space[Any], gym.Space[Any]]
"""Of observations and of actions, of a single environment."""


def check_spaces(name: str, env: AnyVectorEnv, spaces: Spaces) -> None:
    """Raise unless a policy of these spaces can act in the environments that were given as `name`."""
    found = env.single_observation_space, env.single_action_space
    for kind, own, other in zip(("observations", "actions"), spaces, found, strict=True):
        if space_text(own) != space_text(other):
            raise ConfigError(
                f"{name} has {kind} of {space_text(other)}; the policy was made for {space_text(own)}"
            )


def play(policy: Any, env: EnvGiven, episodes: int, seed: int, spaces: Spaces) -> Evaluation:
    """Measure a policy, made for these spaces, in an environment of the caller."""
    with closing(vector_env(env)) as made:
        check_spaces("env", made, spaces)
        return evaluate(_best(policy), EnvConfig(), episodes=episodes, seed=seed, env=made)[0]


def _best(policy: Any) -> Act:
    return lambda obs: policy.act(obs, deterministic=True)


def predict(policy: Any, space: gym.Space[Any], obs: Any, deterministic: bool) -> tuple[NDArray[Any], None]:
    """Actions for one observation or a batch of them, as `Agent.predict` gives them."""
    if isinstance(obs, Mapping) and not isinstance(space, gym.spaces.Dict) and set(GOAL_KEYS) <= obs.keys():
        single = to_numpy(obs[GOAL_KEYS[0]]).ndim == 1
        obs = flat_batch({key: to_numpy(obs[key])[None] if single else obs[key] for key in GOAL_KEYS})
        obs = obs[0] if single else obs
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(obs, Mapping) or not space.spaces.keys() <= obs.keys():
            found = sorted(map(str, obs)) if isinstance(obs, Mapping) else f"a {type(obs).__name__}"
            raise DataError(f"obs must be a dict with {sorted(space.spaces)}, not {found}")
        arrays = {name: to_numpy(obs[name]) for name in space.spaces}
        extra = {_batch_axes(arrays[name], part, name) for name, part in space.spaces.items()}
        batch: Any = arrays if extra == {1} else {name: part[None] for name, part in arrays.items()}
        single = extra == {0}
    else:
        array = to_numpy(obs)
        single = _batch_axes(array, space, "obs") == 0
        batch = array[None] if single else array
    actions = policy.act(batch, deterministic=deterministic)
    return (np.asarray(actions)[0] if single else np.asarray(actions)), None


def _batch_axes(array: NDArray[Any], space: gym.Space[Any], name: str) -> int:
    """0 for one observation, 1 for a batch."""
    shape = tuple(space.shape or ())
    extra = array.ndim - len(shape)
    if extra not in (0, 1) or array.shape[extra:] != shape:
        raise DataError(f"{name} has shape {list(array.shape)}; the policy observes {list(shape)}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise DataError(f"{name} holds NaN or infinite values")
    return extra
