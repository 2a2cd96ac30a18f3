"""From frames to calibrated probabilities and rewards: the one way for all who score images.

`ImageScorer` scores frames with a checkpoint's model, calibration and threshold. `RewardManager` is one that
follows the `reward` section; runs, wrappers, cards and workers score through it, `image_success` through
`ImageScorer`. `StreamingScorer` scores frames on a thread while more of them are made.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import torch

from guerdon.config import RewardModelConfig
from guerdon.core.atomic import locked_directory, make_directory
from guerdon.core.devices import resolve_device
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.images import latest_frames
from guerdon.core.types import BoolArray, FloatArray, IntArray, UInt8Array, display_path
from guerdon.data.datasets.pictures import save_picture
from guerdon.envs.observations import images_from
from guerdon.rewards.image.accelerate import RawScores, Scorer, make_scorer
from guerdon.rewards.image.base import RewardModel, pool_features
from guerdon.rewards.image.checkpoint import load_checkpoint
from guerdon.rewards.image.contract import Contract, changed_settings
from guerdon.rewards.image.given import RewardGiven, reward_section
from guerdon.rewards.image.int8 import int8_scorer
from guerdon.rewards.image.int8_file import int8_path, load_int8
from guerdon.rewards.model import SuccessScores
from guerdon.rewards.relabel import fires, map_rewards

log = logging.getLogger("guerdon")

Scores: TypeAlias = SuccessScores
"""What is said of N frames; arrays [N]."""
Frames: TypeAlias = Mapping[str, UInt8Array]
"""camera -> uint8 [N, H, W, C], or stacks of frames [N, k, H, W, C]; may be empty."""
MINI_BATCH = 256
"""Frames that are scored at once."""
COLOUR_FRAMES = 64
"""Batches of so many frames are checked for swapped colours each; fewer may show an odd moment, and only the
first batch is."""
DEBUG_VARIABLE = "DEBUG_IMAGE_SAVE_DIR"


@dataclass(frozen=True, kw_only=True)
class RewardFacts:
    """What others need to know of a loaded reward model."""

    image_keys: tuple[str, ...]
    """The cameras it looks at."""
    threshold: float
    """Above which a probability counts as success in this run."""
    num_members: int
    """Heads of its ensemble."""
    num_frames: int
    """Frames that it scores together."""
    only_at_rest: bool
    """Whether it scores robots that stand still alone."""
    contract: Contract
    version: str
    """The data it was fitted to and where it was loaded from."""
    gives_rewards: bool = False
    """Whether its scores are rewards instead of probabilities: those of a function."""


class ImageScorer:
    """Scores frames with a fitted model, its calibration and its threshold; scoring changes nothing.

    Args:
        model: in eval mode.
        contract: of its checkpoint; knows calibration, threshold and what frames must look like.
        source: where it came from, for messages.
        threshold: above which a probability counts as success; None takes the calibrated one.
        int8: the file beside the checkpoint, for `precision: int8`.
        decides: whether decisions are taken; an int8 file is made for one threshold.
        device: where to compute; `auto`: on a GPU where there is one, unless the model is int8.
    """

    def __init__(
        self,
        model: RewardModel,
        contract: Contract,
        *,
        source: str,
        threshold: float | None = None,
        int8: Path | None = None,
        decides: bool = True,
        device: str = "auto",
    ) -> None:
        broken = [name for name, value in model.state_dict().items() if not bool(value.isfinite().all())]
        if broken:  # a fused ReLU would turn NaN into 0 and hide it
            raise DataError(f"{source}: the weights {broken[0]} are not finite")
        self.model, self.contract, self.source = model, contract, source
        self.image_keys = model.config.image_keys
        self.calibration, self._frame_check = contract.calibration_map, contract.frame_check
        self.threshold = self._threshold(threshold)
        self.facts = RewardFacts(
            image_keys=self.image_keys,
            threshold=self.threshold,
            num_members=model.num_members,
            num_frames=contract.num_frames,
            only_at_rest=contract.only_at_rest,
            contract=contract,
            version=f"{contract.data_hash or 'unknown'}/{source}",
        )
        self._int8, self._decides = int8, decides
        self._device = scoring_device(device, model.config.precision)
        self._scorer: Scorer | None = self._make_scorer(self._device)
        self._checked_colours = False

    @classmethod
    def load(
        cls,
        path: Path | str,
        config: RewardModelConfig | None = None,
        *,
        threshold: float | None = None,
        decides: bool = True,
        device: str = "auto",
    ) -> Self:
        """Load a checkpoint.

        Args:
            path: a file or folder.
            config: the section of the model, with the precision; a setting that differs from both the
                checkpoint and the default was set by hand, and is refused.
            threshold: see the class.
            decides: see the class.
            device: see the class.
        """
        given = set() if config is None else changed_settings(config)
        model, contract, _ = load_checkpoint(path, config, given)
        int8 = int8_path(path) if model.config.precision == "int8" else None
        source = display_path(path)
        return cls(
            model, contract, source=source, threshold=threshold, int8=int8, decides=decides, device=device
        )

    def _threshold(self, given: float | None) -> float:
        if given is not None:
            return float(given)
        if self.contract.threshold is None:
            log.warning("%s has no calibrated threshold; 0.5 is used", self.source)
            return 0.5
        return self.contract.threshold

    def _make_scorer(self, device: str) -> Scorer:
        precision = self.model.config.precision
        if precision != "int8":
            return make_scorer(self.model, precision, device=device)
        assert self._int8 is not None
        threshold_logit = self.calibration.logit_at(self.threshold) if self._decides else None
        return int8_scorer(self.model, load_int8(self._int8, self.model, threshold_logit))

    def to_device(self, device: str) -> Self:
        """Compute elsewhere from now on; returns self."""
        self._device, self._scorer = scoring_device(device, self.model.config.precision), None
        return self

    def check(self, frames: Frames) -> None:
        """Raise a `DataError` if a batch is not of the kind that the model was trained on."""
        count = max((len(images) for images in frames.values()), default=0)
        self._frame_check.check(frames, colours=not self._checked_colours or count >= COLOUR_FRAMES)
        self._checked_colours = True

    def score(self, frames: Frames) -> Scores:
        """Calibrated probabilities of any number of frames, in mini-batches of 256."""
        if not isinstance(frames, Mapping):
            raise DataError(
                f"frames by camera are needed, such as {{{self.image_keys[0]!r}: uint8 [N, H, W, C]}}, "
                f"not {type(frames).__name__}"
            )
        counts = {name: len(each) for name, each in frames.items()}
        if len(set(counts.values())) > 1:
            raise DataError(f"the cameras have different numbers of frames: {counts}")
        return self.score_some(frames, 0, next(iter(counts.values()), 0))

    def score_some(self, frames: Frames, start: int, stop: int) -> Scores:
        """The same of the frames from `start` to `stop`; frames that do not fit fail this request alone."""
        edges = range(start, stop, MINI_BATCH)
        return join_scores(
            [
                self._score_batch(
                    {name: each[at : min(at + MINI_BATCH, stop)] for name, each in frames.items()}
                )
                for at in edges
            ]
        )

    def _score_batch(self, frames: Frames) -> Scores:
        logits, disagreement = self.logits(frames)
        prob = self.calibration.apply(logits)
        return Scores(prob_success=prob, disagreement=disagreement.astype(np.float32))

    def logits(self, frames: Frames) -> RawScores:
        """What the model says of one batch before calibration, and its members' disagreement."""
        self.check(frames)
        if self._scorer is None:
            self._scorer = self._make_scorer(self._device)
        logits, disagreement = self._scorer(frames)
        if not bool(np.isfinite(logits).all()):
            bad = int(np.flatnonzero(~np.isfinite(logits))[0])
            raise DataError(f"the reward model's score of frame {bad} of {len(logits)} is not finite")
        return logits, disagreement

    def fires(self, prob_success: FloatArray) -> BoolArray:
        """Which of these probabilities count as success."""
        return fires(prob_success, self.threshold)

    @torch.no_grad()
    def features(self, frames: Frames) -> FloatArray:
        """Pooled encoder features of frames -> float32 [N, F], comparable with the contract's statistics."""
        pixels = self.model.preprocess(frames).to(next(self.model.parameters()).device)
        pooled: FloatArray = pool_features(self.model.encode(pixels)).float().cpu().numpy()
        return pooled

    # As runs ask, which may have several workers: frames come in parts

    def score_parts(self, parts: Sequence[Frames], counts: Sequence[int]) -> list[Scores]:
        """Scores of each part of the frames, of which there are `counts`."""
        return [self.score_some(part, 0, count) for part, count in zip(parts, counts, strict=True)]

    def features_of(self, parts: Sequence[Frames], rows: Sequence[IntArray]) -> FloatArray:
        """Features of the frames `rows` of each part, float32 [K, F], one part after another."""
        pairs = [(part, some) for part, some in zip(parts, rows, strict=True) if len(some)]
        return np.concatenate([self.features_some(part, some) for part, some in pairs])

    def features_some(self, frames: Frames, rows: IntArray) -> FloatArray:
        """Features of the frames `rows`, float32 [K, F]."""
        return self.features({name: images[rows] for name, images in frames.items()})


class RewardManager(ImageScorer):
    """Loads the reward model that a `reward` section names, and computes learned rewards from images."""

    def __init__(self, cfg: RewardGiven, *, device: str = "auto") -> None:
        """Load `cfg.model.checkpoint_path`.

        Args:
            cfg: the `reward` section, or the path of a checkpoint. The checkpoint knows its model; a setting
                of `cfg.model` that differs from both the checkpoint and the default was set by hand, and is
                refused.
            device: where to compute; `auto`: on a GPU where there is one, unless the model is int8.
        """
        self.cfg = cfg = reward_section(cfg, type(self).__name__)
        path = cfg.model.checkpoint_path
        if path is None:
            raise ConfigError("reward.model.checkpoint_path is not set: which reward model should be used?")
        model, contract, _ = load_checkpoint(path, cfg.model, changed_settings(cfg.model))
        super().__init__(
            model,
            contract,
            source=display_path(path),
            threshold=None if cfg.reward_threshold == "calibrated" else float(cfg.reward_threshold),
            int8=int8_path(path) if model.config.precision == "int8" else None,
            decides=cfg.reward_type == "binary",
            device=device,
        )
        folder = cfg.model.debug_save_dir or os.environ.get(DEBUG_VARIABLE)
        self._debug = None if folder is None else DebugPictures(Path(folder))

    def describe(self) -> RewardFacts:
        """What others need to know, for workers elsewhere."""
        return self.facts

    def use_checkpoint(self, checkpoint: Path | str) -> RewardFacts:
        """Score with another checkpoint from now on; returns what others need to know of it."""
        model = replace(self.cfg.model, checkpoint_path=str(Path(checkpoint).resolve()))
        self.__init__(replace(self.cfg, model=model), device=self._device)  # type: ignore[misc]
        return self.facts

    def images(self, observations: Any) -> dict[str, UInt8Array]:
        """The model's cameras in a batched observation -> uint8 [N, H, W, C] each.

        A model that scores stacks of k frames needs them in the observation, [N, k, H, W, C], oldest first.
        """
        found = images_from(observations, self.image_keys)
        self.check(found)
        return found

    def _score_batch(self, frames: Frames) -> Scores:
        scores = super()._score_batch(frames)
        if self._debug is not None:
            shown = latest_frames(frames[self.image_keys[0]])
            self._debug.save(shown, scores.prob_success, self.threshold)
        return scores

    def compute_rewards(self, observations: Any) -> FloatArray:
        """Learned rewards of a batched observation, however large -> float32 [N]."""
        return map_rewards(self.score(self.images(observations)).prob_success, self.cfg, self.threshold)


def join_scores(parts: Sequence[Scores]) -> Scores:
    """The scores of the frames of all parts, in their order; parts may be missing altogether."""
    none = [np.zeros(0, np.float32)]
    return Scores(
        prob_success=np.concatenate([part.prob_success for part in parts] or none),
        disagreement=np.concatenate([part.disagreement for part in parts] or none),
    )


def scoring_device(device: str, precision: str) -> str:
    """The device that `device` means for a model of this precision: int8 runs on the CPU alone."""
    if precision != "int8":
        return resolve_device(device)
    if str(device) not in ("auto", "cpu"):
        raise ConfigError(f"int8 scoring runs on the CPU alone, not on {device}: use bf16 or fp32")
    return "cpu"


class DebugPictures:
    """Saves scored frames as `resnet_success|resnet_fail/{id:06d}_prob{p:.4f}.png`."""

    def __init__(self, folder: Path) -> None:
        self._folders = {True: folder / "resnet_success", False: folder / "resnet_fail"}
        self._counter = folder / ".next"
        for place in self._folders.values():
            make_directory(place)

    def save(self, frames: UInt8Array, prob_success: FloatArray, threshold: float) -> None:
        """One picture per frame; other managers that write to the folder get other numbers."""
        fired = fires(prob_success, threshold).tolist()
        numbers = range(start := self._claim(len(frames)), start + len(frames))
        for number, frame, prob, success in zip(numbers, frames, prob_success.tolist(), fired, strict=True):
            save_picture(self._folders[success] / f"{number:06d}_prob{prob:.4f}.png", frame)

    def _claim(self, count: int) -> int:
        """The first of so many numbers that nobody else gets."""
        with locked_directory(self._counter.parent):
            try:
                first = int(self._counter.read_text())
            except (FileNotFoundError, ValueError):  # pictures of an earlier version, or none
                first = sum(1 for place in self._folders.values() for _ in place.glob("*.png"))
            self._counter.write_text(str(first + count))
        return first


# While a rollout goes on

REQUEST_MIN_FRAMES = 2 * MINI_BATCH
"""Frames in a request: few, so that scoring begins early and little is left for the end."""


class ScoresSome(Protocol):
    """Whoever scores a part of some frames."""

    def score_some(self, frames: Frames, start: int, stop: int) -> Scores:
        """Scores of the frames from `start` to `stop`."""


class StreamingScorer:
    """Takes the frames of a rollout as they are made; the scores are those of scoring all in the end."""

    def __init__(self, scorer: ScoresSome) -> None:
        """Score with `scorer`, which nobody else may ask meanwhile."""
        self._scorer = scorer
        self._pool = ThreadPoolExecutor(1, "scorer")
        self._parts: list[Future[Scores]] = []
        self._asked = 0

    def reset(self) -> None:
        """A new rollout; what is left of a broken one is dropped."""
        for part in self._parts:
            part.cancel()
        self._parts, self._asked = [], 0

    def ready(self, frames: Frames, count: int, *, last: bool = False) -> None:
        """The first `count` frames are there and stay as they are.

        Requests are whole mini-batches, so that no score depends on when its frame came; the `last` takes
        the rest.
        """
        while self._asked + REQUEST_MIN_FRAMES <= count or (last and self._asked < count):
            stop = min(self._asked + REQUEST_MIN_FRAMES, count)
            self._parts.append(self._pool.submit(self._scorer.score_some, frames, self._asked, stop))
            self._asked = stop

    def scores(self) -> Scores:
        """Of all frames since `reset`; raises what scoring raised."""
        return join_scores([part.result() for part in self._parts])

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)
