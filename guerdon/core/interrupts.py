"""Ctrl-C in a long loop: what there is can be saved between two steps; a second Ctrl-C ends at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

SAID = b"\ninterrupted: saving as soon as this step is over; Ctrl-C again ends at once\n"
_PLAIN = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_UNDER = "TORCHELASTIC_RUN_ID"
"""Set by `torchrun`, which hands Ctrl-C on to its processes as one of these signals."""
_listeners: list[Callable[[], bool]] = []


def also_ask(requested: Callable[[], bool]) -> None:
    """Let this process be interrupted by another one too: `requested` tells whether it wants that."""
    _listeners.append(requested)


class Interrupts:
    """Takes Ctrl-C while it is in a `with` block, in the main thread; elsewhere it changes nothing.

    Where somebody else has a plan for the signal, theirs is kept.
    """

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        """`tell` is called at the first Ctrl-C within `deferred`; it must not wait for anything."""
        self.count = 0
        """How often Ctrl-C was pressed."""
        self._tell = tell
        self._deferred = False
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether to stop."""
        return self.count > 0 or any(asked() for asked in _listeners)

    @contextmanager
    def deferred(self, wanted: bool = True) -> Iterator[None]:
        """The first Ctrl-C in this block is only noted; unless `wanted` it is raised where the program is."""
        before, self._deferred = self._deferred, wanted
        try:
            yield
        finally:
            self._deferred = before

    def check(self) -> None:
        """Raise what was noted."""
        if self.requested:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number, plain in _PLAIN.items():
                if signal.getsignal(number) is plain and (number == signal.SIGINT or _UNDER in os.environ):
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1 or not self._deferred:
            raise KeyboardInterrupt
        self._tell()
        with suppress(OSError):  # not through a stream, which may be in the middle of a write
            os.write(2, SAID)
