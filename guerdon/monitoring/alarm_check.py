"""What every alarm has in common: statistics to look at, hysteresis, and files in the run's folder.

A check collects what it needs until `min_episodes` episodes have ended, and is then evaluated once.
Evaluations share no episodes, so that several in a row above the limit are hardly ever chance.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np

from guerdon.config import MonitorConfig
from guerdon.core import strict_json
from guerdon.core.atomic import make_directory, storage_errors
from guerdon.core.errors import WorkerLostError
from guerdon.core.types import BoolArray, FloatArray, UInt8Array
from guerdon.data.datasets.pictures import save_picture
from guerdon.rewards.image.contract import Contract

log = logging.getLogger("guerdon")

ALARMS_FILE = "alarms.jsonl"
CLEAR_SHARE = 0.8
"""An alarm ends below this share of its limit."""
Offenders: TypeAlias = tuple[BoolArray, FloatArray]
"""Which frames [T, N] speak for an alarm, and a score [T, N] that is highest for the worst."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A signal that stayed above its limit."""

    name: str
    step: int
    """Environment step of the run."""
    value: float
    limit: float
    remedy: str
    frames: list[Path]
    """Pictures of offending frames."""


@dataclass(frozen=True, kw_only=True)
class MonitorSetup:
    """What is known before the first step."""

    cfg: MonitorConfig
    contract: Contract
    """What the reward model promises."""
    threshold: float
    """A probability above it fires in this run."""
    knows_success: bool
    """Whether the environment reports success."""
    folder: Path
    """Of the run."""


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """T steps of N environments, and counts of the episodes that ended in them."""

    step: int
    """Environment step of the run."""
    scored: BoolArray
    """[T, N]; the reward model saw the frame."""
    fired: BoolArray
    """[T, N]; its probability lies above the threshold."""
    success: BoolArray
    """[T, N]; the environment reports success. All False where it never does."""
    wrong: BoolArray
    """[T, N]; fired without a success."""
    early: BoolArray
    """[T, N]; fired before the first step at which calibration saw a success."""
    prob_success: FloatArray
    """[T, N]; NaN where a frame was not scored."""
    disagreement: FloatArray | None
    """[T, N]; deviation between the members of an ensemble."""
    features: FloatArray | None
    """[K, F]; pooled encoder features of K scored frames, drawn at random."""
    frame: Callable[[int, int], UInt8Array]
    """(t, n) -> uint8 [H, W, C]."""
    episodes: int
    """Ended episodes with at least one scored frame."""
    episodes_fired: int
    """Ended episodes that fired."""
    episodes_wrong: int
    """Ended episodes that fired without a success."""
    episodes_early: int
    """Ended episodes that fired early and before any success."""


@dataclass(kw_only=True)
class Signal:
    """What was counted since the last evaluation, and how the last evaluations ended."""

    limit: float
    total: float = 0.0
    count: float = 0.0
    episodes: int = 0
    value: float = math.nan
    """Of the last evaluation."""
    above: int = 0
    below: int = 0
    raised: bool = False

    def add(self, total: float, count: float, episodes: int) -> None:
        """Sum `total` over `count` cases, seen in `episodes` that have ended since."""
        self.total += total
        self.count += count
        self.episodes += episodes

    def ready(self, min_episodes: int) -> bool:
        """Whether there is enough for an evaluation."""
        return self.episodes >= min_episodes and self.count > 0

    def check(self, value: float, patience: int) -> bool:
        """Take in a value and reset the counts; True if the alarm rises now."""
        self.value, self.total, self.count, self.episodes = value, 0.0, 0.0, 0
        self.above = self.above + 1 if value > self.limit else 0
        self.below = self.below + 1 if value < CLEAR_SHARE * self.limit else 0
        rises = not self.raised and self.above >= patience
        self.raised = rises or (self.raised and self.below < patience)
        return rises


class AlarmCheck(ABC):
    """One alarm: a subclass says what is counted and which frames to show."""

    name: ClassVar[str]
    looks_at: ClassVar[str]
    """The measured quantity, in a few words."""
    setting: ClassVar[str]
    """The limit's name in the `monitor` section."""
    remedy: ClassVar[str]
    """What to do about it."""

    def __init__(self, setup: MonitorSetup) -> None:
        self.cfg, self.folder = setup.cfg, setup.folder
        self.signal = Signal(limit=getattr(setup.cfg, self.setting))
        self._pictures: list[UInt8Array] = []

    @classmethod
    def applies(cls, setup: MonitorSetup) -> bool:
        """Whether this alarm is meant for such a run."""
        return True

    @classmethod
    def missing(cls, setup: MonitorSetup) -> str:
        """Why the environment or the checkpoint does not allow this check; empty if it does."""
        return ""

    @abstractmethod
    def count(self, statistics: Statistics) -> tuple[float, float, int]:
        """(sum, number of cases, ended episodes) that a batch adds."""

    def offenders(self, statistics: Statistics) -> Offenders:
        """The frames that show the problem: those that fire without a success."""
        return statistics.wrong, statistics.prob_success

    def value(self) -> float:
        """The measured quantity since the last evaluation."""
        return self.signal.total / self.signal.count

    def check(self, statistics: Statistics) -> Alarm | None:
        """Take in a batch, and evaluate once there is enough; offending frames are kept meanwhile."""
        signal = self.signal
        total, count, episodes = self.count(statistics)
        signal.add(float(total), float(count), episodes)
        if not signal.raised:
            fresh = _pick(statistics, self.offenders(statistics), self.cfg.num_frames)
            self._pictures = (self._pictures + fresh)[-self.cfg.num_frames :]
        if not signal.ready(self.cfg.min_episodes):
            return None
        was_raised = signal.raised
        rises = signal.check(float(self.value()), self.cfg.patience)
        if was_raised and not signal.raised:
            log.info(
                "monitor: %s is over at step %d (%.3g)", as_words(self.name), statistics.step, signal.value
            )
        pictures, self._pictures = self._pictures, []
        return self._raise(statistics.step, pictures) if rises else None

    def state_dict(self) -> dict[str, Any]:
        """All that the next evaluations depend on, in plain containers; pictures are not among it."""
        return dict(vars(self.signal))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave; the limit stays that of the present settings."""
        self.signal = Signal(**{**state, "limit": self.signal.limit})

    def _raise(self, step: int, pictures: Sequence[UInt8Array]) -> Alarm:
        """Save offending frames [H, W, C] as `alarms/<name>_<step>/*.png`, and a line about the alarm."""
        place = make_directory(self.folder / "alarms" / f"{self.name}_{step}")
        paths = [place / f"{number:02d}.png" for number in range(len(pictures))]
        for path, picture in zip(paths, pictures, strict=True):
            save_picture(path, picture)
        alarm = Alarm(
            name=self.name,
            step=step,
            value=self.signal.value,
            limit=self.signal.limit,
            remedy=self.remedy,
            frames=paths,
        )
        line = {**vars(alarm), "frames": [path.relative_to(self.folder).as_posix() for path in paths]}
        target = self.folder / ALARMS_FILE
        with storage_errors(target), target.open("a", encoding="utf-8") as file:
            file.write(strict_json.dumps(line) + "\n")
        return alarm


def as_words(name: str) -> str:
    """An alarm's name in a sentence."""
    return name.replace("_", " ")


def _pick(statistics: Statistics, offenders: Offenders, count: int) -> list[UInt8Array]:
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
            pictures.append(np.array(statistics.frame(t, env)))
        except WorkerLostError as error:  # an alarm is worth more than its pictures
            log.warning("an offending frame cannot be shown: %s", error.reason)
    return pictures
