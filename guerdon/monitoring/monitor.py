"""The reward-hacking monitor: notices a policy that pleases the reward model instead of solving the task.

It keeps statistics of steps and episodes; what they mean is decided by the alarms in `alarms.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guerdon.config import MonitorConfig
from guerdon.core.errors import DataError
from guerdon.core.types import BoolArray
from guerdon.monitoring.alarm_check import (
    Alarm,
    AlarmCheck,
    MonitorSetup,
    RolloutStatistics,
    ScoredRollout,
    as_words,
)
from guerdon.monitoring.alarms import ALARMS, first_success_step
from guerdon.rewards.image.contract import Contract
from guerdon.rewards.relabel import fires

__all__ = ["RewardMonitor", "ScoredRollout"]

log = logging.getLogger("guerdon")

RUNNING: dict[str, type[np.generic]] = {
    **dict.fromkeys(("scored", "fired", "success", "early"), np.bool_),
    "return": np.float64,
}
"""What is kept of a running episode."""
COUNTS: dict[str, Callable[[Mapping[str, NDArray[Any]]], BoolArray]] = {
    "episodes": lambda running: running["scored"],
    "episodes_fired": lambda running: running["fired"],
    "episodes_wrong": lambda running: running["fired"] & ~running["success"],
    "episodes_early": lambda running: running["early"],
    "episodes_success": lambda running: running["scored"] & running["success"],
}
"""What is counted of those that end."""


class RewardMonitor:
    """Watches a run for signs that its policy exploits the reward model.

    Args:
        cfg: limits.
        contract: what an image model promises; None for a model that gives rewards instead of probabilities.
        threshold: above which a probability fires in this run; None for a model that gives rewards.
        folder: of the run; gets `alarms.jsonl` and `alarms/<name>_<step>/*.png`.
        knows_success: whether the environment tells success; if so, every batch must carry it.
    """

    def __init__(
        self,
        cfg: MonitorConfig,
        contract: Contract | None,
        threshold: float | None,
        folder: Path,
        *,
        knows_success: bool,
    ) -> None:
        self.setup = MonitorSetup(
            cfg=cfg,
            contract=Contract(model={}) if contract is None else contract,
            threshold=math.nan if threshold is None else float(threshold),
            gives_rewards=contract is None,
            knows_success=knows_success,
            folder=Path(folder),
        )
        self.cannot_watch: list[str] = []
        """What the environment or the model does not allow to watch, in sentences."""
        self.num_alarms = 0
        self.checks: dict[str, AlarmCheck] = {}
        """Name -> the alarm, for those that can be watched."""
        self._running: dict[str, NDArray[Any]] = {}
        """What is known of the running episode of each environment: name -> [N]."""
        self._first_success = first_success_step(self.setup)
        for alarm in ALARMS if cfg.action != "off" else ():
            if not alarm.applies(self.setup):
                continue
            missing = alarm.missing(self.setup)
            if self.setup.gives_rewards and not alarm.for_rewards:
                missing = "the model gives rewards, and no probabilities"
            if missing:
                self.cannot_watch.append(f"{as_words(alarm.name)}: {missing}")
                log.info("monitor: cannot watch %s", self.cannot_watch[-1])
            else:
                self.checks[alarm.name] = alarm(self.setup)

    def observe(self, step: int, batch: ScoredRollout) -> list[Alarm]:
        """Take in what happened up to environment step `step`; returns the alarms that rise now."""
        if self.setup.cfg.action == "off":
            return []
        statistics = self._statistics(step, batch)
        alarms = [alarm for check in self.checks.values() if (alarm := check.check(statistics)) is not None]
        self.num_alarms += len(alarms)
        return alarms

    def metrics(self) -> dict[str, float]:
        """The last value of each signal, which alarms are on, and how many have risen so far."""
        if self.setup.cfg.action == "off":
            return {}
        signals = {name: check.signal for name, check in self.checks.items()}
        values = {f"monitor/{name}": s.value for name, s in signals.items() if math.isfinite(s.value)}
        values["monitor/alarms_on"] = float(sum(signal.raised for signal in signals.values()))
        values["monitor/alarms"] = float(self.num_alarms)
        return values

    def state_dict(self) -> dict[str, Any]:
        """All that the next alarms depend on, in plain containers; pictures are not among it."""
        return {
            "num_alarms": self.num_alarms,
            "signals": {name: check.state_dict() for name, check in self.checks.items()},
            "running": {name: values.tolist() for name, values in self._running.items()} or None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave; an alarm that is newer than the checkpoint starts empty."""
        there, here = set(state["signals"]), set(self.checks)
        if there - here:
            raise DataError(f"the saved monitor watched {sorted(there)}, this one watches {sorted(here)}")
        for name, saved in state["signals"].items():
            if name == "drift" and "distances" in state:  # where older checkpoints have them
                saved = {**saved, "distances": state["distances"]}
            self.checks[name].load_state_dict(saved)
        renamed = {"judged": "scored"}  # in older checkpoints
        running = {renamed.get(name, name): values for name, values in (state["running"] or {}).items()}
        self._running = {name: np.array(values, RUNNING[name]) for name, values in running.items()}
        self.num_alarms = int(state["num_alarms"])

    def _statistics(self, step: int, batch: ScoredRollout) -> RolloutStatistics:
        """Carry the running episodes on through [T, N] steps, and count those that end."""
        if self.setup.knows_success and batch.env_success is None:
            raise DataError("the monitor expects env_success in every batch, and this one has none")
        if self.setup.gives_rewards != (batch.rewards is not None):
            kind = "gives rewards" if self.setup.gives_rewards else "gives probabilities"
            raise DataError(f"the monitor watches a model that {kind}: give batches of the same kind")
        scored = ~np.isnan(batch.prob_success)
        fired = scored & fires(batch.prob_success, self.setup.threshold)
        success = np.zeros_like(fired)
        if self.setup.knows_success and batch.env_success is not None:
            success = batch.env_success
        early = fired & (batch.elapsed < self._first_success)  # never, if that is NaN
        gains = np.zeros(scored.shape)
        if batch.rewards is not None:
            gains = np.where(scored & np.isfinite(batch.rewards), batch.rewards, 0.0)
        running = self._running_episodes(scored.shape[1])
        counts: dict[str, Any] = dict.fromkeys(COUNTS, 0)
        returns = 0.0
        for t, ended in enumerate(batch.done):
            starts = batch.elapsed[t] == 0
            if starts.any():  # an episode that a reset from outside ended counts for nothing
                _forget(running, starts)
            running["scored"] |= scored[t]
            running["fired"] |= fired[t]
            running["success"] |= success[t]
            running["early"] |= early[t] & ~running["success"]  # a fire after an early success is right
            running["return"] += gains[t]
            if ended.any():
                for name, which in COUNTS.items():
                    counts[name] += int((ended & which(running)).sum())
                returns += float(running["return"][ended].sum())
                _forget(running, ended)
        return RolloutStatistics(
            **vars(batch),
            step=step,
            scored=scored,
            fired=fired,
            success=success,
            wrong=fired & ~success,
            early=early,
            returns=returns,
            **counts,
        )

    def _running_episodes(self, num_envs: int) -> dict[str, NDArray[Any]]:
        if not self._running:
            self._running = {"scored": np.zeros(num_envs, np.bool_)}
        known = len(self._running["scored"])
        if known != num_envs:
            raise DataError(f"the monitor watches {known} environments, not {num_envs}")
        for name, dtype in RUNNING.items():  # older checkpoints do not have all of them
            self._running.setdefault(name, np.zeros(num_envs, dtype))
        return self._running


def _forget(running: Mapping[str, NDArray[Any]], which: BoolArray) -> None:
    for values in running.values():
        values[which] = 0
