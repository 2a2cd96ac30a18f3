"""The format `lerobot` among the others, with its settings."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

from guerdon.core.types import Episode, Fault
from guerdon.data.formats.base import EpisodeFacts, EpisodeWriter, Format, existing
from guerdon.data.formats.lerobot.labels import LabelAt
from guerdon.data.formats.lerobot.meta import INFO, is_lerobot
from guerdon.data.formats.lerobot.reading import LeRobotData
from guerdon.data.formats.lerobot.settings import WriteSettings


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
    fps: int = WriteSettings.fps
    """Of what is written: Guerdon's episodes do not tell theirs."""
    videos: bool = WriteSettings.videos
    """Whether frames are written as videos, which loses detail, instead of PNG in the rows."""
    task: str = WriteSettings.task
    robot_type: str = WriteSettings.robot_type
    data_files_mb: float = WriteSettings.data_files_mb
    video_files_mb: float = WriteSettings.video_files_mb

    def detect(self, path: Path) -> bool:
        """Whether there is LeRobot's `info.json`."""
        return is_lerobot(path)

    def _opened(self, path: Path) -> LeRobotData:
        return LeRobotData(
            existing(path), label_at=self.label_at, label_from=self.label_from, outcomes=self.outcomes
        )

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """The episodes in the order of their numbers, after faults of `meta/`."""
        with closing(self._opened(path)) as data:
            yield from data.items()

    def read_except(self, path: Path, done: Collection[str]) -> Iterator[Episode | Fault]:
        """Those that are not in `done`; the source of each names the folder and the episode's number."""
        with closing(self._opened(path)) as data:
            yield from data.named_items(done)

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

    def writer(self, path: Path) -> EpisodeWriter:
        """Append to a data set that Guerdon wrote, or make one."""
        from guerdon.data.formats.lerobot.writing import LeRobotWriter  # which is not needed to read

        names = [item.name for item in fields(WriteSettings)]
        return LeRobotWriter(Path(path), WriteSettings(**{name: getattr(self, name) for name in names}))
