"""The image success classifier of stage 2 as a model of the zoo: it scores the frame after an action.

prob_success is the output of a fitted reward model (`guerdon train-reward`) for `frames`. The pipelines get
them from the camera that the model was fitted to. Without frames, `next_obs` is used if it is an image. The
reward is that probability (`continuous`), or one of two values, decided at the checkpoint's own threshold
(`binary`). The model is already fitted: `train` does nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from guerdon.config import RewardConfig
from guerdon.config.limits import Fraction
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.steps import checked_values
from guerdon.rewards.image.contract import Contract
from guerdon.rewards.image.scorer import MINI_BATCH, ImageScorer
from guerdon.rewards.model import SuccessScores
from guerdon.rewards.steps import StepBatch
from guerdon.rewards.zoo.base import ZooModel, ZooSettings
from guerdon.rewards.zoo.networks import RewardNetwork


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
    """A fitted classifier of one camera's frames; its scores are those of a `RewardManager`."""

    def __init__(self, scorer: ImageScorer) -> None:
        super().__init__()
        self.scorer = scorer
        self.camera = scorer.model.config.image_keys[0]
        self.classifier = scorer.model.requires_grad_(False)  # its weights are what is saved

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, H, W, C] -> calibrated prob_success, float32 [N]."""
        parts = [
            self.scorer.score({self.camera: part.cpu().numpy()}).prob_success
            for part in torch.split(images, MINI_BATCH)
            if len(part)
        ]
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0)


class ImageSuccess(ZooModel):
    """Rewards frames that show success, as a classifier fitted to labelled frames sees it."""

    Settings = ImageSuccessSettings
    needs_experience = False
    cfg: ImageSuccessSettings
    network: SuccessClassifier

    def make_network(self) -> SuccessClassifier:
        """The classifier from its checkpoint."""
        if self.cfg.checkpoint_path is None:
            raise ConfigError("reward_model.checkpoint_path is missing: it names the fitted classifier")
        scorer = ImageScorer.load(
            self.cfg.checkpoint_path, threshold=self.cfg.reward_threshold, device=str(self.device)
        )
        cfg, contract, cameras = self.cfg, scorer.contract, scorer.model.config.image_keys
        if len(cameras) != 1 or contract.num_frames != 1:
            raise ConfigError(
                f"image_success judges single frames of one camera, the checkpoint looks at "
                f"{contract.num_frames} frames of {list(cameras)}: use a RewardManager"
            )
        if contract.only_at_rest:
            raise ConfigError(
                "the checkpoint judges robots at rest alone, which image_success does not know about: use a "
                "RewardManager"
            )
        if contract.threshold is None and cfg.reward_threshold is None and cfg.reward_type == "binary":
            raise ConfigError("the checkpoint has no threshold: set reward_model.reward_threshold")
        self.obs_key = cameras[0]
        self.mapping = RewardConfig(
            reward_type=cfg.reward_type, success_reward=cfg.success_reward, fail_reward=cfg.fail_reward
        )
        return SuccessClassifier(scorer)

    @property
    def threshold(self) -> float:  # type: ignore[override]
        """Above which a probability counts as success."""
        return self.network.scorer.threshold

    @torch.no_grad()
    def score(self, batch: StepBatch) -> SuccessScores:
        """Probabilities that the frames which the actions led to show success, [*L]."""
        flat = self.checked(batch).flat()
        images = flat.next_obs.round().to(torch.uint8) if flat.frames is None else flat.frames
        prob = checked_values(self.network(images).view(batch.shape), batch, type(self).__name__)
        return SuccessScores(prob_success=prob)

    def checked(self, batch: StepBatch) -> StepBatch:
        """The batch, if it has frames, or observations that are images with values of 0 to 255."""
        images = batch.next_obs if batch.frames is None else batch.frames
        shape = list(images.shape[len(batch.shape) :])
        if len(shape) != 3 or shape[-1] not in (1, 3):
            raise DataError(f"image_success takes images [H, W, C], not observations of shape {shape}")
        batch.check_finite()
        if images.dtype != torch.uint8 and len(batch):
            low, high = float(batch.next_obs.min()), float(batch.next_obs.max())
            if low < 0.0 or high > 255.0 or 0.0 < high <= 1.0:
                raise DataError(f"images must have values of 0 to 255, these have {low:g} to {high:g}")
        return batch.to(self.device)

    def own_state(self) -> dict[str, Any]:
        """The contract: the weights mean little without their calibration and threshold."""
        return {"contract": json.dumps(self.network.scorer.contract.to_dict())}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Score with the weights that were loaded, as their own contract says."""
        scorer = self.network.scorer
        kept = state.get("contract")  # older runs have none: the checkpoint's holds
        contract = scorer.contract if kept is None else Contract.from_dict(json.loads(kept), "the saved run")
        self.network.scorer = ImageScorer(
            self.network.classifier.eval(),
            contract,
            source=scorer.source,
            threshold=self.cfg.reward_threshold,
            device=str(self.device),
        )

    def to_device(self, device: torch.device | str) -> None:
        """Move to another device."""
        super().to_device(device)
        self.network.scorer.to_device(str(device))
