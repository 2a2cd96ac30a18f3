"""Scorers: fp32 is the model."""

import numpy as np
import pytest
import torch

from guerdon.models import BinaryRewardClassifier, ResNetRewardModel
from guerdon.rewards.image.accelerate import make_scorer, uses_folded_steps
from guerdon.rewards.image.steps import FoldedSteps, resnet_steps
from tests.rewards.image.frames import eager, lively, random_frames

CLASSES = {"binary": BinaryRewardClassifier, "resnet": ResNetRewardModel}


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


@pytest.mark.parametrize("arch", ["resnet10", "resnet50"])
@pytest.mark.parametrize("same_padding", [False, True])
@pytest.mark.parametrize("size", [(64, 64), (45, 100), (32, 32)])
def test_folded_steps_are_the_resnet(arch, same_padding, size):
    """Whatever the processor: plain, Winograd's and dense convolutions, on maps whose sides are odd, too."""
    model = ResNetRewardModel(arch=arch, width=32, image_size=(3, *size))
    model.resnet.use_layout("batch", same_padding)
    lively(model)
    with torch.no_grad():
        pixels = model.preprocess(random_frames(3, size))[:, 0]
        folded = FoldedSteps(resnet_steps(model.resnet, size))
        kinds = {type(run).__name__ for _, run in folded._run}
        exact = model.resnet(pixels)
        assert "method" in kinds  # `Step.run`
        assert ("_Winograd" in kinds) == (size != (32, 32)) and ("_Dense" in kinds) == (size != (45, 100))
        torch.testing.assert_close(folded(pixels), exact, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_fp32_is_the_model_by_either_way(capability, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    model = lively(BinaryRewardClassifier(width=32))
    assert uses_folded_steps(model.resnet) == (capability == "AVX2")
    scorer = make_scorer(model)
    for count in (1, 70):
        frames = random_frames(count)
        np.testing.assert_allclose(scorer(frames)[0], eager(model, frames), atol=1e-4)


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_model_is_left_alone(precision):
    model = lively(ResNetRewardModel(arch="resnet10", width=8, image_size=(3, 64, 64))).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    frames = random_frames(8)
    scorer = make_scorer(model, precision)
    first = scorer(frames)[0]
    assert model.training and all(value.requires_grad for value in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    np.testing.assert_array_equal(scorer(frames)[0], first)
