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
from guerdon.core.errors import DataError, WorkerLostError
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array
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
    """What an image model promises; empty for a model that gives rewards."""
    threshold: float
    """A probability above it fires in this run."""
    gives_rewards: bool
    """Whether the model gives rewards, and no probabilities."""
    knows_success: bool
    """Whether the environment reports success."""
    folder: Path
    """Of the run."""


@dataclass(frozen=True, kw_only=True)
class ScoredRollout:
    """T steps of N environments, as the reward model and the environment scored them."""

    prob_success: FloatArray
    """float32 [T, N]; NaN where a frame was not scored."""
    done: BoolArray
    """bool [T, N]; the episode ended with this step, terminated or truncated."""
    elapsed: IntArray
    """int64 [T, N]; the step within the episode, from 0."""
    frame: Callable[[int, int], UInt8Array] | None = None
    """(t, n) -> uint8 [H, W, C], the scored frame of that step and environment; None: no pictures."""
    env_success: BoolArray | None = None
    """bool [T, N]; None where the environment does not tell."""
    disagreement: FloatArray | None = None
    """float32 [T, N]; deviation between the members of an ensemble."""
    features: FloatArray | None = None
    """float32 [K, F]; pooled encoder features of K scored frames, drawn at random."""
    rewards: FloatArray | None = None
    """float32 [T, N]; what a model that gives no probabilities gave instead; see `of_rewards`."""

    def __post_init__(self) -> None:
        shape = self.prob_success.shape
        if len(shape) != 2:
            raise DataError(f"ScoredRollout.prob_success must have shape [T, N], not {list(shape)}")
        for name in ("done", "elapsed", "env_success", "disagreement", "rewards"):
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise DataError(
                    f"ScoredRollout.{name} must have shape {list(shape)}, not {list(value.shape)}"
                )

    @classmethod
    def of_rewards(cls, rewards: FloatArray, scored: BoolArray | None = None, **others: Any) -> ScoredRollout:
        """What a model gave that answers with rewards [T, N], at the steps `scored` [T, N] (None: at all).

        The `others` are `done`, `elapsed` and, where there are any, `env_success` and `frame`.
        """
        scored = np.ones(rewards.shape, np.bool_) if scored is None else scored
        nothing = np.where(scored, np.float32(0.0), np.float32(np.nan))  # never fires
        return cls(prob_success=nothing, rewards=rewards, **others)


@dataclass(frozen=True, kw_only=True)
class RolloutStatistics(ScoredRollout):
    """The same steps with what the alarms count, and counts of the episodes that ended in them."""

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
    episodes: int
    """Ended episodes with at least one scored frame."""
    episodes_fired: int
    """Ended episodes that fired."""
    episodes_wrong: int
    """Ended episodes that fired without a success."""
    episodes_early: int
    """Ended episodes that fired early and before any success."""
    episodes_success: int
    """Ended episodes with at least one scored frame and a success."""
    returns: float
    """Sum of the learned rewards of ended episodes, of a model that gives rewards."""


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

    for_rewards: ClassVar[bool] = False
    """Whether it watches rewards; otherwise probabilities."""
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
        self.memory: dict[str, Any] = {}
        """What an alarm keeps besides its signal, in plain containers."""
        self._pictures: list[UInt8Array] = []

    @classmethod
    def applies(cls, setup: MonitorSetup) -> bool:
        """Whether this alarm is meant for such a run."""
        return setup.gives_rewards or not cls.for_rewards

    @classmethod
    def missing(cls, setup: MonitorSetup) -> str:
        """Why the environment or the checkpoint does not allow this check; empty if it does."""
        return ""

    @abstractmethod
    def count(self, statistics: RolloutStatistics) -> tuple[float, float, int]:
        """(sum, number of cases, ended episodes) that a batch adds."""

    def offenders(self, statistics: RolloutStatistics) -> Offenders:
        """The frames that show the problem: those that fire without a success."""
        return statistics.wrong, statistics.prob_success

    def value(self) -> float:
        """The measured quantity since the last evaluation."""
        return self.signal.total / self.signal.count

    def check(self, statistics: RolloutStatistics) -> Alarm | None:
        """Take in a batch, and evaluate once there is enough; offending frames are kept meanwhile."""
        signal = self.signal
        total, count, episodes = self.count(statistics)
        signal.total += float(total)
        signal.count += float(count)
        signal.episodes += episodes
        if not signal.raised:
            fresh = _pick(statistics, self.offenders(statistics), self.cfg.num_frames)
            self._pictures = (self._pictures + fresh)[-self.cfg.num_frames :]
        if signal.episodes < self.cfg.min_episodes or not signal.count:
            return None
        was_raised = signal.raised
        rises = signal.check(float(self.value()), self.cfg.patience)
        if was_raised and not signal.raised:
            name = as_words(self.name)
            log.info("monitor: the alarm %s ended at step %d (%.3g)", name, statistics.step, signal.value)
        pictures, self._pictures = self._pictures, []
        return self._raise(statistics.step, pictures) if rises else None

    def state_dict(self) -> dict[str, Any]:
        """All that the next evaluations depend on, in plain containers; pictures are not among it."""
        return {**vars(self.signal), **self.memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` gave; the limit stays that of the present settings."""
        self.memory = {name: state[name] for name in self.memory}
        signal = {name: value for name, value in state.items() if name not in self.memory}
        self.signal = Signal(**{**signal, "limit": self.signal.limit})

    def _raise(self, step: int, pictures: Sequence[UInt8Array]) -> Alarm:
        """Save offending frames [H, W, C] as `alarms/<name>_<step>/*.png`, and a line about the alarm."""
        place = self.folder / "alarms" / f"{self.name}_{step}"
        paths = [place / f"{number:02d}.png" for number in range(len(pictures))]
        for path, picture in zip(paths, pictures, strict=True):
            save_picture(make_directory(place) / path.name, picture)
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


def _pick(statistics: RolloutStatistics, offenders: Offenders, count: int) -> list[UInt8Array]:
    """Copies of up to `count` offending frames, the worst of each environment first."""
    chosen, score = offenders
    steps, envs = np.nonzero(chosen)
    if not len(steps) or statistics.frame is None:
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
