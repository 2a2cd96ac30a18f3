"""The tests' own machinery: what a test costs is counted, marks are kept to, files stay together."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import cpu_times
from tests.browser import dump_dom
from tests.conftest import APART, LONGEST, RAY, file_of, pytest_collection_modifyitems, scope_of

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[1]

SPENDING = """
    import subprocess, sys, time
    import pytest

    WORK = "import time\\nwhile time.process_time() < {}: pass"

    def spend(seconds):
        start = time.process_time()
        while time.process_time() < start + seconds:
            pass

    @pytest.fixture(scope="module")
    def dear():
        spend(0.6)

    def test_cheap(dear):
        pass

    def test_child():
        subprocess.run([sys.executable, "-S", "-c", WORK.format(0.7)], check=True)

    @pytest.mark.slow
    def test_marked():
        spend(0.5)

    def test_idle():
        time.sleep(0.5)
"""


def test_what_a_test_uses_is_counted_and_limited(pytester, monkeypatch):
    """In a process that runs tests for another, as with `make test`."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the plugins are ours
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take seconds to import
    pytester.makeini("[pytest]\nmarkers = slow: takes long")
    pytester.makepyfile(SPENDING)
    file = pytester.path / "times"
    options = ["-p", "xdist", "-n1", "-p", "tests.cpu_times", "-p", "no:cacheprovider", f"--cpu-times={file}"]
    # A limit of which even a machine 100 times slower makes 0.1 s.
    result = pytester.runpytest_subprocess(*options, "--cpu-limit=0.001")

    rows = {row["test"].partition("::")[2]: row for row in map(json.loads, file.read_text().splitlines())}
    assert rows["test_cheap"]["fixtures"]["dear"] >= 0.55 > rows["test_cheap"]["cpu"]
    assert rows["test_child"]["cpu"] >= 0.65 and rows["test_marked"]["cpu"] >= 0.45
    assert rows["test_idle"]["cpu"] < 0.3  # half a second of waiting is none of computing
    assert rows["test_idle"]["wall"] >= 0.5
    assert [name for name, row in rows.items() if row["slow"]] == ["test_marked"]

    result.assert_outcomes(passed=4)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    text = result.stdout.str()
    assert "test_child used" in text and "test_cheap used" in text
    assert "test_marked used" not in text
    assert "waited for the last one: 0 s" in text


@pytest.mark.parametrize(("limit", "probe", "expected"), [(2.0, 1.0, 1), (2.0, 2.0, 0), (4.0, 0.1, 0)])
def test_the_limit_grows_on_a_slower_machine_and_never_shrinks(monkeypatch, limit, probe, expected):
    monkeypatch.setattr(cpu_times, "probe_seconds", lambda: probe * cpu_times.REFERENCE_SECONDS)
    account = cpu_times.Account(None, limit)
    account.rows = [{"test": "t", "cpu": 3.0, "fixtures": {}, "slow": False}]
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    hook = account.pytest_sessionfinish(session)
    next(hook)
    assert len(account.over) == expected
    assert session.exitstatus == (pytest.ExitCode.TESTS_FAILED if expected else pytest.ExitCode.OK)


def test_the_time_of_living_children_counts():
    before = cpu_times.cpu_seconds()
    code = "import time\nwhile time.process_time() < .5: pass\nprint(1, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"1\n"
        assert cpu_times.cpu_seconds() - before >= 0.45
        child.communicate(b"\n")


PROVING = """
    import pytest
    from guerdon.config import load_config
    from guerdon.training.trainer import EmbodiedRunner

    @pytest.mark.outcome
    @pytest.mark.parametrize("given", ["none", "env"])
    def test_on_a_reward(given, tmp_path):
        config = load_config("train", [f"reward.control={given}", "env.train.num_envs=1"])
        runner = EmbodiedRunner(config, tmp_path)
        runner.close()
        assert runner.config.reward.control == given

    @pytest.mark.outcome
    def test_that_proves_nothing():
        pass

    @pytest.mark.outcome
    def test_that_is_broken():
        raise ValueError

    @pytest.fixture
    def broken():
        assert False

    @pytest.mark.outcome
    def test_whose_fixture_is_broken(broken):
        pass

    def test_of_something_else():
        assert False
"""


@pytest.mark.slow
def test_a_test_that_passes_without_the_reward_is_a_failure(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the plugins are ours
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nmarkers = outcome: x")
    pytester.makepyfile(PROVING)
    options = ["-p", "tests.planted", "-p", "no:cacheprovider", "--planted=shuffled"]
    result = pytester.runpytest_subprocess(*options, timeout=480)
    # On a learned reward it fails as it should; a control stays one, and such a test passes.
    result.assert_outcomes(xfailed=1, failed=3, errors=1, deselected=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*"])


@pytest.mark.slow
def test_a_process_that_is_lost_fails_the_test_it_ran_and_no_other(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the plugins are ours
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    lost = "import os, signal\ndef test_lost(): os.kill(os.getpid(), signal.SIGSEGV)\n"
    well = "".join(f"def test_well_{number}(): pass\n" for number in range(3))
    pytester.makeini("[pytest]\nmarkers =\n  sim: x\n  system: x")
    pytester.makepyfile(test_a=well + lost + well.replace("well", "later"), test_b=well)
    plugins = ["-p", "xdist", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    result = pytester.runpytest_subprocess(*plugins, "-n1", "--no-loadscope-reorder", timeout=480)
    result.assert_outcomes(passed=9, failed=1)
    result.stdout.fnmatch_lines(["*crashed while running*test_lost*"])


def test_without_its_mark_a_test_has_no_simulator_and_no_browser():
    with pytest.raises(ImportError):
        import mani_skill  # noqa: F401
    with pytest.raises(ImportError):
        import sapien.core  # noqa: F401
    with pytest.raises(AssertionError, match="carries the mark `system`"):
        dump_dom("page.html")


@pytest.mark.sim
def test_with_its_mark_a_test_has_the_simulator():
    import mani_skill

    assert mani_skill is sys.modules["mani_skill"]


def test_test_processes_compute_on_one_thread():
    assert torch.get_num_threads() == 1


def test_every_file_of_tests_has_a_name_of_its_own():
    """By which pytest imports it: a second one of that name ends the whole run."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)


def test_long_files_go_first_and_clusters_stay_together():
    names = [
        "tests/a.py::t",
        "tests/robot/b.py::t",
        "tests/distributed/c.py::t[x::y]",
        "tests/training/test_learning.py::t",
    ]
    items = [SimpleNamespace(nodeid=name) for name in names]
    pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == [names[3], names[2], names[1], names[0]]
    assert file_of(names[2]) == "distributed/c.py" and RAY in LONGEST
    assert [scope_of(name) for name in names[:3]] == ["a.py", "robot/b.py", RAY]
    page = f"tests/{APART[0]}.py::t[x]"
    assert scope_of(page) == page


@pytest.mark.slow
def test_a_forked_command_is_like_one_that_was_started(command_server, tmp_path):
    """The same folder, variables, streams, arguments and exit code; also of a module and of a file."""
    code = "import os, sys; print(os.getcwd(), os.environ['SAID'], sys.argv[1:], input(), __name__)"
    code += "; sys.stderr.write('told'); sys.exit(7)"
    (tmp_path / "said.py").write_text(code)
    options = {"cwd": tmp_path, "input": "heard", "capture_output": True, "text": True}
    variables = {**os.environ, "PATH": command_server.path, "SAID": "this"}
    for arguments in (["-c", code, "a b"], ["said.py", "a b"], ["-m", "said", "a b"]):
        real, forked = (
            subprocess.run([program, *arguments], env=variables, **options)
            for program in (sys.executable, "python")
        )
        assert real.returncode == forked.returncode == 7
        assert (forked.stdout, forked.stderr) == (real.stdout, real.stderr)
    killed = subprocess.run(["python", "-c", "import os; os.abort()"], env=variables, **options)
    assert killed.returncode == 128 + signal.SIGABRT  # as a shell tells it


def test_a_part_that_is_missing_fails_a_test():
    """Everything that tests import is in `[dev]`; a test that skips without it would do so in silence."""
    word = "importor" + "skip"
    assert [path.name for path in Path(__file__).parent.rglob("*.py") if word in path.read_text()] == []
