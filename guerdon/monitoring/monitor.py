"""The reward-hacking monitor: notices a policy that pleases the reward model instead of solving the task.

It keeps statistics of steps and episodes; what they mean is decided by the alarms in `alarms.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.config import MonitorConfig
from guerdon.core.errors import DataError
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.monitoring.alarm_check import Alarm, AlarmCheck, MonitorSetup, Statistics, as_words
from guerdon.monitoring.alarms import ALARMS, first_success_step
from guerdon.rewards.calibration import fires
from guerdon.rewards.image.contract import Contract

log = logging.getLogger("guerdon")


@dataclass(frozen=True, kw_only=True)
class Watched:
    """T steps of N environments, as the reward model and the environment judged them."""

    prob_success: FloatArray
    """float32 [T, N]; NaN where a frame was not judged."""
    done: BoolArray
    """bool [T, N]; the episode ended with this step, terminated or truncated."""
    elapsed: IntArray
    """int64 [T, N]; the step within the episode, from 0."""
    frame: Callable[[int, int], UInt8Array]
    """(t, n) -> uint8 [H, W, C], the judged frame of that step and environment."""
    env_success: BoolArray | None = None
    """bool [T, N]; None where the environment does not tell."""
    disagreement: FloatArray | None = None
    """float32 [T, N]; deviation between the members of an ensemble."""
    features: FloatArray | None = None
    """float32 [K, F]; pooled encoder features of K judged frames, drawn at random."""

    def __post_init__(self) -> None:
        shape = self.prob_success.shape
        if len(shape) != 2:
            raise DataError(f"Watched.prob_success must have shape [T, N], not {list(shape)}")
        for name in ("done", "elapsed", "env_success", "disagreement"):
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise DataError(f"Watched.{name} must have shape {list(shape)}, not {list(value.shape)}")


class RewardMonitor:
    """Watches a run for signs that its policy exploits the reward model.

    Args:
        cfg: limits.
        contract: what the reward model promises.
        threshold: above which a probability fires in this run.
        folder: of the run; gets `alarms.jsonl` and `alarms/<name>_<step>/*.png`.
        knows_success: whether the environment tells success; if so, every batch must carry it.
    """

    def __init__(
        self,
        cfg: MonitorConfig,
        contract: Contract,
        threshold: float,
        folder: Path,
        *,
        knows_success: bool,
    ) -> None:
        setup = MonitorSetup(
            cfg=cfg,
            contract=contract,
            threshold=float(threshold),
            knows_success=knows_success,
            folder=Path(folder),
        )
        self.setup = setup
        self.cannot_watch: list[str] = []
        """What the environment or the checkpoint does not allow to watch, in sentences."""
        self.num_alarms = 0
        self.checks: dict[str, AlarmCheck] = {}
        """Name -> the alarm, for those that can be watched."""
        self._running: dict[str, BoolArray] = {}
        """What is known of the running episode of each environment: name -> bool [N]."""
        self._first_success = first_success_step(setup)
        if cfg.action == "off":
            return
        for alarm in ALARMS:
            if not alarm.applies(setup):
                continue
            if missing := alarm.missing(setup):
                self.cannot_watch.append(f"{as_words(alarm.name)}: {missing}")
                log.info("monitor: cannot watch %s", self.cannot_watch[-1])
            else:
                self.checks[alarm.name] = alarm(setup)

    def observe(self, step: int, batch: Watched) -> list[Alarm]:
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
        self._running = {
            renamed.get(name, name): np.array(values, np.bool_)
            for name, values in (state["running"] or {}).items()
        }
        self.num_alarms = int(state["num_alarms"])

    def _statistics(self, step: int, batch: Watched) -> Statistics:
        """Carry the running episodes on through [T, N] steps, and count those that end."""
        if self.setup.knows_success and batch.env_success is None:
            raise DataError("the monitor expects env_success in every batch, and this one has none")
        prob, done, starts = batch.prob_success, batch.done, batch.elapsed == 0
        scored = ~np.isnan(prob)
        fired = scored & fires(prob, self.setup.threshold)
        success = np.zeros_like(fired)
        if self.setup.knows_success and batch.env_success is not None:
            success = batch.env_success
        early = fired & (batch.elapsed < self._first_success)  # never, if that is NaN
        running = self._running_episodes(done.shape[1])
        episodes = episodes_fired = episodes_wrong = episodes_early = 0
        for t in range(len(done)):
            if starts[t].any():  # an episode that a reset from outside ended counts for nothing
                for flags in running.values():
                    flags[starts[t]] = False
            running["scored"] |= scored[t]
            running["fired"] |= fired[t]
            running["success"] |= success[t]
            running["early"] |= early[t] & ~running["success"]  # a fire after an early success is right
            ended = done[t]
            if ended.any():
                episodes += int((ended & running["scored"]).sum())
                episodes_fired += int((ended & running["fired"]).sum())
                episodes_wrong += int((ended & running["fired"] & ~running["success"]).sum())
                episodes_early += int((ended & running["early"]).sum())
                for flags in running.values():
                    flags[ended] = False
        return Statistics(
            step=step,
            scored=scored,
            fired=fired,
            success=success,
            wrong=fired & ~success,
            early=early,
            prob_success=prob,
            disagreement=batch.disagreement,
            features=batch.features,
            frame=batch.frame,
            episodes=episodes,
            episodes_fired=episodes_fired,
            episodes_wrong=episodes_wrong,
            episodes_early=episodes_early,
        )

    def _running_episodes(self, num_envs: int) -> dict[str, BoolArray]:
        if not self._running:
            names = ("scored", "fired", "success", "early")
            self._running = {name: np.zeros(num_envs, np.bool_) for name in names}
        known = len(self._running["scored"])
        if known != num_envs:
            raise DataError(f"the monitor watches {known} environments, not {num_envs}")
        return self._running
