"""Hindsight experience replay (Andrychowicz et al., 2017, arXiv:1707.01495).

An episode that missed its goal is a success for the goal that it did reach. Finished episodes are copied,
with the desired goal of each step replaced by an achieved goal:

- `future`: at this step of the episode or a later one,
- `episode`: at any step of it,
- `final`: at its last step.

The environment's own `compute_reward` computes the rewards for the new goal. The sign is that of the
environment, usually 0 at the goal and -1 elsewhere.

Observations are goal-conditioned dicts (observation, achieved_goal, desired_goal); inside they are flat, in
that order. The off-policy pipeline adds the copies (`augment`) to the replay buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from guerdon.config.limits import NonNegativeFloat, NonNegativeInt, PositiveInt
from guerdon.core.errors import ConfigError, DataError
from guerdon.envs.wrappers import goal_rules
from guerdon.rewards.steps import StepBatch, from_items
from guerdon.rewards.zoo.base import ZooModel, ZooSettings


@dataclass(frozen=True, kw_only=True)
class HERSettings(ZooSettings):
    """`reward_model` of type `her`."""

    strategy: Literal["future", "episode", "final"] = "future"
    """Which achieved goals are put in the place of the wanted one."""
    k: PositiveInt = 4
    """Copies of each step, with a goal drawn for each; `final` has one choice and makes one copy."""
    goal_size: NonNegativeInt = 0
    """Numbers in a goal; 0: as the environment or dict observations say."""
    tolerance: NonNegativeFloat | None = None
    """Without an environment: the reward is 0 within this distance of the goal, else -1; null: there must be
    an environment that has `compute_reward`."""


@dataclass(frozen=True)
class NearGoal:
    """The rule of a task without an environment: 0 within `tolerance` of the goal, else -1."""

    tolerance: float

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        """Goals [R, G] -> [R]."""
        return np.where(np.linalg.norm(achieved_goal - desired_goal, axis=-1) <= self.tolerance, 0.0, -1.0)


class HER(ZooModel):
    """Relabels goals: reached goals replace the wanted ones."""

    Settings = HERSettings
    needs_experience = False
    augments = True
    changes = ("obs", "next_obs", "reward")
    cfg: HERSettings

    def setup(self) -> None:
        """Goals and rules, where the settings know them."""
        self.goal_size = 0
        self.rules: Any = None if self.cfg.tolerance is None else NearGoal(self.cfg.tolerance)
        if self.cfg.goal_size:
            self._take_goal_size(self.cfg.goal_size)

    def bind_env(self, env: Any) -> None:
        """Take the rules of goal-conditioned environments; `tolerance`, if set, has the last word."""
        rules, goal_size = goal_rules(env)
        self._take_goal_size(goal_size)
        self.rules = self.rules if self.rules is not None else rules

    def _take_goal_size(self, goal_size: int) -> None:
        if self.goal_size not in (0, goal_size):
            raise DataError(f"goals have {goal_size} numbers here, HER was made for {self.goal_size}")
        if 2 * goal_size >= self.cfg.obs_size:
            raise ConfigError(
                f"observations of {self.cfg.obs_size} numbers have no room for two goals of {goal_size}"
            )
        self.goal_size = goal_size

    def collect_data(self, data: Any) -> None:
        """Nothing is kept: the pipeline hands finished episodes to `augment`."""
        self.checked(from_items(data))

    # Rewards and goals

    def rewards(self, batch: StepBatch) -> Tensor:
        """What the environment gives for reaching `next_obs` with the goal that is wanted, [*L]."""
        rewards = self._asked("compute_reward", batch.flat())
        return torch.from_numpy(np.array(rewards, np.float32)).view(batch.shape).to(batch.obs.device)

    def _asked(self, what: str, flat: StepBatch) -> Any:
        """The rules' answer about rows, [R]."""
        if self.rules is None or not self.goal_size:
            raise ConfigError(
                "HER needs the rules of a goal-conditioned environment: train in one, or set "
                "reward_model.tolerance and reward_model.goal_size"
            )
        goals = flat.next_obs.flatten(1)[:, -2 * self.goal_size :].cpu().numpy()
        answer = getattr(self.rules, what)(goals[:, : self.goal_size], goals[:, self.goal_size :], {})
        if np.shape(answer) != (len(flat),):
            raise DataError(f"{what} gave the shape {list(np.shape(answer))} for {len(flat)} goals")
        return answer

    def augment(self, episodes: Sequence[StepBatch]) -> StepBatch:
        """Copies of finished episodes, [T] each, with goals in hindsight and their rewards: [k * rows]."""
        rows = self.checked(StepBatch.cat(episodes))
        lengths = [len(each) for each in episodes]
        copies = 1 if self.cfg.strategy == "final" else self.cfg.k
        return StepBatch.cat([self._relabelled(rows, lengths, self.generator) for _ in range(copies)])

    def _relabelled(self, rows: StepBatch, lengths: Sequence[int], generator: torch.Generator) -> StepBatch:
        size = self.goal_size
        chosen = steps_in_hindsight(lengths, self.cfg.strategy, generator).to(rows.obs.device)
        goals = rows.next_obs[chosen, -2 * size : -size]
        obs, next_obs = (torch.cat([part[:, :-size], goals], 1) for part in (rows.obs, rows.next_obs))
        new = replace(rows, obs=obs, next_obs=next_obs)
        new = replace(new, env_rewards=self.rewards(new))
        if hasattr(self.rules, "compute_terminated"):
            ended = torch.from_numpy(np.array(self._asked("compute_terminated", new), np.bool_))
            new = replace(new, terminated=ended.to(rows.obs.device))
        return new

    def estimate(self, data: Any) -> Any:
        """Episodes as if what they achieved had been wanted: as many new steps, with one goal for each.

        Dict observations come back as dicts. The same data gives the same goals.
        """
        if not isinstance(data, StepBatch) and not self.goal_size:
            first = data[0] if isinstance(data, Sequence) and data else None
            obs = first.get("obs") if isinstance(first, Mapping) else None
            if not isinstance(obs, Mapping) or "desired_goal" not in obs:
                raise DataError(
                    "HER needs observations that are dicts of observation, achieved_goal and desired_goal, "
                    "or reward_model.goal_size where they are flat"
                )
            self._take_goal_size(int(np.size(obs["desired_goal"])))
        batch = self.checked(from_items(data))
        if not len(batch):
            return batch
        ends = batch.streams().done.T.clone()
        ends[:, -1] = True  # an episode that is cut off counts as one
        lengths = torch.diff(torch.nonzero(ends.flatten()).flatten(), prepend=torch.tensor([-1])).tolist()
        by_stream = batch.streams().map(lambda part: part.transpose(0, 1).flatten(0, 1))
        new = self._relabelled(by_stream, lengths, torch.Generator().manual_seed(self.cfg.seed))
        shape = batch.streams().shape
        new = new.map(lambda part: part.view(shape[1], shape[0], *part.shape[1:]).transpose(0, 1))
        new = new if len(batch.shape) == 2 else new.map(lambda part: part[:, 0])
        if isinstance(data, StepBatch):
            return new
        return [_with_goal(item, new[row], self.goal_size) for row, item in enumerate(data)]


def steps_in_hindsight(lengths: Sequence[int], strategy: str, generator: torch.Generator) -> Tensor:
    """The step whose achieved goal each step is given, int64 [rows], of episodes one after the other."""
    each = torch.tensor(lengths)
    length = each.repeat_interleave(each)
    first = (each.cumsum(0) - each).repeat_interleave(each)
    drawn = torch.rand(len(length), generator=generator, dtype=torch.float64)
    if strategy == "final":
        return first + length - 1
    if strategy == "episode":
        return first + (drawn * length).long()
    here = torch.arange(len(length))
    return here + (drawn * (first + length - here)).long()


def _with_goal(item: Mapping[str, Any], new: StepBatch, goal_size: int) -> dict[str, Any]:
    """A new item with the goal and reward of `new`, in the types that the item had."""
    parts = {"obs": new.obs, "next_obs": new.next_obs, "reward": new.env_rewards, "done": new.done}
    changed = dict(item)
    for key, value in parts.items():
        old = item[key]
        if isinstance(old, Mapping):
            changed[key] = {**old, "desired_goal": _like(old["desired_goal"], value[-goal_size:])}
        else:
            changed[key] = _like(old, value)
    return changed


def _like(old: Any, value: Tensor) -> Any:
    """`value` in the shape and type of `old`: a tensor, an array or a number."""
    if isinstance(old, Tensor):
        return value.to(old.device, old.dtype).reshape(old.shape).clone()
    if isinstance(old, np.ndarray | np.generic):
        return value.cpu().numpy().astype(old.dtype).reshape(old.shape)
    return type(old)(value.item()) if isinstance(old, bool | int | float) else value.clone()
