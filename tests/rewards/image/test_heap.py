"""No convolution that Guerdon builds writes past its buffers: all of them run under glibc's heap check.

oneDNN 3.12, which comes with torch 2.13, does so on AVX2 in one of its kernels; see `Conv1x1`. Damage to the
heap shows at a random place much later, so that only a heap check proves anything.
"""

import ctypes
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import guerdon
from guerdon.rewards.image.encoders import Conv1x1

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
CHECK = {
    "LD_PRELOAD": "libc_malloc_debug.so.0",
    "GLIBC_TUNABLES": "glibc.malloc.check=3",
    "OMP_NUM_THREADS": "1",
}
CONTROLS = ("overflow", "strided 1x1")


@pytest.fixture(scope="module", params=[pytest.param("native", marks=pytest.mark.slow), "avx2"])
def run(request):
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the heap check is a part of glibc, and this is another C library")
    ctypes.CDLL(CHECK["LD_PRELOAD"])  # glibc has it since 2.34; where it is missing the test fails
    extra = AVX2 if request.param == "avx2" else {}
    result = subprocess.run(
        [sys.executable, "-m", "tests.rewards.image.convolutions"],
        env=os.environ | CHECK | extra, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return request.param, json.loads(result.stdout), result.stderr


def test_convolutions_leave_the_heap_alone(run):
    _, found, printed = run
    bad = {name: code for name, code in found["ends"].items() if code != 0 and name not in CONTROLS}
    assert not bad, printed
    assert {"resnet10", "resnet50", "reward models", "policies"} <= found["ends"].keys()


def test_the_check_notices_a_write_past_a_buffer(run):
    assert run[1]["ends"]["overflow"] < 0


def test_the_check_notices_the_convolution_that_is_avoided(run):
    """Where it does not die any more, torch has mended it, and `Conv1x1` may become a plain convolution."""
    name, found, _ = run
    if not found["torch"].startswith("2.13.") or (name == "native" and found["isa"] != "AVX2"):
        pytest.skip(f"the fault is that of torch 2.13 on AVX2, not of {found['torch']} on {found['isa']}")
    assert found["ends"]["strided 1x1"] < 0


@pytest.mark.parametrize("channels", [1, 4, 7, 8, 16])
@pytest.mark.parametrize("stride", [1, 2])
def test_few_channels_give_what_a_plain_convolution_gives(channels, stride):
    torch.manual_seed(0)
    conv, pixels = Conv1x1(channels, 5, stride).double(), torch.randn(3, channels, 7, 6, dtype=torch.float64)
    ours, plain = pixels.clone().requires_grad_(), pixels.clone().requires_grad_()
    out = conv(ours)
    expected = torch.nn.functional.conv2d(plain, conv.weight, stride=stride)  # contiguous, which is sound
    torch.testing.assert_close(out, expected)
    weight_grads = [
        torch.autograd.grad(y.square().sum(), (conv.weight, x)) for y, x in ((out, ours), (expected, plain))
    ]
    torch.testing.assert_close(*weight_grads)


def test_no_other_file_builds_convolutions():
    """A new one has to be run by `convolutions.py` too."""
    package = Path(guerdon.__file__).parent
    builds = re.compile(r"\bnn\.(Lazy)?Conv(Transpose)?[123]d\(|class \w+\(nn\.Conv")
    found = {
        str(path.relative_to(package)) for path in package.rglob("*.py") if builds.search(path.read_text())
    }
    assert found == {"rewards/image/encoders.py"}
