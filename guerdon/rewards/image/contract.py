"""What a checkpoint promises and expects: DESIGN.md, decision 4.

The contract travels with the weights. A config or a batch of frames that does not fit it is refused with both
sides named; nothing is guessed in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import guerdon
from guerdon.config.build import build, to_plain
from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.frame_check import FrameCheck
from guerdon.rewards.image.base import RewardModel
from guerdon.rewards.image.encoders import Norm, ResNet
from guerdon.rewards.image.hf_encoder import EncoderFacts, HFEncoder, same_encoder
from guerdon.rewards.relabel import Calibration

logger = logging.getLogger("guerdon")

MODEL_KEYS = (
    "model_type",
    "arch",
    "width",
    "encoder",
    "image_keys",
    "image_size",
    "num_frames",
    "only_at_rest",
    "crop",
    "hidden_dim",
    "dropout",
    "num_spatial_blocks",
    "latent_dim",
    "num_members",
    "use_pretrain",
    "freeze_encoder",
    "normalize",
)
"""The settings of `reward.model` that belong to the trained model."""
_LATER_KEYS = {"num_frames": 1, "only_at_rest": False, "crop": None, "encoder": None, "latent_dim": 256}
"""Not in contracts of older versions, which had just this."""
_FREE_KEYS = ("dropout", "freeze_encoder")  # without effect on what a trained model says
_RESNET_KEYS = ("arch", "width")  # without effect on a model with an encoder of its own
_WITHOUT_EFFECT = {
    "resnet_reward": ("num_spatial_blocks", "use_pretrain", "latent_dim"),
    "binary_classifier": ("latent_dim",),
    "lerobot_classifier": ("use_pretrain",),
}


_FORMER_DEFAULTS = {"arch": "resnet18", "width": 64}
"""Of version 0.1. RLinf's blocks and the `config.yaml` of every older run mean them, so nobody set them."""


def changed_settings(config: RewardModelConfig) -> set[str]:
    """The settings of a model that somebody set: those that were given, or differ from the defaults."""
    if config.given is not None:
        return set(MODEL_KEYS) & config.given
    default = to_plain(RewardModelConfig())
    plain, former = to_plain(config), {**default, **_FORMER_DEFAULTS}
    return {key for key in MODEL_KEYS if plain[key] not in (default[key], former[key])}


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a trained model is and what it was trained on; None and empty where that is not known."""

    model: dict[str, Any]
    """`MODEL_KEYS` as trained (`freeze_encoder` resolved)."""
    norm: Norm = "batch"
    """The encoder's norm layers."""
    same_padding: bool = False
    """Whether the encoder pads as Flax does."""
    encoder: dict[str, Any] | None = field(default=None, repr=False)
    """`EncoderFacts` of an `hf:` encoder: its name, the hash of its weights, its configuration."""
    frame_sizes: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """camera -> (H, W, C) as collected, before the model resizes."""
    layout: str = "HWC"
    value_range: str = "uint8 0-255"
    colour_order: str = "RGB"
    pixel_mean: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """camera -> mean per channel of the training frames, in grey levels from 0 to 255."""
    pixel_std: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """camera -> standard deviation per channel, in grey levels."""
    feature_mean: tuple[float, ...] | None = field(default=None, repr=False)
    """Mean encoder features of the training frames, for drift detection."""
    feature_std: tuple[float, ...] | None = field(default=None, repr=False)
    threshold: float | None = None
    """Calibrated probability above which a frame counts as success."""
    calibration: dict[str, Any] | None = field(default=None, repr=False)
    """`map`: what `rewards/relabel.py` reads; `threshold`: what `fit/calibrate.py` promises."""
    metrics: dict[str, Any] = field(default_factory=dict)
    data_hash: str | None = None
    guerdon_version: str = guerdon.__version__

    @classmethod
    def of(cls, model: RewardModel, **known: Any) -> Contract:
        """The contract of `model`, with the further fields that are `known`."""
        section = {key: to_plain(getattr(model.config, key)) for key in MODEL_KEYS}
        section["freeze_encoder"] = model.encoder_frozen
        encoder = model.image_encoder
        if isinstance(encoder, ResNet):
            return cls(model=section, norm=encoder.norm, same_padding=encoder.same_padding, **known)
        assert isinstance(encoder, HFEncoder)
        return cls(model=section, encoder=encoder.facts.to_dict(), **known)

    @classmethod
    def from_dict(cls, data: Any, source: str = "contract") -> Contract:
        """Read what `to_dict` wrote; a `DataError` that names `source` if it is something else."""
        try:
            contract = build(cls, _as_of_today(data))
            absent = [key for key in MODEL_KEYS if key not in contract.model]
            if absent:
                raise ConfigError(f"model lacks {', '.join(absent)}")
            contract.model_config()
            if (contract.model["encoder"] is None) != (contract.encoder is None):
                raise ConfigError("it does not describe the encoder that its model has")
            if contract.encoder is not None:
                EncoderFacts.from_dict(contract.encoder)
        except ConfigError as error:
            raise DataError(f"{source}: the contract is damaged or of another version: {error}") from error
        return contract

    @property
    def calibration_map(self) -> Calibration:
        """From the model's logits to probabilities; the identity if it was never calibrated."""
        stored = (self.calibration or {}).get("map")
        return Calibration() if stored is None else Calibration.from_dict(stored)

    @property
    def num_frames(self) -> int:
        """Frames that are scored together."""
        return int(self.model["num_frames"])

    @property
    def only_at_rest(self) -> bool:
        """Whether frames of a robot in motion are no success, unseen."""
        return bool(self.model["only_at_rest"])

    @property
    def input_sizes(self) -> dict[str, tuple[int, ...]]:
        """Camera -> shape of what is scored: (H, W, C), or (k, H, W, C) of a stack of frames."""
        count = self.num_frames
        return {name: size if count == 1 else (count, *size) for name, size in self.frame_sizes.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        plain: dict[str, Any] = to_plain(self)
        return plain

    def model_config(self, base: RewardModelConfig | None = None) -> RewardModelConfig:
        """The config to rebuild the model with; `base` gives what is not part of the model."""
        trained = {key: self.model[key] for key in MODEL_KEYS}
        plain = to_plain(base or RewardModelConfig())
        # The weights are in the checkpoint; those that the encoder started from are not needed again.
        return build(RewardModelConfig, {**plain, **trained, "pretrained_encoder_path": None}, "reward.model")

    def check_config(self, config: RewardModelConfig, given: Collection[str]) -> None:
        """Raise a `ConfigError` if a setting contradicts the trained model.

        Args:
            config: the user's section.
            given: the keys that the user set; defaults contradict nothing.
        """
        trained = self.model_config()
        skipped: tuple[str, ...] = _FREE_KEYS + _WITHOUT_EFFECT[trained.model_type]
        skipped += _RESNET_KEYS if trained.encoder is not None else ()
        clashes = []
        for key in MODEL_KEYS:
            ours, theirs = getattr(config, key), getattr(trained, key)
            same = sorted(ours) == sorted(theirs) if key == "image_keys" else ours == theirs
            if key in given and key == "encoder" and ours is not None and self.encoder is not None:
                same = self._has_weights_of(ours)
            if key not in given or key in skipped or same:
                continue
            sides = f"{key} is {_show(ours)} in the config and {_show(theirs)} in the checkpoint"
            if key == "encoder" and ours is not None and theirs is not None:
                sides += " with other weights"
            if key == "use_pretrain":
                logger.warning("reward.model.%s; the checkpoint's is used", sides)
            else:
                clashes.append(sides)
        if clashes:
            raise ConfigError(f"reward.model does not fit the checkpoint: {'; '.join(clashes)}")

    def _has_weights_of(self, name: str) -> bool:
        """Whether the encoder began with the weights that `hf:PATH` has now."""
        return same_encoder(name, EncoderFacts.from_dict(self.encoder))

    @property
    def frame_check(self) -> FrameCheck:
        """What frames must look like."""
        return FrameCheck(
            cameras=tuple(self.model["image_keys"]),
            num_frames=self.num_frames,
            sizes=self.frame_sizes,
            value_range=self.value_range,
            colour_order=self.colour_order,
            mean=self.pixel_mean,
            std=self.pixel_std,
        )

    def check_frames(self, frames: Mapping[str, Any] | Any) -> None:
        """Raise a `DataError` if a batch is not of the kind that the model was trained on."""
        self.frame_check.check(frames)


def _as_of_today(data: Any) -> Any:
    """A contract that an older version wrote, with the settings that came later."""
    if not isinstance(data, Mapping):
        return data
    newer = {key: value for key, value in data.items() if key != "crop" or value is not None}
    if isinstance(data.get("model"), Mapping):
        newer["model"] = {**_LATER_KEYS, **data["model"]}
    return newer


def _show(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
