"""The command with engine=ray: what it prints, what it leaves behind, and what survives a kill."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from guerdon.cli.train import train
from guerdon.config import load_config
from tests.training.test_embodied import lines, without_times

ROOT = Path(__file__).parents[2]
LONG = ["learner.total_steps=10_000_000", "learner.eval_interval=10_000_000"]


@pytest.fixture
def place():
    """A short path for temporary files, by which the processes of a run can be told from others."""
    folder = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def environment(place):
    return {**os.environ, "TMPDIR": str(place), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(place, arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "guerdon.cli.main", "train", *arguments, "engine=ray", "--json"],
        cwd=place,
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_of(place):
    """Ids and commands of all processes that were started with this TMPDIR."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"TMPDIR={place}\0".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes()[:80]
    return found


def wait_for(what, seconds=300):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.1)


def wait_for_none(what, seconds=120):
    """Until there are none; fails with those that are left."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and what():
        time.sleep(0.1)
    assert not what()


def shared_memory_of(place):
    """Names in /dev/shm of what processes with this TMPDIR use now."""
    names = {}
    for file in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            names[file.stat().st_ino] = file.name
    found = set()
    for number in processes_of(place):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{number}/maps").read_text().splitlines():
                if "/dev/shm/" in line:  # under the name that it had first: the inode tells
                    found.add(names.get(int(line.split()[4])))
    return found - {None}


class Watch:
    """Notes all shared memory that processes with a TMPDIR ever use; that of other tests is theirs."""

    def __init__(self, place):
        self.place, self.names, self._over = place, set(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self):
        while not self._over.wait(0.2):
            self.names |= shared_memory_of(self.place)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def nothing_is_left(self):
        wait_for_none(lambda: processes_of(self.place))
        wait_for_none(lambda: {name for name in self.names if Path("/dev/shm", name).exists()})
        return not list(self.place.glob("guerdon-ray-*"))


@pytest.fixture
def watch(place):
    with Watch(place) as found:
        yield found


def test_shared_memory_is_known_by_who_uses_it(place):
    code = "import multiprocessing as m; lock = m.get_context('spawn').Lock(); print(1, flush=True); input()"
    mine = multiprocessing.get_context("spawn").Lock()  # as another test has it while it runs
    held = Path("/dev/shm", f"sem.{mine._semlock.name.lstrip('/')}")
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(place), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with Watch(place) as watch:
        assert run.stdout.readline() == b"1\n" and held.exists()
        wait_for(lambda: watch.names)
        assert len(watch.names) == 1 and held.name not in watch.names
        (name,) = watch.names
        assert Path("/dev/shm", name).exists()
        run.communicate(b"\n")
        assert watch.nothing_is_left() and held.exists()


@pytest.mark.slow
def test_a_killed_learner_resumes_and_the_command_leaves_nothing_behind(settings, tmp_path, place, watch):
    settings = [*settings, "learner.ppo.anneal_lr=false"]  # which depends on the length of the run
    killed = tmp_path / "killed"
    run = start(place, [*settings, *LONG, f"runner.logger.log_path={killed}"])
    saved = killed / "checkpoints" / "step_400" / "state.pt"
    try:
        wait_for(lambda: saved.is_file() or run.poll() is not None)
        assert run.poll() is None, run.stderr.read()
    finally:
        run.kill()
        run.communicate()
    assert watch.nothing_is_left()  # Ray's processes go with the one that started them

    resumed = tmp_path / "resumed"
    checkpoint = killed / "checkpoints" / "step_400"
    more = [f"runner.resume_dir={checkpoint}", f"runner.logger.log_path={resumed}"]
    run = start(place, [*settings, *more])
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert json.loads(out)["env_steps"] == 800  # one JSON object and nothing else
    # On a busy machine Ray's start may be tried again, which is logged.
    err = "\n".join(line for line in err.splitlines() if not line.startswith("Ray did not"))
    assert "raylet" not in err and "ray::" not in err and "Traceback" not in err
    assert watch.nothing_is_left()

    whole, _ = train(load_config("train", [*settings, f"runner.logger.log_path={tmp_path / 'whole'}"]))
    expected = [without_times(entry) for entry in lines(whole) if entry["step"] > 400]
    assert [without_times(entry) for entry in lines(resumed)] == expected and len(expected) >= 2


@pytest.mark.slow
def test_an_interrupted_command_leaves_nothing_behind(settings, tmp_path, place, watch):
    folder = tmp_path / "run"
    run = start(place, [*settings, *LONG, f"runner.logger.log_path={folder}"])
    try:
        metrics = folder / "metrics.jsonl"
        wait_for(lambda: (metrics.is_file() and metrics.stat().st_size > 0) or run.poll() is not None)
        assert len(processes_of(place)) > 3
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        out, err = run.communicate(timeout=200)
    finally:
        run.kill()
    assert run.returncode == 1 and "Traceback" not in err and not out
    *_, message, command = err.strip().splitlines()
    assert message.startswith("guerdon: interrupted at step ") and "runner.resume_dir=" in command
    assert list(folder.glob("checkpoints/step_*/state.pt"))
    assert watch.nothing_is_left()


@pytest.mark.slow
def test_a_cluster_that_is_not_there(settings, place):
    run = start(place, [*settings, "cluster.address=127.0.0.1:1"])
    out, err = run.communicate(timeout=200)
    assert run.returncode == 1 and not out
    assert "there is no Ray cluster at '127.0.0.1:1': " in err.splitlines()[-1]


@pytest.mark.slow
def test_a_machine_that_leaves(settings, tmp_path, place):
    more = ["learner.total_steps=100_000", "reward.use_reward_model=false"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.node_loss", str(tmp_path / "run"), *settings, *more],
        env=environment(place),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    # the third machine takes the place of the second; when it goes too, nothing can
    assert result["restarts"]["env"] >= 1 and result["iterations"] == 4
    assert not result["connected"]
    assert "cluster.num_nodes asks for 2 machines, 1 machine is there" in result["reported"]
    assert "the last good state is" in result["reported"]
    assert (tmp_path / "run" / "checkpoints" / "step_600" / "state.pt").is_file()
    assert len([entry for entry in lines(tmp_path / "run") if "train/policy_loss" in entry]) == 3
    wait_for_none(lambda: processes_of(place))
