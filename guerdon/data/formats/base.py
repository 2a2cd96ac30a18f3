"""What a data format offers: detect itself, read episodes, and (if it can) write them.

A new format is one file with a subclass of `Format` and its line in the table `FORMATS`. Below are also the
parts that formats share: one bad file gives one `Fault`, and truncated episodes go to `unfinished/`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from guerdon.core.atomic import make_directory
from guerdon.core.errors import ConfigError, DataError, StorageError
from guerdon.core.types import Episode, Fault, display_path, is_positive
from guerdon.data.files.bounds import memory_budget, one_line

UNFINISHED = "unfinished"
"""Directory beside the others for truncated episodes, in formats that cannot mark them."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class EpisodeFacts:
    """What can be told of an episode without its frames."""

    source: str
    success: bool
    complete: bool
    num_frames: int
    num_positive_frames: int
    camera_shapes: Mapping[str, tuple[int, int, int]]
    """Camera name -> (H, W, C)."""

    @classmethod
    def of(cls, episode: Episode) -> EpisodeFacts:
        """The facts of an episode that was read."""
        return cls(**{item.name: getattr(episode, item.name) for item in fields(cls)})


class EpisodeWriter(ABC):
    """Appends episodes to one place. An episode is safe on disk when `add` or `add_many` returns.

    Writing never overwrites: counters continue after the highest number that is there. A failing write
    raises `StorageError` and leaves every finished episode in place.
    """

    def check(self, episode: Episode) -> None:  # noqa: B027 - most formats can keep every episode
        """Raise a `DataError` if this episode cannot be kept; `add` and `add_many` then do the same."""

    @abstractmethod
    def add(self, episode: Episode) -> str:
        """Write one episode; return where it went (a path or an id)."""

    def add_many(self, episodes: Iterable[Episode]) -> list[str]:
        """Write several episodes; formats that can sync once for all of them override this."""
        return [self.add(episode) for episode in episodes]

    def close(self) -> None:  # noqa: B027 - most formats have nothing left to do
        """Finish; afterwards the data set is complete."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Format(ABC):
    """A data format; one instance of each stands in `guerdon.data.formats.FORMATS`."""

    name: ClassVar[str]
    looks_for: ClassVar[str]
    """The files by which it is detected, for messages."""
    names_episodes: ClassVar[bool] = False
    """Whether `read_except` gives every episode a source of its own, so that a copy knows what it has."""

    @abstractmethod
    def detect(self, path: Path) -> bool:
        """Whether `path` holds this format; looks at names and first bytes only, runs nothing."""

    @abstractmethod
    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """Yield every episode in a stable order; what cannot be used is yielded as a `Fault`."""

    def facts(self, path: Path) -> Iterator[EpisodeFacts | Fault]:
        """What `read` would yield, without the frames; formats that need not decode them override this."""
        for item in self.read(path):
            yield item if isinstance(item, Fault) else EpisodeFacts.of(item)

    def read_except(self, path: Path, done: Collection[str]) -> Iterator[Episode | Fault]:
        """What `read` yields but the episodes whose source is in `done`; see `names_episodes`."""
        for item in self.read(path):
            if isinstance(item, Fault) or item.source not in done:
                yield item

    def findings(self, path: Path) -> list[tuple[str, str, str]]:
        """(level, check, message) of what an audit should say of this format's own peculiarities."""
        return []

    def configured(self, **settings: Any) -> Format:
        """The same format with other settings; a setting that it does not have is a `ConfigError`."""
        record: Any = self  # a dataclass, if it has settings
        known = [item.name for item in fields(record)] if is_dataclass(record) else []
        for name in settings:
            if name not in known:
                raise ConfigError(f"the format {self.name} has no setting {name!r}; it has {known or 'none'}")
        made: Format = replace(record, **settings) if settings else self
        return made

    def count(self, path: Path) -> tuple[int, int]:
        """How many successes and failures are at `path`; (0, 0) if there is nothing."""
        if not path.exists() or not self.detect(path):
            return 0, 0
        complete = [item for item in self.read(path) if isinstance(item, Episode) and item.complete]
        good = sum(item.success for item in complete)
        return good, len(complete) - good

    @property
    def writable(self) -> bool:
        """Whether episodes can be written, too."""
        return type(self).writer is not Format.writer

    def writer(self, path: Path) -> EpisodeWriter:
        """Open `path` for appending."""
        raise DataError(f"the format {self.name} can be read but not written")


class EpisodeFiles(Format):
    """A format with one file for each episode."""

    @abstractmethod
    def files(self, path: Path) -> list[Path]:
        """The files at or below `path` that may hold episodes, in reading order."""

    @abstractmethod
    def read_file(self, path: Path) -> Episode:
        """The episode in one file; may raise whatever a damaged file sets off."""

    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """One episode or fault for each file."""
        for file in self.files(existing(path)):
            yield read_or_fault(file, partial(self.read_file, file))


class LabelledFiles(EpisodeFiles):
    """With a directory for successes and one for failures below `path`."""

    kinds: ClassVar[tuple[str, str]]
    """The names of the two directories."""
    suffix: ClassVar[str]
    writer_class: ClassVar[type[LabelledWriter]]

    def files(self, path: Path) -> list[Path]:
        """The file itself; or those in the directory, then those in the directories below it."""
        if path.is_file():
            return [path]
        return [*files_in(path, self.suffix), *labelled_files(path, self.kinds, self.suffix)]

    def count(self, path: Path) -> tuple[int, int]:
        """By the directories alone: a collector asks before every run, and reading all files takes long."""
        success, failure = (len(files_in(path / kind, self.suffix)) for kind in self.kinds)
        return success, failure

    def writer(self, path: Path) -> EpisodeWriter:
        """Append to the two directories below `path`."""
        success, failure = (Path(path) / kind for kind in self.kinds)
        return self.writer_class(success, failure)


def is_unfinished(path: Path) -> bool:
    """Whether an episode's file lies where truncated episodes are kept."""
    return path.absolute().parent.parent.name == UNFINISHED


# Writers


class LabelledWriter(EpisodeWriter):
    """Writes to a directory for successes and one for failures; truncated episodes to `unfinished/`."""

    def __init__(self, success_dir: Path, failure_dir: Path) -> None:
        self.directories = {True: make_directory(success_dir), False: make_directory(failure_dir)}
        self.root = success_dir.parent
        self._unfinished: LabelledWriter | None = None

    def add(self, episode: Episode) -> str:
        """Write one episode; return its path."""
        if episode.complete or self.root.absolute().name == UNFINISHED:
            return self._write(episode, is_positive(episode.labels, episode.success))
        if self._unfinished is None:
            places = (place.parent / UNFINISHED / place.name for place in self.directories.values())
            self._unfinished = type(self)(*places)
        return self._unfinished.add(episode)

    @abstractmethod
    def _write(self, episode: Episode, positive: bool) -> str:
        """Write one episode to one of the two directories; return its path."""


class SpooledWriter(EpisodeWriter):
    """For formats that are one file, which `close` writes; leaving a `with` block closes too.

    All episodes are in memory then. That is bounded: beyond a quarter of what is available `add` refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._free()

    def _free(self) -> None:
        """Nothing is kept in memory (any more)."""
        self._room = memory_budget() // 2

    def _reserve(self, episode: Episode) -> None:
        """Take room for an episode that is kept in memory."""
        size = sum(images.nbytes for images in episode.frames.values())
        if size > self._room:
            raise StorageError(
                f"cannot write {display_path(self.path)}: this format is one file, and its episodes do not "
                "fit into memory; use the format native"
            )
        self._room -= size


# Reading files, of which some may be damaged


def to_fault(path: Path, error: Exception, part: str = "") -> Fault:
    """What is wrong with a file, or with a `part` of it; the path is not repeated in the reason."""
    name = display_path(path)
    if isinstance(error, DataError):
        reason = str(error).removeprefix(f"{name}: ")
    elif isinstance(error, OSError):
        reason = f"cannot be read: {error.strerror or error}"
    else:
        reason = f"has unexpected content: {type(error).__name__}: {error}"
    return Fault(path=name, reason=f"{part}: " * bool(part) + one_line(reason, 300))


def read_or_fault(path: Path, make: Callable[[], T], part: str = "") -> T | Fault:
    """What `make` reads from a file (or from a `part` of it), or the fault that keeps it from being read."""
    try:
        return make()
    except Exception as error:  # hostile bytes can fail in any way, and the other files are read all the same
        return to_fault(path, error, part)


def files_in(directory: Path, *suffixes: str) -> list[Path]:
    """The files with one of these suffixes, sorted; hidden files (also unfinished writes) are left out."""
    if not directory.is_dir():
        return []
    return sorted(
        item
        for item in directory.iterdir()
        if item.suffix.lower() in suffixes and not item.name.startswith(".") and item.is_file()
    )


def labelled_files(path: Path, kinds: tuple[str, str], *suffixes: str) -> list[Path]:
    """The files in the directories `kinds` below `path`, then those of truncated episodes."""
    places = [root / kind for root in (path, path / UNFINISHED) for kind in kinds]
    return [file for place in places for file in files_in(place, *suffixes)]


def head_of(path: Path, count: int) -> bytes:
    """The first bytes of a file, at most `count`; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError:
        return b""


def existing(path: Path) -> Path:
    """The path itself; raises if nothing is there."""
    if not path.exists():
        raise DataError(f"{display_path(path)} does not exist")
    return path
