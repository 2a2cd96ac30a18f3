"""Sends what the lines of a file hold to a tracker: each piece once, in order, around what is refused.

A call that fails tells little: the tracker may be away, or it may refuse one piece for ever. A piece is left
out only if it fails alone again and again while the same tracker takes other pieces.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from guerdon.data.files.bounds import one_line
from guerdon.training.trackers.lines import GrowingLines

log = logging.getLogger("guerdon")

MAX_FAILURES = 5
"""Of a call before its pieces are sent in smaller parts; of a single piece before it is left out."""
MAX_FAILURES_AGAIN = 2
"""The same of a piece whose kind was refused before."""
MAX_PASSED = 20
"""At the end of a run, pieces that fail before a tracker counts as away."""
SHRINK = 10
"""A part that fails is sent in parts that are smaller by this factor; those that are taken grow by it."""


class Piece(NamedTuple):
    """One number, or one picture."""

    line: int
    """Of the file, from 0; numbers of one line are one row."""
    step: int
    name: str
    value: float = 0.0
    path: Path | None = None
    """Of a picture."""

    @property
    def kind(self) -> Hashable:
        """What a tracker refuses: all numbers of a name, or one picture."""
        return self.path or self.name


class Delivery:
    """The pieces of one file on their way to one tracker.

    Args:
        lines: the file; a line is taken when all of its pieces are.
        pieces_of: of the line of that number.
        tracker: its name, for the log.
        max_rows: lines that a call may hold pieces of.
        max_pieces: of a call.
    """

    def __init__(
        self,
        lines: GrowingLines,
        pieces_of: Callable[[int, bytes], list[Piece]],
        tracker: str,
        max_rows: int = 1,
        max_pieces: int = 1,
    ) -> None:
        self.lines, self._pieces_of, self._tracker = lines, pieces_of, tracker
        self._max_rows, self._max_pieces = max_rows, max_pieces
        self.answered = False
        """Whether the tracker took a piece in the last attempt."""
        self.left_out = 0
        """Pieces that the tracker refuses."""
        self._refused: set[Hashable] = set()
        self._size = max_pieces
        self._failures = 0  # of calls since one of full size was taken
        self._alone: tuple[Piece | None, int] = (None, 0)  # a piece, and how often it failed by itself
        self._probes = 0
        self._dealt_with: set[Piece] = set()  # of lines that are not taken yet
        self._queue: deque[Piece] = deque()
        self._passed: list[Piece] = []  # over, in the last attempts of a run
        self._failed: set[Hashable] = set()  # kinds of these since something was taken

    def attempt(self, send: Callable[[Sequence[Piece]], None], *, last: bool = False) -> None:
        """Send what is new; raises if something is left that the tracker does not take now.

        Args:
            send: takes all pieces of a call, or raises and takes none.
            last: the run is over, and what comes after a piece that fails is sent now, too.
        """
        self.answered = False
        while lines := self.lines.read():
            first = self.lines.num_taken
            pieces = (piece for at, line in enumerate(lines, first) for piece in self._pieces_of(at, line))
            self._queue = deque(piece for piece in pieces if piece not in self._dealt_with)
            self._passed, self._failed, error = [], set(), None
            self._take(lines, first)
            while self._queue:
                if self._queue[0].kind in self._failed:
                    self._passed.append(self._queue.popleft())
                    continue
                part = self._part()
                try:
                    send(part)
                except Exception as failure:  # of a foreign package, or of a network
                    error = failure
                    if not (self._passes(part) if last else self._goes_on(part, send, failure)):
                        raise
                else:
                    self._succeeded(part)
                self._take(lines, first)
            if self._passed and error is not None:
                raise error

    def _part(self) -> list[Piece]:
        """The next pieces for one call; those of a kind that was refused before go alone."""
        part: list[Piece] = []
        rows: set[int] = set()
        unsure = self._refused | self._failed
        for piece in islice(self._queue, self._size):
            rows.add(piece.line)
            if len(rows) > self._max_rows or (part and piece.kind in unsure):
                break
            part.append(piece)
            if piece.kind in self._refused:
                break
        return part

    def _succeeded(self, part: list[Piece]) -> None:
        self.answered = True
        self._refused.discard(part[0].kind)  # alone in its part, if it was refused before
        self._failed.clear()
        if self._size == self._max_pieces:
            self._failures = 0
        self._size = min(SHRINK * self._size, self._max_pieces)
        self._settle(len(part))

    def _settle(self, count: int) -> None:
        """The first pieces of the queue are dealt with."""
        self._dealt_with.update(self._queue.popleft() for _ in range(count))

    def _take(self, lines: list[bytes], first: int) -> None:
        """Take the lines before the first piece that is left."""
        left = [*islice(self._queue, 1), *self._passed[:1]]
        end = min((piece.line for piece in left), default=first + len(lines))
        if end > self.lines.num_taken:
            self.lines.take(lines[self.lines.num_taken - first : end - first])
            self._dealt_with = {piece for piece in self._dealt_with if piece.line >= end}

    # A call that failed

    def _goes_on(self, part: list[Piece], send: Callable[[Sequence[Piece]], None], error: Exception) -> bool:
        """Whether there is something to send at once: smaller parts, or what follows a refused piece."""
        self._failures += part[0].kind not in self._refused
        if len(part) > 1:
            if self._failures < MAX_FAILURES:
                return False
            self._size = max(1, len(part) // SHRINK)
            return True
        piece, count = part[0], self._alone[1] + 1 if self._alone[0] == part[0] else 1
        self._alone = piece, count
        known = piece.kind in self._refused
        if count < MAX_FAILURES and not known:
            return False
        if not self.answered:
            self.answered = self._probe(send)
            return self.answered  # then this piece has one more chance
        if count < MAX_FAILURES_AGAIN:
            return True
        if not known:
            what = one_line(" ".join(f"{type(error).__name__}: {error}".split()), 200)
            log.warning("%s refuses %s (%s): it gets all but that", self._tracker, piece.name, what)
        self._refused.add(piece.kind)
        self.left_out += 1
        self._settle(1)
        return True

    def _probe(self, send: Callable[[Sequence[Piece]], None]) -> bool:
        """Whether the tracker takes one of the later pieces, another one each time."""
        later = list(islice(self._queue, 1, None))
        kinds = {*self._refused, self._queue[0].kind}
        later = [piece for piece in later if piece.kind not in kinds] or later
        if not later:
            return False
        piece = later[self._probes % len(later)]
        self._probes += 1
        try:
            send([piece])
        except Exception:  # of a foreign package, or of a network
            return False
        self._queue.remove(piece)
        self._dealt_with.add(piece)
        return True

    def _passes(self, part: list[Piece]) -> bool:
        """Go on behind a piece that fails, unless nothing is taken at all."""
        if len(part) > 1:
            self._size = max(1, len(part) // SHRINK)
            return True
        self._failed.add(part[0].kind)
        self._passed.append(self._queue.popleft())
        return self.answered or len(self._failed) < MAX_PASSED
