"""FitProcess: outcomes, exact resume, steps of a plain loop, encode once, and clear errors."""

import json
import logging
import math
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from guerdon.config import (
    AugmentConfig,
    EarlyStopConfig,
    FitDataConfig,
    RewardModelConfig,
)
from guerdon.core.errors import ConfigError, DataError
from guerdon.data.datasets.sampling import EpochSampler
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.data.summary import convert
from guerdon.datasets import RewardDataset
from guerdon.fit import fit_reward_model
from guerdon.fit.fit import low_recall_message, open_data
from guerdon.fit.metrics import LabelledScores, OperatingPoint, auc
from guerdon.fit.threshold import measure_threshold
from guerdon.fit.trainer import RewardModelTrainer
from guerdon.models import build_model, load_checkpoint, save_checkpoint
from tests.fit.synthetic import episode, score_rows, write_store
from tests.plain_fit import plain_fit, plain_optim

MODEL = RewardModelConfig(
    model_type="binary_classifier", arch="resnet10", width=8, image_size=(3, 32, 32), hidden_dim=16
)
FIT = plain_fit(
    epochs=4,
    global_batch_size=32,
    log_interval=1,
    save_interval=5,
    optim=plain_optim(lr=3e-3),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("fit") / "data")


def on(data, **changes):
    return replace(FIT, data=FitDataConfig(path=str(data)), **changes)


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture(scope="module")
def fitted(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, fit_reward_model(MODEL, on(data, epochs=6), folder=folder, seed=0)


def test_it_learns_and_knows_its_errors(fitted, data, tmp_path):
    folder, result = fitted
    assert result.metrics["auc"] > 0.99
    assert 0 < result.threshold.threshold < 1
    fresh = EpisodeStore(write_store(tmp_path / "fresh", count=10))
    model, contract, _ = load_checkpoint(result.checkpoint)
    logits = score_rows(model, RewardDataset(fresh), np.arange(fresh.num_frames))
    assert auc(logits, fresh.labels) > 0.99
    assert contract.threshold == result.threshold.threshold
    assert contract.data_hash == EpisodeStore(data).content_hash
    assert len(contract.feature_mean) == 8 * MODEL.width
    assert contract.frame_sizes == {"base_camera": (32, 32, 3)}
    assert not (folder / "features.f32").exists()


def test_a_printed_result_fits_a_screen(fitted):
    assert len(repr(fitted[1])) < 80 * 30


def test_checkpoints_have_the_documents_layout(fitted):
    folder, result = fitted
    best = torch.load(folder / "checkpoints" / "reward_model_best.pt", weights_only=True)
    assert {"epoch", "model_state_dict", "optimizer_state_dict", "train_loss", "train_acc"} <= best.keys()
    steps = sorted(int(item.name[5:]) for item in (folder / "checkpoints").glob("step_*"))
    assert steps == list(range(5, result.num_steps + 1, 5))
    assert (folder / "checkpoints" / "step_5" / "checkpoint.pt").exists()
    assert (result.checkpoint / "model.safetensors").exists()


def test_the_log_has_losses_and_validations(fitted):
    folder, result = fitted
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses(folder)) == result.num_steps
    assert sum("val/auc" in line for line in lines) == 6
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1


def test_an_interrupted_run_resumes_to_the_same_losses(data, tmp_path):
    settings = on(data, epochs=2, augment=AugmentConfig(shift_pixels=2, color=0.2))
    model = replace(MODEL, dropout=0.3)
    whole = fit_reward_model(model, settings, folder=tmp_path / "whole", seed=3)
    first = fit_reward_model(model, replace(settings, epochs=1), folder=tmp_path / "half", seed=3)
    assert first.num_steps < whole.num_steps
    shutil.copytree(tmp_path / "half", tmp_path / "resumed")
    resumed = fit_reward_model(
        model, settings, folder=tmp_path / "resumed", seed=3, resume_dir=tmp_path / "resumed"
    )
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")  # to the digit
    for name, value in load_checkpoint(whole.checkpoint)[0].state_dict().items():
        assert torch.equal(value, load_checkpoint(resumed.checkpoint)[0].state_dict()[name]), name


def test_the_best_model_is_taken_along_into_another_folder(data, tmp_path, caplog):
    settings = on(data, epochs=2, save_interval=1)
    first = fit_reward_model(MODEL, settings, folder=tmp_path / "first", seed=0)
    again = fit_reward_model(
        MODEL, settings, folder=tmp_path / "again", seed=0, resume_dir=tmp_path / "first"
    )  # at its end already
    assert again.best_step == first.best_step and again.num_steps == first.num_steps
    best = load_checkpoint(first.checkpoint)[0].state_dict()
    for name, value in load_checkpoint(again.checkpoint)[0].state_dict().items():
        assert torch.equal(value, best[name]), name
    assert "the search for the best starts again" not in caplog.text
    shutil.copytree(tmp_path / "first/checkpoints" / f"step_{first.num_steps}", tmp_path / "alone/step_1")
    alone = fit_reward_model(
        MODEL, settings, folder=tmp_path / "third", seed=0, resume_dir=tmp_path / "alone"
    )
    assert alone.best_step == first.num_steps  # the only model that is there
    assert alone.best_step == first.best_step or "the search for the best starts again" in caplog.text


def test_resuming_on_other_data_or_with_another_seed_is_refused(data, fitted, tmp_path):
    folder, _ = fitted
    with pytest.raises(DataError, match="seed 0, this run 1"):
        fit_reward_model(MODEL, on(data), folder=tmp_path / "a", seed=1, resume_dir=folder)
    other = write_store(tmp_path / "other", count=20)
    with pytest.raises(DataError, match="other data"):
        fit_reward_model(MODEL, on(other), folder=tmp_path / "b", seed=0, resume_dir=folder)
    with pytest.raises(DataError, match="no checkpoint to resume from"):
        fit_reward_model(MODEL, on(data), folder=tmp_path / "c", resume_dir=tmp_path)


def test_every_step_is_that_of_a_plain_loop(data, tmp_path, monkeypatch):
    """Loss, gradients and weights of each step, by lines of torch that begin at the checkpoint before it.

    Two programs that run freely part from each other, because Adam's first steps are the signs of gradients,
    also of those that are nothing but rounding. A single step has no time for that, on any processor.
    """
    rows, original = [], RewardModelTrainer._train_step
    monkeypatch.setattr(
        RewardModelTrainer, "_train_step", lambda self, batch: rows.append(batch) or original(self, batch)
    )
    settings = on(data, epochs=1, save_interval=1)
    fit_reward_model(MODEL, settings, folder=tmp_path, seed=0)
    steps = [tmp_path / "checkpoints" / f"step_{n}" / "checkpoint.pt" for n in range(1, len(rows) + 1)]
    saved = [torch.load(path, weights_only=True)["optimizer_state_dict"]["state"] for path in steps]
    dataset = RewardDataset(EpisodeStore(data))
    assert len(rows) == 8 and sorted(np.concatenate(rows)) != list(np.concatenate(rows))  # shuffled
    for step in range(1, len(rows)):
        model, after = load_checkpoint(steps[step - 1])[0].train(), load_checkpoint(steps[step])[0]
        batch = dataset.batch(rows[step])
        labels = torch.from_numpy(EpisodeStore(data).labels[rows[step]])
        loss = F.binary_cross_entropy_with_logits(model(batch.frames), labels)
        assert losses(tmp_path)[step + 1] == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.optim.clip_grad)
        for number, (weight, changed) in enumerate(zip(model.parameters(), after.parameters(), strict=True)):
            old, new = saved[step - 1][number], saved[step][number]
            wanted = 0.9 * old["exp_avg"] + 0.1 * weight.grad
            # Rounding is relative to the terms of a sum; gradients that cancel keep that of their terms.
            torch.testing.assert_close(new["exp_avg"], wanted, rtol=1e-3, atol=1e-6)
            squares = 0.999 * old["exp_avg_sq"] + 0.001 * weight.grad.square()
            torch.testing.assert_close(new["exp_avg_sq"], squares, rtol=1e-3, atol=1e-9)
            mean = new["exp_avg"] / (1 - 0.9 ** (step + 1))
            deviation = (new["exp_avg_sq"] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            moved = weight.detach() - settings.optim.lr * mean / deviation
            torch.testing.assert_close(changed.detach(), moved, rtol=1e-5, atol=1e-6)


def pretrained(tmp_path, seed=7):
    """Weights of a random encoder as a torchvision file: a stand-in for pretrained ones."""
    torch.manual_seed(seed)
    path = tmp_path / "encoder.pt"
    torch.save(build_model(MODEL).resnet.state_dict(), path)
    return str(path)


def test_a_frozen_encoder_is_run_once_and_gives_the_same_model(data, tmp_path, monkeypatch):
    model = replace(MODEL, pretrained_encoder_path=pretrained(tmp_path), num_members=2)
    calls = []
    from guerdon.models import BinaryRewardClassifier

    original = BinaryRewardClassifier.encode
    monkeypatch.setattr(
        BinaryRewardClassifier, "encode", lambda self, x: calls.append(len(x)) or original(self, x)
    )
    cached = fit_reward_model(model, on(data), folder=tmp_path / "cached", seed=0)
    store = EpisodeStore(data)
    once = store.num_frames
    assert sum(calls) < 2.5 * once  # once for the cache, once more to calibrate and for statistics
    monkeypatch.setattr("guerdon.fit.trainer.Inputs.encode", None)
    monkeypatch.setattr("guerdon.fit.trainer.RewardModelTrainer._may_cache", lambda self: False)
    calls.clear()
    plain = fit_reward_model(model, on(data), folder=tmp_path / "plain", seed=0)
    assert sum(calls) > 4 * once
    left, right = losses(tmp_path / "cached"), losses(tmp_path / "plain")
    np.testing.assert_allclose(list(left.values()), list(right.values()), rtol=1e-4)
    assert cached.metrics["auc"] == pytest.approx(plain.metrics["auc"], abs=1e-3)


def test_augmented_views_are_cached(data, tmp_path):
    model = replace(MODEL, pretrained_encoder_path=pretrained(tmp_path))
    settings = on(data, augment=AugmentConfig(shift_pixels=1, color=0.0, num_views=2))
    result = fit_reward_model(model, settings, folder=tmp_path / "run", seed=0)
    plain = fit_reward_model(model, on(data), folder=tmp_path / "plain", seed=0)
    assert losses(tmp_path / "run") != losses(tmp_path / "plain")
    assert result.num_steps == plain.num_steps


def test_gradient_accumulation_gives_the_same_step(data, tmp_path):
    model = replace(
        MODEL, pretrained_encoder_path=pretrained(tmp_path)
    )  # BatchNorm fixed: batches do not mix
    for name, micro in (("whole", None), ("parts", 8)):
        fit_reward_model(model, on(data, epochs=2, micro_batch_size=micro), folder=tmp_path / name, seed=0)
    left, right = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    np.testing.assert_allclose(list(left.values()), list(right.values()), rtol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ({"global_batch_size": 239}, 1),  # of 240 frames
        ({"global_batch_size": 240, "micro_batch_size": 239}, 1),
        ({"global_batch_size": 118, "micro_batch_size": 39}, 3),  # one left over in passes, four at the end
    ],
)
def test_a_frame_left_over_is_not_alone_before_batch_norm(data, tmp_path, monkeypatch, sizes, steps):
    """On images of 32x32 the last BatchNorm sees one value for each frame and channel."""
    from guerdon.models import BinaryRewardClassifier

    seen, original = [], BinaryRewardClassifier.encode

    def encode(self, x):
        seen.extend([len(x)] if self.training else [])
        return original(self, x)

    monkeypatch.setattr(BinaryRewardClassifier, "encode", encode)
    result = fit_reward_model(MODEL, on(data, epochs=1, **sizes), folder=tmp_path / "run", seed=0)
    assert sum(seen) == 240 and min(seen) > 1  # every frame once
    assert len(losses(tmp_path / "run")) == result.num_steps == steps


def test_batches_of_one_frame_are_refused_where_batch_norm_is_trained(data, tmp_path):
    for sizes in ({"global_batch_size": 1}, {"micro_batch_size": 1}):
        with pytest.raises(ConfigError, match=rf"fit\.{next(iter(sizes))} is 1, .* BatchNorm"):
            fit_reward_model(MODEL, on(data, **sizes), folder=tmp_path / "run", seed=0)
    model = replace(MODEL, pretrained_encoder_path=pretrained(tmp_path))  # a fixed one needs no others
    settings = on(data, epochs=1, micro_batch_size=1)
    assert fit_reward_model(model, settings, folder=tmp_path / "run", seed=0).num_steps == 8


def test_epochs_may_differ_in_length(data, tmp_path, monkeypatch):
    """Few frames of each episode, and as many failures as successes: each epoch has another number."""
    lengths, original = [], EpochSampler.epoch

    def epoch(self, number):
        rows = original(self, number)
        lengths.append(len(rows))
        assert len(lengths) < 20, "it goes round in circles"
        return rows

    monkeypatch.setattr(EpochSampler, "epoch", epoch)
    few = FitDataConfig(path=str(data), num_samples_per_episode=3, fail_success_ratio=1.0)
    settings = replace(on(data, epochs=4, global_batch_size=6, save_interval=1), data=few)
    result = fit_reward_model(MODEL, settings, folder=tmp_path / "run", seed=0)
    steps = [-(-length // 6) for length in lengths[1:]]  # the first was asked for twice
    assert len(steps) == 4 and len(set(steps)) > 1
    assert result.num_steps == sum(steps)
    entries = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [e["step"] for e in entries if "val/auc" in e] == np.cumsum(steps).tolist()
    lengths.clear()
    middle = tmp_path / "run" / "checkpoints" / f"step_{sum(steps[:2]) + 1}"
    fit_reward_model(MODEL, settings, folder=tmp_path / "resumed", seed=0, resume_dir=middle)
    before, after = losses(tmp_path / "run"), losses(tmp_path / "resumed")
    assert after == {step: before[step] for step in range(sum(steps[:2]) + 2, sum(steps) + 1)}


def test_early_stop(data, tmp_path):
    settings = on(data, epochs=50, early_stop=EarlyStopConfig(patience=2, min_delta=0.05))
    result = fit_reward_model(MODEL, settings, folder=tmp_path / "run", seed=0)
    assert result.num_steps < 50 * 4
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    checks = [(row["val/auc"], -row["val/loss"], row["step"]) for row in rows if "val/auc" in row]
    improved, bad = -math.inf, 0
    for number, (value, _, _) in enumerate(checks, start=1):
        improved, bad = (value, 0) if value > improved + 0.05 else (improved, bad + 1)
        assert (bad == 2) == (number == len(checks))  # the second check without an improvement is the last
    assert checks[-1][2] == result.num_steps
    equal = [check for check in checks if check[0] == improved]
    assert result.best_step == max(equal)[2]  # of equal ones the one with the lowest loss


def test_a_threshold_that_hardly_fires_is_said_loudly(data, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("guerdon.fit.fit.MIN_RECALL", 1.1)
    better = OperatingPoint(false_positive_rate=0.02, true_positive_rate=0.9, threshold=0.1)
    monkeypatch.setattr("guerdon.fit.fit.better_recall", lambda *args, **given: better)
    place = tmp_path / "exported"  # a folder, since it does not end in .pt
    fit_reward_model(
        MODEL, on(data, epochs=1, export_path=str(place)), folder=tmp_path, seed=0, tensorboard=False
    )
    assert "ATTENTION: at the threshold of" in caplog.text
    assert f"--checkpoint {place} " in caplog.text and load_checkpoint(place)[1].threshold is not None


def test_the_warning_names_a_better_threshold(tmp_path):
    rng = np.random.default_rng(0)
    episodes, steps = np.divmod(np.arange(2000), 20)
    success = np.arange(100) % 2 == 0
    labels = success[episodes].astype(np.float32)
    prob = 1 / (1 + np.exp(-(rng.normal(0, 1.2, 2000) + 4.0 * labels - 2.0))).astype(np.float32)
    scores = LabelledScores(prob_success=prob, labels=labels, episode=episodes, step=steps, success=success)
    strict = measure_threshold(scores, 0.95, seed=0)
    assert strict.true_positive_rate < 0.5
    text = low_recall_message(scores, strict, tmp_path / "best model")
    (given,) = re.findall(r"reward_threshold=([0-9.]+)", text)
    assert np.mean(prob[labels > 0.5] > float(given)) >= 0.8
    assert f"--checkpoint '{tmp_path / 'best model'}'" in text and "--fpr 0.0" in text
    blind = replace(scores, prob_success=np.where(labels > 0.5, 0.1, 0.2).astype(np.float32))
    assert "No threshold mends that" in low_recall_message(blind, strict, tmp_path)


def test_several_cameras(tmp_path):
    cameras = ("base_camera", "wrist_camera")
    data = write_store(tmp_path / "two", cameras=cameras)
    model = replace(MODEL, image_keys=cameras)
    result = fit_reward_model(model, on(data, epochs=5), folder=tmp_path / "run", seed=0)
    assert result.metrics["auc"] > 0.98
    assert set(result.contract.pixel_mean) == set(cameras)


def test_loader_processes_are_said_to_have_no_effect(data, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    for count, said in ((0, False), (4, True)):
        open_data(MODEL, replace(FIT, data=FitDataConfig(path=str(data), num_workers=count)), tmp_path)
        assert ("fit.data.num_workers=4 has no effect" in caplog.text) is said


def test_foreign_formats_are_copied_once(data, tmp_path):
    convert(data, tmp_path / "npy", "npy-trajectory")
    directories = FitDataConfig(
        positive_dir=str(tmp_path / "npy" / "positive"), negative_dir=str(tmp_path / "npy" / "negative")
    )
    settings = replace(FIT, epochs=1, data=directories)
    fit_reward_model(MODEL, settings, folder=tmp_path / "run", seed=0)
    copies = list((tmp_path / "run" / "cache").glob("*/manifest.json"))
    assert len(copies) == 1
    before = copies[0].stat().st_mtime_ns
    fit_reward_model(MODEL, settings, folder=tmp_path / "run", seed=0)
    assert [item.stat().st_mtime_ns for item in (tmp_path / "run" / "cache").glob("*/manifest.json")] == [
        before
    ]


def test_a_loss_that_is_not_finite_stops_and_names_the_files(data, tmp_path):
    settings = on(data, optim=plain_optim(lr=1e30, clip_grad=0.0), save_interval=1000)
    with pytest.raises(DataError, match=r"not finite at step \d+ .*positive/0000\d\d.npy") as stop:
        fit_reward_model(MODEL, settings, folder=tmp_path / "run", seed=0)
    assert "checkpoint" in str(stop.value)


def test_the_last_good_checkpoint_survives_a_bad_loss(data, tmp_path, monkeypatch):
    original = RewardModelTrainer.logits

    def poisoned(self, rows, *, train=False):
        logits = original(self, rows, train=train)
        return logits * float("nan") if train and self.progress.step == 7 else logits

    monkeypatch.setattr(RewardModelTrainer, "logits", poisoned)
    with pytest.raises(DataError, match=r"step 7 .*step_5/checkpoint.pt"):
        fit_reward_model(MODEL, on(data), folder=tmp_path / "run", seed=0)
    model, _, extra = load_checkpoint(tmp_path / "run" / "checkpoints" / "step_5" / "checkpoint.pt")
    assert extra["progress"]["step"] == 5
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        ([episode(seed, False) for seed in range(12)], "no success frame"),
        ([episode(0, True), episode(1, False)], "at least 2 are needed|no failure|no success"),
    ],
)
def test_too_little_data_is_named(tmp_path, episodes, message):
    with StoreWriter(tmp_path / "data") as writer:
        writer.add_many(episodes)
    with pytest.raises(DataError, match=message):
        fit_reward_model(MODEL, on(tmp_path / "data"), folder=tmp_path / "run", seed=0)


def test_a_missing_camera_is_named(data, tmp_path):
    with pytest.raises(DataError, match=r"no camera 'front'.*base_camera"):
        fit_reward_model(replace(MODEL, image_keys=("front",)), on(data), folder=tmp_path / "run", seed=0)


def test_missing_data_is_named(tmp_path):
    with pytest.raises(DataError, match=r"fit\.data\.path"):
        fit_reward_model(MODEL, FIT, folder=tmp_path / "run", seed=0)
    with pytest.raises(DataError, match="nowhere"):
        fit_reward_model(MODEL, on("nowhere"), folder=tmp_path / "run", seed=0)


def test_a_failing_write_of_a_checkpoint_is_a_clear_error(data, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="not a directory"):
        fit_reward_model(
            MODEL, on(data, save_dir=str(tmp_path / "file" / "x")), folder=tmp_path / "run", seed=0
        )


def test_pictures_of_the_training_frames(data, tmp_path):
    settings = replace(
        on(data, epochs=1),
        data=FitDataConfig(path=str(data), debug_save_dir=str(tmp_path / "debug")),
    )
    fit_reward_model(MODEL, settings, folder=tmp_path / "run", seed=0)
    success = list((tmp_path / "debug" / "success").glob("*.png"))
    assert len(success) >= 20
    assert len(list((tmp_path / "debug" / "fail").glob("*.png"))) > len(success)


def test_a_saved_model_scores_the_same(fitted, data, tmp_path):
    _, result = fitted
    model, contract, _ = load_checkpoint(result.checkpoint)
    save_checkpoint(tmp_path / "again", model, contract)
    store = EpisodeStore(data)
    dataset, rows = RewardDataset(store), np.arange(50)
    np.testing.assert_array_equal(
        score_rows(model, dataset, rows), score_rows(load_checkpoint(tmp_path / "again")[0], dataset, rows)
    )
