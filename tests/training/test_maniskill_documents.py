"""The commands of RLinf's guides on the task that they are written for: ManiSkill's PickCube, shortened.

The commands are those of the how-to pages, in their order, each as it stands there with small numbers added.

A policy that has just begun places no cube. So that stage 2 has successes to learn from, the scripted policy
adds some to what stage 1 collected; counters go on, nothing is overwritten.
"""

import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from guerdon.models import load_checkpoint

pytestmark = pytest.mark.sim

ROOT = Path(__file__).parent.parent.parent
PAGES = {name: ROOT / "docs" / "howto" / f"{name}.md" for name in ("ppo-cnn", "sac-cnn", "resnet-reward")}
STEPS = 30
SHORT = [
    "env.train.num_envs=4",
    "env.eval.num_envs=1",
    f"env.train.max_episode_steps={STEPS}",
    "env.eval.max_episode_steps=5",
    "env.train.init_params.image_size=[32,32]",
    "env.eval.init_params.image_size=[32,32]",
    "env.train.init_params.num_processes=1",
    "learner.eval_episodes=1",
    "learner.network.hidden=[16]",
    "learner.network.image_features=16",
    f"learner.ppo.num_steps={STEPS}",
    "learner.ppo.minibatch_size=40",
    "learner.sac.learning_starts=40",
    "learner.sac.batch_size=16",
    "learner.sac.updates_per_step=0.1",
    "learner.sac.buffer_size=500",
    f"learner.total_steps={4 * STEPS}",
    "runner.logger.backends=[]",
]
SMALL = ["reward.model.width=8", "reward.model.image_size=[3,32,32]", "reward.model.hidden_dim=16"]
FEW = ["collect.policy_noise=0.0", "reward.data_collection.max_positive_trajectories=6"]
FEW += [
    "reward.data_collection.max_negative_trajectories=4",
    "collect.target_success=6",
    "collect.target_failure=0",
]
ADDED = {
    "maniskill_train_resnet_reward": [*SMALL, "reward_training.epochs=1"],
    "train_reward_model.sh": [*SMALL, "reward.num_epochs=2", "reward.save_interval=5"],
    "guerdon.fit.train_reward_model": [
        "--epochs",
        "1",
        "--image-size",
        "3",
        "32",
        "32",
        "--hidden-dim",
        "16",
    ],
    "guerdon collect": [*SHORT[:7], *FEW],
    "guerdon data": [],
    "maniskill_": SHORT,
}
"""What shortens a command: the first entry whose name is in it."""
CONTINUOUS = ["reward.reward_type=continuous"]


def commands(page):
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGES[page].read_text(), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line]


def run(work, line, *more, code=0):
    """Run a command of a page with what shortens it and `more` at its end."""
    added = next(added for name, added in ADDED.items() if name in line)
    environment = {**os.environ, "EMBODIED_PATH": str(work / "examples" / "embodiment")}
    command = " ".join([line, *(shlex.quote(str(part)) for part in (*added, *more))])
    result = subprocess.run(
        ["bash", "-c", command], cwd=work, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert result.returncode == code, f"{command}\n{result.stdout}\n{result.stderr}"
    return result


def run_all(work, page):
    """All commands of a page in a folder of their own; what each of them printed."""
    return [
        run(work, line, *(CONTINUOUS if "use_reward_model=True" in line else ())) for line in commands(page)
    ]


def latest(work, name):
    """The summary of the last run of a config, and the lines of its log."""
    return read(max(work.glob(f"runs/{name}/*")))  # they are named by the time of day


def earliest(work, name):
    return read(min(work.glob(f"runs/{name}/*")))


def read(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return json.loads((folder / "summary.json").read_text()), lines


def follows_the_model(lines):
    """Whether the policy was trained on what the model said, and on nothing else."""
    scored = [line for line in lines if "reward/prob_mean" in line]
    assert scored
    for line in scored:
        assert line["reward/frames_scored"] > 0
        assert line["rollout/rewards"] == pytest.approx(line["reward/prob_mean"], rel=1e-4)
        assert line["rollout/rewards"] != pytest.approx(line["rollout/env_rewards"], rel=1e-2)
    return True


@pytest.fixture(scope="module")
def work(tmp_path_factory, simulator_commands):
    """A directory as a user of the examples has it, with examples that may be written to."""
    place = tmp_path_factory.mktemp("documents")
    shutil.copytree(ROOT / "examples", place / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", simulator_commands.path)
        yield place


@pytest.fixture(scope="module")
def first(work):
    """What the commands of the first page printed."""
    return run_all(work, "ppo-cnn")


def test_every_how_to_page_is_run_here():
    script = "\nbash examples/embodiment/run_embodiment.sh"
    assert {*PAGES.values()} == {page for page in (ROOT / "docs").rglob("*.md") if script in page.read_text()}
    assert [len(commands(name)) for name in PAGES] == [6, 3, 5]


def test_the_first_page_leaves_the_prescribed_files(work, first):
    assert "reward       env" in first[0].stdout
    for kind, label, count in (("negative", 0.0, 4), ("positive", 1.0, 6)):
        files = sorted((work / "reward_data" / kind).iterdir())
        assert [file.name for file in files][:count] == [f"{number:06d}.npy" for number in range(count)]
        episode = np.load(files[count - 1], allow_pickle=True).item()
        images = episode["images"]["base_camera"]
        assert images.shape == (STEPS, 3, 32, 32) and images.dtype == np.float32
        assert 0.0 <= images.min() < images.max() <= 1.0 and images.std() > 0.01
        assert episode["labels"].shape == (STEPS,) and episode["labels"].max() == label
    assert "episodes     10 (6 success, 4 failure" in first[2].stdout
    assert f"positive: 6 trajectories, {6 * STEPS} frames" in first[4].stderr
    assert (
        f"negative: 4 trajectories, {4 * STEPS} frames (label=1: 0, label=0: {4 * STEPS})" in first[4].stderr
    )
    place = work / "runs" / "reward-model-training" / "checkpoints"
    assert (place / "step_5" / "checkpoint.pt").is_file()
    model, contract, _ = load_checkpoint(place / "best_model")
    assert model.config.model_type == "binary_classifier" and contract.threshold is not None


def test_the_first_page_trains_on_the_learned_reward(work, first):
    summary, lines = latest(work, "maniskill_ppo_cnn")
    assert summary["reward"] == "learned (replace)" and summary["env"] == "PickCube-v1"
    assert summary["env_steps"] == 4 * STEPS and "reward       learned (replace)" in first[-1].stdout
    assert follows_the_model(lines)


def test_the_second_page(work, first):
    before = len(list((work / "reward_data" / "negative").glob("*.npy")))
    collected, _, _ = run_all(work, "sac-cnn")
    assert "reward       env" in collected.stdout
    played = sum(line.get("env/episodes", 0) for line in earliest(work, "maniskill_sac_cnn")[1])
    assert len(list((work / "reward_data" / "negative").glob("*.npy"))) == before + played > before
    saved = torch.load(work / "checkpoints" / "reward_model.pt", weights_only=True)
    assert {"epoch", "model_state_dict", "optimizer_state_dict", "train_loss", "train_acc"} <= saved.keys()
    assert list((work / "positive_samples_vis").glob("positive_00000?_frame*.png"))
    summary, lines = latest(work, "maniskill_sac_cnn")
    assert summary["algorithm"] == "sac" and summary["reward"] == "learned (replace)"
    assert follows_the_model(lines)


def test_the_third_page(work):
    collect, add, fit, train, resume = commands("resnet-reward")
    run(work, collect)
    place = work / "examples" / "embodiment" / "data"
    files = sorted((place / "failure").iterdir())
    assert [file.name for file in files] == [f"episode_{number:06d}.pkl" for number in range(4)]
    with files[0].open("rb") as file:
        episode = pickle.load(file)
    assert episode["label"] == 0 and episode["success"] is False and len(episode["frames"]) == STEPS
    frame = episode["frames"][-1]
    assert {"obs", "action", "reward", "done", "grasp", "success"} <= set(frame) and frame["done"]
    assert np.asarray(frame["obs"]["states"]).shape == (42,)
    assert np.asarray(frame["obs"]["main_images"]).shape[:2] == (32, 32)
    run(work, add)
    assert len(list((place / "success").iterdir())) == 6
    run(work, fit)
    assert (work / "logs" / "reward_checkpoints" / "reward_model_best.pt").is_file()

    terminal = ["reward.reward_mode=terminal", "reward.reward_type=continuous"]
    run(work, train, *terminal)
    summary, lines = read(work / "runs" / "first")
    assert summary["reward"] == "learned (replace)"
    (line,) = [line for line in lines if "reward/prob_mean" in line]
    assert line["reward/frames_rendered"] == 4.0  # of each environment the end of its one episode
    assert line["rollout/rewards"] == pytest.approx(line["reward/prob_mean"] / STEPS, rel=1e-4)
    more = [*terminal, f"learner.total_steps={8 * STEPS}"]
    reported = run(work, resume, *more).stderr
    assert f"resumed from runs/first at step {4 * STEPS}" in reported
    summary, lines = read(work / "runs" / "more")
    assert [line["step"] for line in lines if "reward/prob_mean" in line] == [8 * STEPS]  # one rollout more

    other = "env.train.init_params.control_mode=pd_joint_delta_pos"
    refused = run(work, resume, *more, other, code=2).stderr
    assert "pd_ee_delta_pos" in refused and "pd_joint_delta_pos" in refused and "Traceback" not in refused
