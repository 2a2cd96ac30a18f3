"""Encoder weights from elsewhere: torchvision's key layout, and the Flax pickle that HIL-SERL publishes."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.errors import DataError
from guerdon.core.types import display_path
from guerdon.data.files import safe_pickle
from guerdon.data.files.bounds import one_line
from guerdon.data.files.rebuild import Allowed, set_state
from guerdon.rewards.image.encoders import ImageEncoder, ResNet, make_resnet
from guerdon.rewards.image.hf_encoder import load_hf_encoder
from guerdon.rewards.image.weights import has_batch_norm, load_weights, read_weights, strip_prefixes

logger = logging.getLogger("guerdon")

PREFIXES = ("module.", "backbone.", "encoder.", "resnet_backbone.")
_FLAX_SUFFIXES = (".pkl", ".pickle")
_FLAX_BLOCK = {
    "Conv_0": "conv1",
    "Conv_1": "conv2",
    "MyGroupNorm_0": "bn1",
    "MyGroupNorm_1": "bn2",
    "conv_proj": "downsample.0",
    "norm_proj": "downsample.1",
}
_FLAX_STEM = {"conv_init": "conv1", "norm_init": "bn1"}
_FLAX_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}
_FLAX_HEAD = "output_head"  # ImageNet's classifier


def encoder_for(config: RewardModelConfig) -> ImageEncoder:
    """The encoder that a config asks for: built, its weights loaded, and frozen where that is due.

    `freeze_encoder: auto` freezes it only if pretrained weights were loaded.
    """
    if config.encoder is not None:
        first_token = config.model_type == "lerobot_classifier"
        encoder = load_hf_encoder(config.encoder, config.num_frames, first_token=first_token)
        encoder.freeze(config.freeze_encoder is not False)
        return encoder
    path = config.pretrained_encoder_path
    if path is not None and not config.use_pretrain:
        logger.warning("use_pretrain is false: the weights in %s are not loaded", display_path(path))
        path = None
    stacked = config.num_frames if path is None else 1  # pretrained weights are for single frames
    backbone = make_resnet(config.arch, config.width, in_channels=stacked * config.image_size[0])
    if path is not None:
        load_pretrained(backbone, path)
        if config.num_frames > 1:
            backbone.widen_input(config.num_frames)
    if config.freeze_encoder is True and path is None:
        logger.warning(
            "TRAP: freeze_encoder is true, but no pretrained weights were loaded: the encoder stays random "
            "and only the head learns, which costs accuracy. Set freeze_encoder: auto (or false), or give "
            "pretrained_encoder_path."
        )
    backbone.freeze(path is not None if config.freeze_encoder == "auto" else config.freeze_encoder)
    return backbone


def load_pretrained(backbone: ResNet, path: Path | str) -> None:
    """Load encoder weights; the file decides the kind of norm, and a Flax file the padding too.

    Args:
        backbone: filled in place.
        path: a `.pt`, `.pth` or `.safetensors` file with torchvision's names (bare, or under one of
            `state_dict`, `model_state_dict`, `model`; prefixes of wrappers are dropped and `fc.*` is
            ignored), or for a ResNet10 the Flax pickle `resnet10_params.pkl`.

    Raises:
        DataError: a name or shape does not fit; missing and unexpected ones are listed.
    """
    path = Path(path)
    if path.suffix in _FLAX_SUFFIXES:
        weights = dict(_from_flax(_read_flax(path), display_path(path)))
        backbone.use_layout("group", same_padding=True)
    else:
        weights = strip_prefixes(read_weights(path), PREFIXES)
        backbone.use_layout("batch" if has_batch_norm(weights) else "group", same_padding=False)
    weights = {name: value for name, value in weights.items() if not name.startswith("fc.")}
    load_weights(backbone, weights, display_path(path))
    logger.info("encoder weights from %s (%s, %s norm)", display_path(path), backbone.arch, backbone.norm)


def _from_flax(tree: Any, source: str) -> Iterator[tuple[str, Tensor]]:
    """The entries of a Flax parameter tree under torchvision's names; strange ones keep their own."""
    if not isinstance(tree, Mapping):
        raise DataError(f"{source}: holds a {type(tree).__name__}; expected a tree of Flax parameters")
    for path, value in _leaves(tree, source):
        if path[0] == _FLAX_HEAD:
            continue
        tensor = torch.from_numpy(np.array(value, dtype=np.float32))  # a copy: pickled arrays are read-only
        if path[-1] == "kernel" and tensor.ndim == 4:
            tensor = tensor.permute(3, 2, 0, 1)  # [kh, kw, in, out] -> [out, in, kh, kw]
        yield _torch_name(path), tensor


def _torch_name(path: tuple[str, ...]) -> str:
    leaf = _FLAX_LEAVES.get(path[-1])
    if len(path) == 2 and path[0] in _FLAX_STEM and leaf:
        return f"{_FLAX_STEM[path[0]]}.{leaf}"
    block = re.fullmatch(r"ResNetBlock_(\d+)", path[0])
    if len(path) == 3 and block and path[1] in _FLAX_BLOCK and leaf:
        return f"layer{int(block[1]) + 1}.0.{_FLAX_BLOCK[path[1]]}.{leaf}"
    return "/".join(path)


def _leaves(
    tree: Mapping[Any, Any], source: str, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], NDArray[Any]]]:
    for key, value in tree.items():
        here = (*path, one_line(key))
        if isinstance(value, Mapping) and len(here) < 8:
            yield from _leaves(value, source, here)
        elif isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating):
            yield here, value
        else:
            raise DataError(f"{source}: {'/'.join(here)} is no array of numbers")


def _read_flax(path: Path) -> Any:
    """Read the pickle as `safe_pickle.load` does, with the one more name that jax arrays carry.

    The published file holds jax arrays, which pickle themselves as a call around numpy's own parts; those
    parts go through the same checks as everywhere. Nothing of jax is imported.
    """
    if path.is_file() and not path.stat().st_size:
        raise DataError(f"{display_path(path)}: is truncated: it has no bytes")
    return safe_pickle.load(path, more={_JAX_ARRAY: Allowed(".".join(_JAX_ARRAY), _jax_array)})


_JAX_ARRAY = ("jax._src.array", "_reconstruct_array")


def _jax_array(make: Any, arguments: Any, state: Any, *_: Any) -> NDArray[Any]:
    """What `_reconstruct_array` of jax does, with checked parts: an empty numpy array, then its state."""
    if type(make) is not Allowed or type(arguments) is not tuple:
        raise DataError("has a damaged jax array")
    array = make.call(*arguments)
    if not isinstance(array, np.ndarray):
        raise DataError("has a damaged jax array")
    set_state(array, state)
    return array
