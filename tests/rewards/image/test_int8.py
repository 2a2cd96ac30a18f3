"""int8 decides as the model does, or is refused; on every processor."""

import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from guerdon.core.errors import ConfigError, DataError
from guerdon.envs import ScriptedExpert, TabletopVectorEnv
from guerdon.models import BinaryRewardClassifier, ResNetRewardModel
from guerdon.rewards.image.accelerate import make_scorer
from guerdon.rewards.image.int8 import (
    MIN_AGREEMENT,
    coarse_scorer,
    int8_scorer,
    make_int8,
    verify_agreement,
)
from guerdon.rewards.image.quantize import (
    WEIGHT_LIMIT,
    activation_ranges,
    border_pixel,
    bytes_to_windows,
    onnx_graph,
)
from guerdon.rewards.image.steps import resnet_steps
from tests.rewards.image.frames import eager, lively, random_frames


def quantized(model, frames):
    """The int8 scorer alone, calibrated on `frames`."""
    images = model.images(frames).flatten(0, 1)
    return coarse_scorer(model, activation_ranges(model.resnet, images, *model.scale_shift()))


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


def fit(num_steps):
    """A model after some steps of fitting, its training frames, and frames of other episodes."""
    frames, labels = tabletop(60, 0)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = BinaryRewardClassifier(width=16, image_size=(3, 48, 48))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    classes = np.flatnonzero(labels), np.flatnonzero(~labels)
    for _ in range(num_steps):
        picks = np.concatenate([rng.choice(rows, 32) for rows in classes])
        target = torch.from_numpy(labels[picks].astype(np.float32))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(frames[picks]), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    calibration = frames[rng.choice(len(frames), 256, replace=False)]
    return model.eval(), calibration, tabletop(40, 10_000)[0]


@pytest.fixture(scope="module")
def fitted():
    """After a few steps: it tells frames apart, though not well."""
    return fit(50)


@pytest.mark.slow
def test_int8_decides_as_fp32_does():
    model, calibration, held_out = fit(150)
    fp32 = make_scorer(model)
    logits = np.concatenate([fp32(part)[0] for part in np.array_split(held_out, 12)])
    assert logits.std() > 1  # a real spread
    for threshold_logit in (0.0, float(np.quantile(logits, 0.9))):
        made = make_int8(model, calibration, held_out, threshold_logit)
        int8 = int8_scorer(model, made)
        assert verify_agreement(fp32, int8, held_out, threshold_logit) == made.agreement >= MIN_AGREEMENT
        coarse = np.concatenate([int8.coarse(part)[0] for part in np.array_split(held_out, 12)])
        assert np.sqrt(np.mean((coarse - logits) ** 2)) < 0.1 * logits.std()
        assert int8.near(coarse).mean() == pytest.approx(made.rescored, abs=1e-3)
        assert made.rescored < 0.25  # most frames are scored in int8 alone
        assert made.num_check_frames == len(held_out)


def test_frames_near_the_threshold_are_judged_in_fp32(fitted):
    model, calibration, held_out = fitted
    frames = held_out[::10]
    exact = eager(model, frames)
    threshold = float(np.quantile(exact, 0.95))  # some frames are near it, whatever the fit has led to
    int8 = int8_scorer(model, make_int8(model, calibration, held_out[::3], threshold))
    coarse, logits = int8.coarse(frames)[0], int8(frames)[0]
    near = int8.near(coarse)
    assert 0 < near.sum() < len(frames)
    np.testing.assert_allclose(logits[near], exact[near], atol=1e-4)
    np.testing.assert_array_equal(logits[~near], coarse[~near])


def test_int8_is_refused_if_it_decides_otherwise(fitted, monkeypatch):
    model, calibration, held_out = fitted
    middle = float(np.median(eager(model, held_out[::3])))  # where most frames are, without a second look
    monkeypatch.setattr("guerdon.rewards.image.int8._margin", lambda *_: 0.0)
    with pytest.raises(DataError, match=r"refused.*agree with fp32 on \d+\.\d+%.*99\.9%.*fp32.*more frames"):
        make_int8(model, calibration, held_out[::3], middle)


# The same on every processor


def test_the_sums_of_bytes_are_exact(fitted):
    """For the same bytes every layer of the optimised graph gives what it gives in floats, but for rounding.

    Without VNNI, pairs of products are added in 16 bits: with weights of 8 bits 5 to 34% of a layer's outputs
    were off by more than one level, the stem's by up to 22. Each layer is given the exact bytes of the layers
    before it, since ties that add up over layers differ between processors.
    """
    import onnx
    import onnx.utils
    import onnxruntime as runtime

    model, calibration, held_out = fitted
    scale, shift = model.scale_shift()
    ranges = activation_ranges(model.resnet, model.images(calibration).flatten(0, 1), scale, shift)
    graph = onnx.load_model_from_string(onnx_graph(model.resnet, (48, 48), ranges, scale, shift))
    names = [node.output[0] for node in graph.graph.node if node.op_type == "QuantizeLinear"]
    assert len(names) == len(ranges)
    for name in names:
        graph.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.UINT8, None))
    layers = onnx.utils.Extractor(graph)
    floats = runtime.SessionOptions()
    floats.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL

    def run(whole, options, wanted, given):
        session = runtime.InferenceSession(
            whole.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return session.run(wanted, given)

    exact = {"windows": bytes_to_windows(held_out[::60], border_pixel(scale, shift).numpy())}
    exact |= zip(names, run(graph, floats, names, exact), strict=True)
    for step in resnet_steps(model.resnet, (48, 48)):
        inputs = ["windows" if name == "image" else f"{name}.u8" for name in step.inputs]
        layer = layers.extract_model(inputs, [f"{step.output}.u8"])
        given = {name: exact[name] for name in inputs}
        (fast,) = run(layer, runtime.SessionOptions(), [f"{step.output}.u8"], given)
        off = np.abs(exact[f"{step.output}.u8"].astype(int) - fast)
        assert off.max() <= 1 and off.mean() < 0.002, step.output


def test_no_two_products_of_a_byte_and_a_weight_leave_16_bits(fitted):
    import onnx

    model, calibration, _ = fitted
    scale, shift = model.scale_shift()
    ranges = activation_ranges(model.resnet, model.images(calibration).flatten(0, 1), scale, shift)
    graph = onnx.load_model_from_string(onnx_graph(model.resnet, (48, 48), ranges, scale, shift))
    weights = [
        onnx.numpy_helper.to_array(value)
        for value in graph.graph.initializer
        if value.name.endswith(".weight.u8")
    ]
    assert len(weights) == 12 and all(value.dtype == np.int8 for value in weights)
    largest = max(int(np.abs(value.astype(int)).max()) for value in weights)
    assert largest == WEIGHT_LIMIT and 2 * 255 * largest < 2**15


def test_int8_that_computes_otherwise_here_is_refused(fitted, monkeypatch):
    model, calibration, held_out = fitted
    made = make_int8(model, calibration, held_out[::6], 0.0)
    rounding = replace(made, probe_logits=made.probe_logits + 0.1 * made.margin)
    int8_scorer(model, rounding)
    elsewhere = replace(made, probe_logits=made.probe_logits + 0.6 * made.margin, processor="AVX-OTHER")
    with pytest.raises(DataError, match=r"refused on this processor.*verified on AVX-OTHER.*reward quantize"):
        int8_scorer(model, elsewhere)
    with pytest.raises(DataError, match="refused on this processor"):
        int8_scorer(model, replace(made, probe_logits=made.probe_logits * np.nan))


def test_int8_that_is_too_inexact_to_be_fast_says_so(fitted, monkeypatch, caplog):
    model, calibration, held_out = fitted
    monkeypatch.setattr("guerdon.rewards.image.int8._margin", lambda *_: 1000.0)
    make_int8(model, calibration, held_out[:64], 0.0)
    assert "100% of the held-out frames are scored again" in caplog.text


def test_the_model_is_left_alone(fitted):
    model, calibration, held_out = fitted
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = make_int8(model, calibration, held_out[:300], 0.0)
    int8_scorer(model, made)(held_out[:10])
    assert all(value.requires_grad for value in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


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
