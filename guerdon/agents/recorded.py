"""Recorded episodes as learners need them: each action beside what it was chosen in and what it led to."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from guerdon.agents.networks import STATE, ObsSpec
from guerdon.core.errors import DataError
from guerdon.core.types import Episode, FloatArray, control_mode_of, display_path
from guerdon.data.datasets.frames import check_motion_is_seen, open_store
from guerdon.data.store import EpisodeStore

log = logging.getLogger("guerdon")


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """The steps of an episode whose beginning is known."""

    obs: dict[str, NDArray[np.generic]]
    """`state` -> float32 [M, S], camera -> uint8 [M, H, W, C]; what each action was chosen in."""
    actions: FloatArray
    """float32 [M, A]."""
    intended: FloatArray | None
    """float32 [M, A]; the same without the noise of the demonstrator, where the data tells."""
    next_obs: dict[str, NDArray[np.generic]]
    """Like `obs`; what each action led to."""
    first: int
    """The step of the episode that comes first here, 0 or 1."""
    episode: Episode
    """The whole of it."""

    def __len__(self) -> int:
        return len(self.actions)


@contextmanager
def open_demonstrations(
    path: Path | str, spec: ObsSpec, control_mode: str | None = None
) -> Iterator[list[Demonstration]]:
    """The successful, complete episodes of a data set in any format; the arrays are valid inside the block.

    Step t led to state and frame t, so action t was chosen in those of step t - 1, and action 0 in the
    initial state. No frame of the start is kept: where the policy sees images, or the initial state was not
    recorded, step 0 is left out.

    Args:
        path: the data set; one that is in a foreign format is copied to a temporary folder first.
        spec: what the policy observes; states and cameras must fit it.
        control_mode: what actions mean to the robot; data that is known to mean something else is refused.
    """
    with tempfile.TemporaryDirectory() as copy:
        store, _ = open_store(str(path), None, None, Path(copy))
        for camera, shape in spec.images:
            if store.cameras.get(camera) != shape:
                raise DataError(
                    f"the policy observes {camera} {shape}, but {display_path(path)} has {store.cameras}"
                )
        _check_control_mode(store, path, control_mode)
        numbers = np.flatnonzero(store.success & store.complete).tolist()
        shown = [_demonstration(store.read_episode(number), spec, path) for number in numbers]
        if not sum(map(len, shown)):
            raise DataError(f"{display_path(path)} has no successful, complete episode to learn from")
        yield shown


def _check_control_mode(store: EpisodeStore, path: Path | str, wanted: str | None) -> None:
    recorded = {control_mode_of(str(source)) for source in store.episode_column("source")} - {None}
    others = sorted(str(mode) for mode in recorded if mode != wanted)
    if wanted is not None and others:
        raise DataError(
            f"{display_path(path)} was recorded with control_mode {', '.join(others)}, the environment has "
            f"{wanted}: the same numbers move the robot differently"
        )


def _demonstration(episode: Episode, spec: ObsSpec, path: Path | str) -> Demonstration:
    if episode.actions is None:
        raise DataError(f"{display_path(path)} has no actions to learn from")
    if spec.images:
        check_motion_is_seen(episode, path)
    first = 1 if spec.images or (spec.state_size and episode.initial_state is None) else 0
    obs: dict[str, NDArray[np.generic]] = {name: episode.frames[name][:-1] for name, _ in spec.images}
    next_obs: dict[str, NDArray[np.generic]] = {name: episode.frames[name][1:] for name, _ in spec.images}
    if spec.state_size:
        states = _states(episode, spec.state_size, path)
        start = len(states) - 1 - len(episode.actions[first:])
        obs[STATE], next_obs[STATE] = states[start:-1], states[start + 1 :]
    return Demonstration(
        obs=obs,
        actions=episode.actions[first:],
        intended=None if episode.intended is None else episode.intended[first:],
        next_obs=next_obs,
        first=first,
        episode=episode,
    )


def _states(episode: Episode, size: int, path: Path | str) -> FloatArray:
    """float32 [T + 1, S] with the initial state, [T, S] without one."""
    if episode.states is None:
        raise DataError(f"{display_path(path)} has no states; collect with keep_states")
    before = episode.initial_state
    for found in (episode.states.shape[1], size if before is None else len(before)):
        if found != size:
            raise DataError(f"{display_path(path)} has states of size {found}, not {size}")
    return episode.states if before is None else np.concatenate((before[None], episode.states))
