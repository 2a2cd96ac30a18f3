"""Models that see more than one frame, or only a part of it: data, fit, checkpoint, scores and card."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from guerdon.cli.reward import card, quantize, score
from guerdon.config import (
    AugmentConfig,
    FitDataConfig,
    RewardConfig,
    RewardModelConfig,
)
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import stack_episode
from guerdon.core.types import Episode
from guerdon.data.store import EpisodeStore, StoreWriter
from guerdon.datasets import RewardDataset
from guerdon.fit import fit_reward_model
from guerdon.fit.inputs import augment
from guerdon.models import Contract, build_model, load_checkpoint, save_checkpoint
from guerdon.rewards.image.accelerate import make_scorer
from guerdon.rewards.image.int8 import int8_scorer, make_int8
from guerdon.serve import ImageRewardWorker, RewardManager
from tests.fit.moving import write_moving
from tests.fit.synthetic import write_store
from tests.plain_fit import plain_fit, plain_optim

SMALL = RewardModelConfig(
    model_type="binary_classifier", arch="resnet10", width=8, image_size=(3, 32, 32), hidden_dim=16
)


def fit(data, folder, model, epochs=10, **changes):
    cfg = plain_fit(
        epochs=epochs, global_batch_size=64, optim=plain_optim(lr=3e-3), data=FitDataConfig(path=str(data))
    )
    return fit_reward_model(model, replace(cfg, **changes), folder=folder, tensorboard=False)


@pytest.fixture(scope="module")
def moving(tmp_path_factory):
    return write_moving(tmp_path_factory.mktemp("moving") / "data", 120, 0)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    return write_moving(tmp_path_factory.mktemp("fresh") / "data", 30, 7)


@pytest.fixture(scope="module")
def two_frames(fresh, tmp_path_factory):
    """Fitted to a few episodes; `test_two_frames_tell_...` proves what a whole fit can do."""
    return fit(fresh, tmp_path_factory.mktemp("two"), replace(SMALL, num_frames=2))


# Data


def numbered(path, lengths):
    """Episodes whose frames are full of their own row's number."""
    row = 0
    with StoreWriter(path) as writer:
        for length in lengths:
            frames = np.repeat(np.arange(row, row + length, dtype=np.uint8), 4 * 4 * 3).reshape(
                length, 4, 4, 3
            )
            row += length
            labels = np.zeros(length, np.float32)
            writer.add(Episode(frames={"base_camera": frames}, labels=labels, success=False))
    return EpisodeStore(path)


def test_stacks_stay_within_their_episode(tmp_path):
    store = numbered(tmp_path / "data", [4, 1, 3])
    dataset = RewardDataset(store, num_frames=3)
    frames = dataset.batch([7, 0, 4, 1, 5, 3]).frames["base_camera"]
    assert frames.shape == (6, 3, 4, 4, 3)
    assert frames[:, :, 0, 0, 0].tolist() == [
        [5, 6, 7],
        [0, 0, 0],
        [4, 4, 4],
        [0, 0, 1],
        [5, 5, 5],
        [1, 2, 3],
    ]
    image, _ = dataset[3]
    assert image.shape == (3, 3, 4, 4)
    assert [round(float(value) * 255) for value in image[:, 0, 0, 0]] == [1, 2, 3]
    np.testing.assert_array_equal(
        stack_episode(store.read_episode(0).frames["base_camera"], 3),
        dataset.batch(np.arange(4)).frames["base_camera"],
    )


def test_the_frames_of_a_stack_are_augmented_alike():
    cfg = AugmentConfig(shift_pixels=3, crop_fraction=0.2, color=0.3, blur=0.5)
    frame = torch.randint(
        0, 255, (5, 16, 16, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    alone = augment(frame, cfg, torch.Generator().manual_seed(1))
    stacked = augment(torch.stack([frame, frame], 1), cfg, torch.Generator().manual_seed(1))
    assert torch.equal(stacked[:, 0], alone) and torch.equal(stacked[:, 1], alone)


# What they are for


@pytest.mark.slow
def test_two_frames_tell_still_from_moving_and_one_does_not(moving, fresh, tmp_path):
    one = fit(moving, tmp_path / "one", SMALL)
    two = fit(moving, tmp_path / "two", replace(SMALL, num_frames=2))
    assert two.metrics["auc"] > 0.93
    assert one.metrics["auc"] < two.metrics["auc"] - 0.15
    scored = score(fresh, two.checkpoint, None, precision="fp32")
    assert scored["metrics"]["auc"] > 0.9


def test_the_checkpoint_says_how_many_frames_it_needs(two_frames):
    contract = load_checkpoint(two_frames.checkpoint)[1]
    assert contract.num_frames == 2
    assert contract.frame_sizes == {"base_camera": (32, 32, 3)}
    assert contract.input_sizes == {"base_camera": (2, 32, 32, 3)}
    given = RewardConfig(
        model=replace(RewardModelConfig(), checkpoint_path=str(two_frames.checkpoint), num_frames=3)
    )
    with pytest.raises(ConfigError, match="num_frames is 3 in the config and 2 in the checkpoint"):
        RewardManager(given)
    manager = RewardManager(
        RewardConfig(model=replace(RewardModelConfig(), checkpoint_path=str(two_frames.checkpoint)))
    )
    single = np.zeros((5, 32, 32, 3), np.uint8)
    with pytest.raises(DataError, match=r"expected stacks of 2 frames \[N, 2, H, W, C\]"):
        manager.compute_rewards({"main_images": single})
    with pytest.raises(DataError, match="stacks of 3, the checkpoint scores 2"):
        RewardManager(manager.cfg).compute_rewards({"main_images": np.stack([single] * 3, 1)})
    worker = ImageRewardWorker(manager.cfg)
    worker.init_worker()
    with pytest.raises(DataError, match=r"expected stacks of 2 frames \[N, 2, H, W, C\]"):
        worker.score_some({"base_camera": single}, 0, 5)
    stacks = np.stack([single, single], 1)
    np.testing.assert_array_equal(
        worker.compute_rewards({"main_images": stacks}),
        [worker.score({"base_camera": stacks}).prob_success[0] > manager.threshold] * 5,
    )


def test_an_older_contract_is_of_single_whole_frames(tmp_path):
    model = build_model(SMALL)
    contract = Contract.of(model)
    old = contract.to_dict()
    for key in ("num_frames", "crop"):
        del old["model"][key]
    assert Contract.from_dict({**old, "crop": None}) == contract
    del old["model"]["arch"]
    with pytest.raises(DataError, match="lacks arch"):
        Contract.from_dict(old)


def test_scores_card_and_int8_of_stacks(fresh, two_frames, tmp_path):
    data, checkpoint = fresh, two_frames.checkpoint
    result = score(data, checkpoint, tmp_path / "scores.json", precision="fp32")
    rows = json.loads((tmp_path / "scores.json").read_text())
    store, manager = (
        EpisodeStore(data),
        RewardManager(RewardConfig(model=replace(RewardModelConfig(), checkpoint_path=str(checkpoint)))),
    )
    episode = stack_episode(store.read_episode(3).frames["base_camera"], 2)
    np.testing.assert_allclose(
        [row["prob_success"] for row in rows if row["episode"] == 3],
        manager.score({"base_camera": episode}).prob_success,
        atol=1e-5,
    )
    shown = card(data, checkpoint, tmp_path / "card.html", precision="fp32")["metrics"]
    assert shown == pytest.approx(result["metrics"], nan_ok=True)
    made = quantize(data, checkpoint, None)
    assert made["agreement"] >= 0.999
    exact = score(data, checkpoint, None, precision="int8")["metrics"]
    assert exact["auc"] == pytest.approx(result["metrics"]["auc"], abs=0.02)


def test_a_frozen_encoder_is_asked_once_for_each_stack(fresh, tmp_path, monkeypatch):
    encoder = build_model(SMALL).resnet
    torch.save(encoder.state_dict(), tmp_path / "encoder.pt")
    model = replace(SMALL, num_frames=2, pretrained_encoder_path=str(tmp_path / "encoder.pt"))
    built = build_model(model)
    assert built.encoder_frozen and built.resnet.conv1.weight.shape[1] == 6
    frame = np.random.default_rng(0).integers(0, 255, (3, 32, 32, 3), dtype=np.uint8)
    alone = build_model(replace(model, num_frames=1))
    with torch.no_grad():  # copies of one frame say what the frame alone says
        torch.testing.assert_close(
            built.encode(built.preprocess(np.stack([frame, frame], 1))), alone.encode(alone.preprocess(frame))
        )
    counts = []
    real = type(built).encode
    monkeypatch.setattr(
        type(built), "encode", lambda self, pixels: counts.append(len(pixels)) or real(self, pixels)
    )
    result = fit(fresh, tmp_path / "fit", model, epochs=9)
    assert result.num_steps > 60
    assert sum(counts) == EpisodeStore(fresh).num_frames  # once, however many epochs there are


# Fast scorers


@pytest.mark.parametrize("model_type", ["resnet_reward", "binary_classifier"])
def test_fast_scorers_say_what_the_model_says_of_stacks(model_type):
    torch.manual_seed(0)
    model = build_model(
        replace(SMALL, model_type=model_type, num_frames=3, crop=(0.25, 0.0, 0.5, 1.0))
    ).eval()
    frames = np.random.default_rng(0).integers(0, 255, (300, 3, 40, 40, 3), dtype=np.uint8)
    with torch.no_grad():
        expected = model(frames).double().numpy()
    np.testing.assert_allclose(make_scorer(model)(frames)[0], expected, atol=1e-4)
    np.testing.assert_allclose(make_scorer(model, "bf16")(frames)[0], expected, atol=0.1)
    threshold = float(np.median(expected))
    made = make_int8(model, frames[:200], frames[200:], threshold)
    logits = int8_scorer(model, made)(frames)[0]
    assert ((logits > threshold) == (expected > threshold)).mean() > 0.99


# A part of the picture


def test_a_crop_looks_at_its_region_alone_and_in_the_order_given():
    model = build_model(replace(SMALL, crop=(0.5, 0.25, 0.5, 0.25)))
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (4, 64, 128, 3), dtype=np.uint8)
    expected = frames[:, 32:64, 32:64]
    np.testing.assert_array_equal(model.images(frames)[:, 0].numpy(), expected)
    elsewhere = rng.integers(0, 255, frames.shape, dtype=np.uint8)
    elsewhere[:, 32:64, 32:64] = expected
    assert torch.equal(model.preprocess(frames), model.preprocess(elsewhere))


def test_a_crop_is_part_of_the_contract(tmp_path):
    model = build_model(replace(SMALL, crop=(0.25, 0.25, 0.5, 0.5)))
    save_checkpoint(tmp_path / "model", model, Contract.of(model))
    loaded, contract, _ = load_checkpoint(tmp_path / "model")
    assert loaded.config.crop == (0.25, 0.25, 0.5, 0.5)
    frames = np.random.default_rng(0).integers(0, 255, (4, 48, 48, 3), dtype=np.uint8)
    assert torch.equal(loaded.images(frames), model.images(frames))
    other = replace(RewardModelConfig(), crop=(0.0, 0.0, 0.5, 0.5))
    with pytest.raises(ConfigError, match=r"crop is \[0.0, 0.0, 0.5, 0.5\] in the config and \[0.25"):
        contract.check_config(other, ["crop"])


@pytest.mark.parametrize("crop", [(0.5, 0.0, 0.6, 1.0), (0.0, 0.5, 1.0, 0.6), (0.0, 0.0, 0.0, 1.0)])
def test_a_crop_beyond_the_frame_is_refused(crop):
    with pytest.raises(ConfigError, match="must lie within it"):
        build_model(replace(SMALL, crop=crop))


def test_a_crop_helps_where_success_is_small_in_a_large_picture(tmp_path):
    """The square of `write_store` in the middle of a picture in which everything else changes at random."""
    write_store(tmp_path / "small", count=40)
    rng = np.random.default_rng(0)
    with StoreWriter(tmp_path / "data") as writer:
        for episode in EpisodeStore(tmp_path / "small"):
            tiles = rng.integers(0, 255, (episode.num_frames, 16, 16, 3), dtype=np.uint8)
            images = tiles.repeat(8, axis=1).repeat(8, axis=2)
            images[:, 48:80, 48:80] = episode.frames["base_camera"]
            writer.add(replace(episode, frames={"base_camera": images}))
    model = replace(SMALL, image_size=(3, 16, 16))
    whole = fit(tmp_path / "data", tmp_path / "whole", model, epochs=3)
    part = fit(
        tmp_path / "data", tmp_path / "part", replace(model, crop=(0.375, 0.375, 0.25, 0.25)), epochs=3
    )
    assert part.metrics["auc"] > 0.95
    assert part.metrics["auc"] > whole.metrics["auc"] + 0.05
