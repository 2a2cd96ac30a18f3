"""Waiting for processes, for tests that start some and end them."""

import time
from pathlib import Path


def alive(pid):
    """Whether a process is there and is more than an exit code that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, process=None, seconds=400):
    """Until `condition()` holds; `process`, where there is one, must not end before."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it takes too long"
        assert process is None or process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
