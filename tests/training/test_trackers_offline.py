"""The real packages, without a network: what each tracker holds is what the run's folder holds."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from guerdon.core.errors import ConfigError, DataError
from guerdon.fit.logs import MetricLog
from guerdon.training.trackers import Trackers, follower, run
from guerdon.training.trackers.mlflow_tracker import legal_name
from tests.fit.test_logs import events
from tests.training.tracked_runs import REMOTE, config_for, latest, lines_of


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
    return {name: saved.id for name, saved in run.read_trackers(folder).items() if saved.id}


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


def test_mlflow_takes_numbers_of_any_name(offline, tmp_path):
    """Names that it forbids are changed, and those that differ stay apart."""
    names = [
        "train/loss", "train/loss(q)", "train/loss[q]", "train/loss_q_", "train/q@0.5", "a//b", "a/../c",
        "/d", "e/", "..", "", "n" * 250, "n" * 251, "n" * 252, "val/été: x-1.0",
    ]  # fmt: skip
    with Trackers(config_for(tmp_path, ["mlflow"]), tmp_path) as trackers:
        with MetricLog(tmp_path, tensorboard=False) as logs:
            for step in range(3):
                logs.write(step, {name: step + index / 8 for index, name in enumerate(names)})
            logs.write(3, {"train/after": 0.5})
        trackers.finish()
    numbers = mlflow_holds(run.read_trackers(tmp_path)["mlflow"].id)[0]
    assert len({legal_name(name) for name in names}) == len(names)
    assert sorted(numbers) == sorted(
        (step, legal_name(name), value) for step, name, value in lines_of(tmp_path)
    )
    assert [name for name in names if legal_name(name) == name] == [
        "train/loss", "train/loss_q_", "n" * 250, "val/été: x-1.0",
    ]  # fmt: skip
    assert legal_name("train/loss(q)").startswith("train/loss_q_-")


def test_a_failure_between_calls_to_mlflow_repeats_nothing(offline, tmp_path, monkeypatch):
    """Of the calls that 500 rows need, the third fails, and the fifth, and what is in them comes later."""
    from mlflow.tracking import MlflowClient

    log_batch, calls = MlflowClient.log_batch, []

    def sometimes(self, run_id, metrics=(), **more):
        if metrics:
            calls.append(len(metrics))
            if len(calls) in (3, 5):
                raise ConnectionError("reset by peer")
        return log_batch(self, run_id, metrics=metrics, **more)

    monkeypatch.setattr(MlflowClient, "log_batch", sometimes)
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.5)
    with Trackers(config_for(tmp_path, ["mlflow"]), tmp_path) as trackers:
        with MetricLog(tmp_path, tensorboard=False) as logs:
            for step in range(500):
                logs.write(step, {f"m/{index}": step + index / 8 for index in range(9)})
            logs.write(500, {f"wide/{index}": index / 8 for index in range(1700)})
        trackers.finish()
    numbers = mlflow_holds(run.read_trackers(tmp_path)["mlflow"].id)[0]
    assert sorted(numbers) == sorted(lines_of(tmp_path)) and len(calls) > 6


@pytest.mark.parametrize("state", ["KILLED", "RUNNING", "FAILED"])
def test_mlflow_keeps_the_state_of_a_run_that_gets_a_card(offline, tmp_path, state):
    from mlflow.tracking import MlflowClient

    with Trackers(config_for(tmp_path, ["mlflow"]), tmp_path):
        pass
    run_id = run.read_trackers(tmp_path)["mlflow"].id
    assert mlflow_holds(run_id)[3] == "KILLED"
    MlflowClient().update_run(run_id, status=state)
    card = tmp_path / "card.html"
    card.write_text("card")
    run.send_files(tmp_path, [card])
    _, paths, _, after = mlflow_holds(run_id)
    assert "card.html" in paths and after == state


ROOT = Path(__file__).parents[2]
KILLED = """
import os, sys
from pathlib import Path
from tests.training.test_trackers_offline import config_for, Trackers, write_alarm
folder = Path(sys.argv[1])
Trackers(config_for(folder, ["tensorboard"]), folder).begin()
write_alarm(folder, 10)
os._exit(9)
"""


def write_alarm(folder, step):
    place = folder / f"alarms/stuck_{step}"
    place.mkdir(parents=True)
    Image.fromarray(np.full((8, 8, 3), 77, np.uint8)).save(place / "00.png")
    alarm = {"name": "stuck", "step": step, "frames": [f"alarms/stuck_{step}/00.png"]}
    with (folder / "alarms.jsonl").open("a") as file:
        file.write(json.dumps(alarm) + "\n")


def test_tensorboard_gets_the_alarms_of_a_killed_run_when_it_is_resumed(tmp_path):
    """And gets none of them twice, however often the run is resumed or interrupted."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, check=False, timeout=120)
    assert killed.returncode == 9
    resumed = config_for(tmp_path, ["tensorboard"], f"runner.resume_dir={tmp_path}")
    for step in (20, 30):
        with Trackers(resumed, tmp_path):
            write_alarm(tmp_path, step)
    with Trackers(resumed, tmp_path) as trackers:
        trackers.finish()
    shown = [
        event.step for event in events(tmp_path) for value in event.summary.value if value.HasField("image")
    ]
    assert shown == [10, 20, 30]
    with pytest.raises(DataError, match="has no tracker to send to"):
        run.send_files(tmp_path, [tmp_path / "alarms.jsonl"])
