"""Progress on stderr, the time that parts of a run take, and what a reward model notes for the log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

LINE_SECONDS = 10.0
"""Before the first line of progress and, at least, between two of them."""
LINE_SHARE = 0.02
"""Of the time that has passed: the interval between lines of a long run."""

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
    """Iterate with a progress bar, or with lines now and then where stderr is no terminal."""
    bar: Iterable[T] = _make_bar(quiet, iterable=items, desc=what, total=total, unit=unit)
    return bar


def progress_bar(what: str, total: int | None = None, unit: str = "it", *, quiet: bool = False) -> Any:
    """A bar to be moved by hand; close it (or use `with`) when done."""
    return _make_bar(quiet, desc=what, total=total, unit=unit)


def _make_bar(quiet: bool, **settings: Any) -> Any:
    quiet = quiet or _QUIET.get()
    if quiet or sys.stderr.isatty():
        return tqdm(**settings, disable=quiet, leave=False)
    return ProgressLines(**settings)


class ProgressLines(tqdm):  # type: ignore[type-arg]
    """Progress for a file or a pipe: a line after ten seconds, then at growing intervals."""

    def __init__(self, **settings: Any) -> None:
        known = "{percentage:3.0f}% ({n_fmt}/{total_fmt} {unit}, {elapsed} gone, {remaining} left)"
        shown = known if settings.get("total") else "{n_fmt} {unit} ({elapsed} gone)"
        super().__init__(
            **settings,
            file=sys.stderr,
            leave=False,
            delay=LINE_SECONDS,
            mininterval=LINE_SECONDS,
            miniters=1,
            bar_format="{desc}: " + shown + "{postfix}",
        )

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Print the state as a line of its own."""
        elapsed = self.format_dict["elapsed"]
        self.mininterval = max(LINE_SECONDS, elapsed * LINE_SHARE)  # a run of a day has some hundred lines
        self.fp.write(f"{str(self).strip()}\n")
        self.fp.flush()

    def close(self) -> None:
        """End without clearing the last line."""
        self.last_print_t = self.start_t
        super().close()


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
