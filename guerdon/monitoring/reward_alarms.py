"""Alarms for reward models that give rewards and no probabilities, such as those of the zoo."""

# ruff: noqa: D102 - the base class documents the methods
from __future__ import annotations

import math

import numpy as np

from guerdon.core.running_stats import Moments
from guerdon.core.types import FloatArray
from guerdon.monitoring.alarm_check import AlarmCheck, MonitorSetup, Offenders, RolloutStatistics

NOTHING = (0.0, 0.0, 0.0)
"""`Moments` of no rewards."""


def rewards_of(statistics: RolloutStatistics) -> FloatArray:
    """[T, N]; alarms for rewards are made for models that give them alone."""
    assert statistics.rewards is not None
    return statistics.rewards


class _RewardAlarm(AlarmCheck):
    """Of a model that gives rewards."""

    for_rewards = True

    def offenders(self, statistics: RolloutStatistics) -> Offenders:
        """The steps with the highest rewards."""
        return statistics.scored, rewards_of(statistics)


class SuccessDrop(_RewardAlarm):
    """The learned return rises while success falls.

    Means over as many evaluations as `patience` says are compared with the best such mean so far, since the
    best of many small samples is a lucky one.
    """

    name = "success_drop"
    looks_at = "fall of the success rate from its best, while the learned return is higher than it was then"
    setting = "max_success_drop"
    remedy = (
        "the policy earns more of the learned reward and succeeds less often: lower the reward's weight, or "
        "refit the model with what the policy does now"
    )

    def __init__(self, setup: MonitorSetup) -> None:
        super().__init__(setup)
        self.memory |= {"returns": 0.0, "latest": [], "best": None}

    @classmethod
    def missing(cls, setup: MonitorSetup) -> str:
        return "" if setup.knows_success else "the environment does not tell success"

    def count(self, statistics: RolloutStatistics) -> tuple[float, float, int]:
        self.memory["returns"] += statistics.returns
        return statistics.episodes_success, statistics.episodes, statistics.episodes

    def value(self) -> float:
        seen = [self.signal.total / self.signal.count, self.memory["returns"] / self.signal.count]
        latest = [*self.memory["latest"], seen][-self.cfg.patience :]
        self.memory |= {"returns": 0.0, "latest": latest}
        if len(latest) < self.cfg.patience:
            return 0.0
        success, mean_return = np.mean(latest, axis=0).tolist()
        best = self.memory["best"]
        if best is None or success >= best[0]:
            self.memory["best"] = best = [success, mean_return]
        return float(best[0] - success) if mean_return > best[1] else 0.0


class RewardCollapse(_RewardAlarm):
    """All steps get the same reward, after they did not: the policy learns nothing from it any more."""

    name = "reward_collapse"
    looks_at = "loss of the rewards' deviation, as a share of the largest one so far"
    setting = "max_reward_collapse"
    remedy = (
        "the rewards hardly differ any more: a model that learns beside the policy has decided for all or "
        "none of its steps; train it less often, or refit it from its demonstrations"
    )

    def __init__(self, setup: MonitorSetup) -> None:
        super().__init__(setup)
        self.memory |= {"rewards": NOTHING, "largest": 0.0}

    def count(self, statistics: RolloutStatistics) -> tuple[float, float, int]:
        rewards = rewards_of(statistics)
        values = rewards[statistics.scored & np.isfinite(rewards)].astype(np.float64)
        if len(values):
            mean = float(values.mean())
            fresh = Moments(float(len(values)), mean, float(np.square(values - mean).sum()))
            self.memory["rewards"] = list(Moments(*self.memory["rewards"]).merged(fresh))
        return 0.0, len(values), statistics.episodes

    def value(self) -> float:
        """0 for rewards that never differed: a sparse one may still be to come."""
        rewards = Moments(*self.memory["rewards"])
        deviation = math.sqrt(rewards.spread / rewards.count)
        deviation = 0.0 if deviation < 1e-9 * abs(rewards.mean) else deviation  # rounding
        largest = max(self.memory["largest"], deviation)
        self.memory |= {"rewards": NOTHING, "largest": largest}
        return 1.0 - deviation / largest if largest else 0.0


class NonfiniteRewards(_RewardAlarm):
    """The model gives NaN or infinity."""

    name = "nonfinite_rewards"
    looks_at = "share of rewards that are NaN or infinite"
    setting = "max_nonfinite_rewards"
    remedy = "the model gives NaN or infinity: lower its learning rate or normalise its inputs, and refit it"

    def count(self, statistics: RolloutStatistics) -> tuple[float, float, int]:
        broken = statistics.scored & ~np.isfinite(rewards_of(statistics))
        return broken.sum(), statistics.scored.sum(), statistics.episodes

    def offenders(self, statistics: RolloutStatistics) -> Offenders:
        broken = statistics.scored & ~np.isfinite(rewards_of(statistics))
        return broken, np.zeros_like(statistics.prob_success)
