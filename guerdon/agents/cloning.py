"""Behaviour cloning: supervised learning of the actions in demonstrations, as a start for any policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from guerdon.agents.networks import Obs, ObsSpec, num_rows
from guerdon.agents.policies import ActorCritic
from guerdon.agents.recorded import Demonstration, open_demonstrations
from guerdon.config import BCConfig
from guerdon.core.errors import DataError
from guerdon.core.types import FloatArray, display_path


def clone(
    actor: ActorCritic, data: tuple[Mapping[str, Tensor], Tensor], cfg: BCConfig, seed: int
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

    def step(obs: Obs, actions: Tensor, lr: float) -> float:
        batch = {name: part.to(device) for name, part in obs.items()}
        loss = actor.imitation_loss(actor.prepare(batch), actions.to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        return float(loss.detach())

    outcome = imitate(step, data, cfg, seed)
    optimizer.zero_grad()
    return outcome


def imitate(
    step: Callable[[Obs, Tensor, float], float],
    data: tuple[Mapping[str, Tensor], Tensor],
    cfg: BCConfig,
    seed: int,
) -> dict[str, float]:
    """Minibatches of demonstrations for any learner; see `clone`.

    Args:
        step: takes observations and actions of a minibatch and a learning rate, which falls to zero in a
            straight line with `cfg.anneal_lr`; learns from them and returns the loss.
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
    done, total_updates = 0, cfg.epochs * -(-count // cfg.batch_size)
    for _ in range(cfg.epochs):
        total = 0.0
        for rows in torch.split(torch.randperm(count, generator=generator), cfg.batch_size):
            batch = {name: part.index_select(0, rows) for name, part in obs.items()}
            lr = cfg.lr * (1.0 - cfg.anneal_lr * done / total_updates)
            total += step(batch, actions.index_select(0, rows), lr) * len(rows)
            done += 1
        losses.append(total / count)
    first, last = losses[0], losses[-1]
    if not np.isfinite(last):
        raise DataError(f"cloning went astray: the loss is {last}; are the demonstrations finite numbers?")
    return {
        "loss_first": first,
        "loss_last": last,
        "num_transitions": count,
        "num_updates": total_updates,
    }


def demonstrations(
    path: Path | str,
    spec: ObsSpec,
    control_mode: str | None = None,
    *,
    intended: bool = False,
    num_episodes: int | None = None,
) -> tuple[Obs, Tensor]:
    """What was done in the successful, complete episodes of a data set; see `open_demonstrations`.

    Args:
        path: a data set in any format that keeps actions and what the policy observes.
        spec: what the policy observes; states and cameras of the data must fit it.
        control_mode: see `open_demonstrations`.
        intended: what was meant to be done instead, without the noise of the demonstrator; data that does not
            tell is refused.
        num_episodes: take so many of them, the first ones; None: all.

    Returns:
        `state` float32 [M, S] and camera -> uint8 [M, H, W, C], as far as the policy observes them, and
        actions float32 [M, A].
    """
    with open_demonstrations(path, spec, control_mode) as every:
        shown = every[:num_episodes]
        obs = {name: np.concatenate([item.obs[name] for item in shown]) for name in shown[0].obs}
        actions = np.concatenate([_meant(item, path) if intended else item.actions for item in shown])
    return {name: torch.from_numpy(part) for name, part in obs.items()}, torch.from_numpy(actions)


def _meant(item: Demonstration, path: Path | str) -> FloatArray:
    if item.intended is None:
        raise DataError(
            f"{display_path(path)} does not tell what the demonstrator meant to do, which "
            "learner.warm_start.intended asks for: only a scripted policy does, in the native format"
        )
    return item.intended
