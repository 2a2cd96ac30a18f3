"""Outcome: a policy that never sees the env's reward solves the task, on a reward that was fitted for it."""

import json

import pytest
import torch

from guerdon.cli import main


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_solves_the_task(capsys, tmp_path):
    """As `make demo`, on half the data and with half the steps."""
    torch.set_num_threads(1)
    brief = ["collect.target_success=80", "collect.target_failure=80", "learner.total_steps=48_000"]
    assert main(["demo", "--json", f"runner.output_dir={tmp_path}", *brief]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["stage2"]["val_auc"] > 0.99
    assert summary["stage3"]["episodes"] >= 100
    assert summary["stage3"]["success_rate"] >= 0.9
