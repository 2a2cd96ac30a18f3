"""The watchdog clears up after a cluster, and after nothing else."""

import os
import subprocess
import sys
import time

import pytest

from guerdon.distributed import watchdog


def begin(*arguments, **options):
    """A process that waits; no path of ours is in its command line, which could look like Ray's."""
    return subprocess.Popen(["/bin/sh", "-c", "kill -STOP $$; :", "sh", *arguments], **options)


@pytest.fixture
def cluster(tmp_path):
    """Folder of a cluster, and one process of each kind: to be ended, to be left alone."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    mark = str(folder)
    bare = {name: value for name, value in os.environ.items() if name != watchdog.VARIABLE}
    with (folder / "worker.out").open("w") as log, (folder / "tail.out").open("w") as watched:
        theirs = {
            "mark": begin(env={**bare, watchdog.VARIABLE: mark}),
            "command line": begin("/ray/raylet", f"--socket={folder}/s", env=bare),
            "open log": begin("ray::IDLE", "/ray/", stdout=log, env=bare),
        }
        others = {
            "another mark": begin(env={**bare, watchdog.VARIABLE: f"{mark}2"}),
            "another folder": begin("/ray/raylet", "--socket=/elsewhere/s", env=bare),
            "not Ray's, but reads a log": begin(f"{folder}/worker.out", stdout=watched, env=bare),
        }
    time.sleep(0.5)  # until all of them have begun
    yield folder, theirs, others
    for process in [*theirs.values(), *others.values()]:
        process.kill()
        process.wait()


def guard(folder):
    command = [sys.executable, watchdog.__file__, str(folder), str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def test_all_of_a_cluster_ends_with_its_owner_and_nothing_else(cluster):
    folder, theirs, others = cluster
    guarding = guard(folder)
    time.sleep(0.5)
    assert not [kind for kind, process in theirs.items() if process.poll() is not None]
    guarding.communicate(timeout=120)  # closes its stdin, as the end of the owner does
    assert guarding.returncode == 0 and not folder.exists()
    assert [kind for kind, process in theirs.items() if process.wait(60) != -9] == []
    assert [kind for kind, process in others.items() if process.poll() is not None] == []


def test_nothing_is_done_after_an_orderly_shutdown(cluster):
    folder, theirs, _ = cluster
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    guarding = guard(folder)
    guarding.communicate(timeout=120)
    assert guarding.returncode == 0
    assert [kind for kind, process in theirs.items() if process.poll() is not None] == []
