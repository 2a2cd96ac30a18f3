"""The network of LeRobot's reward classifier, whose folders `lerobot_files.py` reads.

Each camera is pooled by 4x4 learned weights and becomes a latent vector; a head of two layers takes them
together. Over a transformer the first token of each camera goes into the head as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from guerdon.config.schema_reward import RewardModelConfig
from guerdon.core.errors import ConfigError
from guerdon.rewards.image.base import IMAGENET_MEAN, IMAGENET_STD, RewardModel
from guerdon.rewards.image.encoders import ImageEncoder, ResNet, SpatialLearnedEmbeddings
from guerdon.rewards.image.hf_encoder import HFEncoder
from guerdon.rewards.image.pretrained import encoder_for

MAP_SIZE = (4, 4)
"""Of the feature map that it pools: images of 97 to 128 pixels with the usual five halvings."""
STD_EPS = 1e-8


class LeRobotClassifier(RewardModel):
    """The first token of an encoder, or its 4x4 feature map pooled for each camera, and a head of two layers.

    Args:
        config: the model's section.
        built_encoder: the encoder, if it is built already; None builds the one that the config asks for.
        settings: single settings by name.
    """

    model_type = "lerobot_classifier"

    pixel_mean: Tensor
    """[K, C]: normalisation of each camera, for colours from 0 to 1."""
    pixel_std: Tensor

    def __init__(
        self,
        config: RewardModelConfig | None = None,
        built_encoder: ImageEncoder | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(config, **settings)
        config = self.config
        if config.num_frames > 1 or config.image_size[0] != 3:
            raise ConfigError("reward.model.model_type=lerobot_classifier scores single colour frames")
        encoder = self.encoder = built_encoder or encoder_for(config)
        if isinstance(encoder, ResNet):
            encoder.end_padded_pool = True
        self.reads_tokens = isinstance(encoder, HFEncoder) and encoder.facts.features == "first"
        size, count = encoder.output_size(*config.image_size[1:]), len(config.image_keys)
        channels = encoder.num_features
        if not self.reads_tokens and size != MAP_SIZE:
            raise ConfigError(
                f"lerobot_classifier pools feature maps of 4x4, and images of {config.image_size[1]}x"
                f"{config.image_size[2]} give {size[0]}x{size[1]}: set reward.model.image_size=[3,128,128]"
            )
        self.feature_shape = (count * channels, *size)
        width = channels
        if not self.reads_tokens:
            blocks, width = config.num_spatial_blocks, config.latent_dim
            self.pooling = SpatialLearnedEmbeddings(*size, count * channels, blocks)
            self.latents = nn.ModuleList(
                nn.Sequential(
                    nn.Dropout(config.dropout),
                    nn.Linear(channels * blocks, width),
                    nn.LayerNorm(width),
                    nn.Tanh(),
                )
                for _ in range(count)
            )
        self.classifiers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(count * width, config.hidden_dim),
                nn.Dropout(config.dropout),
                nn.LayerNorm(config.hidden_dim),
                nn.ReLU(),
                nn.Linear(config.hidden_dim, 1),
            )
            for _ in range(config.num_members)
        )
        mean, std = encoder.mean or IMAGENET_MEAN, encoder.std or IMAGENET_STD
        if not config.normalize:
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        self.register_buffer("pixel_mean", torch.tensor([mean] * count))
        self.register_buffer("pixel_std", torch.tensor([std] * count))

    @property
    def is_fusable(self) -> bool:
        """Its cameras are normalised each on its own, so nothing stands in for the encoder."""
        return False

    def _normalised(self, pixels: Tensor) -> Tensor:
        """uint8 [N, K, H, W, C] -> float32 [N, K, C, H, W], in the order of LeRobot's operations."""
        images = pixels.permute(0, 1, 4, 2, 3).to(torch.float32) / 255
        mean, std = (values[None, :, :, None, None] for values in (self.pixel_mean, self.pixel_std))
        return (images - mean) / (std + STD_EPS)

    def encode(self, pixels: Tensor) -> Tensor:
        """float32 [N, K, C, H, W] -> feature maps [N, K * C', 4, 4], or tokens [N, K * C', 1, 1]."""
        maps: Tensor = self.encoder(pixels.flatten(0, 1))
        return maps.reshape(-1, *self.feature_shape)

    def head(self, features: Tensor) -> Tensor:
        """[N, *feature_shape] -> logits_success_is_high [N, M]."""
        if self.reads_tokens:
            return self._member_logits(features.flatten(1))
        cameras = self.pooling(features).chunk(len(self.latents), dim=1)
        parts = [latent(camera) for latent, camera in zip(self.latents, cameras, strict=True)]
        return self._member_logits(torch.cat(parts, dim=1))
