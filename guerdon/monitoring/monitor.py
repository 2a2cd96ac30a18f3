"""The reward-hacking monitor: notices a policy that pleases the reward model instead of solving the task.

Each signal collects what it needs until `min_episodes` episodes have ended, and then makes one check. Checks
share no episodes, so that several in a row above a limit are hardly ever chance.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from guerdon.config.schema_watch import MonitorConfig
from guerdon.core.errors import DataError, WorkerLostError
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
from guerdon.monitoring.alarms import Alarm, raise_alarm
from guerdon.monitoring.drift import FeatureDrift, Signal, number, promised_rate, success_share
from guerdon.rewards.calibration import fires
from guerdon.rewards.image.contract import Contract

log = logging.getLogger("guerdon")

MAX_DISTANCES = 4096
"""Distances that a drift check is made of, at most; later ones replace earlier ones."""
Offenders: TypeAlias = tuple[BoolArray, FloatArray]
"""Which frames [T, N] speak for an alarm, and a score [T, N] that is highest for the worst."""


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


@dataclass(kw_only=True)
class _Running:
    """What is known of the running episode of each environment, all bool [N]."""

    judged: BoolArray
    fired: BoolArray
    success: BoolArray
    early: BoolArray

    @classmethod
    def begin(cls, num_envs: int) -> _Running:
        return cls(**{item.name: np.zeros(num_envs, np.bool_) for item in fields(cls)})

    def clear(self, envs: BoolArray) -> None:
        for values in vars(self).values():
            values[envs] = False


@dataclass(kw_only=True)
class _Ended:
    """Counts of the episodes that ended in a batch."""

    judged: int = 0
    fired: int = 0
    gap: int = 0
    early: int = 0


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
        self.cfg, self.folder = cfg, Path(folder)
        self.knows_success = knows_success
        self.cannot_watch: list[str] = []
        """What the environment or the checkpoint does not allow to watch, in sentences."""
        self.num_alarms = 0
        self._threshold = float(threshold)
        self._signals: dict[str, Signal] = {}
        self._running: _Running | None = None
        self._distances: FloatArray = np.zeros(0, np.float32)
        self._pictures: dict[str, list[UInt8Array]] = {}
        self._usual_rate = self._first_success = math.nan
        self._drift: FeatureDrift | None = None
        if cfg.action != "off":
            self._choose_signals(contract)
            for line in self.cannot_watch:
                log.info("monitor: cannot watch %s", line)

    def observe(self, step: int, batch: Watched) -> list[Alarm]:
        """Take in what happened up to environment step `step`; returns the alarms that rise now."""
        if self.cfg.action == "off":
            return []
        if self.knows_success and batch.env_success is None:
            raise DataError("the monitor expects env_success in every batch, and this one has none")
        prob = batch.prob_success
        judged = ~np.isnan(prob)
        fired = judged & fires(prob, self._threshold)
        nothing = np.zeros_like(fired)
        success = batch.env_success if self.knows_success and batch.env_success is not None else nothing
        early = fired & (batch.elapsed < self._first_success)  # never, if that is NaN
        ended = self._follow(batch, judged, fired, success, early)
        self._count(batch, judged, fired, success, ended)
        wrong, unsure = (fired & ~success, prob), prob if batch.disagreement is None else batch.disagreement
        offenders: dict[str, Offenders] = {
            "success_gap": wrong,
            "wrong_fires": wrong,
            "fire_rate": wrong,
            "early_fires": (early & ~success, prob),
            "drift": (judged, np.zeros_like(prob)),
            "disagreement": (fired, unsure),
        }
        return [
            alarm
            for name, signal in self._signals.items()
            if (alarm := self._check(name, signal, step, batch, offenders[name])) is not None
        ]

    def metrics(self) -> dict[str, float]:
        """The values of the last checks, which alarms are on, and how many have risen so far."""
        if self.cfg.action == "off":
            return {}
        values = {
            f"monitor/{name}": signal.value
            for name, signal in self._signals.items()
            if math.isfinite(signal.value)
        }
        values["monitor/alarms_on"] = float(sum(signal.raised for signal in self._signals.values()))
        values["monitor/alarms"] = float(self.num_alarms)
        return values

    def state_dict(self) -> dict[str, Any]:
        """All that the next checks depend on, in plain containers; pictures are not among it."""
        running = self._running
        return {
            "num_alarms": self.num_alarms,
            "signals": {name: dict(vars(signal)) for name, signal in self._signals.items()},
            "running": None if running is None else {k: v.tolist() for k, v in vars(running).items()},
            "distances": self._distances.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; limits stay those of the present settings."""
        there, here = set(state["signals"]), set(self._signals)
        if there != here:
            raise DataError(f"the saved monitor watched {sorted(there)}, this one watches {sorted(here)}")
        for name, saved in state["signals"].items():
            self._signals[name] = Signal(**{**saved, "limit": self._signals[name].limit})
        running = state["running"]
        self._running = (
            None if running is None else _Running(**{k: np.array(v, np.bool_) for k, v in running.items()})
        )
        self._distances = np.array(state["distances"], np.float32)
        self.num_alarms = int(state["num_alarms"])

    # What can be watched

    def _choose_signals(self, contract: Contract) -> None:
        cfg, metrics = self.cfg, contract.metrics
        if self.knows_success:
            self._signals["success_gap"] = Signal(limit=cfg.max_success_gap)
            name, (rate, why) = "wrong_fires", promised_rate(contract, self._threshold)
        else:
            self.cannot_watch.append("the success gap: the environment does not tell success")
            name, (rate, why) = "fire_rate", success_share(metrics)
        if not why and rate * cfg.max_fire_ratio >= 1.0:
            why = f"{cfg.max_fire_ratio:g} times the usual rate of {rate:.1%} is more than all frames"
        self._add(name, cfg.max_fire_ratio, why)
        self._usual_rate = max(rate, 1e-6)
        first = number(metrics.get("first_success_step"))
        missing = 'the checkpoint has no metrics["first_success_step"]' if math.isnan(first) else ""
        self._add("early_fires", cfg.max_early_fires, missing)
        self._first_success = first
        if contract.feature_mean is not None and contract.feature_std is not None:
            self._drift = FeatureDrift(contract.feature_mean, contract.feature_std)
        missing = "the checkpoint has no feature statistics" if self._drift is None else ""
        self._add("drift", cfg.max_drift, missing)
        single = int(contract.model.get("num_members", 1)) < 2
        missing = "the model is no ensemble (reward.model.num_members)" if single else ""
        self._add("disagreement", cfg.max_disagreement, missing)

    def _add(self, name: str, limit: float, missing: str) -> None:
        if missing:
            self.cannot_watch.append(f"{name.replace('_', ' ')}: {missing}")
        else:
            self._signals[name] = Signal(limit=limit)

    # What happened

    def _follow(
        self, batch: Watched, judged: BoolArray, fires: BoolArray, success: BoolArray, early: BoolArray
    ) -> _Ended:
        """Carry the running episodes on through [T, N] steps, and count those that end."""
        done, begins = batch.done, batch.elapsed == 0
        if self._running is None:
            self._running = _Running.begin(done.shape[1])
        now = self._running
        if len(now.fired) != done.shape[1]:
            raise DataError(f"the monitor watches {len(now.fired)} environments, not {done.shape[1]}")
        counts = _Ended()
        for t in range(len(done)):
            now.clear(begins[t])  # an episode that was cut off by a reset from outside counts for nothing
            now.judged |= judged[t]
            now.fired |= fires[t]
            now.success |= success[t]
            now.early |= early[t] & ~now.success  # a fire after a success that came early is right
            over = done[t]
            if over.any():
                counts.judged += int((over & now.judged).sum())
                counts.fired += int((over & now.fired).sum())
                counts.gap += int((over & now.fired & ~now.success).sum())
                counts.early += int((over & now.early).sum())
                now.clear(over)
        return counts

    def _count(
        self, batch: Watched, judged: BoolArray, fires: BoolArray, success: BoolArray, ended: _Ended
    ) -> None:
        """Add a batch to what the signals have counted since their last checks."""
        added: dict[str, tuple[float, float, int]] = {
            "success_gap": (ended.gap, ended.judged, ended.judged),
            "wrong_fires": ((fires & ~success).sum(), (judged & ~success).sum(), ended.judged),
            "fire_rate": (fires.sum(), judged.sum(), ended.judged),
            "early_fires": (ended.early, ended.judged, ended.judged),
        }
        if batch.features is not None and self._drift is not None:
            fresh = self._drift.distances(batch.features)
            self._distances = np.concatenate([self._distances, fresh])[-MAX_DISTANCES:]
        added["drift"] = (0.0, 0 if batch.features is None else len(batch.features), ended.judged)
        disagreement = None if batch.disagreement is None else batch.disagreement[fires]
        if disagreement is not None:
            added["disagreement"] = (disagreement.sum(), len(disagreement), ended.fired)
        for name, values in added.items():
            if name in self._signals:
                total, count, episodes = values
                self._signals[name].add(float(total), float(count), episodes)

    # Alarms

    def _check(
        self, name: str, signal: Signal, step: int, batch: Watched, offenders: Offenders
    ) -> Alarm | None:
        """Check a signal if it has enough; offending frames are kept meanwhile."""
        if not signal.raised:
            kept = self._pictures.get(name, []) + _pick(batch, offenders, self.cfg.num_frames)
            self._pictures[name] = kept[-self.cfg.num_frames :]
        if not signal.ready(self.cfg.min_episodes):
            return None
        was_raised = signal.raised
        value = signal.total / signal.count
        if name in ("wrong_fires", "fire_rate"):
            value /= self._usual_rate
        elif name == "drift":
            value = float(np.median(self._distances))
            self._distances = self._distances[:0]
        rises = signal.check(float(value), self.cfg.patience)
        if was_raised and not signal.raised:
            log.info("monitor: %s is over at step %d (%.3g)", name.replace("_", " "), step, value)
        pictures = self._pictures.pop(name, [])
        if not rises:
            return None
        self.num_alarms += 1
        return raise_alarm(self.folder, name, step, signal.value, signal.limit, pictures)


def _pick(batch: Watched, offenders: Offenders, count: int) -> list[UInt8Array]:
    """Copies of up to `count` offending frames, the worst of each environment first."""
    chosen, score = offenders
    steps, envs = np.nonzero(chosen)
    if not len(steps):
        return []
    by_score = np.argsort(-score[steps, envs], kind="stable")
    steps, envs = steps[by_score], envs[by_score]
    _, inverse, sizes = np.unique(envs, return_inverse=True, return_counts=True)
    rank = np.empty(len(envs), np.int64)  # place of a frame among those of its environment
    rank[np.argsort(inverse, kind="stable")] = np.concatenate([np.arange(size) for size in sizes])
    best = np.argsort(rank, kind="stable")[:count]
    pictures: list[UInt8Array] = []
    for t, env in zip(steps[best].tolist(), envs[best].tolist(), strict=True):
        try:
            pictures.append(np.array(batch.frame(t, env)))
        except WorkerLostError as error:  # an alarm is worth more than its pictures
            log.warning("an offending frame cannot be shown: %s", error.reason)
    return pictures
