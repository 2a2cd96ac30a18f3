"""The image reward models by name."""

from __future__ import annotations

from guerdon.config.schema_reward import RewardModelConfig
from guerdon.rewards.image.base import RewardModel
from guerdon.rewards.image.classifier import BinaryRewardClassifier
from guerdon.rewards.image.resnet import ResNetRewardModel

MODELS: dict[str, type[RewardModel]] = {
    "resnet_reward": ResNetRewardModel,
    "binary_classifier": BinaryRewardClassifier,
}
"""`reward.model.model_type` -> class."""


def build_model(config: RewardModelConfig) -> RewardModel:
    """A new model; with `pretrained_encoder_path` its encoder has those weights. Loads no checkpoint."""
    return MODELS[config.model_type](config)
