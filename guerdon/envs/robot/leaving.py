"""A process that is told to end must not leave an arm on its way."""

from __future__ import annotations

import signal
import threading


def end_like_ctrl_c() -> None:
    """From now on SIGTERM does what Ctrl-C does: it is raised where the program is, and the arm is stopped.

    By default it would end the process at once, with the arm on its way to the last target. Where somebody
    else has a plan for the signal, theirs is kept; only the main thread can make one.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
