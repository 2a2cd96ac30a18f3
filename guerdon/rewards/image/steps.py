"""A ResNet in eval mode as a list of steps with folded batch norms, and its execution in float32.

A plain convolution runs near the peak of a core with AVX2. What is left is to multiply less: Winograd's
F(4x4, 3x3) needs a quarter of the products of a 3x3 convolution, and on maps of up to 2x2 pixels, where most
of a window lies outside, one matrix product needs less than half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guerdon.core.errors import ConfigError
from guerdon.rewards.image.encoders import BasicBlock, Bottleneck, Conv3x3, ResNet

Size: TypeAlias = tuple[int, int]

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


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation of a ResNet in eval mode, with its batch norm folded in."""

    kind: Literal["conv", "pool", "add"]
    inputs: tuple[str, ...]
    output: str
    size: Size
    """(H, W) of the inputs."""
    relu: bool = False
    stride: int = 1
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Left, right, top, bottom."""
    weight: Tensor | None = None
    """float32 [O, I, kh, kw] of a convolution, channels last."""
    bias: Tensor | None = None
    """float32 [O]."""

    def run(self, *inputs: Tensor) -> Tensor:
        """Execute it in float32; a sum overwrites its first input, which no other step reads."""
        if self.kind == "add":
            return inputs[0].add_(inputs[1]).relu_()
        left, right, top, bottom = self.padding
        x, padding = inputs[0], (top, left)
        if (left, top) != (right, bottom):
            x, padding = F.pad(x, self.padding, value=0.0 if self.kind == "conv" else float("-inf")), (0, 0)
        if self.kind == "pool":
            return F.max_pool2d(x, 3, self.stride, padding)
        assert self.weight is not None
        y = F.conv2d(x, self.weight, self.bias, self.stride, padding)
        return y.relu_() if self.relu else y


# A ResNet as a list of steps


def resnet_steps(resnet: ResNet, size: Size) -> list[Step]:
    """All steps from `image` to the feature map, for images of `size` (H, W)."""
    if resnet.norm != "batch":
        raise ConfigError("a GroupNorm cannot be folded into a convolution")
    steps = [_conv_step("image", "stem", resnet.conv1, resnet.bn1, size, relu=True)]
    size = _halved(size)
    padding = _same_padding(size) if resnet.same_padding else (1, 1, 1, 1)
    steps.append(Step(kind="pool", inputs=("stem",), output="pool", size=size, stride=2, padding=padding))
    size = _halved(size)
    for stage, blocks in enumerate((resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4), 1):
        for index, block in enumerate(blocks):
            assert isinstance(block, (BasicBlock, Bottleneck))
            steps += _block_steps(steps[-1].output, f"layer{stage}.{index}", block, size)
            size = steps[-1].size
    return steps


def _block_steps(source: str, name: str, block: BasicBlock | Bottleneck, size: Size) -> list[Step]:
    layers: list[tuple[nn.Conv2d, nn.Module]] = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
    if isinstance(block, Bottleneck):
        layers.append((block.conv3, block.bn3))
    steps: list[Step] = []
    inner, inner_size = source, size
    for number, (conv, norm) in enumerate(layers, 1):
        relu = number < len(layers)
        steps.append(_conv_step(inner, f"{name}.conv{number}", conv, norm, inner_size, relu=relu))
        inner, inner_size = steps[-1].output, _halved(inner_size) if conv.stride == (2, 2) else inner_size
    shortcut = source
    if block.downsample is not None:
        conv1x1, norm = block.downsample
        assert isinstance(conv1x1, nn.Conv2d)
        steps.append(_conv_step(source, f"{name}.downsample", conv1x1, norm, size, relu=False))
        shortcut = steps[-1].output
    add = Step(kind="add", inputs=(inner, shortcut), output=name, size=inner_size, relu=True)
    return [*steps, add]


def _conv_step(source: str, name: str, conv: nn.Conv2d, norm: nn.Module, size: Size, *, relu: bool) -> Step:
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None and norm.running_var is not None
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    weight, bias = conv.weight * factor.view(-1, 1, 1, 1), norm.bias - norm.running_mean * factor
    margin = int(conv.padding[0])
    padding = (margin, margin, margin, margin)
    if isinstance(conv, Conv3x3) and conv.same_padding and conv.stride == (2, 2):
        padding = _same_padding(size)
    return Step(
        kind="conv",
        inputs=(source,),
        output=name,
        size=size,
        relu=relu,
        stride=conv.stride[0],
        padding=padding,
        weight=weight.detach().cpu().contiguous(memory_format=torch.channels_last),
        bias=bias.detach().cpu(),
    )


def _halved(size: Size) -> Size:
    return (size[0] + 1) // 2, (size[1] + 1) // 2


def _same_padding(size: Size) -> tuple[int, int, int, int]:
    """As `pad_same` does."""
    return size[1] % 2, 1, size[0] % 2, 1


# Execution in float32


class FoldedSteps(nn.Module):
    """Some steps of a ResNet, one after the other: float32 [N, C, H, W] -> [N, C', H', W'], channels last.

    Args:
        steps: in order; the first one's input is the input.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self._source = steps[0].inputs[0]
        self._run = [(step, _fastest(step)) for step in steps]

    def forward(self, images: Tensor) -> Tensor:
        """Images, or feature maps of earlier steps."""
        values = {self._source: images.contiguous(memory_format=torch.channels_last)}
        for step, run in self._run:
            values[step.output] = run(*(values[name] for name in step.inputs))
        return values[step.output]


def _fastest(step: Step) -> Callable[..., Tensor]:
    """The fastest way to do a step."""
    if step.weight is None or step.weight.shape[2] != 3:
        return step.run
    height, width = step.size
    if height * width <= _DENSE_PIXELS:
        return _Dense(step)
    tiles = -(-height // _TILE) * -(-width // _TILE)
    is_wide = min(step.weight.shape[:2]) >= _WINOGRAD_CHANNELS
    if step.stride == 1 and is_wide and height * width >= 8 * tiles:
        return _Winograd(step)
    return step.run


def _finished(y: Tensor, step: Step) -> Tensor:
    """Bias and ReLU in place; [N, h, w, C] -> [N, C, h, w]."""
    assert step.bias is not None
    y += step.bias
    return (y.relu_() if step.relu else y).permute(0, 3, 1, 2)


class _Dense:
    """A 3x3 convolution of a map of a few pixels as one matrix product."""

    def __init__(self, step: Step) -> None:
        assert step.weight is not None
        out_channels, in_channels = step.weight.shape[:2]
        left, _, top, _ = step.padding
        (height, width), stride = step.size, step.stride
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

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1).reshape(len(x), -1)
        return _finished((rows @ self._matrix).view(len(x), *self._out), self._step)


class _Winograd:
    """F(4x4, 3x3): tiles of 6x6 pixels and the weights are transformed, multiplied, and transformed back."""

    def __init__(self, step: Step) -> None:
        assert step.weight is not None
        weight = torch.einsum("ik,ockl,jl->jico", _TRANSFORM, step.weight.double(), _TRANSFORM)
        self._step, self._weight = step, weight.flatten(0, 1).float().contiguous()  # [36, C, O]

    def __call__(self, x: Tensor) -> Tensor:
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
        return _finished(whole.contiguous(), self._step)


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
