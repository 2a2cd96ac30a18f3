"""Image encoders by name: ResNets in torchvision's key layout, and the small CNN of policies.

Beside them is the learned spatial pooling of HIL-SERL.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guerdon.core.errors import ConfigError

Norm: TypeAlias = Literal["batch", "group"]
Arch: TypeAlias = Literal["resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]
NORM_GROUPS = 4
MIN_STRIDED_CHANNELS = 8
"""Input channels from which oneDNN's strided 1x1 convolutions are sound; see `Conv1x1`."""


class ImageEncoder(nn.Module):
    """Images [N, C, H, W] -> feature maps [N, num_features, h, w]; may be frozen."""

    num_features: int
    frozen: bool = False
    mean: tuple[float, ...] | None = None
    """Of the colours from 0 to 1 that it was trained with; None: ImageNet's."""
    std: tuple[float, ...] | None = None

    def freeze(self, frozen: bool = True) -> None:
        """Keep all weights and BatchNorm statistics as they are, also under `train()`; or let them go."""
        self.frozen = frozen
        self.requires_grad_(not frozen)
        if frozen:
            self.eval()

    def train(self, mode: bool = True) -> Self:
        """Frozen, it stays in eval mode: BatchNorm would otherwise go on changing."""
        super().train(mode and not self.frozen)
        return self

    @abstractmethod
    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """(h, w) of the feature map for images of that size."""


def make_norm(norm: Norm, channels: int) -> nn.Module:
    """BatchNorm, or the GroupNorm that HIL-SERL's ResNet10 has (4 groups)."""
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if channels % NORM_GROUPS:
        raise ConfigError(f"reward.model.width must be a multiple of {NORM_GROUPS} with GroupNorm weights")
    return nn.GroupNorm(NORM_GROUPS, channels, eps=1e-5)


def pad_same(x: Tensor, value: float = 0.0) -> Tensor:
    """Pad `[N, C, H, W]` as Flax's SAME does for a window of 3 and a stride of 2.

    An even side gets its one pixel of padding at the end only, where torch pads both ends.
    """
    height, width = x.shape[-2:]
    return F.pad(x, (width % 2, 1, height % 2, 1), value=value)


class Conv3x3(nn.Conv2d):
    """A 3x3 convolution without bias, padded as torch does or (`same_padding`) as Flax does."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.same_padding = False

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C', ceil(H / stride), ceil(W / stride)]."""
        if self.same_padding and self.stride == (2, 2):
            return F.conv2d(pad_same(x), self.weight, stride=2)
        return super().forward(x)


class Conv1x1(nn.Conv2d):
    """A 1x1 convolution without bias whose gradient is safe on every processor.

    On AVX2, oneDNN 3.12 (torch 2.13) writes past its buffers in the backward pass of a 1x1 convolution with
    stride 2, channels_last and fewer than 8 input channels. With so few channels the pixels are selected
    first and convolved with stride 1: the same sums, by another kernel.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C', ceil(H / stride), ceil(W / stride)]."""
        if self.stride == (1, 1) or self.in_channels >= MIN_STRIDED_CHANNELS:
            return super().forward(x)
        return F.conv2d(x[..., :: self.stride[0], :: self.stride[1]], self.weight)


def _shortcut(in_channels: int, out_channels: int, stride: int, norm: Norm) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(Conv1x1(in_channels, out_channels, stride), make_norm(norm, out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut; the block of ResNet10, 18 and 34."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = Conv3x3(in_channels, channels, stride)
        self.bn1 = make_norm(norm, channels)
        self.conv2 = Conv3x3(channels, channels)
        self.bn2 = make_norm(norm, channels)
        self.downsample = _shortcut(in_channels, channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C', H', W']."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the block of ResNet50, with the stride in the 3x3."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = Conv1x1(in_channels, channels)
        self.bn1 = make_norm(norm, channels)
        self.conv2 = Conv3x3(channels, channels, stride)
        self.bn2 = make_norm(norm, channels)
        self.conv3 = Conv1x1(channels, out_channels)
        self.bn3 = make_norm(norm, out_channels)
        self.downsample = _shortcut(in_channels, out_channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, 4 * C', H', W']."""
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)), inplace=True)


ARCHS: dict[Arch, tuple[type[BasicBlock] | type[Bottleneck], tuple[int, int, int, int]]] = {
    "resnet10": (BasicBlock, (1, 1, 1, 1)),
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}
"""Name -> block and blocks per stage."""


class ResNet(ImageEncoder):
    """A ResNet without its last pooling and its classifier, with torchvision's names for all weights.

    Attributes:
        end_padded_pool: pad the first pooling at the ends alone, as LeRobot's ResNet10 with GroupNorm does.

    Args:
        arch: a key of `ARCHS`.
        width: channels of the first stage; each later stage doubles them.
        norm: `batch`, or `group` as in HIL-SERL's weights.
        same_padding: pad strided 3x3 windows as Flax does; weights trained there need it.
        in_channels: 3, or 1 for grey images.
    """

    def __init__(
        self,
        arch: Arch,
        *,
        width: int = 64,
        norm: Norm = "batch",
        same_padding: bool = False,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        block, depths = ARCHS[arch]
        self.arch, self.width = arch, width
        self.norm, self.same_padding, self.end_padded_pool = norm, same_padding, False
        self.num_features = 8 * width * block.expansion
        self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = make_norm(norm, width)
        channels, stages = width, []
        for stage, depth in enumerate(depths):
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(block(channels, width * 2**stage, stride, norm))
                channels = width * 2**stage * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.use_layout(norm, same_padding)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # 8 to 50% faster on a CPU

    def use_layout(self, norm: Norm, same_padding: bool) -> None:
        """Change to the norm and padding that weights from a file were trained with.

        Norm layers of another kind are replaced by new ones; the caller then loads their weights.
        """
        if norm != self.norm:
            for parent in list(self.modules()):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.BatchNorm2d):
                        setattr(parent, name, make_norm(norm, child.num_features))
                    elif isinstance(child, nn.GroupNorm):
                        setattr(parent, name, make_norm(norm, child.num_channels))
        self.norm, self.same_padding = norm, same_padding
        for module in self.modules():
            if isinstance(module, Conv3x3):
                module.same_padding = same_padding
        self.freeze(self.frozen)

    def widen_input(self, num_frames: int) -> None:
        """Take stacks of frames: each gets the weights of one, divided by their number.

        Copies of one frame then give what the frame alone gives, as with pretrained weights they should.
        """
        old = self.conv1
        stem = nn.Conv2d(num_frames * old.in_channels, old.out_channels, 7, stride=2, padding=3, bias=False)
        with torch.no_grad():
            stem.weight.copy_(old.weight.repeat(1, num_frames, 1, 1) / num_frames)
        self.conv1 = stem.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """(h, w) of the feature map for images of that size: five strides of 2, each rounded up."""
        return math.ceil(height / 32), math.ceil(width / 32)

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, num_features, ceil(H / 32), ceil(W / 32)]."""
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        if self.same_padding:
            x = F.max_pool2d(pad_same(x, float("-inf")), 3, stride=2)
        elif self.end_padded_pool and self.norm == "group":
            x = F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=float("-inf")), 3, stride=2)
        else:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return x


class ResNet10(ResNet):
    """One basic block per stage: 4.9 million weights at width 64."""

    def __init__(self, **settings: Any) -> None:
        super().__init__("resnet10", **settings)


class SmallCNN(nn.Sequential):
    """Three convolutions, each with a ReLU, down to about 4x4 (images below 64 pixels): what policies use.

    Args:
        in_channels: of all cameras and stacked frames together.
        image_size: (H, W).
    """

    CHANNELS = (32, 64, 64)

    def __init__(self, *, in_channels: int, image_size: tuple[int, int]) -> None:
        layers: list[nn.Module] = []
        for stride, channels in zip(self.strides(*image_size), self.CHANNELS, strict=True):
            layers += [nn.Conv2d(in_channels, channels, stride + 2, stride, padding=1), nn.ReLU()]
            in_channels = channels
        super().__init__(*layers, nn.Flatten())
        self.num_features = self.output_size(*image_size)
        for layer in layers[::2]:
            assert isinstance(layer, nn.Conv2d) and layer.bias is not None
            nn.init.orthogonal_(layer.weight, math.sqrt(2))
            nn.init.zeros_(layer.bias)

    @staticmethod
    def strides(height: int, width: int) -> tuple[int, int, int]:
        """Large images are reduced at once: most time goes there."""
        return (4 if min(height, width) >= 48 else 2, 2, 2)

    @classmethod
    def output_size(cls, height: int, width: int) -> int:
        """Features of an image."""
        for stride in cls.strides(height, width):  # kernels are larger than the stride by 2, padding is 1
            height, width = height // stride, width // stride
        return cls.CHANNELS[-1] * height * width


ENCODERS: dict[str, Callable[..., nn.Module]] = {
    "resnet10": ResNet10,
    "resnet18": partial(ResNet, "resnet18"),
    "resnet34": partial(ResNet, "resnet34"),
    "resnet50": partial(ResNet, "resnet50"),
    "resnet101": partial(ResNet, "resnet101"),
    "resnet152": partial(ResNet, "resnet152"),
    "cnn": SmallCNN,
}
"""Name -> class. Reward models take ResNets, policies the CNN."""


def make_encoder(name: str, **settings: Any) -> nn.Module:
    """A new encoder with random weights; see the classes for their settings."""
    if name not in ENCODERS:
        raise ConfigError(f"there is no encoder {name!r}: {', '.join(ENCODERS)}")
    return ENCODERS[name](**settings)


def make_resnet(arch: Arch, width: int = 64, norm: Norm = "batch", **settings: Any) -> ResNet:
    """A new ResNet with random weights; see `ResNet` for the arguments."""
    resnet = make_encoder(arch, width=width, norm=norm, **settings)
    assert isinstance(resnet, ResNet)
    return resnet


class SpatialLearnedEmbeddings(nn.Module):
    """Pools a feature map with `num_features` learned spatial weightings per channel.

    `kernel` is `[C, H, W, F]`. A channel is pooled by its own weights only, so several cameras whose
    channels are stacked are pooled independently by one such layer.
    """

    def __init__(self, height: int, width: int, channel: int, num_features: int = 8) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(channel, height, width, num_features))
        # LeCun's rule with what one output really sums over; Flax counts the channels too, which makes
        # the outputs smaller the wider the encoder is.
        nn.init.normal_(self.kernel, std=1.0 / math.sqrt(height * width))

    def forward(self, features: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C * F]."""
        return torch.einsum("nchw,chwf->ncf", features, self.kernel).flatten(1)
