"""Three test processes share two cores, as some of them wait: one thread each, in what they start too."""

import os
import signal
import threading

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

# A shell that starts the tests in the background has Ctrl-C ignored, and so would have all that they start.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = ("run/test_learning", "test_docs", "fit/test_distributed", "parallel/", "run/")
"""Files that take minutes; they go first, so that in the end no process waits for another."""


def pytest_collection_modifyitems(items):
    def place(item):
        name = item.nodeid.removeprefix("tests/")
        return next((n for n, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))

    items.sort(key=place)
