"""The fuzzing: every promise that a target breaks is a finding, and the targets of the tree break none."""

from __future__ import annotations

import os
import pickle
import random
import time
from pathlib import Path
from types import SimpleNamespace

import fuzz_example
import pytest

from fuzz import engine, targets
from fuzz.engine import fuzz
from fuzz.mutations import MAX_INPUT, mutate_bytes
from fuzz.results import Log, Result, table
from fuzz.structures import mutate_opcodes
from fuzz.worker import MAX_BASE, corpus

_EACH = 32
_BROKEN = {
    "raise": "uncaught KeyError",
    "crash": "crash SIGSEGV",
    "hang": "hang",
    "memory": "memory",
    "process": "door",
}


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Result], Path]:
    folder = tmp_path_factory.mktemp("findings")
    names = list(fuzz_example.load())
    return fuzz(fuzz_example.load, names, each=4, seconds=5.0, memory=64 << 20, findings=folder), folder


@pytest.mark.parametrize("name", _BROKEN)
def test_a_broken_promise_is_found_with_its_input(name: str, example: tuple[dict[str, Result], Path]) -> None:
    results, folder = example
    (finding,) = results[name].findings
    assert (finding.kind, finding.data) == (_BROKEN[name], name.encode())
    assert results[name].num_findings == 2
    assert results[name].inputs == 4  # a new worker goes on where one has ended
    (saved,) = folder.glob(f"{name}-*.bin")
    assert saved.read_bytes() == name.encode()
    assert _BROKEN[name] in saved.with_suffix(".txt").read_text()


@pytest.mark.parametrize("name", ["sound", "returned"])
def test_what_keeps_its_promises_is_counted(name: str, example: tuple[dict[str, Result], Path]) -> None:
    result = example[0][name]
    assert (result.inputs, result.refused, result.findings) == (4, 1, [])
    assert f"{name} " in table(example[0])


def test_a_process_that_gets_no_processor_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = engine._Worker.__new__(engine._Worker)
    worker._first_seen = None
    worker.slate = SimpleNamespace(running=lambda: (3, b"", time.monotonic() - 100))
    worker.process = SimpleNamespace(pid=1)
    uses = iter([(True, 1.0), (True, 2.0), (True, 30.0), (False, 30.0)])
    monkeypatch.setattr(engine, "_processor_use", lambda pid: next(uses))
    assert [worker.hangs(20.0) for _ in range(3)] == [False, False, True]
    worker._first_seen = None
    assert worker.hangs(20.0)  # it waits for something
    monkeypatch.undo()
    start, (_, before) = time.process_time(), engine._processor_use(os.getpid())
    while time.process_time() < start + 0.1:
        pass
    is_ready, used = engine._processor_use(os.getpid())
    assert is_ready and used - before >= 0.05


def test_a_budget_is_kept_over_all_targets() -> None:
    results = fuzz(fuzz_example.load, ["sound", "process"], inputs=31)
    assert sum(item.inputs for item in results.values()) == 31
    assert all(item.inputs for item in results.values())


def test_a_log_adds_up_runs_that_go_on_where_the_last_one_ended(tmp_path: Path) -> None:
    file, names = tmp_path / "log.jsonl", ["sound", "raise"]
    first = fuzz(fuzz_example.load, names, inputs=20, log=file)
    again = fuzz(fuzz_example.load, names, inputs=20, log=file)  # it is full
    assert table(first) == table(again) == table(Log(file).results(names))
    fuzz(fuzz_example.load, names, inputs=50, seed=1, log=file)
    log = Log(file, seed=1)
    assert sum(item.inputs for item in log.results(names).values()) == 50
    for name in names:  # every input of a seed once, and the seeds together
        lines = [line for line in log.lines if line["target"] == name]
        for seed in (0, 1):
            numbers = [
                line["first"] + i for line in lines if line["seed"] == seed for i in range(line["inputs"])
            ]
            assert numbers == list(range(len(numbers)))
            assert f"seed {seed}, commit " in log.runs()
    assert log.results(names)["raise"].num_findings > first["raise"].num_findings
    assert all(item.inputs >= 50 // 12 for item in log.results(names).values())


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """All targets of the tree with their corpus and a small budget of changed inputs."""
    return fuzz(targets.load, sorted(targets.load()), each=_EACH, findings=tmp_path_factory.mktemp("readers"))


@pytest.mark.parametrize("name", sorted(targets.load()))
def test_readers_keep_their_promises(name: str, readers: dict[str, Result]) -> None:
    assert [(item.kind, item.detail) for item in readers[name].findings] == []
    assert readers[name].inputs == _EACH


@pytest.mark.parametrize("name", sorted(targets.load()))
def test_seeds_are_valid_and_the_corpus_is_small(name: str, tmp_path: Path) -> None:
    target = targets.load()[name]
    seeds = target.seeds(tmp_path)
    assert len(seeds) + len(corpus(name)) <= _EACH // 2, "the budget would not reach beyond them"
    assert all(len(item) < 100_000 for item in corpus(name))
    assert any(len(item) <= MAX_BASE for item in seeds), "no valid input would be changed"
    for seed in seeds:
        size = target.run(seed, tmp_path)  # raises nothing
        assert size is None or size > 0


def test_mutations_change_bytes_and_repeat_with_the_seed() -> None:
    data, other = bytes(range(200)), b"12 other"
    changed = [mutate_bytes(data, random.Random(seed), [data, other]) for seed in range(300)]
    again = [mutate_bytes(data, random.Random(seed), [data, other]) for seed in range(300)]
    assert changed == again
    assert len(set(changed)) > 280
    assert sum(item == data for item in changed) < 15
    assert all(len(item) <= MAX_INPUT for item in changed)
    for seed in range(300):  # nothing to change in
        assert len(mutate_bytes(b"", random.Random(seed))) < MAX_INPUT


def test_a_repeated_opcode_does_not_fill_the_memory() -> None:
    data = pickle.dumps(b"x" * 60_000, protocol=4)
    changed = [mutate_opcodes(data, random.Random(seed)) for seed in range(2000)]
    assert MAX_INPUT // 2 < max(map(len, changed)) < 4 * MAX_INPUT
