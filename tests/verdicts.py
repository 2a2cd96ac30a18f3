"""Really calibrated checkpoints, what they must say of every frame, and who is asked."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from guerdon.config import RewardConfig, RewardModelConfig
from guerdon.core.types import Episode
from guerdon.data.store import StoreWriter
from guerdon.fit.calibrate import calibrate, choose_threshold
from guerdon.fit.metrics import LabelledScores
from guerdon.models import Contract, ResNetRewardModel, save_checkpoint
from guerdon.rewards.relabel import TILT, Calibration
from tests.rewards.image.frames import eager, lively

EPISODES, STEPS, SIZE = 30, 10, 32
CAMERA = "base_camera"
GAP = (4.0, 6.5)
"""No frame has a logit in between, where the threshold is: no decision hangs on a rounding, nor in int8."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint, a data set, and the truth about its frames, computed without the code under test."""

    checkpoint: Path
    data: Path
    frames: np.ndarray
    logits: np.ndarray
    """float64 [N]; what the network says before calibration."""
    threshold: float
    calibration: Calibration

    @property
    def fires(self):
        return by_hand(self.calibration, self.logits) > self.threshold

    def check(self, prob, fires):
        """Assert that these are the verdicts on all frames.

        An isotonic map is steep between two pools: what is allowed for is rounding of the logits.
        """
        low, high = (by_hand(self.calibration, self.logits + off) for off in (-1e-3, 1e-3))
        prob = np.asarray(prob, np.float64)
        assert prob.shape == low.shape and (low - 1e-6 <= prob).all() and (prob <= high + 1e-6).all()
        np.testing.assert_array_equal(np.asarray(fires) > 0.5, self.fires)

    def reward(self, **changes):
        model = RewardModelConfig(checkpoint_path=str(self.checkpoint), **changes.pop("model", {}))
        return RewardConfig(model=model, **changes)


def true_chance(kind, logits):
    """How often such frames show success: the network is far too sure, or wrong in its middle."""
    if kind == "temperature":
        return 1 / (1 + np.exp(-logits / 3.0))
    return np.where(logits < -4, 0.02, np.where(logits < 4, 0.35, 0.98))


def by_hand(calibration, logits):
    """The calibration map, written out a second time."""
    if calibration.kind == "temperature":
        logits = logits / calibration.temperature
    else:
        logits = np.interp(logits, calibration.knots, calibration.values) + TILT * logits
    return 1 / (1 + np.exp(-logits))


def make_case(folder, kind):
    """A network with random weights, calibrated by `calibrate` and `choose_threshold` on labelled frames."""
    torch.manual_seed(3)
    rng = np.random.default_rng(0)
    model = lively(ResNetRewardModel(arch="resnet10", width=8, image_size=(3, SIZE, SIZE), hidden_dim=16))
    tint = rng.integers(0, 200, (2 * EPISODES * STEPS, 1, 1, 3))
    frames = (tint + rng.integers(0, 56, (len(tint), SIZE, SIZE, 3))).astype(np.uint8)
    logits = eager(model, frames)
    with torch.no_grad():  # logits of mean 0 and deviation 6
        last = model.classifiers[0][-1]
        scale = 6.0 / float(logits.std())
        last.weight.mul_(scale)
        last.bias.mul_(scale).sub_(scale * float(logits.mean()))
    logits = eager(model, frames)
    kept = np.flatnonzero((logits < GAP[0]) | (logits > GAP[1]))[: EPISODES * STEPS]
    frames, logits = frames[kept], logits[kept].astype(np.float64)
    labels = (rng.random(len(logits)) < true_chance(kind, logits)).astype(np.float32)
    episode, step = np.divmod(np.arange(len(logits)), STEPS)
    calibration = calibrate(logits, labels, episode, seed=0)
    assert calibration.kind == kind
    scores = LabelledScores(
        prob_success=calibration.apply(logits),
        labels=labels,
        episode=episode,
        step=step,
        success=np.array([labels[episode == number].any() for number in range(EPISODES)]),
    )
    chosen = choose_threshold(scores, target_fpr=0.1, num_resamples=50, seed=0)
    chosen = replace(chosen, threshold=float(by_hand(calibration, np.mean(GAP))))
    contract = Contract.of(
        model,
        frame_sizes={CAMERA: (SIZE, SIZE, 3)},
        threshold=chosen.threshold,
        calibration={"map": calibration.to_dict(), "threshold": chosen.to_dict()},
    )
    with StoreWriter(folder / "data") as writer:
        writer.add_many(
            Episode(
                frames={CAMERA: frames[episode == number]},
                labels=labels[episode == number],
                success=bool(scores.success[number]),
                source=f"{number:06d}",
            )
            for number in range(EPISODES)
        )
    return Case(
        checkpoint=save_checkpoint(folder / "model", model, contract),
        data=folder / "data",
        frames=frames,
        logits=logits,
        threshold=chosen.threshold,
        calibration=calibration,
    )


class Shows(gym.Env):
    """Shows `frames` one after the other, then ends."""

    observation_space = gym.spaces.Dict({CAMERA: gym.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)})
    action_space = gym.spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, frames):
        self.frames, self.number = frames, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = 0
        return {CAMERA: np.zeros((SIZE, SIZE, 3), np.uint8)}, {}

    def step(self, action):
        frame = self.frames[self.number]
        self.number += 1
        return {CAMERA: frame}, 0.0, False, self.number == len(self.frames), {}


def makers(case, count):
    """`count` environments that share the frames, in their order."""
    return [lambda part=part: Shows(part) for part in np.split(case.frames, count)]


def vector(case, count):
    return SyncVectorEnv(makers(case, count), autoreset_mode=AutoresetMode.SAME_STEP)


def read_rows(file):
    """Probabilities and decisions that `reward score` wrote."""
    rows = json.loads(file.read_text())
    return np.array([row["prob_success"] for row in rows]), np.array([row["fires"] for row in rows])
