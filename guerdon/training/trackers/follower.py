"""A thread that sends what a run leaves in its folder to one tracker.

The tracker never meets the training: it may be slow, refuse, or hang. What it did not take is still in the
run's files, and is sent when it answers again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from guerdon.core.errors import ConfigError, GuerdonError
from guerdon.data.files.bounds import one_line
from guerdon.monitoring.alarm_check import ALARMS_FILE
from guerdon.training.trackers.base import Row, TrackedRun, Tracker
from guerdon.training.trackers.delivery import Delivery, Piece
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
MAX_LAST_ATTEMPTS = 30
"""At the end of a run, as long as each brings something."""
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
        self.kind, self.run_info = kind, run
        self.run_id: str | None = None
        """Once it has started; empty for a tracker whose runs are in their folders."""
        metrics, alarms = num_taken or (None, None)
        self.metrics = GrowingLines(run.folder / "metrics.jsonl", metrics)
        self.alarms = GrowingLines(run.folder / ALARMS_FILE, alarms)
        self._deliveries = (
            Delivery(self.metrics, _numbers_of, kind.name, kind.max_rows, kind.max_numbers),
            Delivery(self.alarms, self._pictures_of, kind.name),
        )
        self._save = save
        self._started, self._ending, self._finished = threading.Event(), threading.Event(), False
        self._error: Exception | None = None
        self._failing: set[object] = set()  # what did not go well when it was last tried
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
            self._save(now=True)  # before the run begins, whatever kills it then
        except Exception as error:  # of a foreign package; `begin` raises it
            self._error = error
            return
        finally:
            self._started.set()
        early = self._deliveries[:1] if self.kind.pictures_at_end else self._deliveries
        pauses, due = dict.fromkeys(early, POLL_SECONDS), dict.fromkeys(early, 0.0)
        while not self._ending.wait(POLL_SECONDS):
            for each in early:
                if time.monotonic() < due[each]:
                    continue
                fine = self._deliver(tracker, each)
                more = fine or each.answered
                pauses[each] = POLL_SECONDS if more else min(2 * pauses[each], MAX_PAUSE_SECONDS)
                due[each] = 0.0 if more else time.monotonic() + pauses[each]
        everything = True
        for each in self._deliveries:
            everything &= self._deliver_rest(tracker, each)
        if self._finished:
            everything &= self._send_files(tracker)
        close = partial(tracker.close, finished=self._finished)
        everything &= self._attempt("the end", close, quiet=not everything)
        self._save(now=True)
        if not everything:
            log.warning("%s has not got everything: it is in %s", self.kind.name, self.run_info.folder)

    def _attempt(self, what: object, send: Callable[[], None], *, quiet: bool = False) -> bool:
        """Whether that went well; unless `quiet`, an outage is logged when it begins and when it is over."""
        try:
            send()
        except Exception as error:  # of a foreign package, or of a network: it never stops the run
            if not self._failing and not quiet:
                message = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
                log.warning("%s does not take what is logged (%s); the run goes on", self.kind.name, message)
            self._failing.add(what)
            return False
        if self._failing == {what} and not quiet:
            log.info("%s answers again", self.kind.name)
        self._failing.discard(what)
        return True

    def _deliver(self, tracker: Tracker, delivery: Delivery, *, last: bool = False) -> bool:
        """Send what is new of metrics or of alarms; whether nothing is left."""
        send = partial(self._send_rows if delivery.lines is self.metrics else self._send_pictures, tracker)
        fine = self._attempt(delivery, partial(delivery.attempt, send, last=last))
        if delivery.answered:
            self._save(now=False)
        return fine

    def _deliver_rest(self, tracker: Tracker, delivery: Delivery) -> bool:
        """Send all that the tracker takes; whether it has everything."""
        for _ in range(MAX_LAST_ATTEMPTS):
            if self._deliver(tracker, delivery, last=True):
                return not delivery.left_out
            if not delivery.answered:
                break
            time.sleep(POLL_SECONDS)
        return False

    def _send_rows(self, tracker: Tracker, pieces: Sequence[Piece]) -> None:
        rows: list[Row] = []
        for _, row in groupby(pieces, key=lambda piece: piece.line):
            numbers = list(row)
            rows.append((numbers[0].step, {each.name: each.value for each in numbers}))
        tracker.log(rows)
        self._step = max(self._step, *(step for step, _ in rows))
        self._progress = time.monotonic()

    def _send_pictures(self, tracker: Tracker, pieces: Sequence[Piece]) -> None:
        (piece,) = pieces
        assert piece.path is not None
        tracker.picture(piece.name, piece.path, piece.step)
        self._progress = time.monotonic()

    def _pictures_of(self, number: int, line: bytes) -> list[Piece]:
        """Frames that raised an alarm."""
        alarm = as_object(line)
        step, frames = alarm.get("step"), alarm.get("frames")
        if not isinstance(step, int) or not isinstance(frames, list):
            return []
        paths = [self.run_info.folder / str(frame) for frame in frames]
        return [
            Piece(number, step, f"alarms/{alarm.get('name')}/{index}", path=path)
            for index, path in enumerate(paths)
            if path.is_file()
        ]

    def _send_files(self, tracker: Tracker) -> bool:
        """Films, and the files that tell what came of the run; whether all are taken."""
        folder, fine = self.run_info.folder, True
        sends = [
            partial(tracker.film, f"videos/{film.stem}", film, self._step)
            for film in _in_order(folder / "videos", FILMS)
        ]
        files = [path for name in FILES if (path := folder / name).is_file()]
        for send in (*sends, partial(tracker.files, files)):
            taken = self._attempt(send, send)
            fine &= taken
            if taken:
                self._progress = time.monotonic()
        return fine


def _numbers_of(number: int, line: bytes) -> list[Piece]:
    """Those of a line of `metrics.jsonl`."""
    row = row_of(line)
    return [] if row is None else [Piece(number, row[0], name, value) for name, value in row[1].items()]


def _in_order(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes)
