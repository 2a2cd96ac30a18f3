"""One Ray cluster for all tests of a test process: starting one takes five seconds."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time

import pytest
import ray

from guerdon.distributed import watchdog
from guerdon.distributed.ray_access import own_cluster
from tests.distributed.ray_workers import forked_workers
from tests.training.conftest import save_untrained, settings  # noqa: F401 - a fixture

NUM_CPUS = 4
IDLE_SECONDS = 240.0
"""What was killed is given back a moment later; on a busy machine that moment is long."""


class SharedCluster:
    """A local cluster with a folder of its own, which is started again where a test has left it unusable.

    The watchdog ends its processes and removes the folder if the test process dies.
    """

    def __init__(self):
        self.folder, self.watchdog = None, None

    def start(self):
        self.folder = tempfile.mkdtemp(prefix="guerdon-test-", dir="/tmp")
        self.watchdog = subprocess.Popen(
            [sys.executable, watchdog.__file__, self.folder, self.folder],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        os.environ[watchdog.VARIABLE] = self.folder  # what the cluster starts inherits it
        try:
            with own_cluster():
                ray.init(
                    address="local",
                    num_cpus=NUM_CPUS,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=300 * 2**20,
                    _temp_dir=self.folder,
                )
        finally:
            del os.environ[watchdog.VARIABLE]

    def stop(self):
        if self.folder is None:
            return
        ray.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.watchdog.communicate(timeout=IDLE_SECONDS)  # an end of its input; it ends what is left
        self.folder = None

    def make_ready(self):
        """Start it, or start it again if a test has shut it down or has lost it."""
        if self.folder is not None and not self.is_idle(seconds=5.0):
            self.stop()
        if self.folder is None:
            self.start()

    def is_idle(self, seconds=IDLE_SECONDS):
        """Whether all processors are free, now or soon."""
        until = time.monotonic() + seconds
        while self.free_cpus() != NUM_CPUS:
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def free_cpus(self):
        if not ray.is_initialized():
            return None
        try:
            return ray.available_resources().get("CPU")
        except Exception as error:  # Ray raises several kinds where a cluster has died
            logging.getLogger("guerdon.tests").warning("the cluster does not answer: %s", error)
            return None


@pytest.fixture(autouse=True, scope="package")
def quick_workers():
    """Also of the clusters that Guerdon starts in this process."""
    with forked_workers():
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """For real pictures, which workers draw."""
    return save_untrained(tmp_path_factory.mktemp("reward") / "model")


@pytest.fixture(scope="package")
def shared_cluster():
    """It ends with the tests of this folder: also an idle cluster takes a fiftieth of a core."""
    shared = SharedCluster()
    yield shared
    shared.stop()


@pytest.fixture
def cluster(shared_cluster, monkeypatch):
    """The cluster; a test must give back all that it took, and gives nothing up on a slow machine.

    A test that does not give it back fails alone: the next one has a new cluster.
    """
    monkeypatch.setattr("guerdon.distributed.ray_engine.SLOT_SECONDS", 120.0)
    monkeypatch.setattr("guerdon.distributed.ray_engine.NOTICE_SECONDS", 60.0)
    shared_cluster.make_ready()
    yield
    if not shared_cluster.is_idle():
        left = shared_cluster.free_cpus()
        shared_cluster.stop()
        pytest.fail(f"left behind: {left} of {NUM_CPUS} CPUs are free")
