"""`Trackers`: the trackers of one run, and which runs of theirs are this one."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self

from guerdon.config import GuerdonConfig, to_plain
from guerdon.core import strict_json
from guerdon.core.atomic import write_atomic
from guerdon.core.errors import DataError, GuerdonError, StorageError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line, read_small
from guerdon.training.trackers.base import TrackedRun, Tracker, require_module
from guerdon.training.trackers.follower import FILES, Follower
from guerdon.training.trackers.mlflow_tracker import MlflowTracker
from guerdon.training.trackers.tensorboard_tracker import TensorBoardTracker
from guerdon.training.trackers.trackio_tracker import TrackioTracker
from guerdon.training.trackers.wandb_tracker import WandbTracker

TRACKERS: dict[str, type[Tracker]] = {
    each.name: each for each in (TensorBoardTracker, WandbTracker, MlflowTracker, TrackioTracker)
}
"""Name in `runner.logger.backends` -> tracker."""
TRACKERS_FILE = "trackers.json"
"""In a run's folder: tracker -> id of its run, project, name, and how many lines it has taken."""
SAVE_SECONDS = 10.0
"""Between two writes of that file."""

log = logging.getLogger("guerdon")


def require_trackers(backends: Sequence[str]) -> None:
    """Raise if the package of one of them is not installed; nothing is imported."""
    for name in backends:
        require_module(TRACKERS[name])


class Trackers:
    """Shows a run's folder to the trackers of its config until the run is over; use it in a `with` block.

    Each has a thread of its own. `finish` sends films and files of a run that came to its end; without it the
    run counts as interrupted.
    """

    def __init__(self, config: GuerdonConfig, folder: Path) -> None:
        """Nothing starts yet; one that is not installed is an error."""
        require_trackers(config.runner.logger.backends)
        self._config, self._folder = config, folder
        self._lock, self._saved_at = threading.Lock(), -math.inf
        self._followers: list[Follower] = []
        self._begun = self._over = False

    def begin(self, config: GuerdonConfig | None = None) -> None:
        """Start them, unless that is done; one that cannot start a run is an error.

        Args:
            config: that they show; None: the one given before.
        """
        if self._begun:
            return
        self._begun, self._config = True, config or self._config
        runner, folder = self._config.runner, self._folder
        here = {} if runner.resume_dir is None else read_trackers(folder)
        known = here or ({} if runner.resume_dir is None else _trackers_above(Path(runner.resume_dir)))
        plain, new_name = to_plain(self._config), f"{runner.experiment_name}-{folder.resolve().name}"
        try:
            for each in dict.fromkeys(runner.logger.backends):
                saved = known.get(each, SavedRun("", runner.logger.project_name, new_name))
                run = TrackedRun(
                    folder=folder.resolve(),
                    project=saved.project,
                    name=saved.name,
                    config=plain,
                    run_id=saved.id or None,
                )
                taken = (here[each].metrics, here[each].alarms) if each in here else None
                follower = Follower(TRACKERS[each], run, taken, self._save)
                self._followers.append(follower)
                follower.begin()
        except BaseException:
            self.close()
            raise

    def finish(self) -> None:
        """The run came to its end, and everything about it is in its folder."""
        self._end(finished=True)

    def close(self) -> None:
        """The run is over, whether it came to its end or not; may be called again."""
        self._end(finished=False)

    def _end(self, *, finished: bool) -> None:
        if self._over:
            return
        self._over = True
        for each in self._followers:
            each.ask_to_end(finished=finished)
        for each in self._followers:
            each.wait_for_end()

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _save(self, *, now: bool) -> None:
        """Keep which runs they are and how far they are, at most every few seconds unless `now`."""
        with self._lock:
            if not now and time.monotonic() < self._saved_at + SAVE_SECONDS:
                return
            self._saved_at = time.monotonic()
            known = {each.kind.name: each.state() for each in self._followers if each.run_id is not None}
            if not known:
                return
            try:
                write_atomic(self._folder / TRACKERS_FILE, strict_json.dumps(known, indent=1))
            except StorageError as error:
                log.warning("a resumed run would start new runs at the trackers: %s", error)


class SavedRun(NamedTuple):
    """What `trackers.json` tells of one tracker."""

    id: str
    """By which the tracker finds its run; empty for TensorBoard, whose runs are in their folders."""
    project: str
    name: str
    metrics: int = 0
    """Lines of `metrics.jsonl` that it has taken."""
    alarms: int = 0
    """The same of `alarms.jsonl`."""


def read_trackers(folder: Path) -> dict[str, SavedRun]:
    """The trackers' runs of the run in `folder`; empty if it has none."""
    path = folder / TRACKERS_FILE
    try:
        content = read_small(path)
    except FileNotFoundError:
        return {}
    try:
        found = json.loads(content)
        runs = {name: SavedRun(**saved) for name, saved in found.items() if name in TRACKERS}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{display_path(path)} is damaged: {one_line(error)}") from error
    for saved in runs.values():
        texts, counts = saved[:3], saved[3:]
        if not all(isinstance(each, str) for each in texts) or not all(type(each) is int for each in counts):
            raise DataError(f"{display_path(path)} is damaged: {one_line(saved)}")
    return runs


def _trackers_above(place: Path) -> dict[str, SavedRun]:
    """Of the run that a folder or checkpoint belongs to."""
    for folder in (place, *place.resolve().parents[:3]):
        if folder.is_dir() and (found := read_trackers(folder)):
            return found
    return {}


def send_files(place: Path, paths: Sequence[Path]) -> list[str]:
    """Add files, such as a reward card, to the trackers' runs of a run that is over.

    Args:
        place: a folder or checkpoint of the run.
        paths: they join the run's own files (`FILES`); one of the same name takes its place.

    Returns:
        The trackers that have them now.
    """
    folder = next((each for each in (place, *place.resolve().parents[:3]) if _has_trackers(each)), place)
    known = {name: saved for name, saved in read_trackers(folder).items() if saved.id}
    if not known:
        raise DataError(f"the run of {display_path(place)} has no tracker to send to (in {TRACKERS_FILE})")
    require_trackers(tuple(known))
    names = {path.name: path for name in FILES if (path := folder / name).is_file()}
    names |= {path.name: path for path in paths}
    for name, saved in known.items():
        run = TrackedRun(
            folder=folder.resolve(),
            project=saved.project,
            name=saved.name,
            config={},
            run_id=saved.id,
            adds_files=True,
        )

        def send(kind: type[Tracker] = TRACKERS[name], run: TrackedRun = run) -> None:
            tracker = kind(run)
            try:
                tracker.files(list(names.values()))
            finally:
                tracker.close(finished=(run.folder / "summary.json").is_file())

        try:
            with ThreadPoolExecutor(1) as pool:  # a package may keep what belongs to its caller's thread
                pool.submit(send).result()
        except GuerdonError:
            raise
        except Exception as error:  # of a foreign package, or of a network
            raise StorageError(f"{name} does not take the files: {one_line(error)}") from error
    return list(known)


def _has_trackers(folder: Path) -> bool:
    return (folder / TRACKERS_FILE).is_file()
