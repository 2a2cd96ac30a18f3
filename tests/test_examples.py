"""The commands of RLinf's reward workflow for stage 2, with fewer epochs and smaller models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from guerdon.config import load_config
from guerdon.data.formats import get_format
from guerdon.data.store import StoreWriter
from guerdon.data.summary import convert
from guerdon.models import load_checkpoint
from tests.fit.synthetic import episode, write_store

ROOT = Path(__file__).parent.parent
SMALL = ["reward.model.width=8", "reward.model.image_size=[3,32,32]", "reward.model.hidden_dim=16"]


def run(command, cwd, code=0):
    environment = {**os.environ}
    environment.pop("EMBODIED_PATH", None)
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result


@pytest.fixture
def work(tmp_path, quick_commands):
    """A directory as a user of the examples has it: `examples/` beside the data."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@pytest.fixture
def trajectories(work):
    convert(write_store(work / "store"), work / "reward_data", "npy-trajectory")
    return work / "reward_data"


@pytest.fixture
def told(tmp_path, monkeypatch):
    """What a script starts: programs in its place print their arguments."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "bin").mkdir()
    for name in ("guerdon", "python"):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def tell(script, *arguments):
        lines = run(["bash", f"examples/{script}", *arguments], tmp_path).stdout.splitlines()
        return [line.removeprefix(f"{tmp_path}/") for line in lines]

    return tell


def test_the_script_of_stage_two_takes_a_name_flags_or_nothing(told):
    script, flags = "embodiment/train_reward_model.sh", ["--positive-dir", "./p", "--epochs", "30"]
    assert told(script, *flags) == ["python", "-m", "guerdon.fit.train_reward_model", *flags]
    fit = ["guerdon", "train-reward", "--config-path", "examples/embodiment/config", "--config-name"]
    more = ["reward.num_epochs=50", "reward.data.positive_dir=./reward_data/positive"]
    assert told(script) == [*fit, "train_reward_model"]
    assert told(script, *more) == [*fit, "train_reward_model", *more]
    assert told(script, "mine", *more) == [*fit, "mine", *more]


def test_the_real_world_script_takes_its_data_from_the_config(told):
    script = "reward/run_reward_training.sh"
    fit = ["guerdon", "train-reward", "--config-path", "examples/reward/config"]
    fit += ["--config-name", "reward_training"]
    assert told(script) == fit
    assert told(script, "runner.max_epochs=2") == [*fit, "runner.max_epochs=2"]
    given = ["runner.max_epochs=2", "--data", "/my data", "runner.save_interval=10"]
    overrides = ["fit.data.path=/my data", "runner.max_epochs=2", "runner.save_interval=10"]
    assert told(script, *given) == [*fit, *overrides]


def test_the_data_of_the_real_world_config(tmp_path):
    """`data_path` in the file itself, as RLinf's page has it edited."""
    text = (ROOT / "examples/reward/config/reward_training.yaml").read_text()
    (tmp_path / "reward_training.yaml").write_text(f"{text}\ndata:\n  data_path: /path/of/mine\n")
    assert load_config("reward_training", [], tmp_path).fit.data.path == "/path/of/mine"


@pytest.mark.slow
def test_first_page(work, trajectories):
    result = run(
        ["bash", "examples/embodiment/train_reward_model.sh", "train_reward_model", "reward.gpu_id=0",
         "reward.global_batch_size=32", "reward.num_epochs=2", "reward.save_interval=5",
         "reward.data.positive_dir=./reward_data/positive", "reward.data.negative_dir=./reward_data/negative",
         "runner.output_dir=results", *SMALL],
        work,
    )  # fmt: skip
    assert "positive: 12 trajectories, 144 frames (label=1: 72, label=0: 72)" in result.stderr
    assert "negative: 12 trajectories, 144 frames (label=1: 0, label=0: 144)" in result.stderr
    place = work / "results" / "reward-model-training" / "checkpoints"
    assert (place / "step_5" / "checkpoint.pt").is_file()
    model, contract, _ = load_checkpoint(place / "best_model")
    assert (model.config.model_type, model.config.arch) == ("binary_classifier", "resnet10")
    assert contract.threshold is not None


@pytest.mark.slow
def test_first_page_with_python(work, trajectories):
    run(
        ["python", "examples/embodiment/main_reward.py", "--config-path", "examples/embodiment/config",
         "--config-name", "train_reward_model", "reward.num_epochs=1", "runner.output_dir=results", *SMALL],
        work,
    )  # fmt: skip
    assert (work / "results/reward-model-training/checkpoints/best_model").is_dir()


@pytest.mark.slow
def test_second_page(work, trajectories):
    torch.manual_seed(0)
    command = [
        "python", "-m", "guerdon.fit.train_reward_model", "--positive-dir", "./reward_data/positive",
        "--negative-dir", "./reward_data/negative", "--output-checkpoint", "./checkpoints/reward_model.pt",
        "--backbone", "resnet10", "--image-key", "base_camera", "--image-size", "3", "32", "32",
        "--batch-size", "128", "--epochs", "2", "--lr", "1e-4", "--hidden-dim", "16",
        "--num-spatial-blocks", "8", "--visualize-positive", "--vis-output-dir", "./positive_samples_vis",
    ]  # fmt: skip
    run(command, work)
    saved = torch.load(work / "checkpoints" / "reward_model.pt", weights_only=True)
    assert {"epoch", "model_state_dict", "optimizer_state_dict", "train_loss", "train_acc"} <= saved.keys()
    pictures = sorted(item.name for item in (work / "positive_samples_vis").iterdir())
    assert len(pictures) == 72
    assert pictures[0] == "positive_000000_frame006.png"
    assert sorted(item.name for item in (work / "checkpoints").iterdir()) == ["reward_model.pt"]
    load_checkpoint(work / "checkpoints" / "reward_model.pt")


def test_the_flags_have_rlinfs_defaults():
    from guerdon.fit.train_reward_model import parser

    values = vars(
        parser().parse_args(["--positive-dir", "p", "--negative-dir", "n", "--output-checkpoint", "o"])
    )
    expected = {
        "pretrained_encoder_path": None,
        "backbone": "resnet10",
        "image_key": "base_camera",
        "image_size": [3, 64, 64],
        "batch_size": 32,
        "epochs": 100,
        "lr": 1e-4,
        "hidden_dim": 256,
        "num_spatial_blocks": 8,
        "visualize_positive": False,
        "vis_output_dir": Path("positive_samples_vis"),
    }
    assert {key: values[key] for key in expected} == expected


@pytest.mark.slow
def test_third_page(work, tmp_path):
    with get_format("pkl-episode").writer(work / "data") as writer:
        writer.add_many([episode(seed, seed % 2 == 0) for seed in range(20)])
    run(
        ["bash", "examples/embodiment/run_embodiment.sh", "maniskill_train_resnet_reward",
         "reward_training.epochs=2",
         f"reward_training.data_path={work}/data", f"reward_training.save_dir={work}/logs/reward_checkpoints",
         "runner.output_dir=runs", *SMALL],
        work,
    )  # fmt: skip
    place = work / "logs" / "reward_checkpoints"
    assert (place / "reward_model_best.pt").is_file()
    model, _, _ = load_checkpoint(place / "best_model.pt")  # the name that stage 3 of that page asks for
    assert model.config.model_type == "resnet_reward"


@pytest.mark.slow
def test_real_world_page(work):
    episodes = [episode(seed, seed % 2 == 0) for seed in range(20)]
    with StoreWriter(work / "collected_data") as writer:
        writer.add_many(episodes)
    run(
        ["bash", "examples/reward/run_reward_training.sh", "--data", work / "collected_data",
         "data.num_samples_per_episode=0", "data.fail_success_ratio=3.0", "actor.global_batch_size=32",
         "actor.micro_batch_size=16", "runner.max_epochs=2", "runner.val_check_interval=10",
         "runner.save_interval=10", "runner.early_stop.patience=10",
         "data.debug_save_dir=logs/training_data_debug_realworld",
         "runner.logger.log_path=logs/reward_model_realworld", *SMALL],
        work,
    )  # fmt: skip
    assert (work / "logs/reward_model_realworld/checkpoints/best_model/model.safetensors").is_file()
    assert (work / "logs/reward_model_realworld/checkpoints/step_10/checkpoint.pt").is_file()
    assert len(list((work / "logs/training_data_debug_realworld/success").glob("*.png"))) > 10


@pytest.mark.slow
def test_a_simulator_that_is_not_there_is_named(work, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")  # a real one
    absent = work / "absent" / "mani_skill"
    absent.mkdir(parents=True)
    (absent / "__init__.py").write_text("raise ImportError('No module named mani_skill')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(absent.parent), os.environ.get("PYTHONPATH", "")]))
    result = run(
        ["bash", "examples/embodiment/run_embodiment.sh", "maniskill_collect_reward_data"], work, code=2
    )
    assert "No module named mani_skill" in result.stderr and "make setup-sim" in result.stderr
