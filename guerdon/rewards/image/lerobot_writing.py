"""Writes a reward model as a folder of LeRobot's reward classifier, where its network is one.

LeRobot makes its encoder from `model_name` before it loads the weights, so the encoder goes into a folder
`encoder/` beside them. What LeRobot cannot express is refused with the reason.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from guerdon.core import strict_json
from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.errors import ConfigError
from guerdon.core.types import display_path
from guerdon.rewards.image.base import RewardModel
from guerdon.rewards.image.contract import Contract
from guerdon.rewards.image.encoders import ARCHS, Bottleneck, ResNet
from guerdon.rewards.image.hf_encoder import HFEncoder
from guerdon.rewards.image.lerobot_files import (
    CONFIG_FILE,
    ENCODER_FOLDER,
    KIND,
    WEIGHTS_FILE,
    is_lerobot,
)
from guerdon.rewards.image.lerobot_model import STD_EPS, LeRobotClassifier
from guerdon.rewards.relabel import Calibration

OWN_ENCODER = "lerobot/resnet10"
"""LeRobot's ResNet10 with GroupNorm, of width 64: its code is in that repository alone."""
_STATE = "classifier_preprocessor_step_{}_normalizer_processor"


def write_lerobot(folder: Path | str, model: RewardModel, contract: Contract) -> float:
    """Write the folder; returns the `success_threshold` at which LeRobot decides as Guerdon does.

    A temperature goes into the last layer, so that probabilities are the same; an isotonic calibration does
    not fit into the network, and only decisions are.

    Raises:
        ConfigError: the model is none that LeRobot's network can be.
    """
    folder = Path(folder).expanduser()
    classifier = _fitting(model, contract)
    if (folder / CONFIG_FILE).exists() and not is_lerobot(folder):
        raise ConfigError(f"{display_path(folder)}: holds another model; nothing was written")
    names = [_feature(camera) for camera in classifier.config.image_keys]
    make_directory(folder)
    model_name, encoder = _encoder(classifier, folder)
    head, threshold = _head(classifier, names, contract)
    weights = {f"encoder.{name}": value for name, value in encoder.items()} | head
    _write_weights(folder / WEIGHTS_FILE, weights)
    _write_processors(folder, classifier, names)
    _write_json(folder / CONFIG_FILE, _config(classifier, names, model_name))
    return threshold


def _fitting(model: RewardModel, contract: Contract) -> LeRobotClassifier:
    """The model, if LeRobot's classifier can be it."""
    reason = None
    if not isinstance(model, LeRobotClassifier):
        reason = (
            f"a {model.model_type} has other layers after its encoder: fit one with "
            "reward.model.model_type=lerobot_classifier"
        )
    elif model.num_members > 1:
        reason = f"it has {model.num_members} heads, and LeRobot's classifier has one"
    elif model.config.region is not None:
        reason = "it crops frames (reward.model.crop), which LeRobot's classifier does not"
    elif contract.only_at_rest:
        reason = (
            "it scores robots at rest alone (reward.model.only_at_rest), which LeRobot's does not know of"
        )
    else:
        encoder = model.image_encoder
        if isinstance(encoder, ResNet):
            if encoder.same_padding:
                reason = "its ResNet pads as Flax does, and LeRobot's pads as torch does"
            elif encoder.norm == "group" and (encoder.arch, encoder.width) != ("resnet10", 64):
                reason = f"the one ResNet with GroupNorm that LeRobot has is {OWN_ENCODER}, of width 64"
        elif isinstance(encoder, HFEncoder) and encoder.facts.config["model_type"].endswith("vision_model"):
            reason = "LeRobot takes such a vision tower out of a whole model of images and text alone"
    if reason is not None:
        raise ConfigError(f"this model cannot be one of LeRobot: {reason}")
    assert isinstance(model, LeRobotClassifier)
    return model


def _feature(camera: str) -> str:
    return camera if camera.startswith("observation.image") else f"observation.images.{camera}"


def _encoder(model: LeRobotClassifier, folder: Path) -> tuple[str, dict[str, Tensor]]:
    """`model_name`, and the encoder's weights under LeRobot's names; writes the folder `encoder/`."""
    encoder = model.image_encoder
    place = folder / ENCODER_FOLDER
    if isinstance(encoder, HFEncoder):
        network: Any = encoder.network
        network.save_pretrained(place)
        return str(place.resolve()), safetensors.torch.load_file(place / WEIGHTS_FILE)
    assert isinstance(encoder, ResNet)
    weights = {_their_name(name, encoder.norm == "group"): value for name, value in _plain(encoder).items()}
    if encoder.norm == "group":
        return OWN_ENCODER, weights
    block, depths = ARCHS[encoder.arch]
    sizes = [encoder.width * block.expansion * 2**stage for stage in range(4)]
    config = {
        "model_type": "resnet",
        "architectures": ["ResNetModel"],
        "num_channels": 3,
        "embedding_size": encoder.width,
        "hidden_sizes": sizes,
        "depths": list(depths),
        "layer_type": "bottleneck" if block is Bottleneck else "basic",
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
    }
    make_directory(place)
    _write_weights(place / WEIGHTS_FILE, weights)
    _write_json(place / CONFIG_FILE, config)
    return str(place.resolve()), weights


def _plain(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in module.state_dict().items()}


def _their_name(name: str, own: bool) -> str:
    """Of a ResNet's weight: in LeRobot's ResNet10 (`own`), or in the ResNets of transformers."""
    if match := re.fullmatch(r"(conv|bn)1\.(.+)", name):
        if own:
            return f"embedder.{int(match[1] == 'bn')}.{match[2]}"
        return f"embedder.embedder.{'convolution' if match[1] == 'conv' else 'normalization'}.{match[2]}"
    match = re.fullmatch(r"layer(\d)\.(\d+)\.(conv|bn|downsample\.)(\d)\.(.+)", name)
    assert match is not None
    stage, layer, kind, number, leaf = int(match[1]) - 1, match[2], match[3], int(match[4]), match[5]
    if own:
        part = {"conv": f"conv{number}", "bn": f"norm{number}", "downsample.": f"shortcut.{number}"}[kind]
        return f"encoder.stages.{stage}.{part}.{leaf}"
    is_conv = kind == "conv" or (kind == "downsample." and number == 0)
    part = "shortcut" if kind == "downsample." else f"layer.{number - 1}"
    leaf = f"{'convolution' if is_conv else 'normalization'}.{leaf}"
    return f"encoder.stages.{stage}.layers.{layer}.{part}.{leaf}"


def _head(model: LeRobotClassifier, names: list[str], contract: Contract) -> tuple[dict[str, Tensor], float]:
    """The weights after the encoder, with the temperature in the last layer, and the threshold for them."""
    weights: dict[str, Tensor] = {}
    keys = [name.replace(".", "_") for name in names]
    if not model.reads_tokens:
        kernels = model.pooling.kernel.detach().cpu().chunk(len(keys))
        for key, kernel, latent in zip(keys, kernels, model.latents, strict=True):
            weights[f"encoders.{key}.1.kernel"] = kernel.contiguous()
            for name, value in _plain(latent).items():
                number, leaf = name.split(".", 1)
                weights[f"encoders.{key}.{int(number) + 2}.{leaf}"] = value
    for name, value in _plain(model.classifiers[0]).items():
        weights[f"classifier_head.{name}"] = value
    calibration, rest = contract.calibration_map, contract.calibration_map
    if calibration.kind == "temperature":
        for leaf in ("weight", "bias"):
            weights[f"classifier_head.4.{leaf}"] = (
                weights[f"classifier_head.4.{leaf}"].double() / calibration.temperature
            ).float()
        rest = Calibration()
    threshold = 0.5 if contract.threshold is None else contract.threshold
    return weights, float(Calibration().apply([rest.logit_at(threshold)])[0])


def _write_processors(folder: Path, model: LeRobotClassifier, names: list[str]) -> None:
    """LeRobot's normalisation, with the statistics that the model was fitted with."""
    images, device = _images(model, names), {"device": "cpu", "float_dtype": None}
    steps: list[dict[str, Any]] = []
    for number, features in enumerate((images, _reward())):
        settings = {"eps": STD_EPS, "features": features, "norm_map": {"VISUAL": _mode(model)}}
        step = {"registry_name": "normalizer_processor", "config": settings}
        if model.config.normalize:
            stats = {
                f"{name}.{kind}": values[row].detach().cpu().reshape(3, 1, 1).contiguous()
                for row, name in enumerate(names)
                for kind, values in (("mean", model.pixel_mean), ("std", model.pixel_std))
            }
            step["state_file"] = f"{_STATE.format(number)}.safetensors"
            _write_weights(folder / str(step["state_file"]), stats)
        steps.append(step)
    steps.append({"registry_name": "device_processor", "config": device})
    _write_json(folder / "classifier_preprocessor.json", {"name": "classifier_preprocessor", "steps": steps})


def _mode(model: LeRobotClassifier) -> str:
    return "MEAN_STD" if model.config.normalize else "IDENTITY"


def _images(model: LeRobotClassifier, names: list[str]) -> dict[str, Any]:
    return {name: {"type": "VISUAL", "shape": list(model.config.image_size)} for name in names}


def _reward() -> dict[str, Any]:
    return {"next.reward": {"type": "REWARD", "shape": [1]}}


def _config(model: LeRobotClassifier, names: list[str], model_name: str) -> dict[str, Any]:
    return {
        "type": KIND,
        "input_features": _images(model, names),
        "output_features": _reward(),
        "device": "cpu",
        "num_classes": 2,
        "hidden_dim": model.config.hidden_dim,
        "latent_dim": model.config.latent_dim,
        "image_embedding_pooling_dim": model.config.num_spatial_blocks,
        "dropout_rate": model.config.dropout,
        "model_name": model_name,
        "model_type": "transformer" if model.reads_tokens else "cnn",
        "num_cameras": len(names),
        "normalization_mapping": {"VISUAL": _mode(model)},
    }


def _write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    blob = safetensors.torch.save(weights, metadata={"format": "pt"})
    write_atomic(path, lambda file: file.write(blob))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, strict_json.dumps(value, indent=2) + "\n")
