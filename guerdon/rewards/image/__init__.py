"""Networks that look at a frame and say how likely it shows success, and their checkpoints."""

from guerdon.rewards.image.base import Prediction, RewardModel
from guerdon.rewards.image.checkpoint import load_checkpoint, save_checkpoint
from guerdon.rewards.image.classifier import BinaryRewardClassifier, ResNetEncoderWrapper
from guerdon.rewards.image.contract import Contract
from guerdon.rewards.image.encoders import ResNet10, SpatialLearnedEmbeddings, make_resnet
from guerdon.rewards.image.pretrained import load_pretrained
from guerdon.rewards.image.registry import MODELS, build_model
from guerdon.rewards.image.resnet import ResNetRewardModel

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
