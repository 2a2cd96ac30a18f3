"""Steps in which a person took over from the policy: they are learned from as demonstrations are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.agents.replay import ReplayBuffer
from guerdon.core.images import to_numpy
from guerdon.core.types import BoolArray
from guerdon.data.collect.observations import per_env
from guerdon.training.acting import StepChunk

INTERVENED_INFO, ACTION_INFO = "intervened", "action_taken"
"""The infos that tell whether a person chose the action, and which one it was."""


def taken_actions(info: Mapping[str, Any], chosen: NDArray[Any], done: BoolArray) -> dict[str, Any]:
    """What `EnvStep` says of interventions: the actions [n, ...] that were taken, and where by a person.

    An action of the policy that the robot's safety cut short stays the policy's own: that it is cut short is
    how the world answers to it, and a critic has to learn that.

    Args:
        info: of the step.
        chosen: by the policy, [n, ...].
        done: bool [n].
    """
    told = per_env(info, INTERVENED_INFO, len(done), done)
    if told is None:
        return {}
    intervened: BoolArray = told >= 0.5
    actions = np.array(chosen)
    final = info.get("final_info")
    for env in np.flatnonzero(intervened).tolist():
        place = final if done[env] and isinstance(final, Mapping) and ACTION_INFO in final else info
        actions[env] = to_numpy(place[ACTION_INFO])[env]
    return {"actions": actions, "intervened": intervened}


def store_interventions(
    shown: ReplayBuffer, chunk: StepChunk, done: BoolArray, extras: Mapping[str, NDArray[Any]]
) -> None:
    """Add the steps of a chunk in which a person acted to a buffer of demonstrations.

    Args:
        shown: a buffer for one environment.
        chunk: K steps of n environments.
        done: bool [K, n].
        extras: name -> [K, n, ...].
    """
    if chunk.intervened is None:
        return
    for t in np.flatnonzero(chunk.intervened.any(axis=1)).tolist():
        over = done[t] & chunk.intervened[t]
        store_step(
            shown,
            chunk.intervened[t],
            chunk.obs_at(t),
            chunk.actions[t],
            chunk.env_rewards[t],
            chunk.terminated[t],
            [chunk.final_obs[t] if ended else chunk.obs_after(t) for ended in over.tolist()],
            {name: values[t] for name, values in extras.items()},
        )


def store_step(
    shown: ReplayBuffer,
    intervened: BoolArray,
    obs: Any,
    actions: NDArray[Any],
    env_rewards: NDArray[Any],
    terminated: BoolArray,
    reached: Sequence[Any],
    extras: Mapping[str, NDArray[Any]],
) -> None:
    """Add those of one step's transitions in which a person acted; arrays are [n, ...].

    Every one stands alone, with what it led to, because the policy may act before and after it.

    Args:
        shown: a buffer for one environment.
        intervened: bool [n].
        obs: in which the actions were chosen.
        actions: that were taken.
        env_rewards: of the environments.
        terminated: bool [n].
        reached: for each environment the observations [n, ...] in which its own row is what it reached.
        extras: name -> [n, ...].
    """
    for env in np.flatnonzero(intervened).tolist():
        row = slice(env, env + 1)
        shown.add(
            _rows(obs, row),
            actions[row],
            env_rewards[row],
            terminated[row],
            ~terminated[row],
            _rows(reached[env], row),
            **{name: values[row] for name, values in extras.items()},
        )


def _rows(obs: Any, rows: slice) -> Any:
    return {name: part[rows] for name, part in obs.items()} if isinstance(obs, dict) else obs[rows]
