"""A cluster of ours is reached from this machine alone, and by those who have its token."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from guerdon.config import ClusterConfig
from guerdon.core.errors import ClusterError
from guerdon.distributed import ray_access, ray_engine
from guerdon.distributed.launch import launch_ranks
from guerdon.distributed.ray_engine import RayEngine
from tests.distributed.ranks import listens
from tests.distributed.sockets import is_loopback, listening

ROOT = Path(__file__).parents[2]


def test_the_kernel_tells_who_listens():
    with socket.create_server(("0.0.0.0", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as here:
        found = listening([os.getpid()])
        assert ("0.0.0.0", everywhere.getsockname()[1]) in found and not is_loopback("0.0.0.0")
        assert ("127.0.0.1", here.getsockname()[1]) in found and is_loopback("127.0.0.1")
    with socket.create_server(("::", 0), family=socket.AF_INET6) as everywhere:
        assert ("::", everywhere.getsockname()[1]) in listening([os.getpid()]) and not is_loopback("::")


@pytest.fixture
def reported():
    """What a process that starts a cluster of its own finds out; it takes a cluster and four guests."""
    home = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))  # short, for Ray's sockets
    foreign = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.own_cluster"],
        env={**foreign, "HOME": str(home), "RAY_ADDRESS": "192.0.2.1:6379", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    yield json.loads(done.stdout.splitlines()[-1]), done.stderr, home
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.slow
def test_our_own_cluster_is_for_this_machine_and_its_token(reported):
    result, warned, home = reported
    addresses = [address for address, _ in result["listening"]]
    assert len(addresses) >= 6, "GCS, raylet, object manager, agent, driver, worker: somebody was overlooked"
    assert [address for address in addresses if not is_loopback(address)] == []
    guests = {name: text.strip().splitlines()[-1] for name, text in result["guests"].items()}
    assert guests["the token"] == "joined 1"
    for name in ("another token", "disabled"):
        assert "cannot be joined" in guests[name] and "is its token ours?" in guests[name]
    assert "cannot be joined without a token: make one with `ray get-auth-token --generate`" in guests["none"]
    assert "is joined without token authentication (RAY_AUTH_MODE=disabled)" in result["guests"]["disabled"]
    # a variable that happens to be there does not send the run to another machine
    assert "RAY_ADDRESS is not used: set cluster.address=192.0.2.1:6379" in warned
    assert not (home / ".ray").exists(), "Ray wrote its token where others may read it"


@pytest.mark.slow  # `tests/fit/test_meeting.py` has the same of ranks without Ray
@pytest.mark.usefixtures("cluster")
def test_ranks_listen_on_this_machine_alone():
    for found in launch_ranks(listens, 2, threads=1):
        assert len(found) >= 2, "gloo and the worker itself"
        assert [address for address, _ in found if not is_loopback(address)] == []


def test_a_start_that_takes_too_long_is_tried_again(monkeypatch, caplog):
    """Ray's own limit of 30 s is short on a busy machine."""
    calls = []

    def slow(**settings):
        calls.append((settings["address"], os.environ["RAY_AUTH_MODE"]))
        raise Exception("The current node timed out during startup.\nThis could happen")

    monkeypatch.setattr(ray_engine.ray, "init", slow)
    monkeypatch.setattr(ray_engine.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_engine.ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_access, "_read_again", lambda: None)  # a cluster of another test may be running
    with pytest.raises(
        ClusterError, match=r"does not start on this machine: The current node timed out during"
    ):
        RayEngine(ClusterConfig())
    assert calls == [("local", "token")] * 3
    assert caplog.text.count("is started again") == 2
