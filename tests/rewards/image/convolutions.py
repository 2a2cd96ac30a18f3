"""Every kind of convolution that Guerdon builds, forward and backward.

`test_heap.py` runs it under a heap check.
`python -m tests.rewards.image.convolutions` runs each case in a process of its own, forked after torch is
imported, and prints JSON: name -> how it ended, 0 or minus the number of the signal.
"""

import ctypes
import json
import os
import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn

from guerdon.agents.networks import ObsEncoder, ObsSpec
from guerdon.config import NetworkConfig, RewardModelConfig
from guerdon.models import build_model, make_resnet
from guerdon.rewards.image.accelerate import make_scorer

FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
# From the narrowest that can be asked for to two registers' worth of channels. ResNet18 and 34 repeat the
# blocks of ResNet10; in ResNet50 only width 1 leads to few channels before a strided 1x1 convolution.
ARCHS = {
    "resnet10": {"batch": (1, 2, 3, 4, 5, 6, 7, 8, 9, 16), "group": (4, 8, 12)},
    "resnet18": {"batch": (4, 8), "group": (8,)},
    "resnet34": {"batch": (4, 8), "group": (8,)},
    "resnet50": {"batch": (1, 2, 4, 8), "group": (4, 8)},
}


def overflow() -> None:
    """One byte behind a tensor's: what the heap check has to notice."""
    tensor = torch.zeros(1000, dtype=torch.uint8)
    ctypes.memset(tensor.data_ptr(), 255, 1001)
    del tensor


def strided_1x1() -> None:
    """The convolution that oneDNN gets wrong on AVX2, as torch has it."""
    for _ in range(10):  # whether a write past a buffer is noticed depends on what lies behind it
        for channels in (2, 4, 6):
            train(nn.Conv2d(channels, 32, 1, stride=2, bias=False), (32, channels, 8, 8), torch.channels_last)


def train(network: nn.Module, shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    """Forward and backward, in float32 and as `fit.precision=bf16` does."""
    network.to(memory_format=memory_format)
    for bf16 in (False, True):
        pixels = torch.randn(shape).to(memory_format=memory_format).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            out = network(pixels)
        out.float().square().sum().backward()


def encoders(arch: str) -> None:
    """ResNets of all widths, in both memory formats (FSDP and scorers use contiguous weights)."""
    for norm, widths in ARCHS[arch].items():
        for width in widths:
            for number, memory_format in enumerate(FORMATS.values()):
                grey = bool((width + number) % 2)
                network = make_resnet(
                    arch, width, norm, same_padding=norm == "group", in_channels=1 if grey else 3
                )
                train(network, (2, 1, 33, 40) if grey else (3, 3, 32, 32), memory_format)


def reward_models() -> None:
    """Whole reward models with stacks of frames and two cameras, fitted and then scoring."""
    for model_type in ("resnet_reward", "binary_classifier"):
        for width in (4, 8):
            config = RewardModelConfig(
                model_type=model_type, arch="resnet10", width=width, image_size=(3, 32, 32), num_frames=2,
                image_keys=("front", "wrist"), use_pretrain=False,
            )  # fmt: skip
            model = build_model(config)
            images = torch.randint(0, 256, (4, 2, 2, 32, 32, 3), dtype=torch.uint8)
            frames = {name: images[:, number].numpy() for number, name in enumerate(config.image_keys)}
            model(frames).square().sum().backward()
            for precision in ("fp32", "bf16"):
                make_scorer(model, precision)(frames)


def policies() -> None:
    """The CNN of PPO, SAC and DQN, whose frames come in channels_last."""
    for size, channels, cameras in ((8, 1, 1), (16, 3, 1), (33, 4, 1), (48, 3, 2), (64, 12, 1)):
        images = tuple((f"camera{number}", (size, size, channels)) for number in range(cameras))
        encoder = ObsEncoder(ObsSpec(state_size=0, images=images), NetworkConfig())
        obs = {name: torch.randint(0, 256, (5, *shape), dtype=torch.uint8) for name, shape in images}
        encoder(obs).square().sum().backward()
        for memory_format in FORMATS.values():
            train(encoder.cnn, (5, channels * cameras, size, size), memory_format)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    yield "overflow", overflow
    yield "strided 1x1", strided_1x1
    for arch in ARCHS:
        yield arch, lambda arch=arch: encoders(arch)
    yield "reward models", reward_models
    yield "policies", policies


def how_it_ends(case: Callable[[], None]) -> int:
    """0, minus the signal, or 1 for an exception (whose traceback is on stderr)."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            case()
            code = 0
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ends = {name: how_it_ends(case) for name, case in cases()}
    print(
        json.dumps({"ends": ends, "torch": torch.__version__, "isa": torch.backends.cpu.get_cpu_capability()})
    )
