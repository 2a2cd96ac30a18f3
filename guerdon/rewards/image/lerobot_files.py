"""Folders of LeRobot's reward classifier: `config.json`, `model.safetensors` and its normalisation.

Without LeRobot and without code of a repository. Its encoder's weights are in `model.safetensors`. ResNets
are known by the names of their weights: LeRobot's own ResNet10, and those of `transformers`. For another
encoder the `config.json` of `model_name` is asked for, in a folder or at the hub.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from guerdon.config.build import build
from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.errors import ConfigError, DataError, GuerdonError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line
from guerdon.data.files.hub import local_folder
from guerdon.rewards.image.contract import Contract
from guerdon.rewards.image.encoders import ARCHS, BasicBlock, Bottleneck, ImageEncoder, ResNet, make_resnet
from guerdon.rewards.image.hf_encoder import HFEncoder, described_encoder
from guerdon.rewards.image.hf_files import read_object
from guerdon.rewards.image.lerobot_model import LeRobotClassifier
from guerdon.rewards.image.weights import has_batch_norm, load_weights, read_safetensors

logger = logging.getLogger("guerdon")

KIND = "reward_classifier"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
ENCODER_FOLDER = "encoder"
IMAGE = "observation.image"
CAMERA_PREFIXES = ("observation.images.", "observation.")
_SHARED = re.compile(r"(?:encoder|encoders\.[^.]+\.0)\.(.+)")
_CAMERA = re.compile(r"encoders\.([^.]+)\.([1-5])\.(.+)")
_OWN_NAMES = (  # of LeRobot's ResNet10
    (r"embedder\.0\.", "conv1."),
    (r"embedder\.1\.", "bn1."),
    (r"encoder\.stages\.(\d+)\.norm(\d)\.", r"layer\1.0.bn\2."),
    (r"encoder\.stages\.(\d+)\.conv(\d)\.", r"layer\1.0.conv\2."),
    (r"encoder\.stages\.(\d+)\.shortcut\.", r"layer\1.0.downsample."),
)
_THEIR_NAMES = (  # of the ResNets of transformers
    (r"embedder\.embedder\.convolution\.", "conv1."),
    (r"embedder\.embedder\.normalization\.", "bn1."),
    (r"encoder\.stages\.(\d+)\.layers\.(\d+)\.shortcut\.convolution\.", r"layer\1.\2.downsample.0."),
    (r"encoder\.stages\.(\d+)\.layers\.(\d+)\.shortcut\.normalization\.", r"layer\1.\2.downsample.1."),
    (r"encoder\.stages\.(\d+)\.layers\.(\d+)\.layer\.(\d)\.convolution\.", r"layer\1.\2.conv\3."),
    (r"encoder\.stages\.(\d+)\.layers\.(\d+)\.layer\.(\d)\.normalization\.", r"layer\1.\2.bn\3."),
)
_MODES = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
"""Normalisation of LeRobot -> the statistics that it needs."""


def is_lerobot(folder: Path) -> bool:
    """Whether a folder holds LeRobot's reward classifier."""
    return (read_object(folder / CONFIG_FILE) or {}).get("type") == KIND


def camera_of(feature: str) -> str:
    """`observation.images.front` -> `front`."""
    prefix = next((each for each in CAMERA_PREFIXES if feature.startswith(each)), "")
    return feature.removeprefix(prefix) or feature


def read_lerobot(folder: Path) -> tuple[LeRobotClassifier, Contract]:
    """The model of a folder, in eval mode, with the logits that LeRobot's code gives.

    Raises:
        DataError: it is damaged, or of a kind that no reward model of ours can be: the reason is named.
    """
    source = display_path(folder)
    told = read_object(folder / CONFIG_FILE) or {}
    weights = read_safetensors(folder / WEIGHTS_FILE)[0]
    features = _image_features(told, source)
    try:
        config = _model_config(told, features, weights, source)
        shared = {match[1]: value for name, value in weights.items() if (match := _SHARED.fullmatch(name))}
        encoder = _encoder(folder, told, shared)
        model = LeRobotClassifier(_with_arch(config, encoder), built_encoder=encoder)
    except GuerdonError as error:
        raise DataError(f"{source}: {str(error).removeprefix(f'{source}: ')}") from error
    load_weights(model, {**model.state_dict(), **_head_weights(weights, list(features), model)}, source)
    _load_normalisation(model, folder, told, list(features), weights, source)
    encoder.freeze()
    model.config = replace(model.config, freeze_encoder=True)
    sizes = {camera_of(name): (shape[1], shape[2], shape[0]) for name, shape in features.items()}
    logger.info("%s: LeRobot's reward classifier; it has no calibrated threshold", source)
    return model.eval(), Contract.of(model, frame_sizes=sizes)


def _image_features(told: Mapping[str, Any], source: str) -> dict[str, tuple[int, int, int]]:
    """Feature -> [C, H, W], in LeRobot's order."""
    given = told.get("input_features")
    if not isinstance(given, Mapping):
        raise DataError(f"{source}: its config.json names no input_features")
    found: dict[str, tuple[int, int, int]] = {}
    for name, feature in given.items():
        if not name.startswith(IMAGE):
            continue
        shape = feature.get("shape") if isinstance(feature, Mapping) else None
        if not isinstance(shape, list | tuple) or len(shape) != 3 or shape[0] != 3:
            raise DataError(f"{source}: {one_line(name)} has the shape {one_line(shape)}; expected [3, H, W]")
        if not all(isinstance(side, int) and 0 < side <= 4096 for side in shape):
            raise DataError(f"{source}: {one_line(name)} has the shape {one_line(shape)}")
        found[name] = (shape[0], shape[1], shape[2])
    if not found or len(set(found.values())) > 1:
        sizes = sorted({f"{shape[1]}x{shape[2]}" for shape in found.values()})
        reason = f"its cameras have different sizes ({', '.join(sizes)})" if found else "it has no camera"
        raise DataError(f"{source}: {reason}")
    if len({camera_of(name) for name in found}) < len(found):
        raise DataError(f"{source}: two of its cameras have one name: {one_line(list(found))}")
    return found


def _model_config(
    told: Mapping[str, Any], features: Mapping[str, Any], weights: Mapping[str, Tensor], source: str
) -> RewardModelConfig:
    classes, cameras = told.get("num_classes", 2), told.get("num_cameras", 2)
    if classes != 2:
        raise DataError(f"{source}: tells {one_line(classes)} classes; a reward model tells success alone")
    if cameras != len(features):
        raise DataError(
            f"{source}: num_cameras is {one_line(cameras)}, but it has {len(features)} image features: "
            "LeRobot cannot run it either"
        )
    plain = {
        "model_type": LeRobotClassifier.model_type,
        "image_keys": [camera_of(name) for name in features],
        "image_size": list(next(iter(features.values()))),
        "hidden_dim": told.get("hidden_dim", 256),
        "latent_dim": told.get("latent_dim", 256),
        "num_spatial_blocks": told.get("image_embedding_pooling_dim", 8),
        "dropout": told.get("dropout_rate", 0.1),
        "normalize": _visual_mode(told, source) != "IDENTITY",
    }
    try:
        return build(RewardModelConfig, plain, "config.json")
    except ConfigError as error:
        raise DataError(f"{source}: its config.json is damaged: {error}") from error


def _with_arch(config: RewardModelConfig, encoder: ImageEncoder) -> RewardModelConfig:
    if isinstance(encoder, ResNet):
        return replace(config, arch=encoder.arch, width=encoder.width)
    assert isinstance(encoder, HFEncoder)
    return replace(config, encoder=encoder.facts.source)


# The encoder


def _encoder(folder: Path, told: Mapping[str, Any], weights: Mapping[str, Tensor]) -> ImageEncoder:
    """The encoder with its weights; its `config.json` lies in `encoder/` where we wrote it."""
    source, beside = display_path(folder), folder / ENCODER_FOLDER
    if not weights:
        raise DataError(f"{source}: {WEIGHTS_FILE} has no weights of an encoder")
    is_cnn = told.get("model_type", "cnn") == "cnn"
    names = _OWN_NAMES if "embedder.0.weight" in weights else _THEIR_NAMES
    if is_cnn and ("embedder.0.weight" in weights or "embedder.embedder.convolution.weight" in weights):
        renamed = _renamed(weights, names)
        resnet = _resnet_for(renamed, source)
        load_weights(resnet, renamed, source)
        return resnet
    name = told.get("model_name")
    if not isinstance(name, str) or not name:
        raise DataError(f"{source}: its config.json names no model_name")
    try:
        place = beside if beside.is_dir() else local_folder(name, (CONFIG_FILE,))
        config = read_object(place / CONFIG_FILE)
    except DataError as error:
        raise DataError(f"{source}: its encoder's config.json is needed: {error}") from error
    return described_encoder(name, config or {}, weights, first_token=not is_cnn)


def _renamed(weights: Mapping[str, Tensor], names: tuple[tuple[str, str], ...]) -> dict[str, Tensor]:
    """Weights of a ResNet under our names; stages and layers of a block are counted from 1 there."""

    def counted(match: re.Match[str], pattern: str) -> str:
        groups = [int(group) for group in match.groups()]
        groups[:1] = [groups[0] + 1] if groups else []
        if len(groups) == 3:
            groups[2] += 1
        return re.sub(r"\\(\d)", lambda found: str(groups[int(found[1]) - 1]), pattern)

    renamed = {}
    for name, value in weights.items():
        for pattern, ours in names:
            if match := re.match(pattern, name):
                name = counted(match, ours) + name[match.end() :]
                break
        renamed[name] = value
    return renamed


def _resnet_for(weights: Mapping[str, Tensor], source: str) -> ResNet:
    """A ResNet as names and shapes of weights tell."""
    blocks = {match[1] + match[2] for name in weights if (match := re.match(r"layer(\d)\.(\d+)\.", name))}
    depths = tuple(sum(block[0] == str(stage) for block in blocks) for stage in (1, 2, 3, 4))
    block = Bottleneck if any(".conv3." in name for name in weights) else BasicBlock
    arch = next((name for name, made_of in ARCHS.items() if made_of == (block, depths)), None)
    stem = weights["conv1.weight"]
    if arch is None or stem.ndim != 4 or not 0 < stem.shape[0] <= 512:
        raise DataError(f"{source}: its encoder is no ResNet of {', '.join(ARCHS)}: blocks {depths}")
    return make_resnet(arch, stem.shape[0], "batch" if has_batch_norm(weights) else "group")


# Head and normalisation


def _head_weights(
    weights: Mapping[str, Tensor], features: list[str], model: LeRobotClassifier
) -> dict[str, Tensor]:
    """The weights after the encoder under our names."""
    keys = [name.replace(".", "_") for name in features]
    found: dict[str, Tensor] = {}
    kernels: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name.startswith("classifier_head."):
            found["classifiers.0." + name.removeprefix("classifier_head.")] = value
        elif (match := _CAMERA.fullmatch(name)) and match[1] in keys:
            if match[2] == "1":
                kernels[match[1]] = value
            else:
                found[f"latents.{keys.index(match[1])}.{int(match[2]) - 2}.{match[3]}"] = value
    if not model.reads_tokens:
        absent = [key for key in keys if key not in kernels]
        if absent:
            raise DataError(f"{WEIGHTS_FILE} has no weights of the camera {absent[0]}")
        found["pooling.kernel"] = torch.cat([kernels[key] for key in keys])
    wanted = [name for name in model.state_dict() if not name.startswith(("encoder.", "pixel_"))]
    absent = [name for name in wanted if name not in found]
    if absent:
        raise DataError(f"{WEIGHTS_FILE} lacks weights of the head: {one_line(absent[0])}")
    return found


def _load_normalisation(
    model: LeRobotClassifier,
    folder: Path,
    told: Mapping[str, Any],
    features: list[str],
    weights: Mapping[str, Tensor],
    source: str,
) -> None:
    """Fill `pixel_mean` and `pixel_std`; identity where LeRobot does not normalise."""
    mode = _visual_mode(told, source)
    stats = _statistics(folder, features, weights, source)
    for row, name in enumerate(features):
        mean, std = _affine(mode, stats.get(name, {}), f"{source}: {name}")
        model.pixel_mean[row], model.pixel_std[row] = mean, std
        if mode != "IDENTITY" and name not in stats:
            logger.warning("%s: has no statistics of %s: its colours are not normalised", source, name)


def _statistics(
    folder: Path, features: list[str], weights: Mapping[str, Tensor], source: str
) -> dict[str, dict[str, Tensor]]:
    """Feature -> statistics [3], of the processor's files or, as older versions had it, of the weights."""
    found: dict[str, dict[str, Tensor]] = {}
    for file in sorted(folder.glob("*preprocessor.json")):
        steps = (read_object(file) or {}).get("steps")
        for step in steps if isinstance(steps, list) else []:
            if not isinstance(step, Mapping) or step.get("registry_name") != "normalizer_processor":
                continue
            state = step.get("state_file")
            if isinstance(state, str) and re.fullmatch(r"[\w.-]+\.safetensors", state):
                for key, value in read_safetensors(folder / state)[0].items():
                    name, _, kind = key.rpartition(".")
                    found.setdefault(name, {}).setdefault(kind, value)
        if found:
            break
    for name in features:
        before = f"normalize_inputs.buffer_{name.replace('.', '_')}."
        for key, value in weights.items():
            if key.startswith(before):
                found.setdefault(name, {}).setdefault(key.removeprefix(before), value)
    checked: dict[str, dict[str, Tensor]] = {}
    for name in set(features) & set(found):
        checked[name] = {kind: value.flatten().float() for kind, value in found[name].items()}
        for kind in ("mean", "std", "min", "max"):
            value = checked[name].get(kind, torch.zeros(3))
            if value.shape != (3,) or not bool(value.isfinite().all()):
                raise DataError(f"{source}: the statistics of {one_line(name)} are damaged ({kind})")
    return checked


def _visual_mode(told: Mapping[str, Any], source: str) -> str:
    """How colours are normalised: `IDENTITY`, or one of `_MODES`."""
    mapping = told.get("normalization_mapping")
    if mapping is None:
        return "IDENTITY"
    if not isinstance(mapping, Mapping):
        raise DataError(f"{source}: has the normalization_mapping {one_line(mapping)}, which is no dict")
    mode = mapping.get("VISUAL", "IDENTITY")
    if not isinstance(mode, str) or mode not in ("IDENTITY", *_MODES):
        raise DataError(f"{source}: colours are normalised by {one_line(mode)}, which is not known")
    return mode


def _affine(mode: str, stats: Mapping[str, Tensor], source: str) -> tuple[Tensor, Tensor]:
    """Mean and deviation [3] that do what a mode of LeRobot does."""
    if mode == "IDENTITY" or not stats:
        return torch.zeros(3), torch.ones(3)
    low, high = (stats.get(kind) for kind in _MODES[mode])
    if low is None or high is None or low.shape != (3,) or high.shape != (3,):
        raise DataError(f"{source}: lacks the statistics {' and '.join(_MODES[mode])}")
    return (low, high) if mode == "MEAN_STD" else ((low + high) / 2, (high - low) / 2)
