"""Processes that we start end with us, also if somebody else holds our pipes open."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.processes import alive, wait_for

START = textwrap.dedent(
    """
    import multiprocessing, os, sys, time
    from guerdon.core.parent_watch import end_with

    def work(parent, pidfd):
        if not pidfd:
            del os.pidfd_open  # as on other systems
        end_with(parent)
        while True:
            time.sleep(0.1)

    def started(method, pidfd):
        process = multiprocessing.get_context(method).Process(target=work, args=(os.getpid(), pidfd))
        process.start()
        return process.pid

    def checking():
        from guerdon.rewards.text.deadline import DeadlineChecks
        checks = DeadlineChecks("regex", {"pattern": "a", "flags": 0, "full": True, "references": False}, 5.0)
        assert checks.run([("a", "")]) == [True]
        globals()["kept"] = checks
        return checks._child.pid

    if __name__ == "__main__":
        kind = sys.argv[1]
        pid = checking() if kind == "deadline" else started(kind.split()[0], "polling" not in kind)
        sibling = os.fork()  # it holds all pipes open
        if sibling == 0:
            time.sleep(600)
            os._exit(0)
        print(pid, sibling, flush=True)
        time.sleep(600)
    """
)


@pytest.mark.parametrize("kind", ["spawn", "forkserver", "spawn polling", "deadline"])
def test_a_process_ends_with_the_one_that_started_it(tmp_path, kind):
    program = tmp_path / "start.py"
    program.write_text(START)
    parent = subprocess.Popen([sys.executable, program, kind], stdout=subprocess.PIPE, text=True)
    started = []
    try:
        started = [int(pid) for pid in parent.stdout.readline().split()]
        child, sibling = started
        time.sleep(0.3)
        assert alive(child)
        parent.send_signal(signal.SIGKILL)
        parent.wait(60)
        wait_for(lambda: not alive(child), seconds=60)
        assert alive(sibling)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_process_whose_parent_is_gone_already_ends_at_once():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    program = (
        f"import time; from guerdon.core.parent_watch import end_with; end_with({ended.pid}); time.sleep(600)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 1
