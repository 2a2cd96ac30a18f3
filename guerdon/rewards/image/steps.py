"""A ResNet in eval mode as a list of steps, with its batch norms folded into the convolutions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guerdon.core.errors import ConfigError
from guerdon.rewards.image.encoders import BasicBlock, Bottleneck, Conv3x3, ResNet

Size: TypeAlias = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation of a ResNet in eval mode, with its batch norm folded in."""

    kind: Literal["conv", "pool", "add"]
    inputs: tuple[str, ...]
    output: str
    relu: bool = False
    stride: int = 1
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Left, right, top, bottom."""
    weight: Tensor | None = None
    """float32 [O, I, kh, kw] of a convolution."""
    bias: Tensor | None = None
    """float32 [O]."""

    def run(self, *inputs: Tensor) -> Tensor:
        """Execute it in float32."""
        if self.kind == "add":
            y = inputs[0] + inputs[1]
        elif self.kind == "pool":
            y = F.max_pool2d(F.pad(inputs[0], self.padding, value=float("-inf")), 3, self.stride)
        else:
            assert self.weight is not None
            y = F.conv2d(F.pad(inputs[0], self.padding), self.weight, self.bias, self.stride)
        return F.relu(y) if self.relu else y


# A ResNet as a list of steps


def resnet_steps(resnet: ResNet, size: Size) -> list[Step]:
    """All steps from `image` to the feature map, for images of `size` (H, W)."""
    if resnet.norm != "batch":
        raise ConfigError("a GroupNorm cannot be folded into a convolution")
    steps = [_conv_step("image", "stem", resnet.conv1, resnet.bn1, size, relu=True)]
    size = _halved(size)
    padding = _same_padding(size) if resnet.same_padding else (1, 1, 1, 1)
    steps.append(Step(kind="pool", inputs=("stem",), output="pool", stride=2, padding=padding))
    size = _halved(size)
    for stage, blocks in enumerate((resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4), 1):
        for index, block in enumerate(blocks):
            assert isinstance(block, (BasicBlock, Bottleneck))
            steps += _block_steps(steps[-1].output, f"layer{stage}.{index}", block, size)
            size = _halved(size) if stage > 1 and index == 0 else size
    return steps


def _block_steps(source: str, name: str, block: BasicBlock | Bottleneck, size: Size) -> list[Step]:
    pairs: list[tuple[nn.Conv2d, nn.Module]] = [(block.conv1, block.bn1), (block.conv2, block.bn2)]
    if isinstance(block, Bottleneck):
        pairs.append((block.conv3, block.bn3))
    steps: list[Step] = []
    inner, inner_size = source, size
    for number, (conv, norm) in enumerate(pairs, 1):
        relu = number < len(pairs)
        steps.append(_conv_step(inner, f"{name}.conv{number}", conv, norm, inner_size, relu=relu))
        inner, inner_size = steps[-1].output, _halved(inner_size) if conv.stride == (2, 2) else inner_size
    shortcut = source
    if block.downsample is not None:
        conv1x1, norm = block.downsample
        assert isinstance(conv1x1, nn.Conv2d)
        steps.append(_conv_step(source, f"{name}.downsample", conv1x1, norm, size, relu=False))
        shortcut = steps[-1].output
    return [*steps, Step(kind="add", inputs=(inner, shortcut), output=name, relu=True)]


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
        relu=relu,
        stride=conv.stride[0],
        padding=padding,
        weight=weight.detach().cpu().contiguous(),
        bias=bias.detach().cpu(),
    )


def _halved(size: Size) -> Size:
    return (size[0] + 1) // 2, (size[1] + 1) // 2


def _same_padding(size: Size) -> tuple[int, int, int, int]:
    """As `pad_same` does."""
    return size[1] % 2, 1, size[0] % 2, 1
