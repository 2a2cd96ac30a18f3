"""Progress bars on stderr, the time that parts of a run take, and what a reward model notes for the log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

# Its own lock is shared between processes, and left behind by those that are ended.
tqdm.set_lock(threading.RLock())


def progress(
    items: Iterable[T], what: str, total: int | None = None, unit: str = "it", *, quiet: bool = False
) -> Iterable[T]:
    """Iterate with a progress bar if stderr is a terminal; quietly otherwise."""
    hidden = quiet or not sys.stderr.isatty()
    return tqdm(items, desc=what, total=total, unit=unit, disable=hidden, leave=False)


def progress_bar(what: str, total: int | None = None, unit: str = "it", *, quiet: bool = False) -> Any:
    """A bar to be moved by hand; close it (or use `with`) when done."""
    hidden = quiet or not sys.stderr.isatty()
    return tqdm(desc=what, total=total, unit=unit, disable=hidden, leave=False)


@dataclass
class Stopwatch:
    """Seconds by name, for `time/*`."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        """The time since the last lap was spent on `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def metrics(self, env_steps: int) -> dict[str, float]:
        """`time/<name>` and the rate of environment steps."""
        total = sum(self.seconds.values())
        named = {f"time/{name}": value for name, value in self.seconds.items()}
        return {**named, "time/steps_per_second": env_steps / total}


class Notes:
    """What a reward model has for a logger: scalars are noted and logged with the next line of metrics.

    Everything else goes to TensorBoard as it comes, or nowhere if nothing is written.
    """

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}
        self.board: Any = None

    def add_scalar(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note a number; the latest one of a name counts."""
        self.scalars[name] = float(value)

    def named(self, learned: Any) -> dict[str, float]:
        """What a model returned for the log, which may be anything, and what it noted."""
        noted, self.scalars = self.scalars, {}
        given = learned if isinstance(learned, Mapping) else {}
        return {f"reward_model/{name}": float(value) for name, value in given.items()} | noted

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("add_") and name not in ("flush", "close"):
            raise AttributeError(name)
        return (lambda *args, **kwargs: None) if self.board is None else getattr(self.board, name)
