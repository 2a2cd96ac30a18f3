"""The format `lerobot` among the others, with its settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from guerdon.core.types import Episode, Fault
from guerdon.data.formats.base import EpisodeFacts, Format, existing
from guerdon.data.formats.lerobot.labels import LabelAt
from guerdon.data.formats.lerobot.meta import INFO, is_lerobot
from guerdon.data.formats.lerobot.reading import LeRobotData

FPS = 10


@dataclass(frozen=True)
class LeRobot(Format):
    """A folder with `meta/info.json`; what each row holds is told in `labels`."""

    name: ClassVar[str] = "lerobot"
    looks_for: ClassVar[str] = f"{INFO} of LeRobot"
    names_episodes: ClassVar[bool] = True

    label_at: LabelAt = "auto"
    """Which frame a label belongs to: `row`, `next`, or by the data."""
    label_from: str = "auto"
    """The column with a label of each frame."""
    outcomes: Path | None = None
    """A file that tells which episodes succeeded."""
    fps: int = FPS
    """Of what is written: Guerdon's episodes do not tell theirs."""
    videos: bool = False
    """Whether frames are written as videos, which loses detail, instead of PNG in the rows."""
    task: str = "solve the task"
    """Of what is written."""
    robot_type: str = "unknown"
    """Of what is written."""
    data_files_mb: float = 100
    video_files_mb: float = 200

    def detect(self, path: Path) -> bool:
        """Whether there is LeRobot's `info.json`."""
        return is_lerobot(path)

    def _opened(self, path: Path) -> LeRobotData:
        return LeRobotData(
            existing(path), label_at=self.label_at, label_from=self.label_from, outcomes=self.outcomes
        )

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """The episodes in the order of their numbers, after faults of `meta/`."""
        yield from self.read_except(path, ())

    def read_except(self, path: Path, done: Collection[str]) -> Iterator[Episode | Fault]:
        """The same, without reading the frames of the episodes in `done`."""
        with closing(self._opened(path)) as data:
            yield from data.items(done)

    def facts(self, path: Path) -> Iterator[EpisodeFacts | Fault]:
        """By numbers and headers alone; no frame is decoded."""
        with closing(self._opened(path)) as data:
            yield from data.facts()

    def findings(self, path: Path) -> list[tuple[str, str, str]]:
        """What each way to read the labels would lose."""
        with closing(self._opened(path)) as data:
            return data.findings()

    def count(self, path: Path) -> tuple[int, int]:
        """By labels alone."""
        if not path.exists() or not self.detect(path):
            return 0, 0
        complete = [item for item in self.facts(path) if not isinstance(item, Fault) and item.complete]
        good = sum(item.success for item in complete)
        return good, len(complete) - good
