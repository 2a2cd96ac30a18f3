"""What every image reward model has: frames in, logits out, an encoder that can be frozen and cached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from guerdon.config.build import build, to_plain
from guerdon.config.schema_reward import RewardModelConfig
from guerdon.errors import ConfigError, DataError
from guerdon.images import to_uint8_hwc
from guerdon.models.encoders import ResNet

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
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
    """Judges single frames: `preprocess`, then `encode`, then `head`.

    Args:
        config: the model's section; the class decides `model_type`.
        settings: single settings by name, over `config` or over the defaults.
    """

    model_type: ClassVar[Literal["resnet_reward", "binary_classifier"]]
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

    @abstractmethod
    def encode(self, pixels: Tensor) -> Tensor:
        """float32 [N, K, C, H, W] of `preprocess` -> [N, *feature_shape]; what can be frozen and cached."""

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """[N, *feature_shape] -> logits_success_is_high [N, M], one per member."""

    @property
    def resnet(self) -> ResNet:
        """The encoder; all cameras share it."""
        return next(module for module in self.modules() if isinstance(module, ResNet))

    @property
    def encoder_frozen(self) -> bool:
        """Whether the encoder is fixed, as resolved from `freeze_encoder` and the weights it was given."""
        return self.resnet.frozen

    def preprocess(self, frames: Mapping[str, Any] | Any) -> Tensor:
        """Frames as the encoder wants them: resized, scaled and normalised.

        Args:
            frames: camera -> images `[N, H, W, C]`, or the images alone if the model has one camera; any
                layout and range that `to_uint8_hwc` takes. Cameras that the model does not know are ignored.

        Returns:
            float32 [N, K, C, H, W] on the model's device, cameras in the order of `config.image_keys`.
        """
        return self._normalised(self.images(frames).to(next(self.parameters()).device))

    def images(self, frames: Mapping[str, Any] | Any) -> Tensor:
        """The first half of `preprocess`: frames resized and stacked, uint8 [N, K, H, W, C] on the CPU."""
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
        """The second half of `preprocess`: `pixel * scale + shift` for pixels up to 255; float32 [C] each."""
        channels = self.config.image_size[0]
        scale, shift = torch.full((channels,), 1 / 255), torch.zeros(channels)
        if self.config.normalize:
            mean = torch.tensor(IMAGENET_MEAN if channels == 3 else GREY_MEAN)
            std = torch.tensor(IMAGENET_STD if channels == 3 else GREY_STD)
            scale, shift = scale / std, -mean / std
        return scale, shift

    def _resized(self, images: Any, camera: str) -> Tensor:
        """One camera's images as uint8 [N, H, W, C] of the model's size."""
        array = to_uint8_hwc(images, name=f"frames of {camera!r}")
        array = array[None] if array.ndim == 3 else array
        if array.ndim != 4:
            raise DataError(f"frames of {camera!r} have shape {list(array.shape)}; expected [N, H, W, C]")
        array = np.ascontiguousarray(array)
        tensor = torch.from_numpy(array) if array.flags.writeable else torch.tensor(array)
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
        """uint8 [N, K, H, W, C] -> float32 [N, K, C, H, W], channels last in memory; one multiply-add."""
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

    def _member_logits(self, features: Tensor) -> Tensor:
        """[N, D] -> [N, M]."""
        return torch.cat([classifier(features) for classifier in self.classifiers], dim=1)


def pool_features(features: Tensor) -> Tensor:
    """Features of `encode`, pooled over space: [N, *feature_shape] -> [N, F]. Drift is measured on these."""
    return features.flatten(2).mean(dim=-1) if features.dim() > 2 else features


def mean_logit(logits: Tensor) -> Tensor:
    """[N, M] -> [N]: the logit of the mean probability, exact also where probabilities round to 0 or 1."""
    if logits.shape[1] == 1:
        return logits[:, 0]
    return F.logsigmoid(logits).logsumexp(1) - F.logsigmoid(-logits).logsumexp(1)
