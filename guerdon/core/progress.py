"""Progress bars on stderr, the same everywhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
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
