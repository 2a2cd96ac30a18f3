"""The image success classifier of stage 2 as a model of the zoo: it judges the frame that an action led to.

prob_success is what a fitted reward model (`guerdon train-reward`) says of `frames`, which the pipelines get
from the camera that it was fitted to, or, where there are none, of `next_obs`, if that is an image.
The reward is that probability (`continuous`), or one of two values, decided at the checkpoint's own threshold
(`binary`). It is fitted already: `train` does nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from guerdon.config.limits import Fraction
from guerdon.errors import ConfigError, DataError
from guerdon.models.base import RewardModel
from guerdon.models.checkpoint import load_checkpoint
from guerdon.rewards.base import ZooModel, ZooSettings
from guerdon.rewards.networks import RewardNetwork
from guerdon.rewards.transitions import Transitions

MINI_BATCH = 256
"""Frames that are judged at once."""


@dataclass(frozen=True, kw_only=True)
class ImageSuccessSettings(ZooSettings):
    """`reward_model` of type `image_success`."""

    checkpoint_path: str | None = None
    """The fitted classifier: a folder or a file."""
    reward_type: Literal["continuous", "binary"] = "continuous"
    """The probability of success, or one of two values."""
    reward_threshold: Fraction | None = None
    """Above it a frame counts as success (`binary`); null: as calibrated."""
    success_reward: float = 1.0
    """Of a frame that counts as success."""
    fail_reward: float = 0.0
    """Of any other."""


class SuccessClassifier(RewardNetwork):
    """A fitted classifier of one camera's frames."""

    def __init__(self, classifier: RewardModel) -> None:
        super().__init__()
        self.classifier = classifier.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, H, W, C] -> prob_success, float32 [N]."""
        parts = [self.classifier.predict(part.cpu().numpy()) for part in torch.split(images, MINI_BATCH)]
        return torch.cat([part.prob_success for part in parts]) if parts else torch.zeros(0)


class ImageSuccess(ZooModel):
    """Rewards frames that show success, as a classifier fitted to labelled frames sees it."""

    Settings = ImageSuccessSettings
    needs_experience = False
    cfg: ImageSuccessSettings

    def make_network(self) -> SuccessClassifier:
        """The classifier from its checkpoint."""
        if self.cfg.checkpoint_path is None:
            raise ConfigError("reward_model.checkpoint_path is missing: it names the fitted classifier")
        model, contract, _ = load_checkpoint(self.cfg.checkpoint_path)
        cameras = model.config.image_keys
        if len(cameras) != 1 or contract.num_frames != 1:
            raise ConfigError(
                f"image_success judges single frames of one camera, the checkpoint looks at "
                f"{contract.num_frames} frames of {list(cameras)}: use a RewardManager"
            )
        self.obs_key = cameras[0]
        if contract.only_at_rest:
            raise ConfigError(
                "the checkpoint judges robots at rest alone, which image_success does not know about: use a "
                "RewardManager"
            )
        given = self.cfg.reward_threshold
        self.threshold = contract.threshold if given is None else given
        if self.threshold is None and self.cfg.reward_type == "binary":
            raise ConfigError("the checkpoint has no threshold: set reward_model.reward_threshold")
        return SuccessClassifier(model)

    def score(self, batch: Transitions) -> Tensor:
        """What the reached frames are worth, [*L]."""
        flat = batch.flat()
        images = flat.next_obs.round().to(torch.uint8) if flat.frames is None else flat.frames
        prob_success: Tensor = self.network(images).view(batch.shape)
        if self.cfg.reward_type == "continuous":
            return prob_success
        assert self.threshold is not None
        worth = torch.where(prob_success > self.threshold, self.cfg.success_reward, self.cfg.fail_reward)
        return worth.float()

    def checked(self, batch: Transitions) -> Transitions:
        """The batch, if it has frames, or observations that are images with values of 0 to 255."""
        images = batch.next_obs if batch.frames is None else batch.frames
        shape = list(images.shape[len(batch.shape) :])
        if len(shape) != 3 or shape[-1] not in (1, 3):
            raise DataError(f"image_success takes images [H, W, C], not observations of shape {shape}")
        batch.check_finite()
        if images.dtype == torch.uint8:
            return batch.to(self.device)
        if len(batch):
            low, high = float(batch.next_obs.min()), float(batch.next_obs.max())
            if low < 0.0 or high > 255.0 or 0.0 < high <= 1.0:
                raise DataError(f"images must have values of 0 to 255, these have {low:g} to {high:g}")
        return batch.to(self.device)
