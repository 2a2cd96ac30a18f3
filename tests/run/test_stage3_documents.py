"""The documents' commands for stages 1 and 3, on the embedded environment (`env=tabletop`) and shortened."""

import json
import os
import subprocess
import sys
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
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    environment.pop("EMBODIED_PATH", None)
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def work(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def summary(work):
    (file,) = work.glob("runs/*/*/summary.json")
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", ["maniskill_ppo_cnn", "maniskill_sac_cnn"])
def test_first_and_second_document(work, checkpoint, name):
    script = ["bash", "examples/embodiment/run_embodiment.sh", name, *SHORT]
    run([*script, "reward.collect_data=True", "reward.use_reward_model=False"], work)
    assert summary(work)["reward"] == "env"
    saved = [*(work / "reward_data" / "positive").iterdir(), *(work / "reward_data" / "negative").iterdir()]
    assert len(saved) >= 16 and saved[0].suffix == ".npy"
    (work / "runs").rename(work / "stage1")
    learned = [
        "reward.use_reward_model=True",
        "reward.collect_data=False",
        f"reward.reward_model.checkpoint_path={checkpoint}",
        "reward.reward_model.reward_type=binary",
    ]
    run([*script, *learned], work)
    assert summary(work)["reward"] == "learned (replace)"


def test_first_document_with_python(work, checkpoint):
    command = [sys.executable, "examples/embodiment/train_embodied_agent.py", "--config-path"]
    command += ["examples/embodiment/config/", "--config-name", "maniskill_ppo_cnn", *SHORT]
    out = run([*command, "reward.use_reward_model=True", f"reward.model.checkpoint_path={checkpoint}"], work)
    assert "learned (replace)" in out


def test_third_document(work, checkpoint):
    script = ["bash", "examples/embodiment/run_embodiment.sh"]
    run([*script, "maniskill_collect_reward_data", *SHORT, "collect.save_dir=data"], work)
    assert list((work / "data").glob("*/episode_*.pkl"))
    (work / "runs").rename(work / "stage1")
    name = "maniskill_ppo_mlp_resnet_reward"
    run([*script, name, *SHORT, f"reward.resnet.checkpoint_path={checkpoint}"], work)
    assert summary(work)["reward"] == "learned (replace)"
    (place,) = work.glob("runs/*/*/checkpoints")
    more = [f"runner.resume_dir={place}", "learner.total_steps=1200", "runner.experiment_name=resumed"]
    run([*script, name, *SHORT, f"reward.resnet.checkpoint_path={checkpoint}", *more], work)
    (resumed,) = work.glob("runs/resumed/*/summary.json")
    assert json.loads(resumed.read_text())["env_steps"] >= 1200


def test_env_reward_alone(work):
    run(["bash", "examples/embodiment/run_embodiment.sh", "maniskill_ppo_mlp", *SHORT], work)
    assert summary(work)["reward"] == "env"
