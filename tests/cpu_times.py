"""A pytest plugin that counts the processor seconds of tests: wall time on a shared machine says little.

`--cpu-times FILE` writes one JSON object for each test as it ends; `wall`, with fixtures, shows what waits.
`--cpu-limit SECONDS` fails a run in which a test without the mark `slow` used more, or one fixture for it
did; on a slower machine the limit is higher.
"""

import json
import os
import time
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
REFERENCE_SECONDS = 0.05
"""What `probe_seconds` takes on the machine by which limits are chosen: two cores of an AMD EPYC."""
SHOWN = 15


def cpu_seconds():
    """Of this process and of all below it: those it has waited for, and on Linux the living ones too."""
    if not Path("/proc/self/stat").exists():
        return sum(os.times()[:4])
    total, waiting = 0, [str(os.getpid())]
    while waiting:
        process = Path("/proc", waiting.pop())
        try:
            total += sum(map(int, (process / "stat").read_text().rpartition(")")[2].split()[11:15]))
            for task in (process / "task").iterdir():
                waiting += (task / "children").read_text().split()
        except OSError:  # it has ended meanwhile: what it used is counted with its parent
            continue
    return total / TICKS


def probe_seconds():
    """Processor seconds of a fixed piece of work, the least of several tries."""
    tries = []
    for _ in range(5):
        start = time.process_time()
        sum(number * number % 7 for number in range(600_000))
        tries.append(time.process_time() - start)
    return min(tries)


class Counter:
    """In the process that runs tests: adds what a test used to its last report."""

    def __init__(self):
        self.shared, self.depth = {}, 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.shared, self.start, self.wall = {}, cpu_seconds(), time.monotonic()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        """What several tests use is counted apart from the test that is first to ask for it."""
        if fixturedef.scope == "function" or self.depth:
            return (yield)
        before, self.depth = cpu_seconds(), 1
        try:
            return (yield)
        finally:
            self.depth = 0
            self.shared[fixturedef.argname] = round(cpu_seconds() - before, 2)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when == "teardown":
            own = cpu_seconds() - self.start - sum(self.shared.values())
            wall = round(time.monotonic() - self.wall, 2)
            used = {"cpu": round(max(own, 0.0), 2), "wall": wall, "fixtures": self.shared}
            report.user_properties.append(("used", {**used, "slow": "slow" in item.keywords}))
        return report


class Account:
    """In the process that reports: keeps what tests used, and says which used too much."""

    def __init__(self, file, limit):
        self.file, self.limit, self.rows, self.over = file, limit, [], []
        self.ended = {}
        if file:
            file.write_text("")

    def pytest_runtest_logreport(self, report):
        self.ended[getattr(report, "worker_id", "alone")] = time.monotonic()
        for name, used in report.user_properties:
            if name == "used" and report.when == "teardown":
                self.rows.append({"test": report.nodeid, **used})
                if self.file:
                    with self.file.open("a") as file:
                        file.write(json.dumps(self.rows[-1]) + "\n")

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session):
        """A run that is well otherwise fails where a limit is passed."""
        if self.limit:
            self.limit *= max(1.0, probe_seconds() / REFERENCE_SECONDS)
            self.over = [row for row in self.rows if not row["slow"] and largest(row) > self.limit]
            if self.over and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return (yield)

    def pytest_terminal_summary(self, terminalreporter):
        out = terminalreporter
        total = sum(row["cpu"] + sum(row["fixtures"].values()) for row in self.rows)
        out.section(f"{total:.0f} processor seconds; the {SHOWN} most expensive tests")
        for row in sorted(self.rows, key=largest, reverse=True)[:SHOWN]:
            out.line(f"{largest(row):7.1f} s  {row['test']}{' (slow)' if row['slow'] else ''}")
        last = max(self.ended.values(), default=0.0)
        idle = [f"{last - end:.0f} s" for _, end in sorted(self.ended.items())]
        out.line(f"processes that had no test left waited for the last one: {', '.join(idle)}")
        for row in self.over:
            text = (
                f"{row['test']} used {largest(row):.1f} processor seconds: mark it slow, or make it cheaper"
            )
            out.line(f"OVER THE LIMIT of {self.limit:.0f} s: {text}", red=True)


def largest(row):
    return max(row["cpu"], *row["fixtures"].values(), 0.0)


def pytest_addoption(parser):
    parser.addoption("--cpu-times", type=Path, help="write processor seconds of tests to this file")
    parser.addoption("--cpu-limit", type=float, help="most processor seconds of a test that is not slow")


def pytest_configure(config):
    file, limit = config.option.cpu_times, config.option.cpu_limit
    if file or limit:
        config.pluginmanager.register(Counter())
        if not hasattr(config, "workerinput"):  # of pytest-xdist
            config.pluginmanager.register(Account(file and file.resolve(), limit))
