"""One Ray cluster for all tests of a test process: starting one takes five seconds."""

import logging
import shutil
import tempfile
import time

import pytest
import ray

from guerdon.parallel.ray_access import own_cluster
from tests.run.conftest import checkpoint, settings  # noqa: F401 - fixtures

NUM_CPUS = 4


@pytest.fixture(scope="session")
def session_cluster():
    folder = tempfile.mkdtemp(prefix="guerdon-test-", dir="/tmp")
    with own_cluster():
        ray.init(
            address="local",
            num_cpus=NUM_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=300 * 2**20,
            _temp_dir=folder,
        )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(session_cluster, monkeypatch):
    """The cluster; a test must give back all that it took, and gives nothing up on a slow machine."""
    monkeypatch.setattr("guerdon.parallel.ray_engine.SLOT_SECONDS", 120.0)
    monkeypatch.setattr("guerdon.parallel.ray_engine.NOTICE_SECONDS", 60.0)
    yield
    until = time.monotonic() + 120
    while ray.available_resources().get("CPU") != NUM_CPUS:  # what was killed is given back a moment later
        assert time.monotonic() < until, f"left behind: {ray.available_resources()}"
        time.sleep(0.1)
