"""Behaviour cloning: supervised learning of the actions in demonstrations, as a start for any policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from guerdon.config import BCConfig
from guerdon.errors import DataError
from guerdon.learn.networks import STATE, Obs, ObsSpec, num_rows
from guerdon.store import EpisodeStore, detect_format
from guerdon.types import Episode, FloatArray, IntArray, display_path


class Imitator(Protocol):
    """A policy that can be cloned into; `ActorCritic` is one."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All its weights; those that the loss does not reach stay as they are."""

    def observe(self, obs: Mapping[str, Tensor]) -> None:
        """Take observations into running statistics, where there are any."""

    def prepare(self, obs: Mapping[str, Tensor]) -> Obs:
        """Observations as `imitation_loss` takes them."""

    def imitation_loss(self, prepared: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """[], differentiable; falls as the policy gets to act like `actions`."""


def clone(
    actor: Imitator, data: tuple[Mapping[str, Tensor], Tensor], cfg: BCConfig, seed: int
) -> dict[str, float]:
    """Fit a policy to demonstrations.

    Args:
        actor: what to fit, in place.
        data: observations [M, ...] and the actions chosen in them, float32 [M, A]; see `demonstrations`.
        cfg: the `learner.warm_start` section; its `data` is not read here.
        seed: decides the order of the minibatches.

    Returns:
        `loss_first` and `loss_last`, means over the first and last pass; `num_transitions`, `num_updates`.
    """
    weights = list(actor.parameters())
    device = weights[0].device
    optimizer = torch.optim.Adam(weights, lr=cfg.lr, fused=True)
    actor.observe({name: part.to(device) for name, part in data[0].items()})

    def step(obs: Obs, actions: Tensor) -> float:
        batch = {name: part.to(device) for name, part in obs.items()}
        loss = actor.imitation_loss(actor.prepare(batch), actions.to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    outcome = imitate(step, data, cfg, seed)
    optimizer.zero_grad()
    return outcome


def imitate(
    step: Callable[[Obs, Tensor], float], data: tuple[Mapping[str, Tensor], Tensor], cfg: BCConfig, seed: int
) -> dict[str, float]:
    """Minibatches of demonstrations for any learner; see `clone`.

    Args:
        step: takes observations and actions of a minibatch, learns from them and returns the loss.
        data: see `clone`.
        cfg: see `clone`.
        seed: see `clone`.
    """
    obs, actions = data
    count = num_rows(obs)
    if count == 0 or len(actions) != count:
        raise DataError(f"cannot clone {count} observations with {len(actions)} actions")
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    for _ in range(cfg.epochs):
        total = 0.0
        for rows in torch.split(torch.randperm(count, generator=generator), cfg.batch_size):
            batch = {name: part.index_select(0, rows) for name, part in obs.items()}
            total += step(batch, actions.index_select(0, rows)) * len(rows)
        losses.append(total / count)
    first, last = losses[0], losses[-1]
    if not np.isfinite(last):
        raise DataError(f"cloning went astray: the loss is {last}; are the demonstrations finite numbers?")
    updates = cfg.epochs * -(-count // cfg.batch_size)
    return {"loss_first": first, "loss_last": last, "num_transitions": count, "num_updates": updates}


def demonstrations(path: Path | str, spec: ObsSpec) -> tuple[Obs, Tensor]:
    """What was done in the successful, complete episodes of a native store.

    Action t was chosen in the state that step t - 1 led to, and action 0 in the initial state. A store keeps
    no frame of the start: where the policy sees images, or the initial state was not recorded, action 0 is
    left out.

    Args:
        path: a native store.
        spec: what the policy observes; states and cameras of the store must fit it.

    Returns:
        `state` float32 [M, S] and camera -> uint8 [M, H, W, C], as far as the policy observes them, and
        actions float32 [M, A].
    """
    if (kind := detect_format(Path(path)).name) != "native":
        raise DataError(f"{display_path(path)} is in the format {kind}: convert it to native to clone it")
    store = EpisodeStore(path)
    for camera, shape in spec.images:
        if store.cameras.get(camera) != shape:
            raise DataError(
                f"the policy observes {camera} {shape}, but {display_path(path)} has {store.cameras}"
            )
    numbers = np.flatnonzero(store.success & store.complete)
    states: list[FloatArray] = []
    actions: list[FloatArray] = []
    rows: list[IntArray] = []
    for number in numbers.tolist():
        episode = store.read_episode(number)
        first = 1 if spec.images or episode.initial_state is None else 0
        steps = np.arange(first, episode.num_frames)
        actions.append(_actions(episode, path)[first:])
        rows.append(store.starts[number] + steps - 1)
        if spec.state_size:
            states.append(_states(episode, spec.state_size, path)[-len(steps) - 1 : -1])
    if sum(map(len, actions)) == 0:
        raise DataError(f"{display_path(path)} has no successful, complete episode to learn from")
    obs: dict[str, Any] = {STATE: np.concatenate(states)} if spec.state_size else {}
    for camera, _ in spec.images:
        obs[camera] = store.frames(camera, np.concatenate(rows))
    return {name: torch.from_numpy(part) for name, part in obs.items()}, torch.from_numpy(
        np.concatenate(actions)
    )


def _actions(episode: Episode, path: Path | str) -> FloatArray:
    if episode.actions is None:
        raise DataError(f"{display_path(path)} has no actions to learn from")
    return episode.actions


def _states(episode: Episode, size: int, path: Path | str) -> FloatArray:
    """float32 [T + 1, S] with the initial state, [T, S] without one."""
    if episode.states is None:
        raise DataError(f"{display_path(path)} has no states; collect with collect.keep_states=true")
    if episode.states.shape[1] != size:
        raise DataError(f"{display_path(path)} has states of size {episode.states.shape[1]}, not {size}")
    if episode.initial_state is None:
        return episode.states
    return np.concatenate((episode.initial_state[None], episode.states))
