"""fp32 convolutions for processors with AVX2 and no AVX-512: weights laid out once, fewer multiplications.

A plain convolution of full width already runs near the peak of such a core, so what is left is to multiply
less: Winograd's F(4x4, 3x3) needs a quarter of the products of a 3x3 convolution, and on maps of up to 2x2
pixels, where most of a window lies outside, one matrix product needs less than half. Both are plain torch.

The plain convolutions use private operators of torch, in versions where these are known. In other versions
`FusedEncoder` uses frozen graphs, which are public.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guerdon.rewards.image.steps import Size, Step

FIRST_TORCH, LAST_TORCH = (2, 4), (2, 13)
"""Versions whose private operators (`mkldnn._convolution_pointwise`) are known."""
_CHANNELS_LAST = torch.channels_last
_TILE = 4
_DENSE_PIXELS = 4
_WINOGRAD_CHANNELS = 128
"""With fewer, transforming the tiles costs what is saved (measured with 64)."""
_TRANSFORM = torch.tensor(
    [
        [1 / 4, 0, 0],
        [-1 / 6, -1 / 6, -1 / 6],
        [-1 / 6, 1 / 6, -1 / 6],
        [1 / 24, 1 / 12, 1 / 6],
        [1 / 24, -1 / 12, 1 / 6],
        [0, 0, 1],
    ],
    dtype=torch.float64,
)
"""Of a row of three weights, for the points 0, 1, -1, 2, -2 and infinity."""


def can_pack() -> bool:
    """Whether this torch has oneDNN's convolutions with weights that are laid out beforehand."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    is_tried = FIRST_TORCH <= version <= LAST_TORCH
    return bool(available) and is_tried and hasattr(torch.ops.mkldnn, "_convolution_pointwise")


class PackedSteps(nn.Module):
    """Some steps of a ResNet, one after the other: float32 [N, C, H, W] -> [N, C', H', W'], channels last.

    Args:
        steps: in order; the first one's input is the input.
        size: (H, W) of the input.
        count: how many images are given at a time, mostly.
    """

    def __init__(self, steps: Sequence[Step], size: Size, count: int) -> None:
        super().__init__()
        self._source, self._output = steps[0].inputs[0], steps[-1].output
        self._run: list[tuple[Step, Callable[..., Tensor]]] = []
        sizes = {self._source: size}
        sums = {step.inputs[0]: step for step in steps if step.kind == "add"}
        for step in steps:
            height, width = sizes[step.inputs[0]]
            sizes[step.output] = -(-height // step.stride), -(-width // step.stride)
            if step.kind == "conv" and step.output not in sums:
                self._run.append((step, _convolution(step, (height, width), count)))
            elif step.kind == "pool":
                self._run.append((step, step.run))
            elif step.kind == "add":  # done with the convolution before it
                last = next(each for each in steps if each.output == step.inputs[0])
                convolution = _convolution(last, sizes[last.inputs[0]], count)
                inputs = (last.inputs[0], step.inputs[1])
                self._run.append(
                    (Step(kind="add", inputs=inputs, output=step.output, relu=True), convolution)
                )

    def forward(self, images: Tensor) -> Tensor:
        """Images, or feature maps of earlier steps; they may be overwritten."""
        values = {self._source: images.contiguous(memory_format=_CHANNELS_LAST)}
        for step, run in self._run:
            values[step.output] = run(*(values[name] for name in step.inputs))
        return values[self._output]


def _convolution(step: Step, size: Size, count: int) -> Callable[..., Tensor]:
    """The fastest way to do a convolution: (x) -> y, or (x, shortcut) -> relu(y + shortcut)."""
    assert step.weight is not None
    out_channels, in_channels, kernel, _ = step.weight.shape
    height, width = size
    if kernel == 3 and height * width <= _DENSE_PIXELS:
        return _Dense(step, size)
    tiles = -(-height // _TILE) * -(-width // _TILE)
    plain = kernel == 3 and step.stride == 1 and step.padding == (1, 1, 1, 1)
    if plain and min(in_channels, out_channels) >= _WINOGRAD_CHANNELS and height * width >= 8 * tiles:
        return _Winograd(step)
    return _Packed(step, size, count)


def _finished(y: Tensor, step: Step, shortcut: Tensor | None) -> Tensor:
    """Bias, shortcut and ReLU in place; `y` is [N, h, w, C]."""
    assert step.bias is not None
    y += step.bias
    if shortcut is not None:
        return y.add_(shortcut.permute(0, 2, 3, 1)).relu_()
    return y.relu_() if step.relu else y


class _Packed:
    """oneDNN's convolution, with bias, shortcut and ReLU fused."""

    def __init__(self, step: Step, size: Size, count: int) -> None:
        assert step.weight is not None
        left, right, top, bottom = step.padding
        self._step, self._even = step, left == right and top == bottom
        padding = [top, left] if self._even else [0, 0]
        height, width = (size[0], size[1]) if self._even else (size[0] + top + bottom, size[1] + left + right)
        shape = [count, step.weight.shape[1], height, width]
        stride = [step.stride, step.stride]
        reorder: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
        weight = reorder(step.weight.to_mkldnn(), padding, stride, [1, 1], 1, shape)
        self._arguments = (weight, step.bias, padding, stride, [1, 1], 1)

    def __call__(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        if not self._even:
            x = F.pad(x, self._step.padding).contiguous(memory_format=_CHANNELS_LAST)
        if shortcut is None:
            relu = "relu" if self._step.relu else "none"
            plain: Tensor = torch.ops.mkldnn._convolution_pointwise(x, *self._arguments, relu, [], "")
            return plain
        add = torch.ops.mkldnn._convolution_pointwise_.binary  # overwrites the shortcut
        added: Tensor = add(shortcut, x, *self._arguments, "add", 1.0, "relu", [], "")
        return added


class _Dense:
    """A 3x3 convolution of a map of a few pixels as one matrix product."""

    def __init__(self, step: Step, size: Size) -> None:
        assert step.weight is not None
        out_channels, in_channels = step.weight.shape[:2]
        left, _, top, _ = step.padding
        (height, width), stride = size, step.stride
        self._step, self._out = step, (-(-height // stride), -(-width // stride), out_channels)
        matrix = torch.zeros(height, width, in_channels, *self._out)
        for y in range(self._out[0]):
            for x in range(self._out[1]):
                for row in range(height):
                    for column in range(width):
                        i, j = row - y * stride + top, column - x * stride + left
                        if 0 <= i < 3 and 0 <= j < 3:
                            matrix[row, column, :, y, x] = step.weight[:, :, i, j].T
        self._matrix = matrix.view(height * width * in_channels, -1)

    def __call__(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        rows = x.permute(0, 2, 3, 1).reshape(len(x), -1)
        y = (rows @ self._matrix).view(len(x), *self._out)
        return _finished(y, self._step, shortcut).permute(0, 3, 1, 2)


class _Winograd:
    """F(4x4, 3x3): tiles of 6x6 pixels and the weights are transformed, multiplied, and transformed back."""

    def __init__(self, step: Step) -> None:
        assert step.weight is not None
        weight = torch.einsum("ik,ockl,jl->jico", _TRANSFORM, step.weight.double(), _TRANSFORM)
        self._step, self._weight = step, weight.flatten(0, 1).float().contiguous()  # [36, C, O]

    def __call__(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        count, channels, height, width = x.shape
        tall, wide = -(-height // _TILE), -(-width // _TILE)
        padded = torch.zeros(count, _TILE * tall + 2, _TILE * wide + 2, channels)
        padded[:, 1 : height + 1, 1 : width + 1] = x.permute(0, 2, 3, 1)
        rows = torch.empty(6, count, tall, padded.shape[2], channels)
        _to_points([padded[:, i : i + _TILE * tall - 3 : _TILE] for i in range(6)], list(rows))
        tiles = torch.empty(6, 6, count, tall, wide, channels)  # by column and row of a tile
        _to_points([rows[:, :, :, i : i + _TILE * wide - 3 : _TILE] for i in range(6)], list(tiles))
        products = torch.bmm(tiles.view(36, -1, channels), self._weight)
        sums = products.view(6, 6, count, tall, wide, -1)
        columns = torch.empty(4, *sums.shape[1:])
        _from_points(list(sums), list(columns))
        y = torch.empty(count, tall, _TILE, wide, _TILE, sums.shape[-1])
        _from_points(list(columns.unbind(1)), [y[:, :, i].permute(3, 0, 1, 2, 4) for i in range(_TILE)])
        whole = y.view(count, _TILE * tall, _TILE * wide, -1)[:, :height, :width]
        return _finished(whole.contiguous(), self._step, shortcut).permute(0, 3, 1, 2)


def _to_points(x: list[Tensor], out: list[Tensor]) -> None:
    """Six pixels of each row -> the values at the six points."""
    torch.sub(x[4], x[2], alpha=5, out=out[0]).add_(x[0], alpha=4)
    even, odd = torch.sub(x[4], x[2], alpha=4), torch.sub(x[3], x[1], alpha=4)
    torch.add(even, odd, out=out[1])
    torch.sub(even, odd, out=out[2])
    torch.sub(x[4], x[2], out=even)
    torch.sub(x[3], x[1], out=odd)
    torch.add(even, odd, alpha=2, out=out[3])
    torch.sub(even, odd, alpha=2, out=out[4])
    torch.sub(x[5], x[3], alpha=5, out=out[5]).add_(x[1], alpha=4)


def _from_points(x: list[Tensor], out: list[Tensor]) -> None:
    """Products at the six points -> four pixels of each row."""
    even, odd, far_even, far_odd = x[1] + x[2], x[1] - x[2], x[3] + x[4], x[3] - x[4]
    torch.add(even, x[0], out=out[0]).add_(far_even)
    torch.add(odd, far_odd, alpha=2, out=out[1])
    torch.add(even, far_even, alpha=4, out=out[2])
    torch.add(odd, far_odd, alpha=8, out=out[3]).add_(x[5])
