"""Saved models: a directory of ours (`model.safetensors`, `contract.json`), or the `.pt` file of RLinf.

In both, weights and contract are in *one* file that is replaced atomically, so an interruption never pairs
new weights with an old contract: the safetensors file carries the contract in its metadata. `contract.json`
is the readable copy, written afterwards.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.errors import ConfigError, DataError, GuerdonError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line, read_small
from guerdon.data.files.checksums import load_torch, tensors_checksum
from guerdon.data.files.hub import local_folder
from guerdon.rewards.image.base import RewardModel
from guerdon.rewards.image.contract import Contract
from guerdon.rewards.image.encoders import ARCHS, BasicBlock, Bottleneck, ResNet
from guerdon.rewards.image.hf_encoder import EncoderFacts, HFEncoder, build_hf_encoder
from guerdon.rewards.image.hf_files import read_object
from guerdon.rewards.image.lerobot_files import is_lerobot, read_lerobot
from guerdon.rewards.image.models import build_model
from guerdon.rewards.image.weights import (
    CHECKSUM,
    check_weights,
    find_weights,
    has_batch_norm,
    load_weights,
    read_safetensors,
    strip_prefixes,
)

logger = logging.getLogger("guerdon")

WEIGHTS_FILE = "model.safetensors"
CONTRACT_FILE = "contract.json"
CONFIG_FILE, CARD_FILE = "config.json", "README.md"
KIND = "guerdon_reward_model"
"""`model_type` in the `config.json` of shared models (`shared_model.py`)."""
HUB_PREFIX = "hf:"
"""Before `OWNER/NAME` in the place of a path."""
TORCH_SUFFIXES = (".pt", ".pth")
_IN_DIRECTORY = (
    WEIGHTS_FILE,
    "checkpoint.pt",
    "best_model",
    "checkpoints/best_model",
    "pretrained_model",  # LeRobot's
    "checkpoints/last/pretrained_model",
    "reward_model_best.pt",
    "best_model.pt",
    "model_state_dict/full_weights.pt",  # RLinf's runner
    "actor/model_state_dict/full_weights.pt",
    "best_model/actor/model_state_dict/full_weights.pt",
    "checkpoints/best_model/actor/model_state_dict/full_weights.pt",
)
_KERNEL = "encoder.pooling_layer.kernel"
_BLOCK = re.compile(r"backbone\.layer([1-4])\.(\d+)\.")
_FOREIGN_PREFIXES = ("module.", "_orig_mod.", "model.")
_FOREIGN_NAMES = (  # what RLinf calls the parts that are the same; one camera
    (r"encoders\.[^.]+\.resnet_backbone\.", "encoder.backbone."),
    (r"encoders\.[^.]+\.pooling_layer\.", "encoder.pooling_layer."),
    (r"backbone\.fc\.(?=\d)", "classifiers.0."),
    (r"classifier\.", "classifiers.0."),
)


def save_checkpoint(
    path: Path | str,
    model: RewardModel | Mapping[str, Tensor],
    contract: Contract,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Save a model with its contract; an existing checkpoint of that name is replaced.

    Args:
        path: `.pt` or `.pth` for RLinf's file, any other name for a directory of ours.
        model: its weights are saved; or the weights themselves, if the model is distributed over processes.
        contract: saved with them.
        extra: what else a training script needs. In a `.pt` file these are further entries such as `epoch`,
            `optimizer_state_dict`, `train_loss` and `train_acc`; in a directory they must fit into JSON.
    """
    path = Path(path)
    named = model if isinstance(model, Mapping) else model.state_dict()
    weights = {name: value.detach().cpu().contiguous() for name, value in named.items()}
    if path.suffix in TORCH_SUFFIXES:
        content = {**(extra or {}), "model_state_dict": weights, "contract": _dump(contract.to_dict())}
        make_directory(path.parent)
        write_atomic(path, lambda file: torch.save(content, file))
        return path
    make_directory(path)
    text = _dump({**contract.to_dict(), "extra": dict(extra or {})})
    metadata = {"contract": text, CHECKSUM: tensors_checksum(weights, text)}
    blob = safetensors.torch.save(weights, metadata=metadata)
    write_atomic(path / WEIGHTS_FILE, lambda file: file.write(blob))
    write_atomic(path / CONTRACT_FILE, lambda file: file.write(text.encode() + b"\n"))
    return path


def load_checkpoint(
    path: Path | str, config: RewardModelConfig | None = None, given: Collection[str] = ()
) -> tuple[RewardModel, Contract, dict[str, Any]]:
    """Load a model in eval mode.

    Args:
        path: a checkpoint file, a directory that holds one, or `hf:OWNER/NAME` for one of the hub.
        config: gives the settings that are not part of a trained model (`precision`, ...). A file without a
            contract, written by another program, is built after it.
        given: the keys of `config` that the user set; a contradiction to the contract is a `ConfigError`.

    Returns:
        The model, its contract, and what was saved as `extra`.
    """
    file = find_checkpoint(Path(path))
    weights, text, extra = _read(file)
    source = display_path(file)
    if text is None and file.name == WEIGHTS_FILE and is_lerobot(file.parent):
        model, contract = read_lerobot(file.parent)
        if config is not None:
            contract.check_config(config, given)
            model.config = contract.model_config(config)
        return model, contract, {}
    if text is None:
        _refuse_foreign(file)
        if config is None:
            raise DataError(f"{source}: has no contract; to load it, give the settings of its model")
        weights = _rename_foreign(weights)
        contract = _foreign_contract(config, weights, source)
    else:
        fields, more = _parse(text, source)
        contract, extra = Contract.from_dict(fields, source), {**extra, **more}
        _check_shared(file, contract)
        if config is not None:
            contract.check_config(config, given)
    return _rebuild(contract, config, weights, source), contract, extra


def find_checkpoint(path: Path) -> Path:
    """The file with the weights that `path` stands for; `hf:OWNER/NAME` is fetched from the hub."""
    if is_hub_name(path):
        path = local_folder(str(path).removeprefix(HUB_PREFIX))
    if path.is_file():
        return path.parent / WEIGHTS_FILE if path.name == CONTRACT_FILE else path
    if path.is_dir():
        for name in _IN_DIRECTORY:
            inner = path / name
            if inner.is_file():
                return inner
            if (inner / WEIGHTS_FILE).is_file():
                return inner / WEIGHTS_FILE
        known = ", ".join(sorted({Path(name).name for name in _IN_DIRECTORY}))
        raise DataError(f"{display_path(path)}: holds no checkpoint; looked for {known}")
    # RLinf's workflow saves the first name and loads the second.
    saved = path.with_name("reward_model_best.pt")
    if path.name == "best_model.pt" and saved.is_file():
        logger.info("%s does not exist; %s beside it is used", display_path(path), saved.name)
        return saved
    raise DataError(f"{display_path(path)}: there is no such checkpoint")


def is_hub_name(path: Path | str) -> bool:
    """Whether `path` names a model of the hub."""
    return str(path).startswith(HUB_PREFIX)


def check_own(path: Path | str, what: str) -> None:
    """Raise a `ConfigError` if `what` would be written into the hub's cache or into a folder of LeRobot."""
    kind = "a copy of the hub's" if is_hub_name(path) else "a folder of LeRobot"
    if is_hub_name(path) or is_lerobot(find_checkpoint(Path(path)).parent):
        raise ConfigError(
            f"{path}: {what} is not written into {kind}: export the model to a folder first "
            f"(guerdon reward export --checkpoint {path} --out FOLDER)"
        )


def _check_shared(file: Path, contract: Contract) -> None:
    """Compare the `config.json` of a shared model with the contract in its weights."""
    if file.name != WEIGHTS_FILE or (told := read_object(file.parent / CONFIG_FILE)) is None:
        return
    if told.get("model_type") != KIND or told.get("model") != contract.to_dict()["model"]:
        raise DataError(
            f"{display_path(file.parent / CONFIG_FILE)}: does not describe the model in {WEIGHTS_FILE}: the "
            "files are of two models, or one was changed"
        )


def _refuse_foreign(file: Path) -> None:
    """Raise a `DataError` if the `config.json` beside weights says that they are of another kind of model."""
    told = read_object(file.parent / CONFIG_FILE) if file.name == WEIGHTS_FILE else None
    if told is None:
        return
    kind = told.get("model_type", told.get("type", "unknown"))
    if kind == KIND:
        raise DataError(f"{display_path(file)}: is damaged: it has lost the contract of the model")
    raise DataError(
        f"{display_path(file.parent)}: holds a model of the kind {one_line(kind)}, no reward model of "
        "Guerdon or LeRobot (a vision encoder: reward.model.encoder=hf:PATH)"
    )


def _read(file: Path) -> tuple[dict[str, Tensor], str | None, dict[str, Any]]:
    """Weights, contract text (None if there is none) and further entries of a file."""
    if file.suffix == ".safetensors":
        weights, metadata = read_safetensors(file)
        text = metadata.get("contract")
        if text is not None and CHECKSUM not in metadata:
            logger.info("%s carries no checksum: damage in it would go unnoticed", display_path(file))
        return weights, _compared(file.parent / CONTRACT_FILE, text), {}
    content = load_torch(file)
    weights = find_weights(content, display_path(file))
    text = content.get("contract")
    known = ("model_state_dict", "state_dict", "model", "contract")
    is_wrapped = any(isinstance(content.get(key), Mapping) for key in known)
    extra = {str(key): value for key, value in content.items() if key not in known} if is_wrapped else {}
    return weights, text if isinstance(text, str) else None, extra


def _compared(copy: Path, text: str | None) -> str | None:
    """The contract inside the weights' file, or the one in `contract.json` if there is none."""
    try:
        copied: str | None = read_small(copy).decode().strip()
    except FileNotFoundError:
        copied = None
    except ValueError as error:
        raise DataError(f"{display_path(copy)}: cannot be read: {error}") from error
    if text is not None and copied is not None and copied != text:
        logger.warning(
            "%s differs from the contract inside %s, which is used", display_path(copy), WEIGHTS_FILE
        )
    return copied if text is None else text


def _parse(text: str, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        fields = json.loads(text)
        extra = fields.pop("extra", {})
        if not isinstance(extra, dict):
            raise TypeError(f"its extra is a {type(extra).__name__}")
        return fields, extra
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise DataError(f"{source}: the contract is damaged: {error}") from error


def _dump(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, default=_plain_number)


def _plain_number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not fit into JSON")


def _rename_foreign(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of another program under our names, without the ImageNet classifier that some keep."""
    renamed = {}
    for name, value in strip_prefixes(weights, _FOREIGN_PREFIXES).items():
        for pattern, ours in _FOREIGN_NAMES:
            name = re.sub(f"^{pattern}", ours, name)
        if not re.match(r"(encoder\.)?backbone\.fc\.", name):
            renamed[name] = value
    return renamed


def _foreign_contract(config: RewardModelConfig, weights: Mapping[str, Tensor], source: str) -> Contract:
    """What can be said of weights without a contract: the config, corrected by their shapes."""
    logger.info("%s: has no contract: no threshold, no calibration, and its inputs cannot be checked", source)
    config = _with_encoder_of(weights, config, source)
    kernel = weights.get(_KERNEL)
    if config.model_type == "binary_classifier" and kernel is not None and kernel.ndim == 4:
        averaged, one_cell = kernel.shape[1:3] == (1, 1), max(config.image_size[1:]) <= 32
        if not one_cell and config.use_pretrain == averaged:
            logger.warning(
                "%s: use_pretrain is %s in the config, but the pooling kernel %s says %s, which is used",
                *(source, config.use_pretrain, list(kernel.shape), not averaged),
            )
            config = replace(config, use_pretrain=not averaged)
    config = replace(config, pretrained_encoder_path=None, freeze_encoder=config.freeze_encoder is True)
    with torch.device("meta"):
        contract = Contract.of(build_model(replace(config, freeze_encoder=False)))
    model = {**contract.model, "freeze_encoder": config.freeze_encoder}
    return replace(contract, model=model, norm="batch" if has_batch_norm(weights) else "group")


def _with_encoder_of(
    weights: Mapping[str, Tensor], config: RewardModelConfig, source: str
) -> RewardModelConfig:
    """The config with the encoder that names and shapes of the weights tell, unless the config names one."""
    default = RewardModelConfig()
    if (config.arch, config.width) != (default.arch, default.width):
        return config
    stem = next((value for name, value in weights.items() if name.endswith("backbone.conv1.weight")), None)
    blocks = {match[1] + match[2] for name in weights if (match := _BLOCK.search(name))}
    depths = tuple(sum(block.startswith(str(stage)) for block in blocks) for stage in (1, 2, 3, 4))
    block = Bottleneck if any(".conv3." in name for name in weights) else BasicBlock
    arch = next((name for name, made_of in ARCHS.items() if made_of == (block, depths)), None)
    if stem is None or stem.ndim != 4 or arch is None:
        return config
    logger.info("%s: its weights are those of a %s of width %d", source, arch, len(stem))
    return replace(config, arch=arch, width=len(stem))


def _rebuild(
    contract: Contract, base: RewardModelConfig | None, weights: Mapping[str, Tensor], source: str
) -> RewardModel:
    config = contract.model_config(base)
    if config.num_members > len(weights):
        raise DataError(f"{source}: has {len(weights)} tensors for {config.num_members} members")
    try:
        with torch.device("meta"):  # no memory before the shapes are known to fit, and no random numbers
            model = _shell(contract, config, source)
    except GuerdonError:
        raise
    except Exception as error:  # sizes that no tensor can have fail in several ways
        reason = one_line(error)
        raise DataError(f"{source}: the contract describes an impossible model: {reason}") from error
    if contract.encoder is not None:  # it has more than its weights, which is computed when it is made
        check_weights(model.state_dict(), weights, source)
        with torch.random.fork_rng(devices=[]):
            model = _shell(contract, config, source)
    model.config = config
    encoder = model.image_encoder
    if isinstance(encoder, ResNet):
        encoder.use_layout(contract.norm, contract.same_padding)
    load_weights(model, weights, source)
    encoder.freeze(config.freeze_encoder is True)
    if isinstance(encoder, HFEncoder) and encoder.frozen:
        encoder.check_hash(source)
    return model.eval()


def _shell(contract: Contract, config: RewardModelConfig, source: str) -> RewardModel:
    """The model that a contract describes, with weights of no meaning."""
    encoder = None
    if contract.encoder is not None:
        encoder = build_hf_encoder(EncoderFacts.from_dict(contract.encoder), config.num_frames, source)
    return build_model(replace(config, freeze_encoder=False), encoder)
