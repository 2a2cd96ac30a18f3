"""Checks of text that might never end, in a process of their own that is ended after a few seconds.

Neither a regular expression nor computer algebra can be stopped from within a thread, and signals reach the
main thread alone. So the checks run in one child process with a watchdog: it works from any thread, and a
check that hangs or eats up the memory costs its own score and a new process, nothing else. The watchdog
counts the processor's time, so that a score does not depend on what else the machine does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from guerdon.core.errors import ConfigError
from guerdon.core.parent_watch import end_with

log = logging.getLogger("guerdon")

Pair: TypeAlias = tuple[str, str]
"""(response, reference)."""
MEMORY_LIMIT = 4 << 30
"""Bytes of address space of the child, where the system can limit it."""
PATIENCE = 10.0
"""A pair is given up after so many times its seconds, whatever the processor did meanwhile."""


class DeadlineChecks:
    """Runs one of `CHECKS` on pairs of texts; the child starts with the first batch and stays.

    Args:
        check: a name in `CHECKS`.
        settings: arguments of the check.
        seconds: what a single pair may take of a processor's time.
    """

    def __init__(self, check: str, settings: Mapping[str, Any], seconds: float) -> None:
        self._task = {"check": check, "settings": dict(settings), "seconds": seconds}
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._owner = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies in other processes start children of their own."""
        return type(self), (self._task["check"], self._task["settings"], self._task["seconds"])

    def run(self, pairs: Sequence[Pair]) -> list[bool]:
        """Which pairs pass; one that takes too long, or breaks the check, does not."""
        passed: list[bool] = []
        with self._lock:
            while len(passed) < len(pairs):
                passed += self._ask(pairs[len(passed) :])
        return passed

    def close(self) -> None:
        """End the child; the next batch starts another."""
        with self._lock:
            self._stop()

    def _ask(self, pairs: Sequence[Pair]) -> list[bool]:
        """Results of the pairs that the child lives through, and a failure for the one that ended it."""
        child, passed = self._started(), list[bool]()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(pairs) + "\n")
            child.stdin.flush()
        except BrokenPipeError:  # it ended while idle; the loss of nothing but a process
            self._stop()
            return passed
        for _ in pairs:
            line = child.stdout.readline()
            if not line:
                log.debug("text check: pair %d took too long or too much memory: no reward", len(passed))
                self._stop()
                return [*passed, False]
            answer = json.loads(line)
            if answer["note"]:
                log.debug("text check: %s: no reward", answer["note"])
            passed.append(answer["passed"])
        return passed

    def _started(self) -> subprocess.Popen[str]:
        """The child, started if need be; it first says that it is ready, or why not."""
        if self._owner != os.getpid():  # after a fork the pipes belong to the parent
            self._child, self._owner = None, os.getpid()
        if self._child is not None:
            return self._child
        child = subprocess.Popen(
            [sys.executable, "-m", "guerdon.rewards.text.deadline", json.dumps(self._task), str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, encoding="utf-8",
        )  # fmt: skip
        self._child = child
        self._finalizer = weakref.finalize(self, _end, child, os.getpid())
        assert child.stdout is not None
        greeting = child.stdout.readline().strip()
        if greeting != "ready":
            self._stop()
            raise ConfigError(greeting or "the process that checks texts could not be started")
        return child

    def _stop(self) -> None:
        if self._child is not None:
            self._finalizer()
            self._child = None


def _end(child: subprocess.Popen[str], owner: int) -> None:
    """End a child and wait for it; a forked copy of its owner leaves it alone."""
    if os.getpid() == owner:
        child.kill()
        child.communicate()


# In the child


def _watch_over(seconds: float) -> None:
    """End this process if it computes for so long from now on; 0 ends the watch."""
    clock = getattr(signal, "setitimer", None)  # not on every system
    if clock is not None:
        clock(signal.ITIMER_PROF, seconds)  # its signal ends a process, also one that never looks for signals
    if seconds:
        faulthandler.dump_traceback_later(seconds * (1.0 if clock is None else PATIENCE), exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def _math_check(answer_tag: str | None, max_chars: int) -> Callable[[str, str], bool]:
    try:
        from math_verify import parse, verify  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError("math-verify is not installed: pip install 'guerdon[text]'") from None

    def read(text: str) -> list[Any]:
        bare = not any(mark in text for mark in ("$", "\\boxed", "\\(", "\\["))
        # No time limits of its own: they need signals, and there is the watchdog.
        return list(parse(f"${text}$" if bare else text, parsing_timeout=None))

    def check(response: str, reference: str) -> bool:
        if answer_tag is None:
            said = list(parse(response[-max_chars:], parsing_timeout=None))
        else:
            said = read(tagged(response, answer_tag)[-max_chars:])
        right = read(reference)
        if verify(right, said, timeout_seconds=None):
            return True
        for name, parts in (("response", said), ("reference", right)):
            if all(
                isinstance(part, str) for part in parts
            ):  # math-verify returns what it cannot parse as text
                raise ValueError(f"no mathematical expression could be read in the {name}")
        return False

    for known in (r"\frac{1}{2}", "(x+1)^2", r"\{1, 2\}"):  # the first of a kind loads code: not its fault
        verify(read(known), read(known), timeout_seconds=None)
    return check


def _regex_check(pattern: str, flags: int, full: bool, references: bool) -> Callable[[str, str], bool]:
    test = re.fullmatch if full else re.search
    re.compile(pattern.replace("{reference}", ""), flags)  # the first response does not pay for it

    def check(response: str, reference: str) -> bool:
        filled = pattern.replace("{reference}", re.escape(reference)) if references else pattern
        return test(filled, response, flags) is not None  # `re` keeps the latest expressions compiled

    return check


def tagged(text: str, tag: str) -> str:
    """What stands in the last `<tag>...</tag>`; nothing if there is none."""
    _, opening, inside = text.rpartition(f"<{tag}>")
    inside, closing, _ = inside.partition(f"</{tag}>")
    return inside.strip() if opening and closing else ""


CHECKS: dict[str, Callable[..., Callable[[str, str], bool]]] = {"math": _math_check, "regex": _regex_check}
"""What the child can do."""


def _serve(task: Mapping[str, Any]) -> None:
    """Answer batches (a line of JSON each) pair by pair until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library that prints must not garble the answers
    try:
        check = CHECKS[task["check"]](**task["settings"])
    except ConfigError as error:
        print(error, file=answers, flush=True)
        return
    with contextlib.suppress(ImportError):  # Windows has no limits of this kind
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        for response, reference in json.loads(line):
            passed, note = False, ""
            _watch_over(task["seconds"])
            try:
                passed = check(response, reference)
            except Exception as error:  # whatever computer algebra makes of bad input, it is no success
                note = f"{type(error).__name__}: {error}"[:200]
            finally:
                _watch_over(0.0)
            print(json.dumps({"passed": passed, "note": note}), file=answers, flush=True)


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    _serve(json.loads(sys.argv[1]))
