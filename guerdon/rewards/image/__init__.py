"""Networks that score how likely a frame shows success, and their checkpoints."""

from guerdon.rewards.image.base import Prediction, RewardModel
from guerdon.rewards.image.checkpoint import load_checkpoint, save_checkpoint
from guerdon.rewards.image.contract import Contract
from guerdon.rewards.image.encoders import (
    ENCODERS,
    ResNet10,
    SpatialLearnedEmbeddings,
    make_encoder,
    make_resnet,
)
from guerdon.rewards.image.models import (
    MODELS,
    BinaryRewardClassifier,
    ResNetEncoderWrapper,
    ResNetRewardModel,
    build_model,
)
from guerdon.rewards.image.pretrained import load_pretrained

__all__ = [
    "ENCODERS",
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
    "make_encoder",
    "make_resnet",
    "save_checkpoint",
]
