"""int8 decides as the model does, or is refused; its file belongs to one set of weights and one threshold."""

import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from guerdon.envs import ScriptedExpert, TabletopVectorEnv
from guerdon.errors import ConfigError, DataError
from guerdon.models import BinaryRewardClassifier, ResNetRewardModel, build_model
from guerdon.models.accelerate import make_scorer
from guerdon.models.int8 import (
    MIN_AGREEMENT,
    Int8Model,
    coarse_scorer,
    int8_scorer,
    load_int8,
    make_int8,
    save_int8,
    verify_agreement,
    weights_fingerprint,
)
from guerdon.models.quantize import FORMAT, quantize, resnet_steps
from tests.models.frames import eager, lively, random_frames


def quantized(model, frames):
    """The int8 scorer alone, calibrated on `frames`."""
    return coarse_scorer(
        model, quantize(model.resnet, model.images(frames).flatten(0, 1), *model.scale_shift())
    )


@pytest.mark.parametrize("arch", ["resnet10", "resnet50"])
@pytest.mark.parametrize("same_padding", [False, True])
def test_the_steps_that_are_quantised_are_the_resnet(arch, same_padding):
    model = ResNetRewardModel(arch=arch, width=8, image_size=(3, 45, 64))
    model.resnet.use_layout("batch", same_padding)
    lively(model)
    with torch.no_grad():
        pixels = model.preprocess(random_frames(3, (45, 64)))[:, 0]
        values = {"image": pixels}
        for step in resnet_steps(model.resnet, (45, 64)):
            values[step.output] = step.run(*(values[name] for name in step.inputs))
        torch.testing.assert_close(values[step.output], model.resnet(pixels), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "settings", [{"normalize": False}, {"image_size": (1, 45, 70)}, {"arch": "resnet50"}]
)
def test_int8_is_near_the_model(settings):
    torch.manual_seed(0)
    model = ResNetRewardModel(**{"arch": "resnet10", "width": 16, "image_size": (3, 64, 64), **settings})
    lively(model)
    channels, height, width = model.config.image_size
    brightness = np.linspace(0.1, 1, 64)[:, None, None, None]
    frames = (random_frames(64, (height, width), channels) * brightness).astype(np.uint8)
    exact, rough = eager(model, frames), quantized(model, frames)(frames)[0]
    # Random weights hardly tell frames apart, which makes 8 bits coarse; a wrong layout gives 1 or more.
    assert np.abs(rough - exact).mean() < 0.3 * exact.std()


# A real fit


def tabletop(num_envs, seed):
    """Frames uint8 [50 * num_envs, 48, 48, 3] and success bool."""
    env = TabletopVectorEnv(
        num_envs, image_size=(48, 48), domain_randomization=0.5, autoreset_mode="Disabled"
    )
    expert = ScriptedExpert(noise=0.5, seed=seed)
    env.reset(seed=seed)
    frames, labels = [], []
    for _ in range(50):
        infos = env.step(expert.act(env.state()))[-1]
        frames.append(env.render_frames())
        labels.append(infos["success"])
    return np.concatenate(frames), np.concatenate(labels)


@pytest.fixture(scope="module")
def fitted():
    """A model after some seconds of fitting, its training frames, and frames of other episodes."""
    frames, labels = tabletop(120, 0)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = BinaryRewardClassifier(width=16, image_size=(3, 48, 48))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    classes = np.flatnonzero(labels), np.flatnonzero(~labels)
    for _ in range(150):
        picks = np.concatenate([rng.choice(rows, 32) for rows in classes])
        target = torch.from_numpy(labels[picks].astype(np.float32))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(frames[picks]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    calibration = frames[rng.choice(len(frames), 256, replace=False)]
    return model.eval(), calibration, tabletop(60, 10_000)[0]


@pytest.mark.slow
def test_int8_decides_as_fp32_does(fitted):
    model, calibration, held_out = fitted
    fp32 = make_scorer(model)
    logits = np.concatenate([fp32(part)[0] for part in np.array_split(held_out, 12)])
    assert logits.std() > 1  # a real spread
    for threshold_logit in (0.0, float(np.quantile(logits, 0.9))):
        made = make_int8(model, calibration, held_out, threshold_logit)
        int8 = int8_scorer(model, made)
        assert verify_agreement(fp32, int8, held_out, threshold_logit) == made.agreement >= MIN_AGREEMENT
        coarse = np.concatenate([int8.coarse(part)[0] for part in np.array_split(held_out, 12)])
        assert np.sqrt(np.mean((coarse - logits) ** 2)) < 0.1 * logits.std()
        assert int8.near(coarse).mean() == pytest.approx(made.judged_twice, abs=1e-3)
        assert made.judged_twice < 0.25  # most frames are judged in int8 alone
        assert made.num_check_frames == len(held_out)


def test_frames_near_the_threshold_are_judged_in_fp32(fitted):
    model, calibration, held_out = fitted
    int8 = int8_scorer(model, make_int8(model, calibration, held_out[::3], 0.0))
    frames = held_out[::10]
    exact, coarse, logits = eager(model, frames), int8.coarse(frames)[0], int8(frames)[0]
    near = int8.near(coarse)
    assert 0 < near.sum() < len(frames)
    np.testing.assert_allclose(logits[near], exact[near], atol=1e-4)
    np.testing.assert_array_equal(logits[~near], coarse[~near])


def test_int8_is_refused_if_it_decides_otherwise(fitted):
    model, _, held_out = fitted
    black = np.zeros((32, 48, 48, 3), np.uint8)
    with pytest.raises(DataError, match=r"refused.*agree with fp32 on \d+\.\d+%.*99\.9%.*fp32.*more frames"):
        make_int8(model, black, held_out[::3], 0.0)


def test_int8_that_is_too_inexact_to_be_fast_says_so(fitted, monkeypatch, caplog):
    model, calibration, held_out = fitted
    monkeypatch.setattr("guerdon.models.int8._margin", lambda *_: 1000.0)
    make_int8(model, calibration, held_out[:64], 0.0)
    assert "100% of the held-out frames are judged again" in caplog.text


def test_the_model_is_left_alone(fitted):
    model, calibration, held_out = fitted
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = make_int8(model, calibration, held_out[:300], 0.0)
    int8_scorer(model, made)(held_out[:10])
    assert all(value.requires_grad for value in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_file_gives_the_same_scorer(fitted, tmp_path):
    model, calibration, held_out = fitted
    made = make_int8(model, calibration, held_out[::6], 0.5)
    save_int8(tmp_path / "int8.npz", made)
    again = load_int8(tmp_path / "int8.npz", model, 0.5)
    assert again == made
    for one, other in zip(
        int8_scorer(model, made)(held_out[:300]), int8_scorer(model, again)(held_out[:300]), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_a_file_that_does_not_fit_is_refused(fitted, tmp_path, monkeypatch):
    model = fitted[0]
    path = tmp_path / "int8.npz"
    with pytest.raises(ConfigError, match=r"does not exist.*guerdon reward quantize"):
        load_int8(path, model, 0.0)
    made = Int8Model(
        onnx=b"x",
        margin=0.1,
        threshold_logit=0.0,
        agreement=1.0,
        judged_twice=0.0,
        num_check_frames=1,
        weights=weights_fingerprint(model),
    )
    save_int8(path, made)
    assert load_int8(path, model, None) == made
    with pytest.raises(ConfigError, match=r"verified for a threshold at logit 0\.0000.*at 1\.5000"):
        load_int8(path, model, 1.5)
    save_int8(path, replace(made, weights="other"))
    with pytest.raises(DataError, match="other weights"):
        load_int8(path, model, 0.0)
    plain = build_model(replace(model.config, normalize=not model.config.normalize))
    plain.load_state_dict(model.state_dict())  # the same weights, but they see other numbers
    save_int8(path, made)
    with pytest.raises(DataError, match="other weights"):
        load_int8(path, plain, 0.0)
    with monkeypatch.context() as later:
        later.setattr("guerdon.models.quantize.FORMAT", FORMAT + 1)
        with pytest.raises(DataError, match=f"has the format {FORMAT}"):
            load_int8(path, model, 0.0)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged"):
        load_int8(path, model, 0.0)


def test_what_int8_needs(fitted, monkeypatch):
    model, calibration, held_out = fitted
    with pytest.raises(DataError, match="and some"):
        verify_agreement(make_scorer(model), make_scorer(model), held_out[:0], 0.0)
    grouped = BinaryRewardClassifier(width=8)
    grouped.resnet.use_layout("group", False)
    with pytest.raises(ConfigError, match="BatchNorm"):
        quantized(grouped, random_frames(4))
    for package in ("onnx", "onnxruntime"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ConfigError, match=r"pip install 'guerdon\[serve\]'"):
                quantized(model, calibration)


def test_threads_share_the_batches_and_change_nothing(fitted, monkeypatch):
    model, calibration, held_out = fitted
    alone = quantized(model, calibration)(held_out[:100])[0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    many = quantized(model, calibration)
    np.testing.assert_array_equal(many(held_out[:100])[0], alone)
    names = {thread.name.rsplit("_", 1)[0] for thread in threading.enumerate()}
    assert "guerdon-int8" in names
