"""Trackers that fail, refuse or hang: none of them can stop a run, and each gets what it takes."""

import json
import logging
import threading
import time

import numpy as np
import pytest
from PIL import Image

from guerdon.cli.train import train
from guerdon.config import load_config
from guerdon.core.errors import ConfigError, DataError
from guerdon.fit.logs import MetricLog
from guerdon.training.fit_run import train_reward
from guerdon.training.trackers import TRACKERS, Trackers, follower, run
from guerdon.training.trackers.base import stdout_to_stderr
from tests.training.tracked_runs import REMOTE, config_for, install_fake, lines_of, wait_for


@pytest.fixture
def fake(monkeypatch):
    return install_fake(monkeypatch)


def test_an_outage_is_logged_once_and_what_was_missed_is_sent_later(fake, tmp_path, monkeypatch, caplog):
    failing, attempts = threading.Event(), []

    def before(self, rows):
        if failing.is_set():
            attempts.append(rows)
            raise ConnectionError("no route to host")

    monkeypatch.setattr(fake, "before", before)
    caplog.set_level(logging.INFO, "guerdon")
    with Trackers(config_for(tmp_path, ["wandb"]), tmp_path) as trackers:
        with MetricLog(tmp_path, tensorboard=False) as logs:
            logs.write(0, {"a": 0.25})
            wait_for(lambda: fake.made[0].rows)
            failing.set()
            for step in range(1, 4):
                logs.write(step, {"a": float(step)})
                wait_for(lambda step=step: len(attempts) >= step)
        failing.clear()
        trackers.finish()
    tracker = fake.made[0]
    assert tracker.rows == lines_of(tmp_path) and len(tracker.rows) == 4
    assert tracker.finished is True
    said = [line for line in caplog.messages if "wandb" in line]
    assert [line.split(" (")[0] for line in said] == [
        "wandb does not take what is logged", "wandb answers again",
    ]  # fmt: skip
    assert "no route to host" in said[0]


def test_a_tracker_that_fails_to_the_end_is_named(fake, tmp_path, monkeypatch, caplog):
    def before(self, rows):
        raise ValueError("gone")

    monkeypatch.setattr(fake, "before", before)
    with (
        Trackers(config_for(tmp_path, ["wandb"]), tmp_path),
        MetricLog(tmp_path, tensorboard=False) as logs,
    ):
        logs.write(0, {"a": 0.5})
    assert sum("wandb does not take" in line for line in caplog.messages) == 1
    assert caplog.messages[-1].startswith("wandb has not got everything")
    assert fake.made[0].finished is False
    assert json.loads((tmp_path / "trackers.json").read_text())["wandb"]["metrics"] == 0


def test_a_tracker_that_hangs_is_left_alone(fake, tmp_path, monkeypatch, caplog):
    free = threading.Event()
    monkeypatch.setattr(fake, "before", lambda self, rows: free.wait(60))
    monkeypatch.setattr(follower, "CLOSE_SECONDS", 0.2)
    with Trackers(config_for(tmp_path, ["wandb"]), tmp_path) as trackers:
        started = time.monotonic()
        with MetricLog(tmp_path, tensorboard=False) as logs:
            for step in range(1000):
                logs.write(step, {"a": 1.0})
        trackers.finish()
        assert time.monotonic() - started < 30
    free.set()
    fake.made[0].thread.join(60)
    assert [line for line in caplog.messages if "wandb does not answer" in line]


def test_what_a_tracker_prints_is_no_result_and_the_result_is_printed(fake, tmp_path, monkeypatch, capsys):
    """A tracker that hangs while it prints keeps nobody from standard output."""
    printed, free = threading.Event(), threading.Event()

    def close(self, *, finished):
        with stdout_to_stderr():
            print("* uploading")
            printed.set()
            free.wait(60)
            print("* uploaded")

    monkeypatch.setattr(fake, "close", close)
    monkeypatch.setattr(follower, "CLOSE_SECONDS", 0.2)
    with Trackers(config_for(tmp_path, ["wandb"]), tmp_path) as trackers:
        trackers.finish()
    assert printed.is_set()
    print("the result")
    free.set()
    fake.made[0].thread.join(60)
    print("and more")
    assert capsys.readouterr() == ("the result\nand more\n", "* uploading\n* uploaded\n")


def test_one_that_cannot_start_is_an_error(fake, tmp_path, monkeypatch):
    def refuse(self, run):
        time.sleep(0.3)  # as asking a server takes
        raise RuntimeError("no API key\nconfigured")

    monkeypatch.setattr(fake, "__init__", refuse)
    with pytest.raises(ConfigError, match=r"^wandb cannot start: RuntimeError: no API key configured"):
        Trackers(config_for(tmp_path, ["wandb"]), tmp_path).begin()


@pytest.mark.parametrize("name", REMOTE)
def test_one_that_is_not_installed_is_an_error_before_the_run(settings, tmp_path, monkeypatch, name):
    monkeypatch.setattr(TRACKERS[name], "module", "not_installed_at_all")
    with pytest.raises(ConfigError, match=rf"is not installed: pip install 'guerdon\[{name}\]'$"):
        train(load_config("train", [*settings, f"runner.logger.backends=[{name}]"]))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    fit = [f"runner.logger.log_path={tmp_path / 'fit'}", "fit.data.path=nowhere"]
    with pytest.raises(ConfigError, match=rf"pip install 'guerdon\[{name}\]'$"):
        train_reward(load_config("train_reward", [*fit, f"runner.logger.backends=[{name}]"]))
    assert not (tmp_path / "fit").exists()


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"wandb": 3}', '{"wandb": {"id": 1, "project": "", "name": ""}}']
)
def test_a_damaged_record_of_trackers_is_named(tmp_path, content):
    (tmp_path / "trackers.json").write_text(content)
    with pytest.raises(DataError, match=r"trackers\.json is damaged"):
        run.read_trackers(tmp_path)


# What is refused


def refusing(*names):
    """`Fake.before` of a tracker that refuses whole calls with such a metric, and takes nothing of them."""

    def before(self, rows):
        if any(name in values for _, values in rows for name in names):
            raise ValueError(f"Invalid name in {rows}")

    return before


@pytest.mark.parametrize("at_once", [(1, 1000), (500, 1000), (500, 7)], ids=str)
def test_a_refused_metric_holds_up_no_other(fake, tmp_path, monkeypatch, caplog, at_once):
    """While the run goes on and at its end; every other number is there once."""
    monkeypatch.setattr(fake, "before", refusing("bad", "worse"))
    monkeypatch.setattr(fake, "max_rows", at_once[0], raising=False)
    monkeypatch.setattr(fake, "max_numbers", at_once[1], raising=False)
    with Trackers(config_for(tmp_path, ["wandb"]), tmp_path) as trackers:
        with MetricLog(tmp_path, tensorboard=False) as logs:
            for step in range(40):
                logs.write(step, {"a": step + 0.5, "bad": 1.0, "b": step - 0.5})
                logs.write(step, {"worse": 1.0} if step % 7 == 0 else {"c": 1.0 * step})
            good = [each for each in lines_of(tmp_path) if each[1] not in ("bad", "worse")]
            wait_for(lambda: len(fake.made[0].rows) == len(good))
            logs.write(40, {"bad": 2.0})
            logs.write(41, {"a": 7.0})
        trackers.finish()
    assert sorted(fake.made[0].rows) == sorted([*good, (41, "a", 7.0)])
    said = [line.split(" (")[0] for line in caplog.messages if "refuses" in line]
    assert sorted(said) == ["wandb refuses bad", "wandb refuses worse"]
    assert caplog.messages[-1].startswith("wandb has not got everything")


def test_a_call_that_fails_is_no_refusal_while_nothing_else_is_taken(fake, tmp_path, monkeypatch, caplog):
    """An outage of many attempts: then everything comes, in order and once."""
    failing, attempts = threading.Event(), []
    failing.set()

    def before(self, rows):
        if failing.is_set():
            attempts.append(rows)
            raise ConnectionError("no route to host")

    monkeypatch.setattr(fake, "before", before)
    monkeypatch.setattr(follower, "MAX_PAUSE_SECONDS", 0.02)
    with Trackers(config_for(tmp_path, ["wandb"]), tmp_path) as trackers:
        with MetricLog(tmp_path, tensorboard=False) as logs:
            for step in range(30):
                logs.write(step, {"a": 1.0 * step, "b": 0.5})
            wait_for(lambda: len(attempts) > 50)
            failing.clear()
        trackers.finish()
    assert fake.made[0].rows == lines_of(tmp_path)
    assert not [line for line in caplog.messages if "refuses" in line or "everything" in line]


def write_alarm(folder, step, *, torn=False):
    place = folder / f"alarms/stuck_{step}"
    place.mkdir(parents=True)
    Image.fromarray(np.full((8, 8, 3), 77, np.uint8)).save(place / "00.png")
    if torn:
        (place / "00.png").write_bytes((place / "00.png").read_bytes()[:9])
    alarm = {"name": "stuck", "step": step, "frames": [f"alarms/stuck_{step}/00.png"]}
    with (folder / "alarms.jsonl").open("a") as file:
        file.write(json.dumps(alarm) + "\n")


def open_and_keep(self, name, path, step):
    with Image.open(path) as picture:
        picture.load()
    self.shown.append((name, path.name, step))


def test_a_torn_picture_holds_up_no_other(fake, tmp_path, monkeypatch, caplog):
    """While the run goes on, and at its end, where films and files come, too."""
    monkeypatch.setattr(fake, "picture", open_and_keep)
    monkeypatch.setattr(fake, "film", open_and_keep)
    with Trackers(config_for(tmp_path, ["wandb"]), tmp_path) as trackers:
        write_alarm(tmp_path, 10, torn=True)
        write_alarm(tmp_path, 20)
        wait_for(lambda: fake.made[0].shown)
        with MetricLog(tmp_path, tensorboard=False) as logs:
            logs.write(20, {"a": 0.5})
        wait_for(lambda: fake.made[0].rows)
        wait_for(lambda: "wandb refuses alarms/stuck/0" in caplog.text)
        for step in range(30, 100, 10):
            write_alarm(tmp_path, step, torn=step < 60)
        (tmp_path / "videos").mkdir()
        (tmp_path / "videos/eval_0.gif").write_bytes(b"torn")
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "videos/eval_1.gif")
        (tmp_path / "summary.json").write_text("{}")
        trackers.finish()
    assert [(name, step) for name, _, step in fake.made[0].shown] == [
        *(("alarms/stuck/0", step) for step in (20, 60, 70, 80, 90)), ("videos/eval_1", 20),
    ]  # fmt: skip
    assert fake.made[0].kept == ["summary.json"]
    assert caplog.messages[-1].startswith("wandb has not got everything")
