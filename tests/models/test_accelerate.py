"""Scorers: fp32 is the model, int8 decides as the model does or is refused."""

import sys

import numpy as np
import pytest
import torch

from guerdon.envs import ScriptedExpert, TabletopVectorEnv
from guerdon.errors import ConfigError, DataError
from guerdon.models import BinaryRewardClassifier, ResNetRewardModel
from guerdon.models.accelerate import MIN_AGREEMENT, TwoStepScorer, make_scorer, verify_agreement
from guerdon.models.quantize import resnet_steps

CLASSES = {"binary": BinaryRewardClassifier, "resnet": ResNetRewardModel}


def random_frames(count, size=(64, 64), channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *size, channels), dtype=np.uint8)


def lively(model, seed=0):
    """Batch norms that have seen frames, so that folding them is not trivial."""
    channels, height, width = model.config.image_size
    model.train()
    with torch.no_grad():
        for number in range(2):
            images = random_frames(8, (height, width), channels, seed + number)
            model(dict.fromkeys(model.config.image_keys, images))
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.uniform_(-0.5, 0.5)
    return model.eval()


def eager(model, frames):
    with torch.no_grad():
        return model(frames).numpy()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "settings",
    [
        {"arch": "resnet10", "width": 16},
        {"arch": "resnet18", "width": 8, "num_members": 3},
        {"arch": "resnet50", "width": 8, "normalize": False},
        {"arch": "resnet10", "width": 8, "image_size": (1, 45, 70)},
        {"arch": "resnet10", "width": 8, "image_keys": ("front", "wrist"), "use_pretrain": False},
    ],
)
def test_fp32_is_the_model(kind, settings):
    torch.manual_seed(0)
    model = lively(CLASSES[kind](**{"image_size": (3, 64, 64), **settings}))
    scorer = make_scorer(model, "fp32")
    channels, height, width = model.config.image_size
    for count in (1, 7, 70):
        images = random_frames(count, (height, width), channels, count)
        frames = {key: np.roll(images, n, 1) for n, key in enumerate(model.config.image_keys)}
        logits, spread = scorer(frames)
        assert logits.dtype == spread.dtype == np.float64
        np.testing.assert_allclose(logits, eager(model, frames), atol=1e-4)
        np.testing.assert_allclose(spread, model.predict(frames).disagreement.numpy(), atol=1e-5)
    assert (spread.max() > 0) == (model.num_members > 1)


def test_fp32_of_a_full_batch_and_of_frames_of_another_size():
    model = lively(BinaryRewardClassifier(width=16))
    scorer = make_scorer(model, "fp32")
    for frames in (random_frames(256), random_frames(5, (96, 80))):
        np.testing.assert_allclose(scorer(frames)[0], eager(model, frames), atol=1e-4)


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layouts_of_flax(norm, precision):
    model = BinaryRewardClassifier(width=16, image_size=(3, 45, 64))
    model.resnet.use_layout(norm, True)
    model = lively(model)
    frames = random_frames(9, (45, 64))
    atol = 1e-4 if precision == "fp32" else 0.1
    np.testing.assert_allclose(make_scorer(model, precision)(frames)[0], eager(model, frames), atol=atol)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_the_model_is_left_alone(precision):
    model = lively(ResNetRewardModel(arch="resnet10", width=8, image_size=(3, 64, 64))).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    frames = random_frames(8)
    scorer = make_scorer(model, precision, calibration_frames=frames)
    first = scorer(frames)[0]
    assert model.training and all(value.requires_grad for value in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    np.testing.assert_array_equal(scorer(frames)[0], first)


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
    exact, rough = eager(model, frames), make_scorer(model, "int8", calibration_frames=frames)(frames)[0]
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


def test_int8_decides_as_fp32_does(fitted):
    model, calibration, held_out = fitted
    fp32 = make_scorer(model)
    logits = np.concatenate([fp32(part)[0] for part in np.array_split(held_out, 12)])
    assert logits.std() > 1  # a real spread
    for threshold_logit in (0.0, float(np.quantile(logits, 0.9))):
        int8 = make_scorer(
            model,
            "int8",
            calibration_frames=calibration,
            check_frames=held_out,
            threshold_logit=threshold_logit,
        )
        assert isinstance(int8, TwoStepScorer)
        assert verify_agreement(fp32, int8, held_out, threshold_logit) >= MIN_AGREEMENT
        coarse = np.concatenate([int8.coarse(part)[0] for part in np.array_split(held_out, 12)])
        assert np.sqrt(np.mean((coarse - logits) ** 2)) < 0.1 * logits.std()
        assert int8.near(coarse).mean() < 0.25  # most frames are judged in int8 alone


def test_frames_near_the_threshold_are_judged_in_fp32(fitted):
    model, calibration, held_out = fitted
    int8 = make_scorer(model, "int8", calibration_frames=calibration, threshold_logit=0.0)
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
        make_scorer(model, "int8", calibration_frames=black, check_frames=held_out[::3], threshold_logit=0.0)


def test_int8_that_is_too_inexact_to_be_fast_says_so(fitted, monkeypatch, caplog):
    model, calibration, held_out = fitted
    monkeypatch.setattr("guerdon.models.accelerate._margin", lambda *_: 1000.0)
    make_scorer(
        model, "int8", calibration_frames=calibration, check_frames=held_out[:64], threshold_logit=0.0
    )
    assert "100% of the check frames are judged again" in caplog.text


def test_the_cache_gives_the_same_scorer(fitted, tmp_path, monkeypatch):
    model, calibration, held_out = fitted
    folder = tmp_path / "a" / "cache"

    def make(**changes):
        given = {"calibration_frames": calibration, "check_frames": held_out[::6], "threshold_logit": 0.0}
        return make_scorer(model, "int8", cache=folder, **{**given, **changes})

    first = make()(held_out[:300])
    (file,) = folder.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr("guerdon.models.quantize.quantize", None)
        patch.setattr("guerdon.models.accelerate._margin", None)
        again = make()(held_out[:300])
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    make(threshold_logit=0.5)
    make(calibration_frames=calibration[:200])
    assert len(list(folder.iterdir())) == 3
    file.write_bytes(file.read_bytes()[:1000])  # damaged
    np.testing.assert_array_equal(make()(held_out[:300])[0], first[0])


def test_what_int8_needs(fitted, monkeypatch):
    model, calibration, held_out = fitted
    with pytest.raises(DataError, match="needs calibration_frames"):
        make_scorer(model, "int8")
    with pytest.raises(DataError, match="threshold_logit"):
        make_scorer(model, "int8", calibration_frames=calibration, check_frames=held_out)
    with pytest.raises(DataError, match="and some"):
        verify_agreement(make_scorer(model), make_scorer(model), held_out[:0], 0.0)
    with pytest.raises(ConfigError, match="CPU alone, not on cuda:0"):
        make_scorer(model, "int8", calibration_frames=calibration, device="cuda:0")
    grouped = BinaryRewardClassifier(width=8)
    grouped.resnet.use_layout("group", False)
    with pytest.raises(ConfigError, match="BatchNorm"):
        make_scorer(grouped, "int8", calibration_frames=random_frames(4))
    for package in ("onnx", "onnxruntime"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ConfigError, match=r"pip install 'guerdon\[serve\]'"):
                make_scorer(model, "int8", calibration_frames=calibration)


def test_threads_are_those_of_torch(fitted, monkeypatch):
    import onnxruntime

    model, calibration, _ = fitted
    seen = []
    real = onnxruntime.InferenceSession

    def session(file, options, **more):
        seen.append(options.intra_op_num_threads)
        return real(file, options, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    make_scorer(model, "int8", calibration_frames=calibration[:8])
    assert seen == [3]
