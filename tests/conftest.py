"""What holds for all tests: one thread for each process, marks that are kept to, the order of a run."""

import gc
import logging
import os
import signal
import sys
import threading

# Several test processes share the cores: one thread each, in what they start too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # where a test asks for more, they do not spin
os.environ.setdefault("RAY_worker_niceness", "0")  # as in `guerdon.distributed`, for clusters of tests

import pytest
from hypothesis import settings as hypothesis_settings

import tests.browser
from tests.commands import CommandServer

# It guards against a loss of power, which no test can bring about, and waits for the disk thousands of times.
os.fsync = lambda handle: None
hypothesis_settings.register_profile("guerdon", deadline=None)  # 200 ms pass quickly on a busy machine
hypothesis_settings.load_profile("guerdon")

# A shell that starts the tests in the background has Ctrl-C ignored, and so would have all that they start.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.cpu_times", "tests.planted"]

RAY = "distributed/"
"""One process runs all of these: clusters side by side make each other many times slower."""
LONGEST = (
    "training/test_learning",
    RAY,
    "test_docs",
    "fit/test_distributed",
    "rewards/zoo/test_imitation_outcomes",
    "rewards/zoo/test_curiosity",
    "training/",
    "robot/",
    "envs/test_maniskill",
    "test_cli",
    "test_examples",
    "test_fuzz",
    "rewards/",
    "fit/",
    "config/",
    "data/store/",
    "agents/",
    "test_verdicts",
)
"""Files that take long; they go first, so that in the end no process waits for another."""
APART = ("test_docs",)
"""Files of long tests that share nothing: several processes take part."""
SIMULATOR = ("mani_skill", "sapien")
PARTS = tuple(f"{name}." for name in SIMULATOR)


def pytest_configure(config):
    if not config.getoption("numprocesses", None):  # of pytest-xdist: this process runs tests itself
        import torch

        torch.set_num_threads(1)


def file_of(nodeid):
    return nodeid.removeprefix("tests/").partition("::")[0]


def scope_of(nodeid):
    """What one process runs as a whole: a file, whose tests share what they need, all of Ray, or one test."""
    file = file_of(nodeid)
    if file.startswith(RAY):
        return RAY
    return nodeid if file.startswith(APART) else file


def pytest_collection_modifyitems(items):
    def place(item):
        name = file_of(item.nodeid)
        return next((n for n, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))

    items.sort(key=place)


def pytest_collection_finish():
    """What was imported and collected stays: the garbage collector need not look through it again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, for runs with -n
def pytest_xdist_make_scheduler(config, log):
    """Processes take scopes, not tests: what the tests of a file share is made once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope_of(nodeid)

        def remove_node(self, node):
            """A test whose process died has failed: xdist would run it again and lose the next process."""
            units = self.assigned_work.pop(node)
            left = {scope: [test for test, done in unit.items() if not done] for scope, unit in units.items()}
            lost = next((names.pop(0) for names in left.values() if names), None)
            again = {scope: dict.fromkeys(names, False) for scope, names in left.items() if names}
            self.workqueue.update(again)
            for other in self.assigned_work:
                self._reschedule(other)
            return lost

        def _reschedule(self, node):
            """A process runs a test once it knows the next one, or that none follows: tell a new one too."""
            super()._reschedule(node)
            if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test that lacks the mark for what it needs fails also where that is installed."""
    with pytest.MonkeyPatch.context() as patch:
        if not item.get_closest_marker("sim"):
            for name in [*SIMULATOR, *(n for n in sys.modules if n.startswith(PARTS))]:
                patch.setitem(sys.modules, name, None)  # an import of it raises ImportError
        if not item.get_closest_marker("system"):
            patch.setattr(tests.browser, "find_browser", unmarked_browser)
        return (yield)


@pytest.fixture(autouse=True)
def no_handler_is_left():
    """A command in the test's own process logs to its captured stream, which is closed after the test."""
    before = logging.root.handlers[:]
    yield
    for handler in logging.root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:
            logging.root.removeHandler(handler)


@pytest.fixture(scope="session")
def command_server():
    with CommandServer() as server:
        yield server


@pytest.fixture(scope="session")
def simulator_commands():
    """A server whose commands also share the imported simulator."""
    with CommandServer(simulator=True) as server:
        yield server


@pytest.fixture(scope="module")
def quick_commands(command_server):
    """For the tests of a file, the programs `guerdon` and `python` are those that need not import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", command_server.path)
        yield


def unmarked_browser():
    raise AssertionError("a test that opens a browser carries the mark `system`")
