"""The tests' own cluster: one that is lost costs the test that lost it, and nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from guerdon.distributed import watchdog
from tests.distributed.conftest import NUM_CPUS

ROOT = Path(__file__).parents[2]


@ray.remote(num_cpus=1)
class Holder:
    def pid(self):
        return os.getpid()

    def command_of_parent(self):
        return Path(f"/proc/{os.getppid()}/cmdline").read_bytes()


@pytest.mark.slow
def test_a_cluster_that_is_not_given_back_is_replaced(shared_cluster):
    shared_cluster.make_ready()
    before = shared_cluster.folder
    holder = Holder.remote()
    assert ray.get(holder.pid.remote()) > 0 and not shared_cluster.is_idle(seconds=1.0)
    shared_cluster.make_ready()
    assert shared_cluster.folder != before and not Path(before).exists()
    assert watchdog.members(before, before) == []
    assert shared_cluster.free_cpus() == NUM_CPUS
    again = shared_cluster.folder
    shared_cluster.make_ready()
    assert shared_cluster.folder == again  # one that is idle is kept


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_its_workers_need_not_import():
    holder = Holder.remote()
    assert b"tests.distributed.ray_workers" in ray.get(holder.command_of_parent.remote())
    ray.kill(holder)


@pytest.mark.slow
def test_a_test_process_that_dies_leaves_no_cluster_behind():
    code = (
        "from tests.distributed.conftest import SharedCluster\n"
        "cluster = SharedCluster()\n"
        "cluster.start()\n"
        "print(cluster.folder, flush=True)\n"
        "input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        folder = process.stdout.readline().strip()
        assert Path(folder).is_dir() and watchdog.members(folder, folder)
        process.send_signal(signal.SIGKILL)
    until = time.monotonic() + 240
    while watchdog.members(folder, folder) or Path(folder).exists():
        assert time.monotonic() < until, watchdog.members(folder, folder)
        time.sleep(0.2)
