"""Networks that look at a frame and say how likely it shows success, and their checkpoints."""

from guerdon.models.base import Prediction, RewardModel
from guerdon.models.checkpoint import load_checkpoint, save_checkpoint
from guerdon.models.classifier import BinaryRewardClassifier, ResNetEncoderWrapper
from guerdon.models.contract import Contract
from guerdon.models.encoders import ResNet10, SpatialLearnedEmbeddings, make_resnet
from guerdon.models.pretrained import load_pretrained
from guerdon.models.resnet import ResNetRewardModel
from guerdon.models.table import MODELS, build_model

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
