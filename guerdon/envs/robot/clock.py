"""The robot's time: the wall clock's on a real arm, faster in a simulation."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np


class Clock:
    """Seconds of the robot; `scale` of them pass in one second of the wall clock."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def now(self) -> float:
        """The robot's time, from any beginning."""
        return time.monotonic() * self.scale

    def sleep(self, seconds: float) -> None:
        """Wait so many of the robot's seconds."""
        if seconds > 0.0:
            time.sleep(seconds / self.scale)


_LEAST = 0.8
"""The share of a period that a command gets at least."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How regular the latest steps were; in the robot's seconds."""

    steps: int
    """Steps so far."""
    period: float
    """What a step should take ..."""
    mean_period: float
    """... and what it took."""
    jitter_p50: float
    """How much later than due a step ended: half of the steps were better than that, ..."""
    jitter_p95: float
    """... 95% were, ..."""
    jitter_max: float
    """... all were."""
    overruns: int
    """Steps that ended more than a tenth of a period late, since the beginning."""


class Ticker:
    """Keeps steps at a fixed rate and measures how well that goes."""

    def __init__(self, clock: Clock, rate: float) -> None:
        self.period = 1.0 / rate
        self._clock = clock
        self._late: deque[float] = deque(maxlen=10_000)
        self._took: deque[float] = deque(maxlen=10_000)
        self._steps = self._overruns = 0
        self._due = self._last = clock.now()

    def start(self) -> None:
        """The first step is due a period from now."""
        self._last = self._clock.now()
        self._due = self._last + self.period

    def wait(self) -> None:
        """Wait until the present step is due to end; call it just after the command.

        Where thinking took long, the command still gets most of a period to act, and the step ends late.
        """
        self._clock.sleep(max(self._due, self._clock.now() + _LEAST * self.period) - self._clock.now())
        now = self._clock.now()
        late = max(now - self._due, 0.0)
        self._late.append(late)
        self._took.append(now - self._last)
        self._steps += 1
        self._overruns += late > 0.1 * self.period
        self._last = now
        self._due = (now if late > 0.1 * self.period else self._due) + self.period

    def timing(self) -> Timing:
        """What was measured."""
        late = np.array(self._late or [0.0])
        return Timing(
            steps=self._steps,
            period=self.period,
            mean_period=float(np.mean(self._took or [0.0])),
            jitter_p50=float(np.percentile(late, 50)),
            jitter_p95=float(np.percentile(late, 95)),
            jitter_max=float(late.max()),
            overruns=self._overruns,
        )
