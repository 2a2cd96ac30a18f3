"""Another threshold for a fitted model: written whole, with its rates, and believed by whoever loads it."""

import json
import logging
import shutil

import numpy as np
import pytest

from guerdon.cli.main import main
from guerdon.core.errors import ConfigError, DataError
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.datasets import RewardDataset
from guerdon.fit.recalibrate import recalibrate
from guerdon.fit.threshold import Threshold
from guerdon.models import load_checkpoint, save_checkpoint
from guerdon.rewards.image.int8_file import int8_path, quantize_checkpoint
from guerdon.serve import RewardManager
from tests.verdicts import CAMERA, make_case


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("case"), "temperature")


@pytest.fixture
def model(made, tmp_path):
    return shutil.copytree(made.checkpoint, tmp_path / "model")


def fire_rates(made, checkpoint):
    manager = RewardManager(str(checkpoint))
    fired = manager.fires(manager.score({CAMERA: made.frames}).prob_success)
    positive = EpisodeStore(made.data).labels >= 0.5
    return fired[positive].mean(), fired[~positive].mean()


@pytest.mark.parametrize("rate", [0.02, 0.2])
def test_a_false_fire_rate_is_kept(made, model, rate):
    before = load_checkpoint(model)[0].state_dict()
    found = recalibrate(model, made.data, fpr=rate)
    hits, wrong = fire_rates(made, model)
    assert wrong <= rate and found.threshold.false_positive_rate == pytest.approx(wrong)
    assert found.threshold.true_positive_rate == pytest.approx(hits)
    assert found.previous_threshold == made.threshold != found.threshold.threshold
    after, contract, _ = load_checkpoint(model)
    assert all((value == before[name]).all() for name, value in after.state_dict().items())
    assert contract.threshold == found.threshold.threshold
    assert repr(Threshold.from_dict(contract.calibration["threshold"])) == repr(found.threshold)
    assert contract.metrics["true_positive_rate"] == pytest.approx(hits)
    assert contract.frame_sizes == found.contract.frame_sizes
    assert json.loads((model / "contract.json").read_text())["threshold"] == contract.threshold


def test_a_given_threshold_keeps_the_calibration(made, model, tmp_path):
    out = tmp_path / "other"
    found = recalibrate(model, made.data, threshold=0.25, out=out)
    assert found.checkpoint == out and found.contract.calibration_map == made.calibration
    assert RewardManager(str(out)).threshold == 0.25
    assert RewardManager(str(model)).threshold == made.threshold  # untouched
    hits, wrong = fire_rates(made, out)
    low, high = found.threshold.false_positive_interval
    assert low <= wrong <= high and found.threshold.true_positive_rate == pytest.approx(hits)


def test_a_file_of_rlinfs_layout_keeps_its_entries(made, model, tmp_path):
    weights, contract, _ = load_checkpoint(model)
    file = save_checkpoint(tmp_path / "best.pt", weights, contract, {"epoch": 7})
    found = recalibrate(file, made.data, fpr=0.05)
    _, contract, extra = load_checkpoint(file)
    assert found.checkpoint == file and extra["epoch"] == 7
    assert contract.threshold == found.threshold.threshold


def test_an_int8_file_of_another_threshold_is_removed(made, model, caplog):
    rows = np.arange(len(made.frames))
    quantize_checkpoint(model, RewardDataset(EpisodeStore(made.data), cameras=(CAMERA,)), rows, rows)
    recalibrate(model, made.data, threshold=made.threshold)
    assert int8_path(model).is_file()  # it fits still
    with caplog.at_level(logging.WARNING):
        recalibrate(model, made.data, fpr=0.3)
    assert not int8_path(model).exists() and "int8.npz is removed" in caplog.text


def test_the_command(made, model, tmp_path, capsys):
    command = ["reward", "recalibrate", "--checkpoint", str(model), "--data", str(made.data)]
    assert main([*command, "--fpr", "0.05", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["threshold"] == RewardManager(str(model)).threshold
    assert printed["previous_threshold"] == made.threshold and printed["rates"]["false_positive_rate"] <= 0.05
    assert main([*command, "--threshold", "0.5", "--out", str(tmp_path / "half")]) == 0
    assert "threshold    0.5000 (it was" in capsys.readouterr().out
    page = ["reward", "card", "--checkpoint", str(model), "--data", str(made.data), "--json"]
    assert main([*page, "--out", str(tmp_path / "card.html"), "--threshold", "0.5"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["threshold"] == 0.5 == shown["metrics"]["threshold"]
    assert set(shown["uses"]) == {"continuous", "binary", "terminal", "ending episodes"}
    assert shown["next_steps"][0]["why"]
    assert main([*command, "--fpr", "0.1", "--threshold", "0.5"]) == 2
    assert main([*command, "--fpr", "3"]) == 2


def test_what_cannot_be_calibrated_is_refused(made, model, tmp_path, caplog):
    store = EpisodeStore(made.data)
    failure = store.read_episode(0)
    with StoreWriter(tmp_path / "failures") as writer:
        labels = np.zeros_like(failure.labels)
        writer.add(type(failure)(frames=failure.frames, labels=labels, success=False, source="0"))
    with pytest.raises(DataError, match="no success frame"):
        recalibrate(model, tmp_path / "failures")
    with pytest.raises(ConfigError, match="not both"):
        recalibrate(model, made.data, fpr=0.1, threshold=0.5)
    before = (model / "model.safetensors").read_bytes()
    with pytest.raises(DataError, match="does not exist"):
        recalibrate(model, tmp_path / "nowhere")
    assert (model / "model.safetensors").read_bytes() == before


def test_data_of_the_fit_is_warned_about(made, tmp_path, caplog):
    from dataclasses import replace

    model, contract, _ = load_checkpoint(made.checkpoint)
    own = replace(contract, data_hash=EpisodeStore(made.data).content_hash)
    with caplog.at_level(logging.WARNING):
        recalibrate(save_checkpoint(tmp_path / "model", model, own), made.data)
    assert "what the model was fitted to" in caplog.text
