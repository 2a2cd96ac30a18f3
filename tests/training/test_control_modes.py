"""A policy or a demonstration for another control mode is refused, with both named."""

import json
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest

from guerdon.agents.cloning import demonstrations
from guerdon.agents.networks import ObsSpec
from guerdon.agents.registry import make_agent
from guerdon.config import CollectConfig, EnvConfig, LearnerConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.core.types import Episode, control_mode_of, with_control_mode
from guerdon.data.store import StoreWriter
from guerdon.training.checkpoints import load_policy, save_policy
from guerdon.training.collect_policy import saved_policy

SPACES = gym.spaces.Box(-1, 1, (5,), np.float32), gym.spaces.Box(-1, 1, (4,), np.float32)


@pytest.fixture
def saved(tmp_path):
    cfg = LearnerConfig()
    learner = make_agent(cfg, *SPACES, 0)
    env = EnvConfig(env_type="maniskill", id="PickCube-v1", init_params={"control_mode": "pd_ee_delta_pos"})
    place = tmp_path / "policy"
    return save_policy(place, learner, cfg, env, SPACES, 7, {}, control_mode="pd_ee_delta_pos")


def test_a_policy_knows_its_control_mode(saved):
    policy = load_policy(saved)
    policy.check_fits(SPACES, "pd_ee_delta_pos")
    policy.check_fits(SPACES, None)  # an environment that knows one way alone
    with pytest.raises(
        ConfigError, match=r"control_mode pd_ee_delta_pos, but the environment has pd_joint_pos"
    ):
        policy.check_fits(SPACES, "pd_joint_pos")
    seven = gym.spaces.Box(-1, 1, (7,), np.float32)
    with pytest.raises(ConfigError, match=r"acts in \[4\] numbers, but the environment has \[7\] numbers"):
        policy.check_fits((SPACES[0], seven), "pd_ee_delta_pos")
    with pytest.raises(ConfigError, match=r"observes \[5\] numbers, but the environment has \[7\] numbers"):
        policy.check_fits((seven, SPACES[1]), None)


def test_policies_that_were_saved_before_tell_it_by_their_settings(saved):
    file = saved / "policy.json"
    about = json.loads(file.read_text())
    assert about.pop("control_mode") == "pd_ee_delta_pos"
    file.write_text(json.dumps(about))
    assert load_policy(saved).control_mode == "pd_ee_delta_pos"


def test_collecting_with_a_policy_for_another_control_mode(saved):
    cfg = CollectConfig(policy="checkpoint", policy_checkpoint=str(saved))
    env = EnvConfig(env_type="maniskill", id="PickCube-v1", init_params={"control_mode": "pd_joint_pos"})
    with pytest.raises(ConfigError, match=r"pd_ee_delta_pos.*pd_joint_pos"):
        saved_policy(cfg, env, 0)
    assert saved_policy(cfg, replace(env, init_params={}), 0) is not None


def test_demonstrations_know_theirs(tmp_path):
    source = with_control_mode("PickCube-v1", "pd_joint_pos")
    assert control_mode_of(source) == "pd_joint_pos"
    assert control_mode_of(with_control_mode("somewhere", None)) is None
    shown = Episode(
        frames={"base_camera": np.zeros((3, 8, 8, 3), np.uint8)},
        labels=np.ones(3, np.float32),
        success=True,
        actions=np.zeros((3, 4), np.float32),
        states=np.zeros((3, 5), np.float32),
        initial_state=np.zeros(5, np.float32),
        source=source,
    )
    with StoreWriter(tmp_path / "data") as writer:
        writer.add_many([shown])
    spec = ObsSpec(state_size=5)
    for mode in (None, "pd_joint_pos"):
        assert len(demonstrations(tmp_path / "data", spec, mode)[1]) == 3
    with pytest.raises(DataError, match=r"recorded with control_mode pd_joint_pos.*has pd_ee_delta_pos"):
        demonstrations(tmp_path / "data", spec, "pd_ee_delta_pos")
