"""`ResNetRewardModel`: a ResNet, average pooling, and a small head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from guerdon.config.schema_reward import RewardModelConfig
from guerdon.rewards.image.base import RewardModel
from guerdon.rewards.image.pretrained import make_encoder


class ResNetRewardModel(RewardModel):
    """A ResNet whose averaged features go through Linear, ReLU, Dropout and Linear to one logit.

    Several cameras share the encoder; their features stand side by side in the head. What is cached of a
    frozen encoder is the average, K * C' numbers a frame.

    Args:
        config: the model's section.
        settings: single settings by name: `arch`, `hidden_dim`, `dropout`, `normalize`, `image_size`,
            `precision` (used when scoring), ...
    """

    model_type = "resnet_reward"

    def __init__(self, config: RewardModelConfig | None = None, **settings: Any) -> None:
        super().__init__(config, **settings)
        config = self.config
        self.backbone = make_encoder(config)
        size = self.backbone.num_features * len(config.image_keys)
        self.feature_shape = (size,)
        self.classifiers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(size, config.hidden_dim),
                nn.ReLU(),
                nn.Dropout(config.dropout),
                nn.Linear(config.hidden_dim, 1),
            )
            for _ in range(config.num_members)
        )

    def encode(self, pixels: Tensor) -> Tensor:
        """float32 [N, K, c, H, W] -> [N, K * C']: the averaged feature maps."""
        maps: Tensor = self.backbone(pixels.flatten(0, 1))
        return maps.mean((2, 3)).reshape(-1, *self.feature_shape)

    def head(self, features: Tensor) -> Tensor:
        """[N, K * C'] -> logits_success_is_high [N, M]."""
        return self._member_logits(features)
