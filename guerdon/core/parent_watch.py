"""Processes that we start end when we do, whatever way we end: also after `kill -9`.

The end of a pipe does not tell it: whoever was forked meanwhile holds the pipe open. The kernel knows.
"""

from __future__ import annotations

import os
import select
import threading
import time

POLL_SECONDS = 0.5


def end_with(pid: int) -> None:
    """From now on this process ends with process `pid`, which started it; at once if that is gone already.

    The parent of this process may be another one, such as the server that it was forked from.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # another system, or one that does not allow it
        if os.name == "nt":  # signal 0 is Ctrl-C there, and the parent's number stays
            return
        threading.Thread(target=_poll, args=(pid, os.getppid()), daemon=True).start()
        return
    threading.Thread(target=_wait, args=(handle,), daemon=True).start()


def _wait(handle: int) -> None:
    """Until the process of a `pidfd` has ended, also if nobody has taken note of its end yet."""
    end = select.poll()
    end.register(handle, select.POLLIN)
    while not end.poll():
        pass
    os._exit(1)


def _poll(pid: int, parent: int) -> None:
    """The same by looking again and again; an orphan gets another parent."""
    while os.getppid() == parent and _exists(pid):
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:  # it may be there and not ours to send signals to
        return isinstance(error, PermissionError)
    return True
