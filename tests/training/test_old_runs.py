"""Runs of the version before the move (commit c51cd02) are evaluated, gone on with and reported."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from guerdon.config import load_config
from guerdon.monitoring.report import write_report
from guerdon.training.checkpoints import load_policy
from guerdon.training.trainer import EmbodiedRunner
from tests.training.short_runs import lines

OLD = Path(__file__).parent / "old_runs"
"""`guerdon train` with two environments, hidden=[8] and 512 steps, with PPO and with SAC."""
STEPS = {"ppo": 256, "sac": 512}


@pytest.fixture
def old_run(tmp_path):
    shutil.copytree(OLD, tmp_path / "old")
    return tmp_path / "old"


@pytest.mark.parametrize("algorithm", STEPS)
def test_a_policy_loads_and_acts(old_run, algorithm):
    saved = load_policy(old_run / algorithm)
    assert (saved.step, saved.learner.name) == (STEPS[algorithm], algorithm)
    obs = np.zeros((3, *saved.observation_space.shape), np.float32)
    actions = saved.learner.act(obs, deterministic=True)
    assert actions.shape == (3, 4) and np.isfinite(actions).all()
    assert (actions == saved.learner.act(obs, deterministic=True)).all()


@pytest.mark.parametrize("algorithm", STEPS)
def test_a_run_goes_on_from_its_config(old_run, tmp_path, algorithm):
    """With the settings that it left: every key of its config.yaml is still known."""
    folder = tmp_path / "run"
    folder.mkdir()
    overrides = [
        "learner.total_steps=1024",
        f"runner.resume_dir={old_run / algorithm}",
        f"runner.logger.log_path={folder}",
    ]
    config = load_config("config", overrides, config_path=str(old_run / algorithm))
    summary = EmbodiedRunner(config, folder).run()
    assert summary["env_steps"] == 1024
    rows = lines(folder)
    assert all(row["step"] > STEPS[algorithm] for row in rows) and rows[-1]["eval/episodes"] == 2


def test_a_report_is_written_again(old_run):
    write_report(old_run / "ppo")
    summary = json.loads((old_run / "ppo" / "summary.json").read_text())
    page = (old_run / "ppo" / "report.html").read_text()
    assert summary["algorithm"] in page.lower() and "512" in page
