"""The complete workflow example of RLinf's first two pages, as they print it, on the embedded environment."""

import json
import os
import subprocess

import pytest

from guerdon.models import load_checkpoint
from tests.training.test_stage3_documents import ROOT, SHORT

pytestmark = pytest.mark.slow
COLLECT = """
bash examples/embodiment/run_embodiment.sh maniskill_ppo_cnn \\
    reward.collect_data=True \\
    reward.use_reward_model=False
"""
FIT = """
bash examples/embodiment/train_reward_model.sh train_reward_model \\
    reward.data.positive_dir=./reward_data/positive \\
    reward.data.negative_dir=./reward_data/negative
"""
BARE_FIT = "bash examples/embodiment/train_reward_model.sh"
FLAGS_FIT = """
bash examples/embodiment/train_reward_model.sh \\
    --positive-dir ./reward_data/positive \\
    --negative-dir ./reward_data/negative \\
    --output-checkpoint ./checkpoints/reward_model.pt \\
    --image-key base_camera
"""
TRAIN = """
bash examples/embodiment/run_embodiment.sh maniskill_ppo_cnn \\
    reward.use_reward_model=True \\
    reward.collect_data=False \\
    reward.reward_model.checkpoint_path=./checkpoints/reward_model.pt
"""
SUCCESSES = """
guerdon collect env=tabletop reward.collect_data=True collect.policy=scripted
    reward.data_collection.max_positive_trajectories=12 reward.data_collection.max_negative_trajectories=12
    +env.train.init_params.image_size=[24,24] env.train.num_envs=8
"""
SMALL = ["reward.model.image_size=[3,24,24]", "reward.model.width=8", "reward.model.hidden_dim=16"]
FEW = ["reward.num_epochs=2", *SMALL]
FEW_FLAGS = ["--epochs", "1", "--hidden-dim", "16", "--image-size", "3", "24", "24"]


def run(text, cwd, more=(), code=0):
    """A command of several lines, with shorter settings after it."""
    environment = {**os.environ}
    environment.pop("EMBODIED_PATH", None)
    line = " ".join([text.replace("\\\n", " ").replace("\n", " "), *(f"'{each}'" for each in more)])
    result = subprocess.run(
        ["bash", "-c", line], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result


def latest_run(work):
    return max((work / "runs" / "maniskill_ppo_cnn").iterdir())


@pytest.fixture(scope="module")
def work(tmp_path_factory, quick_commands):
    """After step 1, and with successes of the script, which a policy of 600 steps has none of."""
    place = tmp_path_factory.mktemp("workflow")
    (place / "examples").symlink_to(ROOT / "examples")
    run(COLLECT, place, SHORT)
    assert len(list((place / "reward_data" / "negative").glob("*.npy"))) > 10
    run(SUCCESSES, place)
    assert len(list((place / "reward_data" / "positive").glob("*.npy"))) >= 12
    return place


@pytest.mark.parametrize(
    ("fit", "few"),
    [(FIT, FEW), (BARE_FIT, FEW), (FLAGS_FIT, FEW_FLAGS)],
    ids=["by name", "bare", "with flags"],
)
def test_the_three_steps(work, fit, few):
    file = work / "checkpoints" / "reward_model.pt"
    file.unlink(missing_ok=True)
    refused = run(TRAIN, work, SHORT, code=1)
    assert "checkpoints/reward_model.pt: there is no such checkpoint" in refused.stderr
    run(fit, work, few)
    assert load_checkpoint(file)[0].config.model_type == "binary_classifier"
    assert "reward       learned (replace)" in run(TRAIN, work, SHORT).stdout
    entries = [json.loads(line) for line in (latest_run(work) / "metrics.jsonl").read_text().splitlines()]
    scored = [entry for entry in entries if "reward/fire_rate" in entry]
    assert scored and all(entry["reward/frames_scored"] > 0 for entry in scored)
    for entry in scored:
        assert entry["rollout/rewards"] == pytest.approx(entry["reward/fire_rate"], abs=1e-6)
