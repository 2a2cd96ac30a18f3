import logging
import pickle
import sys
import types

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.errors import DataError, UnsafeDataError
from guerdon.models import build_model, load_pretrained, make_resnet

WIDTH = 8


def same_padded(x: torch.Tensor, kernel: int, stride: int, value: float) -> torch.Tensor:
    """SAME padding as its definition has it: the total goes half to the front, the odd one to the end."""
    pads = []
    for size in (x.shape[3], x.shape[2]):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value)


def flax_conv(x: torch.Tensor, kernel: np.ndarray, stride: int = 1, padding: int | None = None):
    weight = torch.from_numpy(kernel).permute(3, 2, 0, 1)
    x = same_padded(x, kernel.shape[0], stride, 0.0) if padding is None else F.pad(x, [padding] * 4)
    return F.conv2d(x, weight, stride=stride)


def flax_norm(x: torch.Tensor, params: dict[str, np.ndarray]) -> torch.Tensor:
    groups = x.reshape(len(x), 4, -1)
    groups = (groups - groups.mean(2, keepdim=True)) / torch.sqrt(
        groups.var(2, unbiased=False, keepdim=True) + 1e-5
    )
    scale, bias = (torch.from_numpy(params[name]).view(1, -1, 1, 1) for name in ("scale", "bias"))
    return groups.reshape(x.shape) * scale + bias


def flax_forward(params: dict, x: torch.Tensor) -> torch.Tensor:
    """HIL-SERL's ResNet10, step by step."""
    x = flax_conv(x, params["conv_init"]["kernel"], 2, padding=3)
    x = torch.relu(flax_norm(x, params["norm_init"]))
    x = F.max_pool2d(same_padded(x, 3, 2, float("-inf")), 3, 2)
    for index in range(4):
        block, stride = params[f"ResNetBlock_{index}"], 1 if index == 0 else 2
        y = torch.relu(flax_norm(flax_conv(x, block["Conv_0"]["kernel"], stride), block["MyGroupNorm_0"]))
        y = flax_norm(flax_conv(y, block["Conv_1"]["kernel"]), block["MyGroupNorm_1"])
        if "conv_proj" in block:
            x = flax_norm(flax_conv(x, block["conv_proj"]["kernel"], stride), block["norm_proj"])
        x = torch.relu(x + y)
    return x


def flax_params(width: int = WIDTH) -> dict:
    rng = np.random.default_rng(0)

    def conv(size: int, inputs: int, outputs: int) -> dict[str, np.ndarray]:
        return {"kernel": rng.normal(0, 0.2, (size, size, inputs, outputs)).astype(np.float32)}

    def norm(channels: int) -> dict[str, np.ndarray]:
        return {
            "scale": rng.uniform(0.5, 1.5, channels).astype(np.float32),
            "bias": rng.normal(0, 0.2, channels).astype(np.float32),
        }

    params = {"conv_init": conv(7, 3, width), "norm_init": norm(width)}
    inputs = width
    for index in range(4):
        outputs = width * 2**index
        params[f"ResNetBlock_{index}"] = {
            "Conv_0": conv(3, inputs, outputs),
            "Conv_1": conv(3, outputs, outputs),
            "MyGroupNorm_0": norm(outputs),
            "MyGroupNorm_1": norm(outputs),
        }
        if inputs != outputs:
            params[f"ResNetBlock_{index}"] |= {
                "conv_proj": conv(1, inputs, outputs),
                "norm_proj": norm(outputs),
            }
        inputs = outputs
    params["output_head"] = {"kernel": np.zeros((inputs, 10), np.float32), "bias": np.zeros(10, np.float32)}
    return params


@pytest.mark.parametrize("size", [(64, 64), (65, 48), (50, 99)])
def test_flax_weights_give_flax_features(tmp_path, size):
    params = flax_params()
    path = tmp_path / "resnet10_params.pkl"
    path.write_bytes(pickle.dumps(params))
    net = make_resnet("resnet10", WIDTH)
    load_pretrained(net, path)
    assert (net.norm, net.same_padding) == ("group", True)
    x = torch.rand(3, 3, *size)
    torch.testing.assert_close(net(x), flax_forward(params, x), atol=1e-4, rtol=1e-4)


class JaxArray:
    """Pickles itself as a jax array does: a call around the parts of a numpy array."""

    def __init__(self, array: np.ndarray, make=None) -> None:
        self.array, self.make = array, make

    def __reduce__(self):
        make, arguments, state = self.array.__reduce__()
        stub = sys.modules["jax._src.array"]._reconstruct_array
        return stub, (self.make or make, arguments, state, {"weak_type": False, "named_shape": {}})


@pytest.fixture
def jax_stub(monkeypatch):
    """Makes the name of jax's function picklable; loading must do without it."""

    def _reconstruct_array(*_):
        raise AssertionError("jax was called")

    _reconstruct_array.__module__ = "jax._src.array"
    _reconstruct_array.__qualname__ = "_reconstruct_array"
    for name in ("jax", "jax._src", "jax._src.array"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["jax._src.array"]._reconstruct_array = _reconstruct_array


def in_tree(tree, change):
    return {k: in_tree(v, change) if isinstance(v, dict) else change(v) for k, v in tree.items()}


def test_the_published_file_holds_jax_arrays(tmp_path, jax_stub):
    params = flax_params()
    path = tmp_path / "resnet10_params.pkl"
    path.write_bytes(pickle.dumps(in_tree(params, JaxArray)))
    net = make_resnet("resnet10", WIDTH)
    load_pretrained(net, path)
    x = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(net(x), flax_forward(params, x), atol=1e-4, rtol=1e-4)


class Evil:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize("suffix", [".pkl", ".pt"])
def test_hostile_pickle_is_refused(tmp_path, capsys, suffix):
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pkl":
        path.write_bytes(pickle.dumps({"conv_init": {"kernel": Evil()}}))
    else:
        torch.save({"conv1.weight": Evil()}, path)
    with pytest.raises(UnsafeDataError, match="weights"):
        load_pretrained(make_resnet("resnet10", WIDTH), path)
    assert capsys.readouterr().out == ""


def test_jax_array_around_another_function_is_refused(tmp_path, jax_stub, capsys):
    path = tmp_path / "weights.pkl"
    path.write_bytes(pickle.dumps({"conv_init": {"kernel": JaxArray(np.zeros(3), make=print)}}))
    with pytest.raises(UnsafeDataError, match="print"):
        load_pretrained(make_resnet("resnet10", WIDTH), path)
    path.write_bytes(pickle.dumps({"conv_init": {"kernel": JaxArray(np.zeros(3), make=np.ndarray)}}))
    with pytest.raises(DataError, match="jax array"):
        load_pretrained(make_resnet("resnet10", WIDTH), path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "truncated"),
        (pickle.dumps({"conv_init": {"kernel": np.zeros((2, 2), np.float32)}})[:-20], "truncated"),
        (b"no pickle at all", "pickle"),
        (pickle.dumps([1, 2]), "holds a list"),
        (pickle.dumps({"conv_init": {"kernel": "text"}}), "conv_init/kernel is no array"),
    ],
)
def test_damaged_flax_file(tmp_path, content, complaint):
    path = tmp_path / "weights.pkl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=complaint) as caught:
        load_pretrained(make_resnet("resnet10", WIDTH), path)
    assert "\n" not in str(caught.value)


def test_flax_tree_that_does_not_fit(tmp_path):
    params = flax_params()
    params["ResNetBlock_3"]["Conv_7"] = {"kernel": np.zeros((1, 1, 2, 2), np.float32)}
    del params["norm_init"]
    path = tmp_path / "weights.pkl"
    path.write_bytes(pickle.dumps(params))
    with pytest.raises(DataError, match=r"2 missing \(bn1.*1 unexpected \(ResNetBlock_3/Conv_7/kernel\)"):
        load_pretrained(make_resnet("resnet10", WIDTH), path)


def wrapped(state, how):
    if how == "module":
        return {f"module.{name}": value for name, value in state.items()}
    if how == "encoder.backbone":
        return {"state_dict": {f"encoder.backbone.{name}": value for name, value in state.items()}}
    return state if how == "bare" else {how: state, "epoch": 3}


@pytest.mark.parametrize(
    "how", ["bare", "state_dict", "model_state_dict", "model", "module", "encoder.backbone"]
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_torch_files(tmp_path, how, norm):
    source = make_resnet("resnet18", WIDTH, norm).train()
    source(torch.rand(4, 3, 64, 64))  # gives BatchNorm statistics of its own
    state = source.eval().state_dict() | {"fc.weight": torch.zeros(10, 64), "fc.bias": torch.zeros(10)}
    torch.save(wrapped(state, how), tmp_path / "weights.pt")
    net = make_resnet("resnet18", WIDTH).eval()
    load_pretrained(net, tmp_path / "weights.pt")
    assert net.norm == norm
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(net(x), source(x))


def test_safetensors_and_files_without_counters(tmp_path):
    source = make_resnet("resnet10", WIDTH).eval()
    state = {k: v.contiguous() for k, v in source.state_dict().items() if "num_batches" not in k}
    safetensors.torch.save_file(state, tmp_path / "weights.safetensors")
    net = make_resnet("resnet10", WIDTH).eval()
    load_pretrained(net, tmp_path / "weights.safetensors")
    x = torch.rand(2, 3, 64, 64)
    assert torch.equal(net(x), source(x))


def test_mismatch_lists_both_sides(tmp_path):
    torch.save(make_resnet("resnet18", WIDTH).state_dict(), tmp_path / "weights.pt")
    net = make_resnet("resnet10", WIDTH)
    before = net.conv1.weight.clone()
    with pytest.raises(DataError) as caught:
        load_pretrained(net, tmp_path / "weights.pt")
    message = str(caught.value)
    assert "it holds a resnet18 of width 8" in message
    assert "the model has a resnet10 of width 8" in message
    assert "48 unexpected (layer1.1.conv1.weight, " in message
    assert "\n" not in message
    assert torch.equal(net.conv1.weight, before)
    with pytest.raises(DataError, match=r"of another shape \(conv1.weight is \[8, 3, 7, 7\] instead of \[16"):
        load_pretrained(make_resnet("resnet18", 16), tmp_path / "weights.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".pkl"])
def test_missing_and_damaged_files(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    with pytest.raises(DataError, match="does not exist"):
        load_pretrained(make_resnet("resnet10", WIDTH), path)
    path.write_bytes(b"\x00\x01 rubbish" * 9)
    with pytest.raises(DataError, match="weights"):
        load_pretrained(make_resnet("resnet10", WIDTH), path)


@pytest.mark.parametrize("model_type", ["resnet_reward", "binary_classifier"])
@pytest.mark.parametrize(
    ("freeze", "use_pretrain", "loaded", "frozen"),
    [
        ("auto", True, True, True),
        (True, True, True, True),
        (False, True, True, False),
        ("auto", False, False, False),
    ],
)
def test_model_with_pretrained_weights(tmp_path, caplog, model_type, freeze, use_pretrain, loaded, frozen):
    source = make_resnet("resnet10", WIDTH, "group")
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    config = RewardModelConfig(
        model_type=model_type,
        arch="resnet10",
        width=WIDTH,
        image_size=(3, 64, 64),
        pretrained_encoder_path=str(tmp_path / "weights.pt"),
        use_pretrain=use_pretrain,
        freeze_encoder=freeze,
    )
    with caplog.at_level(logging.WARNING, "guerdon"):
        model = build_model(config)
    assert torch.equal(model.resnet.conv1.weight, source.conv1.weight) == loaded
    assert model.encoder_frozen == frozen
    assert all(value.requires_grad != frozen for value in model.resnet.parameters())
    assert ("not loaded" in caplog.text) == (not loaded)
