"""What a tracker is: a place outside the run's folder that shows the run, such as Weights & Biases."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TextIO, TypeAlias, cast

from guerdon.core.errors import ConfigError

Row: TypeAlias = tuple[int, Mapping[str, float]]
"""A step and the metrics that were logged at it."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker has to know of a run when it starts."""

    folder: Path
    """The run's folder."""
    project: str
    name: str
    """Of the run, for people."""
    config: Mapping[str, Any]
    """The whole config in plain containers."""
    run_id: str | None = None
    """Of the tracker's run that is continued; None starts a new one."""
    adds_files: bool = False
    """The run is over or goes on elsewhere: it only gets files, and ends as it ended."""


class Tracker(ABC):
    """A run at one tracker; all methods are called by one thread, and may raise whatever goes wrong."""

    name: ClassVar[str]
    """In `runner.logger.backends`."""
    module: ClassVar[str]
    """Python package that it needs."""
    extra: ClassVar[str] = ""
    """Of ours, that installs it; empty if it is always there."""
    max_rows: ClassVar[int] = 1
    """Of one call of `log`."""
    max_numbers: ClassVar[int] = 1000
    """The same, of all rows together."""
    pictures_at_end: ClassVar[bool] = False
    """Whether pictures are shown when the run is over, and no earlier."""
    run_id: str
    """By which the run is found again."""

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None:
        """Start a run with its config, or go on with `run.run_id`."""

    @abstractmethod
    def log(self, rows: Sequence[Row]) -> None:
        """Take in metrics: all of them, or none if it raises."""

    @abstractmethod
    def picture(self, name: str, path: Path, step: int) -> None:
        """Show a picture (PNG), such as a frame that raised an alarm."""

    @abstractmethod
    def film(self, name: str, path: Path, step: int) -> None:
        """Show a film (GIF or MP4)."""

    @abstractmethod
    def files(self, paths: Sequence[Path]) -> None:
        """Keep files, such as the report, as they are."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """The run is over: at its end if `finished`, else interrupted or failed."""


def require_module(tracker: type[Tracker]) -> None:
    """Raise if the package of a tracker is not installed."""
    if importlib.util.find_spec(tracker.module) is None:
        raise ConfigError(
            f"runner.logger.backends names {tracker.name}, and {tracker.module} is not installed: "
            f"pip install 'guerdon[{tracker.extra}]'"
        )


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings of nested sections by their dotted names."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class _StdoutOfOthers:
    """Standard output for all threads but one, which writes to standard error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr if threading.get_ident() == self._thread else self._stream, name)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Standard output is for results: what a package prints in this thread goes to the log's stream.

    Other threads go on printing there: the command's result comes also while a tracker hangs.
    """
    with contextlib.redirect_stdout(cast("TextIO", _StdoutOfOthers(sys.stdout))):
        yield
