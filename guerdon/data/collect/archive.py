"""Keep finished episodes: count them, stop at the limits, write them off the stepping thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from guerdon.core.errors import GuerdonError, StorageError
from guerdon.core.types import Episode
from guerdon.data.formats import EpisodeWriter, get_format

log = logging.getLogger("guerdon")


MAX_BATCH = 64
"""Episodes that are written with one sync."""


class EpisodeArchive:
    """Where the collectors put their episodes: written on a thread of its own, several with one sync.

    A failure of the thread is raised at the next call. Successes and failures are kept up to a limit each;
    what comes after is dropped and counted. Truncated episodes count for neither; the writers keep them apart
    (marked, or in a directory `unfinished/`).
    """

    def __init__(
        self,
        writer: EpisodeWriter,
        *,
        max_success: int | None = None,
        max_failure: int | None = None,
        num_success: int = 0,
        num_failure: int = 0,
    ) -> None:
        """Archive to `writer`.

        Args:
            writer: receives the episodes.
            max_success: how many successes to keep, including those already there; None: all.
            max_failure: the same for failures.
            num_success: how many successes are there already.
            num_failure: how many failures are there already.
        """
        self.max_success, self.max_failure = max_success, max_failure
        self.num_success, self.num_failure = num_success, num_failure
        self.num_unfinished = self.num_dropped = 0
        self._writer = writer
        self._queue: queue.SimpleQueue[tuple[Episode, Callable[[], None]] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._waiting = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="guerdon-writer", daemon=True)
        self._thread.start()

    def _wants(self, success: bool) -> bool:
        """Whether another success (or failure) would be kept."""
        count = self.num_success if success else self.num_failure
        limit = self.max_success if success else self.max_failure
        return limit is None or count < limit

    @property
    def is_full(self) -> bool:
        """Whether both limits are reached."""
        return not (self._wants(True) or self._wants(False))

    def progress(self) -> str:
        """For a progress line, such as `success 12/50 fail 28/150`."""
        limits = (self.num_success, self.max_success), (self.num_failure, self.max_failure)
        good, bad = (str(count) if limit is None else f"{count}/{limit}" for count, limit in limits)
        return f"success {good} fail {bad}"

    def add(self, episode: Episode, release: Callable[[], None] = lambda: None) -> None:
        """Keep or drop an episode; `release` is called, maybe from the thread, when its arrays are free."""
        if episode.complete and not self._wants(episode.success):
            self.num_dropped += 1
            release()
            return
        self.check()
        with self._idle:
            self._waiting += 1
        self._queue.put((episode, release))
        self.num_unfinished += not episode.complete
        self.num_success += episode.complete and episode.success
        self.num_failure += episode.complete and not episode.success

    def check(self) -> None:
        """Raise what the thread ran into, if anything."""
        if self._error is None:
            return
        if isinstance(self._error, GuerdonError):
            raise self._error
        raise StorageError(f"writing an episode failed: {self._error!r}") from self._error

    def flush(self) -> None:
        """Wait until all that was queued is on disk."""
        with self._idle:
            self._idle.wait_for(lambda: self._waiting == 0)
        self.check()

    def close(self) -> None:
        """Write what is queued, close the writer, and raise if anything failed. Safe to call twice."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
            try:
                self._writer.close()
            except GuerdonError:
                if self._error is None:
                    raise
                log.warning("closing the data set failed too; the first failure is reported")
        self.check()

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            while batch[-1] is not None and len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            self._write([item for item in batch if item is not None])
            if batch[-1] is None:
                return

    def _write(self, batch: list[tuple[Episode, Callable[[], None]]]) -> None:
        try:
            if batch and self._error is None:
                self._writer.add_many([episode for episode, _ in batch])
        except BaseException as error:  # handed to the stepping thread by check()
            self._error = error
        finally:
            for _, done in batch:
                done()
            with self._idle:
                self._waiting -= len(batch)
                self._idle.notify_all()


def open_archive(
    save_dir: Path | str,
    format: str,
    target_success: int | None,
    target_failure: int | None,
    count_existing: bool = True,
) -> EpisodeArchive:
    """An archive that writes `format` to `save_dir`."""
    kind, root = get_format(format), Path(save_dir)
    num_success, num_failure = kind.count(root) if count_existing else (0, 0)
    return EpisodeArchive(
        kind.writer(root),
        max_success=target_success,
        max_failure=target_failure,
        num_success=num_success,
        num_failure=num_failure,
    )
