"""The image reward models, by name: `ResNetRewardModel` and `BinaryRewardClassifier`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from guerdon.config.build import build
from guerdon.config.schema_reward import RewardModelConfig
from guerdon.rewards.image.base import RewardModel
from guerdon.rewards.image.encoders import ImageEncoder, SpatialLearnedEmbeddings
from guerdon.rewards.image.lerobot_model import LeRobotClassifier
from guerdon.rewards.image.pretrained import encoder_for


class ResNetRewardModel(RewardModel):
    """A ResNet whose averaged features go through Linear, ReLU, Dropout and Linear to one logit.

    Several cameras share the encoder; their features stand side by side in the head. What is cached of a
    frozen encoder is the average, K * C' numbers a frame.

    Args:
        config: the model's section.
        built_encoder: the encoder, if it is built already; None builds the one that the config asks for.
        settings: single settings by name: `arch`, `hidden_dim`, `dropout`, `normalize`, `image_size`,
            `precision` (used when scoring), ...
    """

    model_type = "resnet_reward"
    keyword_defaults: ClassVar[dict[str, Any]] = {"arch": "resnet18", "width": 64}

    def __init__(
        self,
        config: RewardModelConfig | None = None,
        built_encoder: ImageEncoder | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(config, **settings)
        config = self.config
        self.backbone = built_encoder or encoder_for(config)
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


class ResNetEncoderWrapper(nn.Module):
    """A ResNet and the learned pooling of its feature map, for one or several cameras.

    Args:
        arch: the ResNet.
        image_size: [C, H, W].
        num_spatial_blocks: learned weightings per channel.
        pretrained_encoder_path: weights for the ResNet; see `load_pretrained`.
        use_pretrain: True pools the feature map with a kernel `[K * C', h, w, F]`; False averages it first,
            and the kernel is `[K * C', 1, 1, F]`.
        freeze_encoder: True, False, or `auto` (frozen only if weights were loaded). The pooling is trained
            in any case.
        width: channels of the ResNet's first stage.
        num_cameras: K; their channels are stacked.
        num_frames: frames of an image, whose channels are stacked.
        backbone: the encoder, if it is built already; the settings above it is built with are then unused.
    """

    def __init__(
        self,
        arch: str = "resnet10",
        image_size: Sequence[int] = (3, 64, 64),
        num_spatial_blocks: int = 8,
        pretrained_encoder_path: str | None = None,
        use_pretrain: bool = True,
        freeze_encoder: bool | str = "auto",
        width: int = 64,
        num_cameras: int = 1,
        num_frames: int = 1,
        backbone: ImageEncoder | None = None,
    ) -> None:
        super().__init__()
        settings = {
            "arch": arch,
            "image_size": list(image_size),
            "num_spatial_blocks": num_spatial_blocks,
            "pretrained_encoder_path": pretrained_encoder_path,
            "use_pretrain": use_pretrain,
            "freeze_encoder": freeze_encoder,
            "width": width,
            "num_frames": num_frames,
        }
        self.use_pretrain = use_pretrain
        self.backbone = backbone or encoder_for(build(RewardModelConfig, settings, "reward.model"))
        channels = num_cameras * self.backbone.num_features
        height, map_width = self.backbone.output_size(*image_size[1:]) if use_pretrain else (1, 1)
        self.feature_shape = (channels, height, map_width)
        self.out_dim = channels * num_spatial_blocks
        self.pooling_layer = SpatialLearnedEmbeddings(height, map_width, channels, num_spatial_blocks)

    def encode(self, pixels: Tensor) -> Tensor:
        """float32 [N, K, c, H, W] or [N, c, H, W] -> feature maps [N, K * C', h, w]."""
        maps: Tensor = self.backbone(pixels.flatten(0, 1) if pixels.ndim == 5 else pixels)
        if not self.use_pretrain:
            maps = maps.mean((2, 3))
        return maps.reshape(-1, *self.feature_shape)

    def forward(self, pixels: Tensor) -> Tensor:
        """float32 [N, K, c, H, W] or [N, c, H, W] -> [N, K * C' * F]."""
        pooled: Tensor = self.pooling_layer(self.encode(pixels))
        return pooled


class BinaryRewardClassifier(RewardModel):
    """Learned spatial pooling, then Linear, LayerNorm, Tanh, Dropout and Linear to one logit.

    All cameras share the ResNet, and each has its own pooling. Sharing keeps the model at the size of one
    encoder, lets every camera's frames train it, and is what HIL-SERL does with its pretrained weights;
    *where* to look is what differs between cameras, and that is the pooling's part.

    Args:
        config: the model's section.
        built_encoder: the encoder, if it is built already; None builds the one that the config asks for.
        settings: single settings by name: `image_keys`, `image_size`, `hidden_dim`, `num_spatial_blocks`,
            `pretrained_encoder_path`, `use_pretrain`, `freeze_encoder`, ... Without a config the encoder is
            RLinf's, a full ResNet10.
    """

    model_type = "binary_classifier"
    keyword_defaults: ClassVar[dict[str, Any]] = {"arch": "resnet10", "width": 64}

    def __init__(
        self,
        config: RewardModelConfig | None = None,
        built_encoder: ImageEncoder | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(config, **settings)
        config = self.config
        self.encoder = ResNetEncoderWrapper(
            arch=config.arch,
            image_size=config.image_size,
            num_spatial_blocks=config.num_spatial_blocks,
            pretrained_encoder_path=config.pretrained_encoder_path,
            use_pretrain=config.use_pretrain,
            freeze_encoder=config.freeze_encoder,
            width=config.width,
            num_cameras=len(config.image_keys),
            num_frames=config.num_frames,
            backbone=built_encoder or encoder_for(config),
        )
        self.feature_shape = self.encoder.feature_shape
        self.classifiers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(self.encoder.out_dim, config.hidden_dim),
                nn.LayerNorm(config.hidden_dim),
                # Nested, so that the last layer has the number that it has in RLinf's sequence.
                nn.Sequential(nn.Tanh(), nn.Dropout(config.dropout)),
                nn.Linear(config.hidden_dim, 1),
            )
            for _ in range(config.num_members)
        )

    def encode(self, pixels: Tensor) -> Tensor:
        """float32 [N, K, c, H, W] -> feature maps [N, K * C', h, w] (h = w = 1 without `use_pretrain`)."""
        return self.encoder.encode(pixels)

    def head(self, features: Tensor) -> Tensor:
        """[N, K * C', h, w] -> logits_success_is_high [N, M]; the pooling is trained, so it is here."""
        return self._member_logits(self.encoder.pooling_layer(features))


MODELS: dict[str, type[RewardModel]] = {
    "resnet_reward": ResNetRewardModel,
    "binary_classifier": BinaryRewardClassifier,
    "lerobot_classifier": LeRobotClassifier,
}
"""`reward.model.model_type` -> class."""


def build_model(config: RewardModelConfig, built_encoder: ImageEncoder | None = None) -> RewardModel:
    """A new model; with `pretrained_encoder_path` its encoder has those weights. Loads no checkpoint."""
    return MODELS[config.model_type](config, built_encoder=built_encoder)
