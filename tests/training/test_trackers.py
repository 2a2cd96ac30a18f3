"""A run's folder at trackers: its lines, and runs that go on; see `test_trackers_outages` and `_offline`."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from guerdon.cli.main import main
from guerdon.cli.train import train
from guerdon.config import load_config
from guerdon.config.load import load_serial
from guerdon.core.errors import ConfigError, DataError, StorageError
from guerdon.fit.logs import MetricLog
from guerdon.training.fit_run import train_reward
from guerdon.training.serial import as_run
from guerdon.training.trackers import Trackers, run
from guerdon.training.trackers.lines import GrowingLines, row_of
from tests.fit.synthetic import write_store
from tests.training.tracked_runs import config_for, install_fake, latest, lines_of


@pytest.fixture
def fake(monkeypatch):
    return install_fake(monkeypatch)


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


@pytest.mark.parametrize("finished", [True, False])
def test_a_card_does_not_change_how_a_run_ended(fake, tmp_path, monkeypatch, finished):
    with Trackers(config_for(tmp_path, ["wandb"]), tmp_path) as trackers:
        if finished:
            (tmp_path / "summary.json").write_text("{}")
            trackers.finish()
    card = tmp_path / "card.html"
    card.write_text("card")
    run.send_files(tmp_path, [card])
    assert [tracker.finished for tracker in fake.made] == [finished, finished]
    assert "card.html" in fake.made[1].kept

    def refuse(self, paths):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(fake, "files", refuse)
    with pytest.raises(StorageError, match="wandb does not take the files: no route to host"):
        run.send_files(tmp_path, [card])
    assert fake.made[2].finished is finished  # it is closed all the same
