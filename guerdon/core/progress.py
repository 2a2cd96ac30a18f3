"""Progress bars on stderr, the same everywhere, and the time that parts of a run take."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

# Its own lock is shared between processes, and left behind by those that are ended.
tqdm.set_lock(threading.RLock())

_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)


@contextmanager
def no_progress() -> Iterator[None]:
    """Show no progress while the block runs."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def progress(
    items: Iterable[T], what: str, total: int | None = None, unit: str = "it", *, quiet: bool = False
) -> Iterable[T]:
    """Iterate with a progress bar if stderr is a terminal; quietly otherwise."""
    hidden = quiet or _QUIET.get() or not sys.stderr.isatty()
    return tqdm(items, desc=what, total=total, unit=unit, disable=hidden, leave=False)


def progress_bar(what: str, total: int | None = None, unit: str = "it", *, quiet: bool = False) -> Any:
    """A bar to be moved by hand; close it (or use `with`) when done."""
    hidden = quiet or _QUIET.get() or not sys.stderr.isatty()
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
