"""Metrics on a disk that fills: one line says why, and what was there stays."""

import json
import multiprocessing
import resource
import struct
import subprocess
import sys

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from guerdon.core.errors import StorageError
from guerdon.fit.logs import MetricLog
from tests.fit.synthetic import write_store

LIMIT = 200_000
"""No file of a process may be longer, which stops root too; a full disk is the same to whoever writes."""


def in_child(run):
    """Run a function in a forked process; its failure is a failure of the test."""
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(120)
    hangs = child.is_alive()
    child.kill()
    child.join()
    assert not hangs and child.exitcode == 0


def events(folder):
    """All events of a folder, with their checksums checked."""
    found = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack_from("<Q", content)
            assert struct.unpack_from("<I", content, 8)[0] == masked_crc32c(content[:8])
            data = content[12 : 12 + size]
            assert struct.unpack_from("<I", content, 12 + size)[0] == masked_crc32c(data)
            found.append(Event.FromString(data))
            content = content[16 + size :]
    return found


def scalars(folder):
    return [(event.step, value.tag, value.simple_value)
            for event in events(folder) for value in event.summary.value
            if value.HasField("simple_value")]  # fmt: skip


def test_tensorboard_gets_the_numbers(tmp_path):
    with MetricLog(tmp_path) as logs:
        for step in range(3):
            logs.write(step, {"a": float(step), "b": 2.5})
        logs.board.add_histogram("h", np.arange(9.0), 2)
    assert scalars(tmp_path) == [(step, name, value) for step in range(3)
                                 for name, value in (("a", float(step)), ("b", 2.5))]  # fmt: skip
    assert events(tmp_path)[0].file_version == "brain.Event:2"
    with MetricLog(tmp_path, resume_step=1) as logs:
        logs.write(2, {"a": 9.0})
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        0, 1, 2,
    ]  # fmt: skip
    assert scalars(tmp_path)[-1] == (2, "a", 9.0)
    assert any(event.session_log.status for event in events(tmp_path))  # TensorBoard hides what came later


@pytest.mark.parametrize("tensorboard", [True, False])
def test_a_full_disk_is_named_and_what_was_there_stays(tmp_path, tensorboard):
    def run():
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
        values = {f"metric/{number}": 1 / 3 for number in range(20)}
        written = 0
        with (
            pytest.raises(StorageError, match=r"^cannot write .*: the file is larger than this process"),
            MetricLog(tmp_path, tensorboard=tensorboard) as logs,
        ):
            for step in range(5000):
                logs.write(step, values)
                written += 1
        lines = (tmp_path / "metrics.jsonl").read_text()
        assert lines.endswith("\n")
        assert [json.loads(line)["step"] for line in lines.splitlines()][:written] == [*range(written)]
        assert written > 100
        if tensorboard:
            assert len(scalars(tmp_path)) > 1000

    in_child(run)


@pytest.mark.slow
def test_a_fit_on_a_full_disk_says_so_in_one_line(tmp_path):
    data = write_store(tmp_path / "data", count=12)
    program = (  # a process of its own: after a fork torch may wait for threads that are not there
        "import resource, sys\n"
        "from guerdon.cli.main import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT}, {LIMIT}))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = [
        "train-reward", f"fit.data.path={data}", f"runner.logger.log_path={tmp_path / 'run'}",
        "reward.model.arch=resnet10", "reward.model.width=8", "reward.model.image_size=[3,32,32]",
        "fit.global_batch_size=8", "fit.log_interval=1", "fit.val_check_interval=100000",
    ]  # fmt: skip
    (tmp_path / "run").mkdir()
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text('{"step": 0}\n' * 20_000)  # as much as there is room for
    before = metrics.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("guerdon: error: cannot write ")
    assert last.endswith("metrics.jsonl: the file is larger than this process may write")
    assert metrics.read_bytes() == before


def test_a_report_on_a_full_disk_leaves_the_old_one(tmp_path):
    from guerdon.monitoring.report import write_report

    (tmp_path / "summary.json").write_text("{}")
    with MetricLog(tmp_path, tensorboard=False) as logs:
        for step in range(50):
            logs.write(step, {"env/success_once": step / 50})
    write_report(tmp_path)
    before = (tmp_path / "report.html").read_bytes()

    def run():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(StorageError, match=r"^cannot write .*report\.html"):
            write_report(tmp_path)

    in_child(run)
    assert (tmp_path / "report.html").read_bytes() == before
