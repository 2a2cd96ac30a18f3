"""Runs at trackers: what each holds is what the run's folder holds, and none of them can stop a run."""

import json
import logging
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

from guerdon.cli.main import main
from guerdon.cli.train import train
from guerdon.config import load_config
from guerdon.config.load import load_serial
from guerdon.core.errors import ConfigError, DataError
from guerdon.fit.logs import MetricLog
from guerdon.training.fit_run import train_reward
from guerdon.training.serial import as_run
from guerdon.training.trackers import TRACKERS, Tracker, Trackers, follower, run
from guerdon.training.trackers.base import stdout_to_stderr
from guerdon.training.trackers.lines import GrowingLines, row_of
from tests.fit.synthetic import write_store
from tests.fit.test_logs import events

REMOTE = ["wandb", "mlflow", "trackio"]


def config_for(folder, backends, *more):
    names = f"runner.logger.backends=[{','.join(backends)}]"
    return load_config("train", [f"runner.logger.log_path={folder}", names, *more])


def lines_of(folder):
    """(step, name, value) of `metrics.jsonl`."""
    return [
        (step, name, value)
        for line in (folder / "metrics.jsonl").read_bytes().splitlines()
        for step, values in [row_of(line)]
        for name, value in values.items()
    ]


# The lines of a file that grows


def test_lines_are_taken_once_and_a_torn_one_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = GrowingLines(path)
    assert lines.read() == []
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n{"st')
    assert lines.read() == lines.read() == [b'{"step": 0}\n', b'{"step": 1}\n']
    lines.take(lines.read())
    assert lines.read() == []
    with path.open("ab") as file:
        file.write(b'ep": 2}\n')
    assert lines.read() == [b'{"step": 2}\n']
    assert GrowingLines(path).read() == []
    assert GrowingLines(path, 2).read() == [b'{"step": 2}\n']


def test_a_file_that_was_cut_gives_its_new_lines(tmp_path):
    with MetricLog(tmp_path, tensorboard=False) as logs:
        for step in range(5):
            logs.write(step, {"a": float(step)})
    lines = GrowingLines(tmp_path / "metrics.jsonl")
    assert lines.num_taken == 5
    with MetricLog(tmp_path, tensorboard=False, resume_step=2) as logs:
        logs.write(3, {"a": 3.0})  # as before
        logs.write(4, {"a": 9.0})
        assert lines.read() == [b'{"step": 4, "a": 9.0}\n']
        assert lines.num_taken == 4


def test_a_file_that_is_replaced_while_it_is_read_gives_its_new_lines(tmp_path, monkeypatch):
    path, new = tmp_path / "metrics.jsonl", tmp_path / "new"
    path.write_bytes(b'{"step": 0}\n{"step": 1}\n')
    lines, opened = GrowingLines(path), Path.open
    new.write_bytes(b'{"step": 0}\n{"step": 7}\n{"step": 8}\n')

    def replaced(self, *args):
        file = opened(self, *args)
        if self == path and new.exists():
            new.replace(path)
        return file

    monkeypatch.setattr(Path, "open", replaced)
    assert lines.read() == []
    assert lines.read() == [b'{"step": 7}\n', b'{"step": 8}\n']


def test_what_is_no_number_is_left_out():
    assert row_of(b'{"step": 3, "a": 1, "b": null, "c": 0.5, "d": "x", "e": true}\n') == (
        3, {"a": 1.0, "c": 0.5},
    )  # fmt: skip
    assert row_of(b"[1]\n") is row_of(b'{"step": "x"}') is row_of(b"\xff") is None


# Outages


class Fake(Tracker):
    """Keeps what it gets; a test may make it fail."""

    name, module, extra = "wandb", "json", "wandb"
    made: ClassVar[list] = []

    def __init__(self, run):
        self.run, self.rows, self.shown, self.kept, self.finished = run, [], [], [], None
        self.run_id = run.run_id or f"id{len(self.made)}"
        self.thread = threading.current_thread()
        self.made.append(self)

    def log(self, rows):
        self.before(rows)
        self.rows += [(step, name, value) for step, values in rows for name, value in values.items()]

    def before(self, rows):
        pass

    def picture(self, name, path, step):
        self.shown.append((name, path.name, step))

    film = picture

    def files(self, paths):
        self.kept += [path.name for path in paths]

    def close(self, *, finished):
        self.finished = finished


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(Fake, "made", [])
    monkeypatch.setitem(TRACKERS, "wandb", Fake)
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.01)
    return Fake


def wait_for(condition):
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


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


# A run, and one that goes on


def test_a_run_and_its_continuation_are_one_run(fake, settings, tmp_path):
    """In the same folder and in another one; pictures of alarms, films and files are there."""
    backends = ["runner.logger.backends=[wandb]", "monitor.min_episodes=1", "runner.logger.project_name=arms"]
    first, _ = train(load_config("train", [*settings, *backends]))
    tracker = fake.made[0]
    assert tracker.rows == lines_of(first) and len(tracker.rows) > 20
    assert tracker.run.project == "arms" and tracker.run.config["learner"]["total_steps"] == 800
    assert tracker.finished is True
    assert ("videos/eval_0", "eval_0.gif", 800) in tracker.shown
    assert tracker.kept == ["config.yaml", "summary.json", "report.html"]
    pictures = [path.relative_to(first / "alarms") for path in sorted(first.glob("alarms/*/*.png"))]
    sent = [(f"{name.split('/')[1]}_{step}", file) for name, file, step in tracker.shown if "alarms" in name]
    assert sorted(sent) == [(path.parent.name, path.name) for path in pictures] and pictures
    more = ["learner.total_steps=1000", f"runner.resume_dir={first}"]
    train(load_config("train", [*settings, *backends, *more]))
    again = fake.made[1]
    assert again.run_id == again.run.run_id == tracker.run_id
    assert again.rows == [row for row in lines_of(first) if row not in tracker.rows] and again.rows
    assert min(step for step, _, _ in again.rows) > 800
    elsewhere = [f"runner.logger.log_path={tmp_path / 'other'}", "learner.total_steps=1200"]
    train(load_config("train", [*settings, *backends, f"runner.resume_dir={first}", *elsewhere]))
    assert fake.made[2].run_id == tracker.run_id
    assert fake.made[2].rows == lines_of(tmp_path / "other")


def test_an_interrupted_run_says_so(fake, settings, monkeypatch):
    from guerdon.training.trainer import EmbodiedRunner

    def fail(self, progress):
        raise DataError("broken")

    monkeypatch.setattr(EmbodiedRunner, "_advance", fail)
    with pytest.raises(DataError, match="broken"):
        train(load_config("train", [*settings, "runner.logger.backends=[wandb]"]))
    assert fake.made[0].finished is False and fake.made[0].kept == []


def test_a_fit_and_its_continuation_are_one_run(fake, tmp_path):
    data = write_store(tmp_path / "data", count=12)
    settings = [
        f"fit.data.path={data}", f"runner.logger.log_path={tmp_path / 'fit'}", "reward.model.arch=resnet10",
        "reward.model.width=8", "reward.model.image_size=[3,32,32]", "fit.global_batch_size=8",
        "fit.log_interval=1", "fit.save_interval=1", "runner.logger.backends=[wandb]",
    ]  # fmt: skip
    folder, _ = train_reward(load_config("train_reward", [*settings, "fit.epochs=1"]))
    more = ["fit.epochs=2", f"runner.resume_dir={folder}"]
    train_reward(load_config("train_reward", [*settings, *more]))
    first, again = fake.made
    assert first.run_id == again.run_id and first.finished and again.finished
    assert latest([*first.rows, *again.rows]) == latest(lines_of(folder))
    assert {name for _, name, _ in first.rows} >= {"train/loss", "val/auc"}
    assert first.kept == ["config.yaml", "summary.json"]


def test_a_serial_pipeline_has_trackers_too(fake, tmp_path):
    tree = {"reward_model": {"type": "rnd"}, "env": {"train": {"id": "guerdon/PointReach-v0"}}}
    cfg = load_serial({**tree, "backends": ["wandb"], "project_name": "zoo", "output_dir": str(tmp_path)})
    logger = as_run(cfg).runner.logger
    assert (logger.backends, logger.project_name) == (("wandb",), "zoo")
    assert as_run(load_serial({**tree, "output_dir": None})).runner.logger.backends == ()
    with pytest.raises(ConfigError, match="backends names wandb, and output_dir is null"):
        as_run(load_serial({**tree, "backends": ["wandb"], "output_dir": None}))


def test_a_card_is_sent_where_its_run_is(monkeypatch, capsys, tmp_path):
    from guerdon.cli import reward

    sent = []
    card = SimpleNamespace(verdict=SimpleNamespace(uses=[], headline="good"), next_steps=[], to_dict=dict)
    monkeypatch.setattr(reward, "assess", lambda *args, **options: card)
    monkeypatch.setattr(reward, "send_files", lambda *args: sent.append(args) or ["wandb"])
    words = ["reward", "card", "--checkpoint", "model", "--data", "data", "--out", "card.html"]
    assert main(words) == 0 and sent == []
    assert main([*words, "--track"]) == 0
    assert sent == [(Path("model"), [Path("card.html")])]
    assert "-> wandb" in capsys.readouterr().out


# The real packages, without a network


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """Weights & Biases offline, MLflow and Trackio in folders."""
    home = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        patch.setenv("WANDB_CACHE_DIR", str(home / "wandb_cache"))
        patch.setenv("WANDB_DATA_DIR", str(home / "wandb_data"))
        patch.setenv("WANDB_CONFIG_DIR", str(home / "wandb_config"))
        patch.setenv("MLFLOW_TRACKING_URI", f"file://{home / 'mlruns'}")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        patch.setenv("TRACKIO_DIR", str(home / "trackio"))
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "HF_TOKEN"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield home


def wandb_records(folder):
    """All records of the offline files of a run, in the order in which they were written."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        store = DataStore()
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            yield Record.FromString(data)
        store._fp.close()


def wandb_holds(folder, run_id):
    """(step, name, value) of all numbers, the names of media, of artifact files, and the config."""
    numbers, media, kept, config = [], set(), set(), {}
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "run":
            assert record.run.run_id == run_id
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        if record.WhichOneof("record_type") == "history":
            items = [([item.key] if item.key else item.nested_key, item) for item in record.history.item]
            media |= {names[0] for names, _ in items if len(names) > 1}
            row = {names[0]: json.loads(item.value_json) for names, item in items if len(names) == 1}
            numbers += [
                (row["step"], name, value)
                for name, value in row.items()
                if not name.startswith("_") and name != "step"
            ]
        if record.WhichOneof("record_type") == "request" and record.request.HasField("log_artifact"):
            kept |= {Path(item.path).name for item in record.request.log_artifact.artifact.manifest.contents}
        if record.WhichOneof("record_type") == "artifact":
            kept |= {Path(item.path).name for item in record.artifact.manifest.contents}
    return numbers, media, kept, config


def mlflow_holds(run_id):
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    run = client.get_run(run_id)
    numbers = [
        (metric.step, name, metric.value)
        for name in run.data.metrics
        for metric in client.get_metric_history(run_id, name)
    ]

    def paths(place=""):
        for item in client.list_artifacts(run_id, place):
            yield from paths(item.path) if item.is_dir else [item.path]

    return numbers, set(paths()), run.data.params, run.info.status


def trackio_holds(project, name):
    from trackio import SQLiteStorage

    numbers, media = [], set()
    for row in SQLiteStorage.get_logs(project, name):
        for key, value in row.items():
            if isinstance(value, dict):
                media.add(key)
            elif key not in ("step", "timestamp"):
                numbers.append((row["step"], key, value))
    return numbers, media, SQLiteStorage.get_run_config(project, name)


def a_run(folder, backends, steps, resume_step=None, *more):
    """What a run of a few steps leaves in its folder, followed by trackers."""
    rng = np.random.default_rng(len(steps))
    config = config_for(folder, backends, *more)
    with Trackers(config, folder) as trackers:
        with MetricLog(folder, tensorboard="tensorboard" in backends, resume_step=resume_step) as logs:
            for step in steps:
                logs.write(step, {"env/return": rng.normal(), "time/steps_per_second": rng.uniform() * 1e3})
                logs.write(step, {"val/auc": rng.uniform(), "val/nan": float("nan")})
        for place in ("alarms/stuck_20", "videos"):
            (folder / place).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8, 3), 77, np.uint8)).save(folder / "alarms/stuck_20/00.png")
        Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save(folder / "videos/eval_0.gif")
        alarm = {
            "name": "stuck",
            "step": 20,
            "value": 1.0,
            "limit": 0.5,
            "frames": ["alarms/stuck_20/00.png"],
        }
        (folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
        for name in ("config.yaml", "summary.json", "report.html", "card.html"):
            (folder / name).write_text(name)
        trackers.finish()
    return {name: saved.id for name, saved in run.read_trackers(folder).items()}


@pytest.fixture(scope="module")
def tracked(offline, tmp_path_factory):
    """A run and its continuation at all trackers: its folder and the ids at first and afterwards."""
    folder = tmp_path_factory.mktemp("tracked")
    backends = ["tensorboard", *REMOTE]
    first = a_run(folder, backends, [10, 20, 30])
    again = a_run(folder, backends, [30, 40], 20, f"runner.resume_dir={folder}")
    return folder, first, again


def test_a_continued_run_keeps_its_ids(tracked):
    _, first, again = tracked
    assert set(first) == set(REMOTE)
    assert first == again


def latest(numbers):
    """The last value of each metric at each step: those that were logged again count once."""
    return {(step, name): value for step, name, value in numbers}


def test_every_tracker_holds_the_numbers_of_the_run(tracked):
    folder, ids, _ = tracked
    expected = latest(lines_of(folder))
    assert len(expected) == len(lines_of(folder)) == 4 * 3
    on_board = {
        (event.step, value.tag): value.simple_value
        for event in events(folder)
        for value in event.summary.value
        if value.HasField("simple_value") and value.tag != "val/nan"
    }
    assert on_board == pytest.approx(expected, rel=1e-6)  # which keeps float32
    assert latest(wandb_holds(folder, ids["wandb"])[0]) == expected
    assert latest(mlflow_holds(ids["mlflow"])[0]) == expected
    assert latest(trackio_holds("guerdon", ids["trackio"])[0]) == expected


def test_nothing_but_what_was_logged_again_is_there_twice(tracked):
    folder, ids, _ = tracked
    repeated = 3  # the numbers of step 30, which came after the checkpoint at 20
    for numbers in (
        wandb_holds(folder, ids["wandb"])[0], mlflow_holds(ids["mlflow"])[0],
        trackio_holds("guerdon", ids["trackio"])[0],
    ):  # fmt: skip
        assert len(numbers) == len(lines_of(folder)) + repeated


def test_every_tracker_has_config_pictures_films_and_files(tracked):
    folder, ids, _ = tracked
    files = {"config.yaml", "summary.json", "report.html", "card.html"}
    shown = {"alarms/stuck/0", "videos/eval_0"}
    _, media, kept, config = wandb_holds(folder, ids["wandb"])
    assert (media, kept) == (shown, files)
    assert config["runner"]["logger"]["project_name"] == "guerdon"
    _, paths, settings, status = mlflow_holds(ids["mlflow"])
    assert paths == files | {"alarms/stuck/0/step_20/00.png"} | {
        path for path in paths if path.startswith("videos/eval_0/step_")
    }
    assert any(path.endswith("/eval_0.gif") for path in paths)
    assert settings["runner.logger.project_name"] == "guerdon"
    assert status == "FINISHED"
    _, media, config = trackio_holds("guerdon", ids["trackio"])
    assert media == shown
    assert config["runner"]["logger"]["project_name"] == "guerdon"
    from trackio import SQLiteStorage

    assert SQLiteStorage.get_artifacts("guerdon")
    tags = {value.tag for event in events(folder) for value in event.summary.value if value.HasField("image")}
    assert tags == shown


def test_a_card_joins_the_run_later(tracked, tmp_path):
    folder, ids, _ = tracked
    card = tmp_path / "card.html"
    card.write_text("a later card")
    assert run.send_files(folder / "checkpoints" / "best_model", [card]) == REMOTE
    from mlflow.tracking import MlflowClient

    place = MlflowClient().download_artifacts(ids["mlflow"], "card.html", str(tmp_path))
    assert Path(place).read_text() == "a later card"
    assert mlflow_holds(ids["mlflow"])[3] == "FINISHED"
    with pytest.raises(DataError, match="has no tracker to send to"):
        run.send_files(tmp_path, [card])


def test_mlflow_without_a_place_for_runs_says_what_to_do(offline, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'm.db'}")
    with pytest.raises(ConfigError, match=r"^mlflow cannot keep runs at sqlite:.*MLFLOW_TRACKING_URI"):
        Trackers(config_for(tmp_path, ["mlflow"]), tmp_path).begin()
