"""What a data format has to offer: detect itself, read episodes, and (if it can) write them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from typing_extensions import Self

from guerdon.core.errors import DataError
from guerdon.core.types import Episode, Fault


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
    writable: ClassVar[bool] = True

    @abstractmethod
    def detect(self, path: Path) -> bool:
        """Whether `path` holds this format; looks at names and first bytes only, runs nothing."""

    @abstractmethod
    def read(self, path: Path) -> Iterator[Episode | Fault]:
        """Yield every episode in a stable order; what cannot be used is yielded as a `Fault`."""

    def count(self, path: Path) -> tuple[int, int]:
        """How many successes and failures are at `path`; (0, 0) if there is nothing."""
        if not path.exists() or not self.detect(path):
            return 0, 0
        complete = [item for item in self.read(path) if isinstance(item, Episode) and item.complete]
        good = sum(item.success for item in complete)
        return good, len(complete) - good

    def writer(self, path: Path) -> EpisodeWriter:
        """Open `path` for appending."""
        raise DataError(f"the format {self.name} can be read but not written")
