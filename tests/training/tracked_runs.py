"""A tracker that keeps what it gets, and what a run's folder holds for it."""

import threading
import time
from typing import ClassVar

from guerdon.config import load_config
from guerdon.training.trackers import TRACKERS, Tracker, follower
from guerdon.training.trackers.lines import row_of

REMOTE = ["wandb", "mlflow", "trackio"]


def config_for(folder, backends, *more):
    names = f"runner.logger.backends=[{','.join(backends)}]"
    return load_config("train", [f"runner.logger.log_path={folder}", names, *more])


def lines_of(folder):
    """(step, name, value) of `metrics.jsonl`."""
    return [
        (step, name, value)
        for line in (folder / "metrics.jsonl").read_bytes().splitlines()
        for step, values in [row_of(line)]
        for name, value in values.items()
    ]


def latest(numbers):
    """The last value of each metric at each step: those that were logged again count once."""
    return {(step, name): value for step, name, value in numbers}


class Fake(Tracker):
    """Keeps what it gets; a test may make it fail."""

    name, module, extra = "wandb", "json", "wandb"
    made: ClassVar[list] = []

    def __init__(self, run):
        self.run, self.rows, self.shown, self.kept, self.finished = run, [], [], [], None
        self.run_id = run.run_id or f"id{len(self.made)}"
        self.thread = threading.current_thread()
        self.made.append(self)

    def log(self, rows):
        self.before(rows)
        self.rows += [(step, name, value) for step, values in rows for name, value in values.items()]

    def before(self, rows):
        pass

    def picture(self, name, path, step):
        self.shown.append((name, path.name, step))

    film = picture

    def files(self, paths):
        self.kept += [path.name for path in paths]

    def close(self, *, finished):
        self.finished = finished


def install_fake(monkeypatch):
    """It takes the place of Weights & Biases, and nobody waits for long."""
    monkeypatch.setattr(Fake, "made", [])
    monkeypatch.setitem(TRACKERS, "wandb", Fake)
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.01)
    return Fake


def wait_for(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)
