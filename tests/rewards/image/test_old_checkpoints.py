"""Checkpoints of version 0.x, written by the code at commit c51cd02, load and give the scores that they gave.

`folder` (safetensors, isotonic calibration, int8 file) and `file.pt` (RLinf's layout, temperature, two heads)
come from fits of ResNet10s of width 2 to 16x16 frames.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from guerdon.config import RewardConfig, RewardModelConfig
from guerdon.models import load_checkpoint
from guerdon.serve import RewardManager

OLD = Path(__file__).parent / "old_checkpoints"
SCORES = json.loads((OLD / "scores.json").read_text())


@pytest.mark.parametrize("case", SCORES)
def test_scores_are_those_of_the_version_that_wrote_it(case):
    name, precision = case.split()
    model = RewardModelConfig(checkpoint_path=str(OLD / name), precision=precision)
    manager = RewardManager(RewardConfig(model=model))
    frames = {"base_camera": np.load(OLD / "frames.npy")}
    scores, wanted = manager.score(frames), SCORES[case]
    np.testing.assert_allclose(scores.prob_success, wanted["prob_success"], atol=1e-4)
    np.testing.assert_allclose(scores.disagreement, wanted["disagreement"], atol=1e-4)
    assert manager.threshold == pytest.approx(wanted["threshold"])
    assert manager.contract.calibration_map.kind == wanted["calibration"]
    rewards = manager.compute_rewards(frames)
    np.testing.assert_array_equal(rewards == 1.0, np.array(wanted["prob_success"]) > wanted["threshold"])


@pytest.mark.parametrize("name", ["folder", "file.pt"])
def test_logits_and_promises_are_kept(name):
    model, contract, extra = load_checkpoint(OLD / name)
    with torch.no_grad():
        logits = model({"base_camera": np.load(OLD / "frames.npy")})
    np.testing.assert_allclose(logits, SCORES[f"{name} fp32"]["logits"], atol=1e-4, rtol=1e-4)
    assert contract.calibration["threshold"]["target_false_positive_rate"] == 0.01
    assert contract.metrics["auc"] > 0.9
    assert extra.keys() == ({"epoch", "train_loss", "train_acc"} if name == "file.pt" else set())
