"""Results print in a few lines."""

from pathlib import Path

import numpy as np

from guerdon.data.collect.run import CollectResult
from guerdon.fit import FitResult
from guerdon.fit.calibrate import Threshold
from guerdon.models import Contract
from guerdon.rewards.relabel import Calibration


def test_a_fit_fits_a_screen():
    threshold = Threshold(
        threshold=0.7,
        target_false_positive_rate=0.01,
        confidence=0.95,
        false_positive_rate=0.01,
        false_positive_interval=(0.0, 0.03),
        failure_episode_rate=0.01,
        failure_episode_interval=(0.0, 0.03),
        true_positive_rate=0.95,
        true_positive_interval=(0.9, 1.0),
        num_failure_episodes=10,
        num_success_episodes=10,
        enough_data=True,
    )
    contract = Contract(model={}, feature_mean=tuple(np.arange(10_000.0)))
    result = FitResult(
        checkpoint=Path("runs/x/best_model"),
        contract=contract,
        metrics={"auc": 0.99, "num_episodes": 20.0},
        threshold=threshold,
        calibration=Calibration(),
        train_loss=0.1,
        train_accuracy=0.9,
        num_steps=100,
        best_step=80,
        faults=(),
        seconds=12.0,
    )
    lines = str(result).splitlines()
    assert lines[0] == "AUC          0.9900 on 20 held-out episodes"
    assert lines[-2:] == ["checkpoint   runs/x/best_model", "took         100 steps, 12 s"]
    assert len(lines) <= 10 and max(map(len, lines)) <= 100 and len(repr(result)) < 2000


def test_a_collection_fits_a_line():
    result = CollectResult(
        save_dir="data",
        format="native",
        num_success=3,
        num_failure=4,
        target_success=5,
        target_failure=None,
        num_unfinished=0,
        num_dropped=0,
        env_steps=1000,
        seconds=2.0,
        complete=False,
        reason="interrupted",
    )
    assert str(result) == "success 3/5 fail 4 in 2.0 s (500 steps/s) -> data (native)"
