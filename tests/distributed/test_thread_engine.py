"""Workers with a thread each: calls in order, errors in a line, and an end."""

import threading
import time

import pytest

from guerdon.config import ClusterConfig
from guerdon.core.errors import ClusterError, ConfigError, WorkerError, WorkerLostError
from guerdon.distributed import LocalEngine, ThreadEngine, WorkerSpec, make_engine
from guerdon.distributed.local_engine import Ready


class Worker:
    def __init__(self, fails=False):
        if fails:
            raise ConfigError("no such robot")
        self.made_in, self.seen = threading.current_thread().name, []

    def note(self, value, seconds=0.0):
        time.sleep(seconds)
        self.seen.append(value)
        return list(self.seen), threading.current_thread().name

    def fail(self, error):
        raise error

    def wait(self, event):
        event.wait(100)


@pytest.fixture
def engine():
    engine = ThreadEngine()
    yield engine
    engine.close()


@pytest.fixture
def group(engine):
    return engine.group("env", [WorkerSpec(cls=Worker)] * 2)


def test_calls_return_at_once_and_are_done_in_order(group):
    event = threading.Event()
    answers = [group.submit(0, "wait", event), *(group.submit(0, "note", number) for number in range(4))]
    assert group.first_ready(answers, 0.0) is None
    event.set()
    assert group.first_ready(answers[:1], 100.0) == 0
    assert [item.result(100)[0] for item in answers[1:]] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert answers[1].result()[1] == group.workers[0].made_in == "env-0"
    assert group.workers[1].made_in == "env-1" and group.workers[1].seen == []


def test_workers_work_side_by_side(group):
    both_there = threading.Barrier(2)
    for item in [group.submit(rank, "wait", both_there) for rank in range(2)]:
        item.result(100)  # raises if one had to wait for the other's end


def test_answers_are_arguments_of_other_workers(group):
    first, second = group.submit_pair(0, "note", "x", 0.05)
    assert group.submit(1, "note", first).result()[0] == [["x"]]
    assert second.result() == "env-0"
    assert group.submit(0, "note", Ready("there")).result()[0] == ["x", "there"]
    assert group.handle(1).call("note", "y")[1] == "env-1"


def test_errors_arrive_where_the_answer_is_asked_for(group, engine):
    with pytest.raises(ConfigError, match=r"^ours$"):
        group.submit(0, "fail", ConfigError("ours")).result()
    with pytest.raises(WorkerError, match=r"^env worker 1 failed: KeyError: 'arm'$") as caught:
        group.submit(1, "fail", KeyError("arm")).result()
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(WorkerError, match="env worker 0 failed: TimeoutError"):
        group.submit(0, "fail", TimeoutError("slow")).result(100)
    broken = group.submit(0, "fail", ValueError("first"))
    with pytest.raises(WorkerError, match="first"):
        group.submit(1, "note", broken).result()
    assert group.submit(0, "note", 1).result()[0] == [1]  # it goes on
    with pytest.raises(ConfigError, match="no such robot"):
        engine.group("reward", [WorkerSpec(cls=Worker, args=(True,))])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reward")]
    with pytest.raises(ClusterError, match="runs in this process and cannot be replaced"):
        group.restart(0, "it stalls")


def test_a_worker_that_hangs_is_told_and_left(group, engine, monkeypatch, caplog):
    monkeypatch.setattr("guerdon.distributed.local_engine.END_SECONDS", 0.2)
    event = threading.Event()
    stuck, behind = group.submit(0, "wait", event), group.submit(0, "note", 1)
    with pytest.raises(WorkerLostError, match=r"env worker 0 is lost: no answer in 0.1 s"):
        stuck.result(0.1)
    thread = next(item for item in threading.enumerate() if item.name == "env-0")
    engine.close()
    engine.close()
    assert thread.is_alive() and thread.daemon  # it cannot keep the process from ending
    assert "the thread env-0 still runs" in caplog.text
    with pytest.raises(WorkerLostError, match="its thread has ended"):
        behind.result()
    assert not [item for item in threading.enumerate() if item.name == "env-1"]
    event.set()
    thread.join(100)
    assert not thread.is_alive()


def test_the_engine_of_a_config():
    cluster = ClusterConfig()
    assert type(make_engine("local", cluster)) is LocalEngine
    assert type(make_engine("local", cluster, threads=True)) is ThreadEngine
