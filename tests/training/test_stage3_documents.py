"""Commands of RLinf's guides on the embedded environment (`env=tabletop`), shortened.

`test_maniskill_documents.py` runs the others where they belong.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SHORT = [
    "env=tabletop",
    "env.train.num_envs=8",
    "env.eval.num_envs=4",
    "+env.train.init_params.image_size=[24,24]",
    "+env.eval.init_params.image_size=[24,24]",
    "+env.train.init_params.max_episode_steps=20",
    "+env.eval.init_params.max_episode_steps=20",
    "learner.eval_episodes=4",
    "learner.network.hidden=[16]",
    "learner.network.image_features=16",
    "learner.ppo.num_steps=25",
    "learner.ppo.minibatch_size=100",
    "learner.sac.learning_starts=100",
    "learner.sac.batch_size=16",
    "learner.sac.updates_per_step=0.05",
    "learner.sac.buffer_size=2000",
    "learner.total_steps=600",
]


def run(command, cwd):
    environment = {**os.environ}
    environment.pop("EMBODIED_PATH", None)
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def work(tmp_path, quick_commands):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def summary(work):
    (file,) = work.glob("runs/*/*/summary.json")
    return json.loads(file.read_text())


@pytest.mark.slow
def test_first_document_with_python(work, checkpoint):
    command = ["python", "examples/embodiment/train_embodied_agent.py", "--config-path"]
    command += ["examples/embodiment/config/", "--config-name", "maniskill_ppo_cnn", *SHORT]
    learned = [
        "reward.use_reward_model=True",
        f"reward.reward_model.checkpoint_path={checkpoint}",
        "reward.reward_model.reward_type=binary",
    ]
    assert "learned (replace)" in run([*command, *learned], work)
    assert summary(work)["reward"] == "learned (replace)"


def test_env_reward_alone(work):
    run(["bash", "examples/embodiment/run_embodiment.sh", "maniskill_ppo_mlp", *SHORT], work)
    assert summary(work)["reward"] == "env"
