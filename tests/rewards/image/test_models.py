import logging

import numpy as np
import pytest
import torch

from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.models import MODELS, BinaryRewardClassifier, ResNetRewardModel, build_model
from guerdon.rewards.image.base import mean_logit

SMALL = {"arch": "resnet10", "width": 8, "image_size": (3, 64, 64), "hidden_dim": 16}
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def small(model_type: str = "resnet_reward", **settings):
    return build_model(RewardModelConfig(model_type=model_type, **{**SMALL, **settings}))


OURS = [name for name in MODELS if name != "lerobot_classifier"]
"""LeRobot's network asks for larger images: `tests/hf/test_lerobot_classifier.py`."""
both = pytest.mark.parametrize("model_type", OURS)


def test_preprocess_is_scaling_and_imagenets_normalisation(frames):
    pixels = small().preprocess(frames)
    assert pixels.shape == (5, 1, 3, 64, 64)
    assert pixels.dtype == torch.float32
    expected = (frames / 255 - MEAN) / STD
    np.testing.assert_allclose(pixels[:, 0].permute(0, 2, 3, 1).numpy(), expected, atol=2e-6)
    assert pixels[:, 0].is_contiguous(memory_format=torch.channels_last)


def test_preprocess_without_normalisation(frames):
    pixels = small(normalize=False).preprocess(frames)
    np.testing.assert_allclose(pixels[:, 0].permute(0, 2, 3, 1).numpy(), frames / 255, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.from_numpy(x),
        lambda x: np.moveaxis(x, -1, 1),
        lambda x: torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(),
        lambda x: (x / 255).astype(np.float32),
        lambda x: torch.from_numpy(x).float(),
        lambda x: torch.from_numpy(x).permute(0, 3, 1, 2) / 255,
        lambda x: {"base_camera": x, "another": x[:2]},
        lambda x: np.concatenate([x, x[..., :1]], axis=-1),
    ],
    ids=["torch", "chw", "torch-chw", "unit", "torch-byte", "torch-chw-unit", "mapping", "alpha"],
)
def test_every_layout_gives_the_same_pixels(frames, change):
    model = small()
    assert torch.equal(model.preprocess(change(frames)), model.preprocess(frames))


def test_read_only_frames_are_left_alone(frames, recwarn):
    original = frames.copy()
    frames.flags.writeable = False
    small().preprocess(frames)
    assert np.array_equal(frames, original)
    assert not recwarn.list


def test_one_frame_is_a_batch_of_one(frames):
    model = small()
    assert torch.equal(model.preprocess(frames[0]), model.preprocess(frames[:1]))


def test_resizing_is_an_antialiased_bilinear_one(frames):
    pixels = small(normalize=False, image_size=(3, 32, 48)).preprocess(frames)
    assert pixels.shape == (5, 1, 3, 32, 48)
    exact = torch.nn.functional.interpolate(
        torch.from_numpy(frames).permute(0, 3, 1, 2).float(), (32, 48), mode="bilinear", antialias=True
    )
    assert (pixels[:, 0] * 255 - exact).abs().max() <= 1.5


def test_a_uniform_frame_stays_uniform_when_resized():
    pixels = small(normalize=False, image_size=(3, 48, 80)).preprocess(
        np.full((2, 100, 60, 3), 200, np.uint8)
    )
    torch.testing.assert_close(pixels, torch.full((2, 1, 3, 48, 80), 200 / 255))


def test_grey_frames_are_repeated_and_colour_is_refused_by_a_grey_model(frames):
    grey = frames[..., :1]
    assert torch.equal(small().preprocess(grey), small().preprocess(np.repeat(grey, 3, axis=-1)))
    model = small(image_size=(1, 64, 64))
    assert model.preprocess(grey).shape == (5, 1, 1, 64, 64)
    assert model(grey).shape == (5,)
    with pytest.raises(DataError, match="grey"):
        model.preprocess(frames)


def test_several_cameras_in_the_order_of_the_config(frames):
    model = small(image_keys=("wrist", "front"))
    pixels = model.preprocess({"front": frames, "wrist": frames[::-1]})
    assert torch.equal(pixels[:, 0], small().preprocess(frames[::-1])[:, 0])
    assert torch.equal(pixels[:, 1], small().preprocess(frames)[:, 0])
    assert pixels.flatten(0, 1).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (lambda x: x, "give a dict"),
        (lambda x: {"front": x}, r"looks at \['front', 'wrist'\], the frames have \['front'\]"),
        (lambda x: {"front": x, "wrist": x[:2]}, "different numbers of frames"),
        (lambda x: {"front": x[None], "wrist": x[None]}, "expected .N, H, W, C."),
    ],
)
def test_wrong_cameras_are_named(frames, given, complaint):
    with pytest.raises(DataError, match=complaint):
        small(image_keys=("front", "wrist")).preprocess(given(frames))


@both
@pytest.mark.parametrize("cameras", [("a",), ("a", "observation.images.b")])
@pytest.mark.parametrize("num_members", [1, 3])
def test_shapes_through_the_model(frames, model_type, cameras, num_members):
    model = small(model_type, image_keys=cameras, num_members=num_members)
    batch = dict.fromkeys(cameras, frames)
    features = model.encode(model.preprocess(batch))
    assert features.shape == (5, *model.feature_shape)
    assert features.numel() // 5 == 64 * len(cameras) * (4 if model_type == "binary_classifier" else 1)
    assert model.head(features).shape == (5, num_members)
    assert model(batch).shape == (5,)
    prediction = model.predict(batch)
    assert prediction.prob_success.shape == prediction.disagreement.shape == (5,)


@both
def test_cameras_have_weights_of_their_own(frames, model_type):
    model = small(model_type, image_keys=("a", "b")).eval()
    one = model({"a": frames, "b": frames[::-1].copy()})
    other = model({"a": frames[::-1].copy(), "b": frames})
    assert not torch.allclose(one, other)


@both
def test_ensemble_is_the_mean_of_its_members(frames, model_type):
    model = small(model_type, num_members=4).eval()
    probs = torch.sigmoid(model.head(model.encode(model.preprocess(frames))))
    prediction = model.predict(frames)
    torch.testing.assert_close(prediction.prob_success, probs.mean(1))
    torch.testing.assert_close(prediction.disagreement, probs.std(1, unbiased=False))
    assert (prediction.disagreement > 0).all()
    torch.testing.assert_close(torch.sigmoid(model(frames)), probs.mean(1))


def test_single_member_has_no_disagreement(frames):
    prediction = small().predict(frames)
    assert torch.equal(prediction.disagreement, torch.zeros(5))


def test_mean_logit_does_not_overflow():
    logits = torch.tensor([[200.0, 300.0], [-200.0, -300.0], [1.0, -1.0]])
    result = mean_logit(logits)
    assert torch.isfinite(result).all()
    assert result[0] > 150
    assert result[1] < -150
    torch.testing.assert_close(result[2], torch.tensor(0.0), atol=1e-6, rtol=0)


@both
def test_prediction_changes_nothing(frames, model_type):
    model = small(model_type, dropout=0.5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first, second = model.predict(frames), model.predict(frames)
    assert torch.equal(first.prob_success, second.prob_success)
    assert not first.prob_success.requires_grad
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_heads_are_what_the_documents_say():
    layers = [type(layer).__name__ for layer in _flat(small("binary_classifier").classifiers[0])]
    assert layers == ["Linear", "LayerNorm", "Tanh", "Dropout", "Linear"]
    layers = [type(layer).__name__ for layer in _flat(small().classifiers[0])]
    assert layers == ["Linear", "ReLU", "Dropout", "Linear"]


def _flat(module):
    return [layer for layer in module.modules() if not list(layer.children())]


def test_documents_keywords():
    model = BinaryRewardClassifier(
        image_keys=["base_camera"],
        image_size=[3, 64, 64],
        hidden_dim=32,
        num_spatial_blocks=4,
        pretrained_encoder_path=None,
        use_pretrain=True,
        freeze_encoder=False,
    )
    assert model.config.arch == "resnet10"
    assert model.config.model_type == "binary_classifier"
    assert model.state_dict()["encoder.pooling_layer.kernel"].shape == (512, 2, 2, 4)
    other = ResNetRewardModel(
        arch="resnet18", hidden_dim=16, dropout=0.1, normalize=False, image_size=[3, 32, 32], precision="bf16"
    )
    assert other.config.precision == "bf16"
    assert other.feature_shape == (512,)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="hidden_dim"):
        ResNetRewardModel(hidden_dims=3)
    with pytest.raises(ConfigError, match="1 or 3 channels"):
        ResNetRewardModel(image_size=[4, 64, 64])
    with pytest.raises(ConfigError, match="each camera once"):
        ResNetRewardModel(image_keys=["a", "a"])


@both
def test_training_reaches_every_weight(frames, model_type):
    model = small(model_type, image_keys=("a", "b"), num_members=2).train()
    model.head(model.encode(model.preprocess({"a": frames, "b": frames[::-1].copy()}))).sum().backward()
    without = [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    assert [name for name in without if "conv" in name or name.startswith("classifiers")] == []
    assert model_type == "resnet_reward" or model.encoder.pooling_layer.kernel.grad.abs().sum() > 0


@both
def test_frozen_encoder_keeps_weights_and_statistics(frames, model_type, caplog):
    with caplog.at_level(logging.WARNING, "guerdon"):
        model = small(model_type, freeze_encoder=True)
    assert "TRAP" in caplog.text  # random features
    assert model.encoder_frozen
    before = {name: value.clone() for name, value in model.resnet.state_dict().items()}
    model.train()
    assert model.training
    assert not model.resnet.training
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    head = [value.clone() for value in model.classifiers.parameters()]
    model(frames).sum().backward()
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.resnet.state_dict().items())
    assert any(not torch.equal(a, b) for a, b in zip(head, model.classifiers.parameters(), strict=True))


@both
@pytest.mark.parametrize("freeze", ["auto", False])
def test_without_weights_the_encoder_learns(frames, model_type, freeze, caplog):
    with caplog.at_level(logging.WARNING, "guerdon"):
        model = small(model_type, freeze_encoder=freeze).train()
    assert caplog.text == ""
    assert not model.encoder_frozen
    before = model.resnet.bn1.running_mean.clone()
    model(frames)
    assert not torch.equal(model.resnet.bn1.running_mean, before)


def test_a_small_model_learns_to_tell_colours():
    rng = np.random.default_rng(1)
    images = rng.integers(0, 120, (64, 32, 32, 3), dtype=np.uint8)
    labels = torch.arange(64) % 2
    images[1::2, 8:20, 8:20, 0] = 250
    for model_type in OURS:
        model = small(model_type, image_size=(3, 32, 32)).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(15):
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(images), labels.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        probs = model.predict(images).prob_success
        assert ((probs > 0.5) == labels.bool()).float().mean() > 0.95, model_type


@both
@pytest.mark.parametrize("cameras", [("a",), ("a", "b")])
def test_a_traced_model_takes_any_batch_size(frames, model_type, cameras):
    model = small(model_type, image_keys=cameras).eval()
    pixels = model.preprocess(dict.fromkeys(cameras, frames))

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, pixels):
            return self.model.head(self.model.encode(pixels))

    with torch.no_grad():
        traced = torch.jit.trace(Network(), pixels[:2])
        torch.testing.assert_close(traced(pixels), Network()(pixels))
