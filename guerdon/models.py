"""Public names: image success classifiers and their checkpoints; see `guerdon.rewards.image`."""

from guerdon.rewards.image import (
    MODELS,
    BinaryRewardClassifier,
    Contract,
    Prediction,
    ResNet10,
    ResNetEncoderWrapper,
    ResNetRewardModel,
    RewardModel,
    SpatialLearnedEmbeddings,
    build_model,
    load_checkpoint,
    load_pretrained,
    make_resnet,
    save_checkpoint,
)

__all__ = [
    "MODELS",
    "BinaryRewardClassifier",
    "Contract",
    "Prediction",
    "ResNet10",
    "ResNetEncoderWrapper",
    "ResNetRewardModel",
    "RewardModel",
    "SpatialLearnedEmbeddings",
    "build_model",
    "load_checkpoint",
    "load_pretrained",
    "make_resnet",
    "save_checkpoint",
]
