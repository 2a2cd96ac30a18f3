"""What every image reward model has: frames in, logits out, an encoder that can be frozen and cached."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guerdon.config.build import build, to_plain
from guerdon.config.limits import Region
from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import to_uint8_hwc
from guerdon.rewards.image.encoders import ImageEncoder, ResNet
from guerdon.rewards.image.hf_files import IMAGENET_MEAN as IMAGENET_MEAN
from guerdon.rewards.image.hf_files import IMAGENET_STD as IMAGENET_STD

if TYPE_CHECKING:
    from guerdon.rewards.image.contract import Contract

GREY_MEAN = (0.449,)  # the average over the colours
GREY_STD = (0.226,)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says about N frames."""

    prob_success: Tensor
    """float32 [N]; the mean over the members."""
    disagreement: Tensor
    """float32 [N]; the standard deviation of the members' probabilities, 0 for a single member."""


class RewardModel(nn.Module, ABC):
    """Scores frames, or stacks of the latest `num_frames` of them: `preprocess`, then `encode`, then `head`.

    The frames of a stack become channels of one image, oldest first: `c` is `num_frames * C` below.

    Args:
        config: the model's section; the class decides `model_type`.
        settings: single settings by name, over `config` or over the defaults.
    """

    model_type: ClassVar[Literal["resnet_reward", "binary_classifier", "lerobot_classifier"]]
    keyword_defaults: ClassVar[dict[str, Any]] = {}
    """Defaults that differ from the config's if the model is made from keywords alone."""

    feature_shape: tuple[int, ...]
    """Shape of one frame's encoder output, all cameras together."""
    classifiers: nn.ModuleList
    """One head per member."""

    def __init__(self, config: RewardModelConfig | None = None, **settings: Any) -> None:
        super().__init__()
        plain = self.keyword_defaults if config is None else to_plain(config)
        config = build(RewardModelConfig, {**plain, **settings}, "reward.model")
        self.config: RewardModelConfig = replace(config, model_type=self.model_type)
        self.num_members: int = config.num_members
        if config.image_size[0] not in (1, 3):
            raise ConfigError(
                f"reward.model.image_size must have 1 or 3 channels, not {config.image_size[0]}"
            )
        if not config.image_keys or len(set(config.image_keys)) < len(config.image_keys):
            raise ConfigError(
                f"reward.model.image_keys must name each camera once: {list(config.image_keys)}"
            )
        check_crop(config.region)

    @abstractmethod
    def encode(self, pixels: Tensor) -> Tensor:
        """float32 [N, K, c, H, W] of `preprocess` -> [N, *feature_shape]; what can be frozen and cached."""

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """[N, *feature_shape] -> logits_success_is_high [N, M], one per member."""

    @property
    def image_encoder(self) -> ImageEncoder:
        """The encoder; all cameras share it."""
        return next(module for module in self.modules() if isinstance(module, ImageEncoder))

    @property
    def resnet(self) -> ResNet:
        """The encoder, for those who need a ResNet of ours."""
        encoder = self.image_encoder
        if not isinstance(encoder, ResNet) or not self.is_fusable:
            other = self.config.encoder or f"of a {self.model_type}"
            raise ConfigError(f"this needs a ResNet, not the encoder {other}")
        return encoder

    @property
    def is_fusable(self) -> bool:
        """Whether normalisation and encoder may be replaced by faster ones: those of a ResNet."""
        return isinstance(self.image_encoder, ResNet)

    @property
    def encoder_frozen(self) -> bool:
        """Whether the encoder is fixed, as resolved from `freeze_encoder` and the weights it was given."""
        return self.image_encoder.frozen

    @property
    def num_channels(self) -> int:
        """c: channels of what the encoder sees, all frames of a stack together."""
        return self.config.num_frames * self.config.image_size[0]

    def preprocess(self, frames: Mapping[str, Any] | Any) -> Tensor:
        """Frames as the encoder wants them: cropped, resized, scaled and normalised.

        Args:
            frames: camera -> images `[N, H, W, C]`, or the images alone if the model has one camera; any
                layout and range that `to_uint8_hwc` takes. With `num_frames` above 1 stacks of that many,
                `[N, k, H, W, C]`, oldest first. Cameras that the model does not know are ignored.

        Returns:
            float32 [N, K, c, H, W] on the model's device, cameras in the order of `config.image_keys`.
        """
        return self._normalised(self.images(frames).to(next(self.parameters()).device))

    def images(self, frames: Mapping[str, Any] | Any) -> Tensor:
        """The first half of `preprocess`: cropped, resized, cameras stacked; uint8 [N, K, H, W, c], CPU."""
        keys = self.config.image_keys
        if not isinstance(frames, Mapping):
            if len(keys) > 1:
                raise DataError(f"the model looks at {len(keys)} cameras {list(keys)}: give a dict of images")
            frames = {keys[0]: frames}
        absent = [key for key in keys if key not in frames]
        if absent:
            raise DataError(f"the model looks at {list(keys)}, the frames have {list(frames)}")
        cameras = [self._resized(frames[key], key) for key in keys]
        if len({len(images) for images in cameras}) > 1:
            counts = {key: len(images) for key, images in zip(keys, cameras, strict=True)}
            raise DataError(f"the cameras have different numbers of frames: {counts}")
        return cameras[0].unsqueeze(1) if len(cameras) == 1 else torch.stack(cameras, dim=1)

    def scale_shift(self) -> tuple[Tensor, Tensor]:
        """The second half of `preprocess`: `pixel * scale + shift` for pixels up to 255; float32 [c] each."""
        channels = self.config.image_size[0]
        scale, shift = torch.full((channels,), 1 / 255), torch.zeros(channels)
        if self.config.normalize:
            encoder = self.image_encoder
            mean = torch.tensor(encoder.mean or (IMAGENET_MEAN if channels == 3 else GREY_MEAN))
            std = torch.tensor(encoder.std or (IMAGENET_STD if channels == 3 else GREY_STD))
            scale, shift = scale / std, -mean / std
        return scale.repeat(self.config.num_frames), shift.repeat(self.config.num_frames)

    def _resized(self, images: Any, camera: str) -> Tensor:
        """One camera's images as uint8 [N, H, W, c] of the model's size."""
        array = to_uint8_hwc(images, name=f"frames of {camera!r}")
        count = self.config.num_frames
        array = array[None] if array.ndim == (3 if count == 1 else 4) else array
        if array.ndim != (4 if count == 1 else 5) or (count > 1 and array.shape[1] != count):
            wanted = "[N, H, W, C]" if count == 1 else f"stacks of {count} frames [N, {count}, H, W, C]"
            raise DataError(f"frames of {camera!r} have shape {list(array.shape)}; expected {wanted}")
        if self.config.region is not None:
            rows, columns = crop_slices(self.config.region, array.shape[-3], array.shape[-2])
            array = array[..., rows, columns, :]
        array = np.ascontiguousarray(array)
        tensor = torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
        if count == 1:
            return self._scaled(tensor, camera)
        flat = self._scaled(tensor.flatten(0, 1), camera)
        stacks = flat.reshape(len(array), count, *flat.shape[1:])
        return stacks.permute(0, 2, 3, 1, 4).flatten(3)  # [N, H, W, k * C]

    def _scaled(self, tensor: Tensor, camera: str) -> Tensor:
        """uint8 images [n, h, w, 1 or C] -> [n, H, W, C] of the model's size."""
        channels, height, width = self.config.image_size
        if tensor.shape[1:3] != (height, width):
            # On uint8 this is ten times as fast as on floats, and within a grey level of them.
            planes = tensor.permute(0, 3, 1, 2)
            planes = F.interpolate(planes, size=(height, width), mode="bilinear", antialias=True)
            tensor = planes.permute(0, 2, 3, 1)
        if tensor.shape[3] == channels:
            return tensor
        if tensor.shape[3] == 1:
            return tensor.expand(-1, -1, -1, channels)
        raise DataError(f"frames of {camera!r} have {tensor.shape[3]} channels; the model takes grey images")

    def _normalised(self, pixels: Tensor) -> Tensor:
        """uint8 [N, K, H, W, c] -> float32 [N, K, c, H, W], channels last in memory; one multiply-add."""
        width, channels = pixels.shape[-2:]
        scale, shift = self.scale_shift()
        # Whole rows, so that the inner loop runs over W * C values instead of C.
        rows = pixels.reshape(-1, width * channels).to(torch.float32)
        torch.addcmul(shift.repeat(width).to(rows), rows, scale.repeat(width).to(rows), out=rows)
        return rows.view(pixels.shape).permute(0, 1, 4, 2, 3)

    def forward(self, frames: Mapping[str, Any] | Any) -> Tensor:
        """Logits of success, [N]; with several members the logit of their mean probability."""
        logits: Tensor = self.head(self.encode(self.preprocess(frames)))
        return mean_logit(logits)

    @torch.no_grad()
    def predict(self, frames: Mapping[str, Any] | Any) -> Prediction:
        """Probabilities of success, without gradients and in eval mode; changes nothing in the model."""
        training = self.training
        self.eval()
        try:
            probs = torch.sigmoid(self.head(self.encode(self.preprocess(frames))).float())
        finally:
            self.train(training)
        return Prediction(prob_success=probs.mean(1), disagreement=probs.std(1, correction=0))

    def save_pretrained(self, folder: str | os.PathLike[str], contract: Contract | None = None) -> Path:
        """Write a folder to share: weights, `config.json`, contract and model card.

        Args:
            folder: made if there is none.
            contract: with threshold and calibration; None: one that knows the model alone.
        """
        from guerdon.rewards.image import Contract
        from guerdon.rewards.image.shared_model import save_shared

        return save_shared(Path(folder), self, Contract.of(self) if contract is None else contract)

    def push_to_hub(
        self,
        name: str,
        contract: Contract | None = None,
        *,
        private: bool = False,
        token: str | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes to `OWNER/NAME` of the Hugging Face hub -> its address."""
        from guerdon.rewards.image import Contract
        from guerdon.rewards.image.shared_model import push_shared

        known = Contract.of(self) if contract is None else contract
        return push_shared(name, self, known, private=private, token=token)

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str]) -> Self:
        """The model of a folder that `save_pretrained` wrote, or of `OWNER/NAME` of the hub, in eval mode."""
        from guerdon.rewards.image.shared_model import load_shared

        return cast("Self", load_shared(name, cls))

    def _member_logits(self, features: Tensor) -> Tensor:
        """[N, D] -> [N, M]."""
        return torch.cat([classifier(features) for classifier in self.classifiers], dim=1)


def check_crop(crop: Region | None) -> None:
    """Raise a `ConfigError` unless a region lies within the image and has a size."""
    if crop is None:
        return
    top, left, height, width = crop
    if min(height, width) <= 0 or top + height > 1 + 1e-9 or left + width > 1 + 1e-9:
        raise ConfigError(
            "reward.model.crop is [top, left, height, width] in shares of the frame, and must lie within it: "
            f"{list(crop)} does not"
        )


def crop_slices(crop: Region, height: int, width: int) -> tuple[slice, slice]:
    """Rows and columns of a frame of `height` x `width` pixels that a region covers; at least one of each."""
    top, left, tall, wide = crop
    first_row, first_column = min(round(top * height), height - 1), min(round(left * width), width - 1)
    last_row = max(round((top + tall) * height), first_row + 1)
    last_column = max(round((left + wide) * width), first_column + 1)
    return slice(first_row, last_row), slice(first_column, last_column)


def pool_features(features: Tensor) -> Tensor:
    """Features of `encode`, pooled over space: [N, *feature_shape] -> [N, F]. Drift is measured on these."""
    return features.flatten(2).mean(dim=-1) if features.dim() > 2 else features


def mean_logit(logits: Tensor) -> Tensor:
    """[N, M] -> [N]: the logit of the mean probability, exact also where probabilities round to 0 or 1."""
    if logits.shape[1] == 1:
        return logits[:, 0]
    return F.logsigmoid(logits).logsumexp(1) - F.logsigmoid(-logits).logsumexp(1)
