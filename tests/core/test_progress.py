"""Progress where stderr is no terminal: lines, at growing intervals."""

import sys

import pytest

from guerdon.core import progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("tqdm.std.time", clock)
    return clock


def test_a_line_now_and_then(clock, capsys):
    with progress.progress_bar("training", total=1000, unit="step") as bar:
        bar.update(100)  # of an earlier run
        for second in range(1, 41):
            clock.now = second
            bar.set_postfix_str(f"success {second / 100}", refresh=False)
            bar.update(10)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and "\r" not in err
    assert len(lines) == 4
    assert lines[0] == "training:  20% (200/1000 step, 00:10 gone, 00:40 left), success 0.1"
    assert lines[-1].startswith("training:  50% (500/1000 step, 00:40 gone")


def test_a_long_run_has_fewer_lines(clock, capsys):
    with progress.progress_bar("training", total=100_000, unit="step") as bar:
        for step in range(1, 10_001):
            clock.now = 10.0 * step  # more than a day
            bar.update(10)
    assert 100 < len(capsys.readouterr().err.splitlines()) < 400


def test_what_is_short_or_quiet_says_nothing(clock, capsys):
    assert list(progress.progress(range(3), "reading")) == [0, 1, 2]
    clock.now = 100.0
    with progress.progress_bar("fitting", total=10, quiet=True) as bar:
        clock.now = 200.0
        bar.update(5)
        bar.set_postfix(loss="1")
    assert capsys.readouterr().err == ""


def test_iterating_without_a_known_number(clock, capsys):
    for number in progress.progress(iter(range(25)), "reading", unit="episode"):
        clock.now = float(number)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "reading: 11 episode (00:10 gone)"
    assert len(lines) == 2


def test_a_terminal_has_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = progress.progress_bar("training", total=10)
    assert not isinstance(bar, progress.ProgressLines)
    bar.close()
