"""Success of a step: where environments report it, and how it is found in those that report it otherwise."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper
from numpy.typing import NDArray

from guerdon.core.calls import check_takes
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_numpy
from guerdon.core.types import BoolArray
from guerdon.envs.observations import per_env, take_row, with_final

SUCCESS_KEYS = ("success", "is_success")
"""Entries of the info that tell success, as ManiSkill and as gymnasium-robotics call it."""
FINAL_KEYS = ("final_obs", "final_info")
"""Entries of the info of a vector environment that speak of episodes that ended in this step."""

LabelFunction: TypeAlias = Callable[[Any, Mapping[str, Any]], Any]
"""(observation, info) of a single environment after a step -> whether it shows success."""


def success_of(info: Mapping[str, Any], num_envs: int, done: BoolArray) -> NDArray[Any] | None:
    """Success of each environment, [N], of the ended episode where one ended; None if it is not reported."""
    found = (per_env(info, key, num_envs, done) for key in SUCCESS_KEYS)
    return next((values for values in found if values is not None), None)


def missing_success(keys: Iterable[str]) -> str:
    """What is wrong if no label is found, and the ways to give one."""
    return (
        "the environment's info has no 'success' and no 'is_success', so its frames cannot be labelled (it "
        f"has: {_listed(keys)}). Name the entry that tells success with success_key=..., or give "
        "label_fn=(obs, info) -> bool; for the command: env.train.success_key=NAME or "
        "env.train.label_fn=MODULE:FUNCTION"
    )


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(sorted({key for key in keys if not key.startswith("_")})) or "nothing"


class SuccessLabels:
    """Puts `success` into the info of a step, from another entry or from a function.

    Args:
        success_key: the entry of the info that tells success. It may be missing in steps without news, such
            as all but the last one of an episode; these are then no success.
        label_fn: gives the label of a single environment; or its place, `module:function`.
    """

    def __init__(self, success_key: str | None = None, label_fn: LabelFunction | str | None = None) -> None:
        if success_key is not None and label_fn is not None:
            raise ConfigError("success_key and label_fn are two ways to label a step: give one of them")
        if not isinstance(success_key, str | None):
            raise ConfigError(f"success_key must name an entry of the info, not {success_key!r:.80}")
        if label_fn is not None and not isinstance(label_fn, str):
            check_takes(label_fn, "label_fn", "obs", "info")
        self._key = success_key
        self._function = _load(label_fn) if isinstance(label_fn, str) else label_fn
        self._seen = False

    @property
    def given(self) -> bool:
        """Whether there is a key or a function; without them every info stays as it is."""
        return self._key is not None or self._function is not None

    def of_step(self, obs: Any, info: Mapping[str, Any], done: bool) -> Mapping[str, Any]:
        """The info of a single environment's step, with `success`."""
        if self._function is not None:
            return {**info, "success": bool(self._function(obs, info))}
        if self._key is None:
            return info
        self._look_for(self._key in info, done, info)
        return {**info, "success": info.get(self._key, False)}

    def of_batch(self, next_obs: Any, info: Mapping[str, Any], done: BoolArray) -> Mapping[str, Any]:
        """The info of a vector environment's step, with `success` [N].

        Args:
            next_obs: [N, ...], what the actions led to: the final observation where an episode ended.
            info: as the environment gave it.
            done: bool [N].
        """
        if not self.given:
            return info
        if self._function is not None:
            rows = ((take_row(next_obs, env), _info_of(info, env, done)) for env in range(len(done)))
            labels = np.array([bool(self._function(obs, row)) for obs, row in rows], np.bool_)
        else:
            assert self._key is not None
            reported = per_env(info, self._key, len(done), done)
            self._look_for(reported is not None, bool(done.any()), info)
            labels = np.zeros(len(done), np.bool_) if reported is None else reported >= 0.5
        everyone = np.ones(len(done), np.bool_)
        labelled = {**info, "success": labels, "_success": everyone}
        final = info.get("final_info")
        if isinstance(final, Mapping):  # what it says of an ended episode counts
            labelled["final_info"] = {**final, "success": labels.copy(), "_success": done.copy()}
        return labelled

    def _look_for(self, found: bool, ended: bool, info: Mapping[str, Any]) -> None:
        """Raise if a whole episode has passed without the key."""
        self._seen = self._seen or found
        if ended and not self._seen:
            final = info.get("final_info")
            keys = [*info, *(final if isinstance(final, Mapping) else ())]
            raise DataError(
                f"success_key is {self._key!r}, but an episode ended without it in the environment's info, "
                f"which has: {_listed(keys)}"
            )


class LabelSuccess(VectorWrapper):
    """A vector environment whose info has `success`, as `labels` find it."""

    def __init__(self, env: VectorEnv[Any, Any, Any], labels: SuccessLabels) -> None:
        super().__init__(env)
        self._labels = labels

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As the environment steps."""
        obs, env_rewards, terminated, truncated, info = self.env.step(actions)
        done: BoolArray = to_numpy(terminated).astype(np.bool_) | to_numpy(truncated).astype(np.bool_)
        next_obs = with_final(obs, info.get("final_obs"), done)
        labelled = self._labels.of_batch(next_obs, info, done)
        return obs, env_rewards, terminated, truncated, dict(labelled)


def _info_of(info: Mapping[str, Any], env: int, done: BoolArray) -> dict[str, Any]:
    """The info of one environment of a batch: of the ended episode, where one ended in this step."""
    final = info.get("final_info")
    source = final if done[env] and isinstance(final, Mapping) else info
    return {
        key: _row(value, env, len(done))
        for key, value in source.items()
        if not key.startswith("_") and key not in FINAL_KEYS and _holds(source.get(f"_{key}"), env)
    }


def _row(value: Any, env: int, num_envs: int) -> Any:
    """The part of one environment; what does not have a part for each stays as it is."""
    if isinstance(value, Mapping):
        return {key: _row(part, env, num_envs) for key, part in value.items()}
    per_env = hasattr(value, "__len__") and not isinstance(value, str) and len(value) == num_envs
    return value[env] if per_env else value


def _holds(mask: Any, env: int) -> bool:
    return mask is None or bool(to_numpy(mask)[env])


def _load(place: str) -> LabelFunction:
    """The function at `module:function`."""
    module, _, name = place.partition(":")
    try:
        function: LabelFunction = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"label_fn={place!r} names no function, as module:function does: {error}"
        ) from error
    if not callable(function):
        raise ConfigError(f"label_fn={place!r} is a {type(function).__name__}, not a function")
    return function
