"""`reward.model.encoder: hf:PATH`: vision encoders in the Hugging Face layout (extra `hf`).

ViT, DINOv2, DINOv3 (ViT and ConvNeXt), SigLIP's vision tower, ConvNeXt, ResNet and others of `transformers`
that give a feature map, or one token for each patch after those that belong to no patch. No code of a
repository is run, and weights are read from safetensors files alone.
"""

from __future__ import annotations

import inspect
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from guerdon.config.build import build, to_plain
from guerdon.core.errors import ConfigError, DataError, GuerdonError
from guerdon.data.files.bounds import one_line
from guerdon.data.files.checksums import tensors_checksum
from guerdon.data.files.hub import require
from guerdon.rewards.image.encoders import ImageEncoder
from guerdon.rewards.image.hf_files import IMAGENET_MEAN, IMAGENET_STD, PREFIX, EncoderFiles, open_encoder

logger = logging.getLogger("guerdon")

MAX_LAYERS = 512
_NO_DROPOUT = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout", "hidden_dropout"),
    *("dropout", "drop_path_rate"),
)
"""Of an encoder: random numbers of a fit belong to a frame, and these would be drawn for a pass."""
_POOLERS = ("pooler", "head")
"""Parts after the features, which are not used; many files lack their weights."""


@dataclass(frozen=True, kw_only=True)
class EncoderFacts:
    """What a contract says of an encoder: enough to build it again without its folder."""

    source: str
    """As the config named it, `hf:...`."""
    weights_hash: str
    """Of the weights that it began with; a frozen encoder still has them."""
    config: dict[str, Any] = field(repr=False)
    """The configuration of its class in `transformers`."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Of the colours from 0 to 1 that it expects."""
    std: tuple[float, float, float] = IMAGENET_STD
    features: Literal["map", "first"] = "map"
    """The features of all patches, or the first token alone: that of the class, where there is one."""

    @classmethod
    def from_dict(cls, data: Any) -> EncoderFacts:
        """Read what `to_dict` wrote; a `ConfigError` if it is something else."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"encoder must be a mapping, not {type(data).__name__}")
        facts = build(cls, data, "encoder")
        if min(facts.std) <= 0:
            raise ConfigError(f"encoder.std must be positive, not {list(facts.std)}")
        return facts

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        plain: dict[str, Any] = to_plain(self)
        return plain


class HFEncoder(ImageEncoder):
    """An encoder of `transformers`: normalised images to feature maps.

    Args:
        network: the model of `transformers`, without its pooling.
        facts: what the contract says of it.
        num_frames: frames of an image, whose channels are stacked; each is encoded on its own, and their
            features are stacked.
    """

    def __init__(self, network: nn.Module, facts: EncoderFacts, num_frames: int = 1) -> None:
        super().__init__()
        self.network, self.facts, self.num_frames = network, facts, num_frames
        self.mean, self.std = facts.mean, facts.std
        config: Any = network.config
        sizes = getattr(config, "hidden_sizes", None)
        channels = sizes[-1] if sizes else getattr(config, "hidden_size", None)
        if not isinstance(channels, int):
            raise DataError(f"{facts.source}: a {config.model_type} does not tell the size of its features")
        self._channels, self.num_features = channels, num_frames * channels
        patch = _stride(config) if _flattens_maps(config) else getattr(config, "patch_size", None)
        self._patch = tuple(patch) if isinstance(patch, list | tuple) else (patch, patch)
        takes = inspect.signature(network.forward).parameters
        self._options = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in takes else {}
        self._unused: tuple[str, ...] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3 * num_frames, H, W] -> [N, num_features, h, w]."""
        count, _, height, width = x.shape
        frames = x.reshape(count * self.num_frames, 3, height, width)
        hidden: Tensor = self.network(pixel_values=frames, **self._options).last_hidden_state
        if self.facts.features == "first":  # of tokens [n, tokens, C]
            hidden = hidden[:, 0, :, None, None]
        elif hidden.ndim == 3:  # those of patches come last, row by row
            rows, columns = self._grid(height, width)
            hidden = hidden[:, -rows * columns :].transpose(1, 2)
            hidden = hidden.reshape(len(frames), self._channels, rows, columns)
        return hidden.reshape(count, self.num_features, *hidden.shape[2:])

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        tall, wide = self._patch
        if not isinstance(tall, int) or not isinstance(wide, int):
            raise DataError(f"{self.facts.source}: its tokens are no patches of an image")
        return height // tall, width // wide

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """(h, w) of the feature map for images of that size, found by trying."""
        device = next(self.network.parameters()).device
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                maps = self(torch.zeros(1, 3 * self.num_frames, height, width, device=device))
        except GuerdonError:
            raise
        except Exception as error:  # images below the encoder's smallest size fail in many ways
            raise ConfigError(
                f"{self.facts.source} does not take images of {height}x{width}: {one_line(error)}"
            ) from error
        finally:
            self.train(training)
        if maps.ndim != 4 or min(maps.shape[2:]) < 1:
            raise ConfigError(f"{self.facts.source}: images of {height}x{width} are too small for it")
        return maps.shape[2], maps.shape[3]

    def freeze(self, frozen: bool = True) -> None:
        """As `ImageEncoder.freeze`; weights that no feature depends on are never trained."""
        super().freeze(frozen)
        if not frozen:
            for name, parameter in self.network.named_parameters():
                parameter.requires_grad_(name not in self._weights_without_effect())

    def _weights_without_effect(self) -> tuple[str, ...]:
        """Names of weights that get no gradient, such as mask tokens; DDP waits for those of all others."""
        if self._unused is None:
            side = max([64, *(4 * size for size in self._patch if isinstance(size, int))])
            weights = dict(self.network.named_parameters())
            with torch.enable_grad():
                image = torch.zeros(
                    1, 3 * self.num_frames, side, side, device=next(iter(weights.values())).device
                )
                found = torch.autograd.grad(self(image).sum(), list(weights.values()), allow_unused=True)
            self._unused = tuple(name for name, grad in zip(weights, found, strict=True) if grad is None)
        return self._unused

    def check_hash(self, source: str) -> None:
        """Raise a `DataError` unless the weights are those that the contract names."""
        found = encoder_hash(self.network)
        if found != self.facts.weights_hash:
            raise DataError(
                f"{source}: the weights of its frozen encoder {self.facts.source} are not those that its "
                f"contract names (hash {found[:12]}, not {self.facts.weights_hash[:12]})"
            )


def encoder_hash(network: nn.Module) -> str:
    """Of names, shapes and numbers of all weights."""
    return tensors_checksum(network.state_dict(), "")


def load_hf_encoder(name: str, num_frames: int = 1, *, first_token: bool = False) -> HFEncoder:
    """The encoder that `hf:PATH` names, with its weights, not frozen.

    Args:
        name: `hf:FOLDER`, `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION`.
        num_frames: see `HFEncoder`.
        first_token: whether encoders of tokens give the first alone, as LeRobot's classifier reads them.

    Raises:
        DataError: there is no such encoder, or it is none that can be used.
    """
    transformers = require("transformers", f"the encoder {name}")
    files = open_encoder(name.removeprefix(PREFIX))
    config = _config_of(transformers, files.config, files.source)
    network = _without_poolers(_loaded(transformers, files.folder, config, files.source))
    facts = EncoderFacts(
        source=name,
        weights_hash=encoder_hash(network),
        config=_plain_config(config),
        mean=files.mean,
        std=files.std,
        features="first" if first_token and not gives_maps(config) else "map",
    )
    logger.info("encoder %s (%s, weights %s)", files.source, type(network).__name__, facts.weights_hash[:12])
    return HFEncoder(network, facts, num_frames)


def _loaded(transformers: Any, folder: Path, config: Any, source: str) -> nn.Module:
    """The network in a folder; `transformers` knows what its weights were called in older versions."""
    with _quiet(transformers):
        try:
            loaded: Any = transformers.AutoModel.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # hostile bytes can fail in any way
            raise DataError(f"{source}: cannot be loaded: {one_line(error)}") from error
    network, found = loaded
    missing = sorted(key for key in found["missing_keys"] if not key.startswith(_POOLERS))
    wrong = [*missing, *(key[0] for key in found["mismatched_keys"])]
    if wrong:
        raise DataError(
            f"{source}: its files lack weights of a {type(network).__name__}, or have them in another "
            f"shape: {one_line(', '.join(wrong))}"
        )
    assert isinstance(network, nn.Module)
    return network


def build_hf_encoder(facts: EncoderFacts, num_frames: int, source: str) -> HFEncoder:
    """An encoder as a contract describes it, with random weights, on torch's present device."""
    transformers = require("transformers", f"{source}, whose encoder is {facts.source},")
    config = _config_of(transformers, facts.config, source)
    with _quiet(transformers), torch.random.fork_rng(devices=[]):
        try:
            network = transformers.AutoModel.from_config(config, dtype=torch.float32)
        except Exception as error:  # sizes that no tensor can have fail in several ways
            raise DataError(f"{source}: describes an impossible encoder: {one_line(error)}") from error
    return HFEncoder(_without_poolers(network), facts, num_frames)


def described_encoder(
    name: str, described: Mapping[str, Any], weights: Mapping[str, Tensor], *, first_token: bool
) -> HFEncoder:
    """The encoder of another program's file: described by its `config.json`, with weights from that file.

    Args:
        name: what the program calls it.
        described: the contents of `config.json`.
        weights: may hold more than the encoder's, such as those of a pooler.
        first_token: see `load_hf_encoder`.
    """
    transformers = require("transformers", f"the encoder {name}")
    config = _config_of(transformers, described, name)
    features: Literal["map", "first"] = "first" if first_token and not gives_maps(config) else "map"
    facts = EncoderFacts(
        source=PREFIX + name, weights_hash="", config=_plain_config(config), features=features
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(facts.config))
        save_file(dict(weights), Path(folder) / "model.safetensors", {"format": "pt"})
        network = _without_poolers(_loaded(transformers, Path(folder), config, name))
    return HFEncoder(network, replace(facts, weights_hash=encoder_hash(network)))


def same_encoder(name: str, facts: EncoderFacts) -> bool:
    """Whether `hf:PATH` has the weights that a contract names; the hub is asked only for another name."""
    if name == facts.source and not EncoderFiles.is_local(name.removeprefix(PREFIX)):
        return True
    return load_hf_encoder(name).facts.weights_hash == facts.weights_hash


def gives_maps(config: Any) -> bool:
    """Whether an encoder of this configuration gives feature maps, and no tokens."""
    return bool(getattr(config, "hidden_sizes", None)) and not _flattens_maps(config)


def _flattens_maps(config: Any) -> bool:
    """Whether an encoder gives the pixels of its last feature map as tokens, after a pooled one."""
    return bool(config.model_type == "dinov3_convnext")


def _stride(config: Any) -> int:
    """Pixels of an image for one of the feature map of a ConvNeXt, along each side."""
    return 2 << len(config.hidden_sizes)  # 4 of the first layer, 2 of each stage after the first


def _config_of(transformers: Any, plain: Mapping[str, Any], source: str) -> Any:
    """The configuration object of a known class; nothing in it can name code or kernels to fetch."""
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    kind = plain.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise DataError(
            f"{source}: its model_type {one_line(kind)} is none of transformers' own, and code of a "
            "repository is never run"
        )
    clean = {
        key: value
        for key, value in plain.items()
        if not key.startswith("_") and key not in ("auto_map", "attn_implementation", "quantization_config")
    }
    try:
        config = transformers.AutoConfig.for_model(**clean)
        config = getattr(config, "vision_config", config)
        config.dtype = None
        for key in _NO_DROPOUT:
            if isinstance(getattr(config, key, None), float | int):
                setattr(config, key, 0.0)
        layers = getattr(config, "num_hidden_layers", None) or sum(getattr(config, "depths", None) or [])
    except Exception as error:  # hostile values can fail in any way
        raise DataError(f"{source}: its config.json is damaged: {one_line(error)}") from error
    if not 0 < layers <= MAX_LAYERS:
        raise DataError(f"{source}: its config.json speaks of {one_line(layers)} layers")
    if getattr(config, "num_channels", 3) != 3:
        raise DataError(f"{source}: takes images of {one_line(config.num_channels)} channels, not of 3")
    return config


def _plain_config(config: Any) -> dict[str, Any]:
    """What `_config_of` needs to make the same configuration."""
    left_out = ("transformers_version", "architectures", "dtype", "id2label", "label2id")
    plain: dict[str, Any] = {
        key: value
        for key, value in config.to_diff_dict().items()
        if key not in left_out and not key.startswith("_")
    }
    return {**cast("dict[str, Any]", to_plain(plain)), "model_type": config.model_type}


def _without_poolers(network: Any) -> nn.Module:
    """The network without what comes after its features, which files may lack and nobody asks for."""
    if getattr(network, "use_head", False):
        network.use_head = False
        del network.head
    pooler = getattr(network, "pooler", None)
    if isinstance(pooler, nn.Module) and any(True for _ in pooler.parameters()):
        network.pooler = None
    assert isinstance(network, nn.Module)
    return network.eval()


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the progress bars and load reports of `transformers`: what matters of them is an error here."""
    logs = transformers.utils.logging
    verbosity, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()
