"""Every YAML block and every list of overrides of RLinf's reward workflow, unchanged, and what each means.

`documents/` holds the blocks as they stand in these pages, one file each, named after the page and
the section they come from. Each is composed by Hydra from a folder of its own.
"""

from __future__ import annotations

import functools
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from guerdon.config import EnvsConfig, GuerdonConfig, load_config, load_tree

Composed = Callable[[str], GuerdonConfig]
PAGES = Path(__file__).parent / "documents"
EXAMPLES = Path(__file__).parents[2] / "examples" / "embodiment" / "config"

COLLECT_WHILE_TRAINING = {
    "reward.group_name": "RewardGroup",
    "reward.use_reward_model": False,
    "reward.collect_data": True,
    "reward.model.model_type": "binary_classifier",
    "reward.model.arch": "resnet10",
    "reward.model.image_keys": ("base_camera",),
    "reward.model.image_size": (3, 64, 64),
    "reward.data_collection.positive_dir": "./reward_data/positive",
    "reward.data_collection.negative_dir": "./reward_data/negative",
    "reward.data_collection.image_keys": ("base_camera",),
    "reward.data_collection.max_positive_trajectories": 500,
    "reward.data_collection.max_negative_trajectories": 500,
}
TRAIN_ON_THE_CLASSIFIER = {
    "reward.group_name": "RewardGroup",
    "reward.use_reward_model": True,
    "reward.collect_data": False,
    "reward.reward_type": "binary",
    "reward.combine_mode": "replace",
    "reward.reward_threshold": "calibrated",
    "reward.model.model_type": "binary_classifier",
    "reward.model.arch": "resnet10",
    "reward.model.checkpoint_path": "./checkpoints/reward_model.pt",
    "reward.model.image_keys": ("base_camera",),
    "reward.model.image_size": (3, 64, 64),
    "reward.model.hidden_dim": 256,
    "reward.model.num_spatial_blocks": 8,
    "reward.model.pretrained_encoder_path": "./resnet10_pretrained.pt",
    "reward.model.use_pretrain": True,
    "reward.model.freeze_encoder": True,
}

MEANING: dict[str, dict[str, Any]] = {
    "000_stage1_data_collection": COLLECT_WHILE_TRAINING,
    "000_stage2_train_reward_model": {
        "cluster.num_nodes": 1,
        "cluster.component_placement": {"reward": "all"},
        "runner.task_type": "embodied",
        "runner.output_dir": "../results",
        "runner.experiment_name": "reward-model-training",
        "reward.group_name": "RewardGroup",
        "fit.backend": "simple",
        "fit.gpu_id": 0,
        "fit.global_batch_size": 32,
        "fit.epochs": 100,
        "fit.log_interval": 100,
        "fit.save_interval": 1000,
        "fit.save_dir": "../results/reward-model-training/checkpoints",
        "reward.model.model_type": "binary_classifier",
        "reward.model.arch": "resnet10",
        "reward.model.image_keys": ("base_camera",),
        "reward.model.image_size": (3, 64, 64),
        "reward.model.hidden_dim": 256,
        "reward.model.num_spatial_blocks": 8,
        "reward.model.pretrained_encoder_path": None,
        "reward.model.use_pretrain": True,
        "reward.model.freeze_encoder": True,
        "fit.optim.optimizer": "adam",
        "fit.optim.lr": 1e-4,
        "fit.optim.clip_grad": 1.0,
        "fit.data.positive_dir": "./reward_data/positive",
        "fit.data.negative_dir": "./reward_data/negative",
        "fit.data.image_keys": ("base_camera",),
        "fit.data.num_workers": 4,
    },
    "000_stage3_policy_training": TRAIN_ON_THE_CLASSIFIER,
    "001_stage1_data_collection": COLLECT_WHILE_TRAINING,
    "001_stage3_policy_training": TRAIN_ON_THE_CLASSIFIER,
    "001_example_stage1": COLLECT_WHILE_TRAINING,
    "001_example_stage3": TRAIN_ON_THE_CLASSIFIER,
    "002_stage1_maniskill_collect_reward_data": {
        "env.train.reward_render_mode": "always",
        "env.train.init_params": {"obs_mode": "state", "render_mode": "rgb_array"},
        "env.eval.reward_render_mode": "always",
        "reward.use_reward_model": False,
        "collect.enabled": True,
        "collect.save_dir": "/path/to/examples/embodiment/data",
        "collect.target_success": 5000,
        "collect.target_failure": 5000,
        "collect.format": "pkl-episode",
    },
    "002_stage2_maniskill_train_resnet_reward": {
        "fit.enabled": True,
        "fit.only": True,
        "fit.data.path": "/path/to/examples/embodiment/data",
        "fit.epochs": 100,
        "fit.micro_batch_size": 64,
        "fit.global_batch_size": 64,
        "fit.optim.lr": 1e-4,
        "fit.save_dir": "/path/to/examples/embodiment/../../logs/reward_checkpoints",
        "reward.model.model_type": "resnet_reward",
    },
    "002_stage3_maniskill_ppo_mlp_resnet_reward": {
        "cluster.component_placement": {"actor": "0-0", "env": "0-0", "rollout": "0-0", "reward": "0-1"},
        "runner.resume_dir": None,
        "reward.use_reward_model": True,
        "reward.combine_mode": "replace",
        "reward.model.model_type": "resnet_reward",
        "reward.model.arch": "resnet18",
        "reward.model.checkpoint_path": "logs/reward_checkpoints/best_model.pt",
    },
    "003_configuration": {
        "reward.use_reward_model": True,
        "reward.group_name": "RewardGroup",
        "reward.reward_mode": "per_step",
        "reward.success_reward": 1.0,
        "reward.fail_reward": 0.0,
        "reward.reward_threshold": 0.5,
        "reward.combine_mode": "replace",
        "reward.reward_weight": 10.0,
        "reward.env_reward_weight": 0.0,
        "reward.model.model_type": "resnet_reward",
        "reward.model.arch": "resnet18",
        "reward.model.hidden_dim": 256,
        "reward.model.dropout": 0.0,
        "reward.model.image_size": (3, 128, 128),
        "reward.model.normalize": True,
        "reward.model.precision": "bf16",
        "reward.model.checkpoint_path": "path/to/checkpoint/best_model",
        "reward.model.debug_save_dir": None,
    },
    "003_step1_realworld_collect_data": {
        "runner.num_data_episodes": 20,
        "env.eval.override_cfg": {
            "target_ee_pose": [0.5, 0.0, 0.1, -3.14, 0.0, 0.0],
            "success_hold_steps": 20,
        },
    },
    "003_step4_realworld_peginsertion_rlpd_cnn_async": {
        "reward.use_reward_model": True,
        "reward.reward_mode": "per_step",
        "reward.combine_mode": "replace",
        "reward.model.model_type": "resnet_reward",
        "reward.model.checkpoint_path": "logs/reward_model_realworld/checkpoints/best_model",
    },
    "003_debugging": {"reward.model.debug_save_dir": "logs/debug_images"},
}

BLOCKS = sorted(MEANING)


@pytest.fixture(autouse=True)
def embodied_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBODIED_PATH", "/path/to/examples/embodiment")


def at(config: Any, path: str) -> Any:
    for part in path.split("."):
        config = getattr(config, part)
    return config


def values(config: GuerdonConfig, paths: Any) -> dict[str, Any]:
    return {path: at(config, path) for path in paths}


def compose(block: str, tmp_path: Path, *overrides: str) -> GuerdonConfig:
    """The block, composed as the only file of a folder."""
    shutil.copy(PAGES / f"{block}.yaml", tmp_path / "pasted.yaml")
    return load_config("pasted", overrides, config_path=str(tmp_path))


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Composed:
    """Block -> its config; each is composed once."""
    return functools.cache(lambda block: compose(block, tmp_path_factory.mktemp("block")))


def test_every_block_has_a_meaning() -> None:
    assert sorted(file.stem for file in PAGES.iterdir()) == BLOCKS


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_means_what_its_page_says(block: str, composed: Composed) -> None:
    assert values(composed(block), MEANING[block]) == MEANING[block]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_changes_nothing_that_it_does_not_name(block: str, composed: Composed) -> None:
    config = composed(block)
    named = {path.split(".")[0] for path in MEANING[block]}
    untouched = {"seed", "engine", "runner", "cluster", "env", "collect", "reward", "fit"} - named
    if block == "003_step1_realworld_collect_data":
        untouched.remove("cluster")
    assert values(config, untouched) == values(GuerdonConfig(), untouched)


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs_on_the_embedded_environment(block: str, composed: Composed, tmp_path: Path) -> None:
    alone = composed(block)
    config = compose(block, tmp_path, "env=tabletop", "collect.policy=scripted")
    assert config.env.train.id == config.env.eval.id == "guerdon/Tabletop-v0"
    assert config.collect.policy == "scripted"
    assert values(config, MEANING[block]) == MEANING[block]
    assert replace(config, collect=alone.collect) == alone  # Tabletop is the default already


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_pasted_under_a_config_of_ours_wins_over_it(block: str, tmp_path: Path) -> None:
    text = (PAGES / f"{block}.yaml").read_text()
    ours = "defaults:\n  - collect\n  - _self_\n"
    text = text.replace("defaults:\n", ours) if text.startswith("defaults:") else ours + text
    (tmp_path / "pasted.yaml").write_text(text)
    config = load_config("pasted", config_path=str(tmp_path))
    assert values(config, MEANING[block]) == MEANING[block]
    if "collect.save_dir" not in MEANING[block] and "runner.output_dir" not in MEANING[block]:
        assert config.collect.save_dir == "runs/collect/data"


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_read_as_plain_yaml_means_the_same(block: str, composed: Composed) -> None:
    import yaml  # type: ignore[import-untyped]

    plain = yaml.safe_load((PAGES / f"{block}.yaml").read_text())
    assert load_tree(plain) == composed(block)


def test_the_robots_address_is_kept_and_can_be_overridden(tmp_path: Path) -> None:
    (group,) = compose("003_step1_realworld_collect_data", tmp_path).cluster.node_groups
    assert group.hardware is not None
    assert (group.hardware.type, group.hardware.configs) == ("Franka", ({"robot_ip": "ROBOT_IP"},))
    address = "cluster.node_groups.0.hardware.configs.0.robot_ip=172.16.0.2"
    (group,) = compose("003_step1_realworld_collect_data", tmp_path, address).cluster.node_groups
    assert group.hardware is not None
    assert group.hardware.configs == ({"robot_ip": "172.16.0.2"},)


def test_the_debugging_block_goes_with_the_configuration_block(tmp_path: Path) -> None:
    texts = [(PAGES / f"{name}.yaml").read_text() for name in ("003_configuration", "003_debugging")]
    (tmp_path / "pasted.yaml").write_text("\n".join(texts))
    model = load_config("pasted", config_path=str(tmp_path)).reward.model
    assert (model.debug_save_dir, model.precision) == ("logs/debug_images", "bf16")


# RLinf's commands, as they stand. What comes before the config's name is the business of the scripts;
# here it is the overrides that count.
COMMANDS = {
    "000_collect": r"""
   python examples/embodiment/train_embodied_agent.py \
       --config-path examples/embodiment/config/ \
       --config-name maniskill_ppo_cnn \
       reward.collect_data=True \
       reward.use_reward_model=False
""",
    "000_override_fitting": r"""
   bash examples/embodiment/train_reward_model.sh train_reward_model \
       reward.gpu_id=1 \
       reward.global_batch_size=64 \
       reward.num_epochs=50 \
       reward.save_interval=500
""",
    "000_train_on_the_model": r"""
   python examples/embodiment/train_embodied_agent.py \
       --config-path examples/embodiment/config/ \
       --config-name maniskill_ppo_cnn \
       reward.use_reward_model=True \
       reward.collect_data=False \
       reward.reward_model.checkpoint_path="./checkpoints/reward_model.pt"
""",
    "000_workflow_step2": r"""
   bash examples/embodiment/train_reward_model.sh train_reward_model \
       reward.data.positive_dir=./reward_data/positive \
       reward.data.negative_dir=./reward_data/negative
""",
    "000_workflow_step3": r"""
   bash examples/embodiment/run_embodiment.sh maniskill_ppo_cnn \
       reward.use_reward_model=True \
       reward.collect_data=False \
       reward.reward_model.checkpoint_path=./checkpoints/reward_model.pt
""",
    "001_collect": r"""
python examples/embodiment/train_embodied_agent.py \
    --config-path examples/embodiment/config/ \
    --config-name maniskill_ppo_cnn \
    reward.collect_data=True \
    reward.use_reward_model=False
""",
    "001_train_on_the_model": r"""
python examples/embodiment/train_embodied_agent.py \
    --config-path examples/embodiment/config/ \
    --config-name maniskill_ppo_cnn \
    reward.use_reward_model=True \
    reward.collect_data=False \
    reward.reward_model.checkpoint_path="./checkpoints/reward_model.pt"
""",
    "003_model_training": r"""
       bash examples/reward/run_reward_training.sh \
            --data /path/to/collected_data \
            data.num_samples_per_episode=0 \
            data.fail_success_ratio=3.0 \
            actor.global_batch_size=32 \
            actor.micro_batch_size=16 \
            runner.max_epochs=100 \
            runner.val_check_interval=10 \
            runner.save_interval=10 \
            runner.early_stop.patience=10 \
            data.debug_save_dir="logs/training_data_debug_realworld" \
            runner.logger.log_path="logs/reward_model_realworld"
""",
}


def overrides_of(command: str) -> list[str]:
    return [word for word in shlex.split(COMMANDS[command].replace("\\\n", " ")) if "=" in word]


@pytest.mark.parametrize("command", ["000_collect", "001_collect"])
def test_the_collection_overrides(command: str) -> None:
    config = load_config(None, overrides_of(command))
    assert (config.reward.collect_data, config.reward.use_reward_model) == (True, False)


def test_the_fitting_overrides_on_rlinfs_config_and_on_ours(tmp_path: Path) -> None:
    overrides = overrides_of("000_override_fitting")
    theirs = compose("000_stage2_train_reward_model", tmp_path, *overrides)
    ours = load_config("train_reward_model", overrides, config_path=str(EXAMPLES))
    for config in (theirs, ours):
        fit = config.fit
        assert (fit.gpu_id, fit.global_batch_size, fit.epochs, fit.save_interval) == (1, 64, 50, 500)
        assert config.reward.model.arch == "resnet10"


def test_the_fitting_data_overrides_on_our_config() -> None:
    fit = load_config("train_reward_model", overrides_of("000_workflow_step2"), config_path=str(EXAMPLES)).fit
    assert (fit.data.positive_dir, fit.data.negative_dir) == (
        "./reward_data/positive",
        "./reward_data/negative",
    )


@pytest.mark.parametrize(
    "command", ["000_train_on_the_model", "000_workflow_step3", "001_train_on_the_model"]
)
def test_the_policy_training_overrides_switch_the_collection_config_over(
    command: str, tmp_path: Path
) -> None:
    config = compose("000_stage1_data_collection", tmp_path, *overrides_of(command))
    assert (config.reward.use_reward_model, config.reward.collect_data) == (True, False)
    assert config.reward.model.checkpoint_path == "./checkpoints/reward_model.pt"
    assert config.reward.model.model_type == "binary_classifier"
    assert config.reward.model.image_size == (3, 64, 64)


@pytest.mark.parametrize("name", [None, "maniskill_train_resnet_reward"])
def test_the_real_world_training_overrides(name: str | None) -> None:
    overrides = [*overrides_of("003_model_training"), "fit.data.path=/path/to/collected_data"]
    config = load_config(name, overrides, config_path=str(EXAMPLES))
    expected = {
        "fit.data.path": "/path/to/collected_data",
        "fit.data.num_samples_per_episode": 0,
        "fit.data.fail_success_ratio": 3.0,
        "fit.global_batch_size": 32,
        "fit.micro_batch_size": 16,
        "fit.epochs": 100,
        "fit.val_check_interval": 10,
        "fit.save_interval": 10,
        "fit.early_stop.patience": 10,
        "fit.data.debug_save_dir": "logs/training_data_debug_realworld",
        "runner.logger.log_path": "logs/reward_model_realworld",
    }
    assert values(config, expected) == expected


def test_the_troubleshooting_settings(tmp_path: Path) -> None:
    remedies = ["reward.reward_mode=terminal", "reward.reward_threshold=0.6", "reward.fail_reward=0.0"]
    reward = compose("003_configuration", tmp_path, *remedies).reward
    assert (reward.reward_mode, reward.reward_threshold, reward.fail_reward) == ("terminal", 0.6, 0.0)


def test_an_environment_block_for_maniskill_moves_to_tabletop(tmp_path: Path) -> None:
    text = (PAGES / "002_stage1_maniskill_collect_reward_data.yaml").read_text()
    (tmp_path / "pasted.yaml").write_text("defaults:\n  - env: maniskill_pickcube\n" + text)
    maniskill = load_config("pasted", config_path=str(tmp_path)).env.train
    assert maniskill.id == "PickCube-v1"
    assert maniskill.init_params["control_mode"] == "pd_ee_delta_pos"
    envs = load_config("pasted", ["env=tabletop"], config_path=str(tmp_path)).env
    assert envs.train.id == "guerdon/Tabletop-v0"
    assert envs.train.init_params == {"obs_mode": "state", "render_mode": "rgb_array"}
    assert envs.eval == EnvsConfig().eval
