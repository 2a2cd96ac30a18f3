"""Weights of strangers: read from a file, compared with what a model expects, and described."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from guerdon.core.errors import DataError
from guerdon.core.types import display_path
from guerdon.data.files import safe_pickle
from guerdon.data.files.bounds import one_line
from guerdon.data.files.checksums import tensors_checksum
from guerdon.rewards.image.encoders import ARCHS, Bottleneck

CHECKSUM = "checksum"
"""Metadata of our safetensors files: `tensors_checksum` of the tensors and the contract."""
WRAPPERS = ("model_state_dict", "state_dict", "model")
"""Keys under which training scripts put the weights."""
_SHOWN = 3  # names per kind of mismatch in a message


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a `.safetensors` file, if its checksum fits or it has none."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = dict(file.metadata() or {})
    except FileNotFoundError:
        raise DataError(f"{display_path(path)}: does not exist") from None
    except Exception as error:  # hostile bytes can fail in any way
        raise DataError(
            f"{display_path(path)}: is damaged or no safetensors file: {one_line(error)}"
        ) from error
    wanted = metadata.get(CHECKSUM)
    if wanted is not None and wanted != tensors_checksum(tensors, metadata.get("contract", "")):
        raise DataError(f"{display_path(path)}: is damaged: its checksum does not fit")
    return tensors, metadata


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a `.safetensors` file or in a file of `torch.save`, by name."""
    if path.suffix == ".safetensors":
        return read_safetensors(path)[0]
    return find_weights(safe_pickle.load_torch(path), display_path(path))


def find_weights(content: Any, source: str) -> dict[str, Tensor]:
    """The weights in what a training script saved: the dict itself, or one of its usual entries."""
    if isinstance(content, Mapping):
        for key in WRAPPERS:
            if isinstance(content.get(key), Mapping):
                content = content[key]
                break
        weights = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if weights and len(weights) == len(content):
            return weights
    raise DataError(f"{source}: holds no weights; expected a dict of tensors, bare or under {list(WRAPPERS)}")


def strip_prefixes(weights: Mapping[str, Tensor], prefixes: Sequence[str]) -> dict[str, Tensor]:
    """Names without the prefixes that wrappers such as DataParallel put before them."""
    pattern = re.compile("(?:" + "|".join(re.escape(prefix) for prefix in prefixes) + ")+")
    return {
        pattern.sub("", name, count=1) if pattern.match(name) else name: value
        for name, value in weights.items()
    }


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Copy `weights` into `module`, all of them and nothing else.

    BatchNorm's `num_batches_tracked`, which older files lack, is zero where it is missing.

    Raises:
        DataError: names are missing or unexpected, or shapes differ; a few of each are named.
    """
    expected = module.state_dict()
    weights = dict(weights)
    for name in expected.keys() - weights.keys():
        if name.endswith(".num_batches_tracked"):
            weights[name] = torch.tensor(0)
    check_weights(expected, weights, source)
    if any(value.is_meta for value in expected.values()):
        module.to_empty(device="cpu")
    module.load_state_dict(weights)


def check_weights(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], source: str) -> None:
    """Raise a `DataError` of one line if names or shapes differ."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    shapes = [
        f"{name} is {list(found[name].shape)} instead of {list(value.shape)}"
        for name, value in expected.items()
        if name in found and found[name].shape != value.shape
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    problems = [f"{len(names)} {kind} ({_few(names)})" for kind, names in kinds.items() if names]
    if not problems:
        return
    theirs, ours = describe_encoder(found), describe_encoder(expected)
    sides = f" (it holds a {theirs}, the model has a {ours})" if theirs and theirs != ours else ""
    raise DataError(f"{source}: the weights do not fit the model{sides}: {'; '.join(problems)}")


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(one_line(name) for name in names[:_SHOWN])
    return shown + (", ..." if len(names) > _SHOWN else "")


def describe_encoder(weights: Mapping[str, Tensor]) -> str | None:
    """Such as `resnet18 of width 64 with BatchNorm`; None if there is no ResNet."""
    blocks: dict[int, set[int]] = {1: set(), 2: set(), 3: set(), 4: set()}
    bottleneck, width = False, None
    for name, value in weights.items():
        if match := re.search(r"(?:^|\.)layer([1-4])\.(\d+)\.conv(\d)\.weight$", name):
            blocks[int(match[1])].add(int(match[2]))
            bottleneck = bottleneck or match[3] == "3"
        elif re.search(r"(?:^|\.)conv1\.weight$", name) and value.ndim == 4:
            width = value.shape[0]
    depths = tuple(len(indices) for indices in blocks.values())
    for arch, (block, known) in ARCHS.items():
        if depths == known and bottleneck == (block is Bottleneck):
            norm = "BatchNorm" if has_batch_norm(weights) else "GroupNorm"
            return f"{arch} of width {width} with {norm}"
    return None


def has_batch_norm(names: Iterable[str]) -> bool:
    """Whether weights of these names come from a network with BatchNorm."""
    return any(name.endswith(".running_mean") for name in names)
