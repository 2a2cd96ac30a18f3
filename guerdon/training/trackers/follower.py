"""A thread that sends what a run leaves in its folder to one tracker.

The tracker never meets the training: it may be slow, refuse, or hang. What it did not take is still in the
run's files, and is sent when it answers again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from guerdon.core.errors import ConfigError, GuerdonError
from guerdon.data.files.bounds import one_line
from guerdon.monitoring.alarm_check import ALARMS_FILE
from guerdon.training.trackers.base import Row, TrackedRun, Tracker
from guerdon.training.trackers.lines import GrowingLines, as_object, row_of

log = logging.getLogger("guerdon")

POLL_SECONDS = 1.0
"""Between two looks at the run's files."""
MAX_PAUSE_SECONDS = 60.0
"""Between two attempts while a tracker does not answer."""
START_SECONDS = 120.0
"""For a tracker to start a run."""
CLOSE_SECONDS = 60.0
"""At the end of a run, for each call to a tracker."""
MAX_ROWS = 500
"""That are sent at a time."""
FILMS = (".gif", ".mp4")
FILES = ("config.yaml", "summary.json", "report.html", "card.html")
"""In a run's folder, where they are there; they are kept as they are."""


class Save(Protocol):
    """Keeps how far the followers of a run are."""

    def __call__(self, *, now: bool) -> None:
        """At once, or when it is time."""


class Follower:
    """Follows one run for one tracker; every call to the tracker is made by a thread of its own."""

    def __init__(
        self, kind: type[Tracker], run: TrackedRun, num_taken: tuple[int, int] | None, save: Save
    ) -> None:
        """Not started yet.

        Args:
            kind: the tracker.
            run: what it has to know.
            num_taken: lines of metrics and of alarms that it has already; None: all that are there.
            save: keeps how far the followers of a run are; called when this one has taken more.
        """
        self._thread = threading.Thread(target=self._follow, name=f"guerdon-{kind.name}", daemon=True)
        self.kind, self.run_info, self.run_id = kind, run, ""
        metrics, alarms = num_taken or (None, None)
        self.metrics = GrowingLines(run.folder / "metrics.jsonl", metrics)
        self.alarms = GrowingLines(run.folder / ALARMS_FILE, alarms)
        self._save = save
        self._started, self._ending, self._finished = threading.Event(), threading.Event(), False
        self._error: Exception | None = None
        self._failing = False  # since the last call that went well
        self._progress = time.monotonic()
        self._step = 0

    def begin(self) -> None:
        """Start, and wait until the tracker has; raises if it cannot."""
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            raise ConfigError(f"{self.kind.name} did not start within {START_SECONDS:.0f} s")
        error = self._error
        if isinstance(error, GuerdonError):
            raise error
        if error is not None:
            what = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 300)
            raise ConfigError(
                f"{self.kind.name} cannot start: {what} (runner.logger.backends names it)"
            ) from error

    def state(self) -> dict[str, Any]:
        """What a resumed run has to know; fields of `SavedRun`."""
        run, counts = self.run_info, {"metrics": self.metrics.num_taken, "alarms": self.alarms.num_taken}
        return {"id": self.run_id, "project": run.project, "name": run.name, **counts}

    def ask_to_end(self, *, finished: bool) -> None:
        """Send what is left, with films and files if the run is `finished`, and close."""
        self._finished = finished
        self._progress = time.monotonic()
        self._ending.set()

    def wait_for_end(self) -> None:
        """Until that is done; a tracker that hangs is left alone."""
        while self._thread.is_alive() and self._started.is_set():
            self._thread.join(0.5)
            if time.monotonic() - self._progress > CLOSE_SECONDS:
                log.warning(
                    "%s does not answer: what it has not taken stays in the run's folder", self.kind.name
                )
                return

    # In the thread

    def _follow(self) -> None:
        """Start the tracker, then send what comes until the end."""
        try:
            tracker = self.kind(self.run_info)
            self.run_id = tracker.run_id
        except Exception as error:  # of a foreign package; `begin` raises it
            self._error = error
            return
        finally:
            self._started.set()
        self._save(now=True)
        pause = POLL_SECONDS
        while not self._ending.wait(pause):
            fine = self._attempt(lambda: self._send_lines(tracker))
            pause = POLL_SECONDS if fine else min(2 * pause, MAX_PAUSE_SECONDS)
        everything = self._attempt(lambda: self._send_lines(tracker))
        if self._finished:
            everything &= self._attempt(lambda: self._send_files(tracker))
        everything &= self._attempt(lambda: tracker.close(finished=self._finished), quiet=not everything)
        self._save(now=True)
        if not everything:
            log.warning("%s has not got everything: it is in %s", self.kind.name, self.run_info.folder)

    def _attempt(self, send: Callable[[], None], *, quiet: bool = False) -> bool:
        """Whether that went well; unless `quiet`, an outage is logged when it begins and when it is over."""
        try:
            send()
        except Exception as error:  # of a foreign package, or of a network: it never stops the run
            if not self._failing and not quiet:
                what = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
                log.warning("%s does not take what is logged (%s); the run goes on", self.kind.name, what)
            self._failing = True
            return False
        if self._failing and not quiet:
            log.info("%s answers again", self.kind.name)
        self._failing = False
        return True

    def _send_lines(self, tracker: Tracker) -> None:
        """New metrics and pictures of alarms."""
        changed = False
        while lines := self.metrics.read():
            for start in range(0, len(lines), MAX_ROWS):
                part = lines[start : start + MAX_ROWS]
                rows: list[Row] = [row for line in part if (row := row_of(line)) is not None]
                tracker.log(rows)
                self._step = max([self._step, *(step for step, _ in rows)])
                self.metrics.take(part)
                self._progress, changed = time.monotonic(), True
        for line in self.alarms.read():
            self._send_alarm(tracker, line)
            self.alarms.take([line])
            changed = True
        if changed:
            self._save(now=False)

    def _send_alarm(self, tracker: Tracker, line: bytes) -> None:
        alarm = as_object(line)
        step, frames = alarm.get("step"), alarm.get("frames")
        if not isinstance(step, int) or not isinstance(frames, list):
            return
        for number, frame in enumerate(frames):
            path = self.run_info.folder / str(frame)
            if path.is_file():
                tracker.picture(f"alarms/{alarm.get('name')}/{number}", path, step)
                self._progress = time.monotonic()

    def _send_files(self, tracker: Tracker) -> None:
        """Films, and the files that tell what came of the run."""
        folder = self.run_info.folder
        for film in _in_order(folder / "videos", FILMS):
            tracker.film(f"videos/{film.stem}", film, self._step)
            self._progress = time.monotonic()
        tracker.files([path for name in FILES if (path := folder / name).is_file()])
        self._progress = time.monotonic()


def _in_order(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes)
