"""A ResNet in 8 bits: quantised after training, executed by ONNX Runtime.

Weights have 7 bits with one scale per output channel, activations are uint8 with one scale per tensor; biases
and sums are int32. The pooling and the heads that follow the ResNet stay in float32. All that is found by
looking at frames is the range of each activation: the graph follows from these and from the weights.

The first convolution reads the camera's bytes: the scaling and normalisation of pixels are folded into its
weights, and its 7x7 windows arrive as 7 rows of 8 pixels, which ONNX Runtime gathers twice as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from guerdon.core.errors import ConfigError
from guerdon.core.types import UInt8Array
from guerdon.rewards.image.encoders import ResNet
from guerdon.rewards.image.steps import Step, resnet_steps

Range: TypeAlias = tuple[float, float]

FORMAT = 2
"""Changes when the same weights and ranges would give another graph."""
WEIGHT_LIMIT = 64
"""Largest weight. Processors without VNNI add two products of bytes in 16 bits, and saturate: two of 255 * 64
fit, two of 255 * 127 do not. With 7 bits the sums are exact, and so the same, on every processor."""
WINDOW = 8
"""Pixels in a row of a 7x7 window; the last has weight zero, so that rows have a multiple of 4 bytes."""
_ZERO_PIXEL = 128
_BATCH = 32  # frames at a time
_SAMPLES = 1 << 13  # values of each activation that are looked at in a batch
_INSTALL = "int8 scoring needs onnxruntime: pip install 'guerdon[serve]'"


# Calibration


@torch.no_grad()
def activation_ranges(resnet: ResNet, images: Tensor, scale: Tensor, shift: Tensor) -> dict[str, Range]:
    """The range of each activation that 8 bits should cover, by the name of its step.

    Args:
        resnet: in eval mode; not changed.
        images: calibration frames, uint8 [N, H, W, C].
        scale: float32 [C]; the network's input is `pixel * scale + shift`.
        shift: float32 [C].
    """
    require_int8(resnet)
    steps = resnet_steps(resnet, (images.shape[1], images.shape[2]))
    generator = torch.Generator().manual_seed(0)
    samples: dict[str, list[Tensor]] = {step.output: [] for step in steps}
    for batch in torch.split(images, _BATCH):
        values = {"image": (batch * scale + shift).permute(0, 3, 1, 2)}
        for step in steps:
            y = step.run(*(values[name] for name in step.inputs))
            values[step.output] = y
            picks = torch.randint(y.numel(), (_SAMPLES,), generator=generator)
            samples[step.output] += [y.flatten()[picks], y.min()[None], y.max()[None]]
    ranges = {name: _best_range(torch.cat(parts)) for name, parts in samples.items()}
    ranges["pool"] = ranges["stem"]  # its values are among the stem's: no rounding between them
    return ranges


def _best_range(values: Tensor) -> Range:
    """How much of the full range to cover: rare extremes are cut off if that makes the mean error smaller."""
    low, high = min(values.min().item(), 0.0), max(values.max().item(), 1e-6)
    candidates = [(low * share, high * share) for share in np.linspace(1.0, 0.3, 29).tolist()]

    def error(candidate: Range) -> float:
        step, zero = _step_and_zero(candidate)
        rounded = (torch.clamp(torch.round(values / step) + zero, 0, 255) - zero) * step
        return float((rounded - values).square().mean())

    return min(candidates, key=error)


def _step_and_zero(limits: Range) -> tuple[float, int]:
    """The size of a quantisation step, and the number that stands for zero."""
    step = (limits[1] - limits[0]) / 255
    return step, round(-limits[0] / step)


# The ONNX graph


def onnx_graph(
    resnet: ResNet, size: tuple[int, int], ranges: Mapping[str, Range], scale: Tensor, shift: Tensor
) -> bytes:
    """An ONNX model from `windows` of `bytes_to_windows` to the feature map float32 [N, C', h, w].

    Args:
        resnet: in eval mode; not changed.
        size: of the images, (H, W).
        ranges: from `activation_ranges`, for every step of the ResNet.
        scale: float32 [C]; the network's input is `pixel * scale + shift`.
        shift: float32 [C].
    """
    with torch.no_grad():
        steps = resnet_steps(resnet, size)
        steps[0] = _on_bytes(steps[0], scale, shift)
    graph = _Graph()
    for step in steps:
        graph.add(step, ranges[step.output])
    height, width = size
    return graph.serialized((height + 6, (width + 1) // 2, WINDOW * len(scale)), steps[-1].output)


def _on_bytes(stem: Step, scale: Tensor, shift: Tensor) -> Step:
    """The first convolution for windows of bytes, less `_ZERO_PIXEL`, instead of normalised images."""
    assert stem.weight is not None and stem.bias is not None
    weight = stem.weight * scale.view(1, -1, 1, 1)
    bias = stem.bias + (stem.weight * (shift + _ZERO_PIXEL * scale).view(1, -1, 1, 1)).sum((1, 2, 3))
    rows = F.pad(weight, (0, WINDOW - weight.shape[3])).permute(0, 3, 1, 2)  # [O, 8, C, 7]
    weight = rows.reshape(len(rows), -1, rows.shape[3], 1)
    return replace(stem, padding=(0, 0, 0, 0), weight=weight, bias=bias)


def bytes_to_windows(images: UInt8Array, border: UInt8Array) -> UInt8Array:
    """The rows of all 7x7 windows with stride 2.

    Args:
        images: uint8 [N, H, W, C].
        border: uint8 [C]; the pixel that normalisation makes zero, with which images are padded.

    Returns:
        uint8 [N, H + 6, ceil(W / 2), 8 * C].
    """
    count, height, width, channels = images.shape
    padded = np.empty((count, height + 6, width + 7, channels), np.uint8)
    padded[:, :3], padded[:, -3:], padded[:, :, :3], padded[:, :, -4:] = border, border, border, border
    padded[:, 3:-3, 3:-4] = images
    rows = padded.reshape(count, height + 6, -1)
    shape = (count, height + 6, (width + 1) // 2, WINDOW * channels)
    overlapping = np.lib.stride_tricks.as_strided(rows, shape, (*rows.strides[:2], 2 * channels, 1))
    return np.ascontiguousarray(overlapping)


class _Graph:
    """Collects ONNX nodes, each between a dequantisation and a quantisation, which the runtime fuses."""

    def __init__(self) -> None:
        self._onnx = _import("onnx")
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._steps = {"image": 1.0}  # name of an activation -> its quantisation step
        self._node("Transpose", ["windows"], "image.u8", perm=[0, 3, 1, 2])
        self._dequantize("image", self._scale("image", np.float32(1.0), np.uint8(_ZERO_PIXEL)))

    def _node(self, kind: str, inputs: Iterable[str], output: str, **attributes: Any) -> str:
        self._nodes.append(self._onnx.helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def _constant(self, name: str, value: Any) -> str:
        self._constants.append(self._onnx.numpy_helper.from_array(np.array(value, order="C"), name))
        return name

    def _scale(self, name: str, scale: Any, zero: Any) -> list[str]:
        return [self._constant(f"{name}.scale", scale), self._constant(f"{name}.zero", zero)]

    def _dequantize(self, name: str, scale: list[str], **attributes: Any) -> None:
        """`name.u8` (or a constant of that name) -> `name`."""
        self._node("DequantizeLinear", [f"{name}.u8", *scale], name, **attributes)

    def add(self, step: Step, limits: Range) -> None:
        """Append one operation, its output quantised to `limits`."""
        left, right, top, bottom = step.padding
        window = {"pads": [top, left, bottom, right], "strides": [step.stride, step.stride]}
        y = f"{step.output}.float"
        if step.kind == "conv":
            weight, bias = self._weights(step)
            # The windows of the stem are laid out side by side already.
            strides = [2, 1] if step.inputs == ("image",) else window["strides"]
            self._node("Conv", [step.inputs[0], weight, bias], y, pads=window["pads"], strides=strides)
        elif step.kind == "pool":
            self._node("MaxPool", step.inputs, y, kernel_shape=[3, 3], **window)
        else:
            self._node("Add", step.inputs, y)
        if step.relu:
            y = self._node("Relu", [y], f"{step.output}.relu")
        size, zero = _step_and_zero(limits)
        self._steps[step.output] = size
        scale = self._scale(step.output, np.float32(size), np.uint8(zero))
        self._node("QuantizeLinear", [y, *scale], f"{step.output}.u8")
        self._dequantize(step.output, scale)

    def _weights(self, step: Step) -> tuple[str, str]:
        """Constants for weights of 7 bits with one scale per output channel, and for the int32 bias."""
        assert step.weight is not None and step.bias is not None
        weight, bias = step.weight.double().numpy(), step.bias.double().numpy()
        scale = np.maximum(np.abs(weight).max((1, 2, 3)) / WEIGHT_LIMIT, 1e-12).astype(np.float32)
        bias_scale = scale * np.float32(self._steps[step.inputs[0]])
        names = (f"{step.output}.weight", f"{step.output}.bias")
        whole = np.rint(weight / scale[:, None, None, None])
        rounded = np.clip(whole, -WEIGHT_LIMIT, WEIGHT_LIMIT).astype(np.int8)
        sums = np.clip(np.rint(bias / bias_scale), -(2**31), 2**31 - 1).astype(np.int32)
        for name, value, size in zip(names, (rounded, sums), (scale, bias_scale), strict=True):
            self._constant(f"{name}.u8", value)
            self._dequantize(name, self._scale(name, size, np.zeros(len(size), value.dtype)), axis=0)
        return names

    def serialized(self, shape: tuple[int, int, int], output: str) -> bytes:
        """The finished model, for any number of windows of `shape`."""
        helper, element = self._onnx.helper, self._onnx.TensorProto
        inputs = [helper.make_tensor_value_info("windows", element.UINT8, ["n", *shape])]
        outputs = [helper.make_tensor_value_info(output, element.FLOAT, ["n", None, None, None])]
        graph = helper.make_graph(self._nodes, "resnet", inputs, outputs, self._constants)
        # Old versions, so that old runtimes take it.
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)
        self._onnx.checker.check_model(model)
        return bytes(model.SerializeToString())


# Execution


class QuantizedEncoder(nn.Module):
    """Stands in for a `ResNet`: uint8 [N, C, H, W] (not normalised) -> float32 [N, C', h, w].

    Args:
        graph: from `onnx_graph`; never read from a file, since a graph may name other files to be read.
        border: uint8 [C]; see `bytes_to_windows`.
    """

    def __init__(self, graph: bytes, border: Tensor) -> None:
        super().__init__()
        runtime = _import("onnxruntime")
        options = runtime.SessionOptions()
        # Each batch on a thread of its own: threads inside the runtime would wait for each other at every
        # layer, and spin meanwhile on the cores that torch wants.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._run: Callable[..., list[NDArray[np.float32]]] = runtime.InferenceSession(
            graph, options, providers=["CPUExecutionProvider"]
        ).run
        self._border: UInt8Array = border.numpy()
        self._threads = ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="guerdon-int8")

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, C, H, W] -> float32 [N, C', h, w]."""
        pixels: UInt8Array = images.permute(0, 2, 3, 1).numpy()
        batches = [pixels[start : start + _BATCH] for start in range(0, len(pixels), _BATCH)]
        each = map(self._maps, batches) if len(batches) == 1 else self._threads.map(self._maps, batches)
        return torch.from_numpy(np.concatenate(list(each)))

    def _maps(self, images: UInt8Array) -> NDArray[np.float32]:
        return self._run(None, {"windows": bytes_to_windows(images, self._border)})[0]


def border_pixel(scale: Tensor, shift: Tensor) -> Tensor:
    """uint8 [C]: the pixel that normalisation makes (nearly) zero, as padding is."""
    return torch.round(-shift / scale).clamp(0, 255).to(torch.uint8)


def require_int8(resnet: ResNet | None = None) -> None:
    """Raise unless the packages that int8 needs are installed; to be asked before hours of work.

    Args:
        resnet: must be one that can be quantised, if it is known already.
    """
    for package in ("onnx", "onnxruntime"):
        _import(package)
    if resnet is not None and resnet.norm != "batch":
        raise ConfigError(
            "int8 scoring needs an encoder with BatchNorm, not GroupNorm as this one has: "
            "use precision fp32 or bf16"
        )


def _import(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(_INSTALL) from error
