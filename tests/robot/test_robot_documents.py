"""The real-world document's settings, in its spelling, reach the robot."""

from pathlib import Path

import pytest

from guerdon.config import load_config
from guerdon.core.errors import ConfigError
from guerdon.envs.robot.vector import control_mode, robot_config

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples" / "embodiment" / "config"
DOCUMENTS = ROOT / "tests" / "config" / "documents"
ADDRESS = "cluster.node_groups.0.hardware.configs.0.robot_ip=172.16.0.2"


def load(name, *overrides, path=EXAMPLES):
    return load_config(name, overrides, str(path))


def test_the_recording_block_of_the_document_goes_on_top_of_ours(tmp_path):
    block = (DOCUMENTS / "003_step1_realworld_collect_data.yaml").read_text()
    for name in EXAMPLES.iterdir():
        (tmp_path / name.name).write_text(name.read_text())
    ours = "defaults:\n  - realworld_collect_data\n  - _self_\n"
    for old, new in (
        ("success_hold_steps: 20", "success_hold_steps: 7"),
        ("[0.5, 0.0, 0.1", "[0.4, 0.1, 0.2"),
        ("num_data_episodes: 20", "num_data_episodes: 30"),
    ):
        assert old in block
        block = block.replace(old, new)
    (tmp_path / "pasted.yaml").write_text(ours + block)
    config = load("pasted", ADDRESS, path=tmp_path)
    robot = robot_config(config.env.eval)
    assert (robot.robot_ip, robot.server_url) == ("172.16.0.2", "http://172.16.0.2:5000")
    assert (robot.success_hold_steps, robot.target_ee_pose) == (7, (0.4, 0.1, 0.2, -3.14, 0.0, 0.0))
    assert (config.runner.num_data_episodes, config.collect.format) == (30, "realworld-pkl")
    assert config.env.train.override_cfg == {}  # no robot there, and no address


def test_the_placeholder_is_not_an_address():
    with pytest.raises(ConfigError, match=r"still ROBOT_IP: put it into cluster.node_groups"):
        robot_config(load("realworld_collect_data").env.eval)


def test_an_address_of_the_environment_itself_wins():
    config = load("realworld_collect_data", ADDRESS, "env.eval.override_cfg.robot_ip=10.0.0.9:5001")
    assert robot_config(config.env.eval).server_url == "http://10.0.0.9:5001"


def test_training_block():
    config = load("realworld_peginsertion_rlpd_cnn_async", ADDRESS, "learner.sac.prior_data=data.pkl")
    reward = config.reward
    assert (reward.use_reward_model, reward.reward_mode, reward.combine_mode) == (True, "per_step", "replace")
    assert reward.model.checkpoint_path == "logs/reward_model_realworld/checkpoints/best_model"
    assert (config.asynchronous.enabled, config.learner.algorithm) == (True, "sac")
    for part in (config.env.train, config.env.eval):
        robot = robot_config(part)
        assert robot.robot_ip == "172.16.0.2"
        assert [camera.name for camera in robot.cameras] == ["front_camera", "wrist_camera"]
    recorded = robot_config(load("realworld_collect_data", ADDRESS).env.eval)
    assert (
        control_mode(recorded) == control_mode(robot_config(config.env.train)) == "ee_xyzrz_10mm_50mrad_10hz"
    )
    assert recorded.target_ee_pose == robot_config(config.env.train).target_ee_pose


@pytest.mark.parametrize("script", ["collect_data.sh", "run_realworld_async.sh"])
def test_scripts_are_there(script):
    text = (ROOT / "examples" / "embodiment" / script).read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "guerdon " in text
