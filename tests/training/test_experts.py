"""Demonstrations that an expert plays before a run, and DI-engine's own cases in its words."""

import pickle
import time
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from guerdon.config import EnvConfig
from guerdon.core.errors import ConfigError, DataError
from guerdon.rewards import create_reward_model
from guerdon.rewards.zoo.demonstrations import read_demonstrations, returns_of
from guerdon.training.experts import expert_policy, play_expert
from guerdon.training.serial import (
    serial_pipeline_reward_model_offpolicy,
    serial_pipeline_reward_model_onpolicy,
)

CARTPOLE = EnvConfig(id="CartPole-v1", num_envs=4)
SHAPES = {"obs_shape": 4, "action_size": 2}


def scripted(model, episodes=1, noise=None):
    play_expert(model, CARTPOLE, expert="scripted", expert_episodes=episodes, expert_noise=noise, seed=0)


def q_network(head):
    """With the names of DI-engine's DQN."""
    return {
        "encoder.init": nn.Linear(4, 8),
        "encoder.main.0": nn.Linear(8, 6),
        f"{head}.0.0": nn.Linear(6, 6),
        f"{head}.1.0": nn.Linear(6, 2),
    }


def saved_checkpoint(path, layers):
    state = {
        f"{name}.{part}": value for name, each in layers.items() for part, value in each.state_dict().items()
    }
    extra = {"head.V.1.0.weight": torch.zeros(1, 6), "head.V.1.0.bias": torch.zeros(1)}
    torch.save({"model": {**state, **extra}, "last_iter": 100}, path)
    return path


@pytest.mark.parametrize("head", ["head.A", "head.Q"])
def test_a_checkpoint_of_di_engine_acts_as_its_network_does(head, tmp_path):
    layers = q_network(head)
    act = expert_policy(str(saved_checkpoint(tmp_path / "iteration_100.pth.tar", layers)), "CartPole-v1")
    obs = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    values = torch.from_numpy(obs)
    *others, last = layers.values()
    for layer in others:
        values = layer(values).relu()
    assert act(obs).tolist() == last(values).argmax(1).tolist()
    with pytest.raises(DataError, match="observations of 4 numbers, not 3"):
        act(obs[:, :3])


def test_what_is_no_such_checkpoint(tmp_path):
    place = tmp_path / "ckpt.pth.tar"
    for content, reason in (
        ({"weights": 3}, "no `model`"),
        ({"model": {"conv.weight": torch.zeros(3)}}, "has no layers"),
        ({"model": {"encoder.0.weight": torch.zeros(3, 3, 2)}}, "no bias"),
        ({"model": {"encoder.0": torch.zeros(3), "head.A.0": torch.zeros(3)}}, "has no layers"),
    ):
        torch.save(content, place)
        with pytest.raises(DataError, match=reason):
            expert_policy(str(place), "CartPole-v1")
    with pytest.raises(DataError, match="there is no expert at"):
        expert_policy(str(tmp_path / "absent"), "CartPole-v1")
    model = create_reward_model({"type": "gail", **SHAPES})
    with pytest.raises(DataError, match="there is no expert at"):
        play_expert(model, CARTPOLE, expert=tmp_path / "absent", expert_episodes=1, expert_noise=None, seed=0)


def test_a_script_plays_for_gail():
    model = create_reward_model({"type": "gail", **SHAPES, "expert_steps": 700})
    scripted(model, episodes=3)
    assert [len(each) for each in model.experts] == [500, 200]
    assert bool(model.experts[-1].truncated[-1])


def test_t_rex_gets_better_and_worse_episodes():
    model = create_reward_model({"type": "trex", **SHAPES})
    scripted(model, episodes=2)
    returns = returns_of(model.experts)
    assert len(returns) == 10 and returns.max() == 500 and returns.min() < 100


def test_bad_noise_is_refused():
    model = create_reward_model({"type": "gail", **SHAPES})
    with pytest.raises(ConfigError, match="expert_noise"):
        scripted(model, noise=[2.0])


def test_episodes_and_returns_of_di_engine(tmp_path):
    rng = np.random.default_rng(0)
    observed = [[[rng.normal(size=4).astype(np.float32) for _ in range(length)]] for length in (9, 5)]
    (tmp_path / "episodes_data.pkl").write_bytes(pickle.dumps(observed))
    (tmp_path / "learning_returns.pkl").write_bytes(pickle.dumps([[9.0], [5.0]]))
    episodes = read_demonstrations(tmp_path)
    assert [len(each) for each in episodes] == [8, 4] and returns_of(episodes).tolist() == [9.0, 5.0]
    assert np.array_equal(episodes[0].next_obs[0], observed[0][0][1])
    (tmp_path / "learning_returns.pkl").write_bytes(pickle.dumps([[9.0]]))
    with pytest.raises(DataError, match="has 2 episodes, and learning_returns"):
        read_demonstrations(tmp_path)


def test_episodes_that_stand_there_over_and_over_are_refused_at_once(tmp_path):
    """A list of lists that are shared: few bytes, any number of episodes and steps."""
    steps = [np.zeros(3, np.float32)] * 500
    for observed, returns, reason in (
        ([[0] * 5000] * 5000, [[1.0]], "holds 25000000 episodes"),
        ([[steps] * 100_000], [[1.0] * 100_000], "over and over"),
    ):
        (tmp_path / "episodes_data.pkl").write_bytes(pickle.dumps(observed))
        (tmp_path / "learning_returns.pkl").write_bytes(pickle.dumps(returns))
        began = time.process_time()
        with pytest.raises(DataError, match=reason):
            read_demonstrations(tmp_path)
        assert time.process_time() - began < 10.0


# The sections and cases of DI-engine's own test of its entry


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"type": "gail", "input_size": 5, "hidden_size": 64, "learning_rate": 2e-3}, ("gail", (64,), 2e-3)),
        ({"type": "guided_cost", "input_size": 5, "learning_rate": 1e-2}, ("gcl", (64, 64), 1e-2)),
        ({"type": "pwil", "s_size": 4, "a_size": 2, "sample_size": 500}, ("pwil", (64, 64), 1e-3)),
        ({"type": "rnd", "obs_shape": 4, "hidden_size_list": [32, 1]}, ("rnd", (32,), 1e-3)),
    ],
)
def test_a_section_of_di_engine(section, expected):
    model = create_reward_model(section, "cpu", None)
    assert (model.cfg.type, model.cfg.hidden, model.cfg.lr) == expected
    assert model.cfg.obs_size == 4
    assert model.cfg.expert_steps == section.get("sample_size", 0)


class AttributeDict(dict):
    """As EasyDict: a dict whose keys are attributes too, all the way down."""

    def __init__(self, tree):
        super().__init__({key: AttributeDict(v) if isinstance(v, dict) else v for key, v in tree.items()})
        self.__dict__ = self


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"type": "gail", "input_size": 5, "collect_count": 1000, "expert_model_path": "best.pth.tar"},
            {"obs_shape": 4, "expert_steps": 0},
        ),
        (
            {"type": "trex", "obs_shape": 4, "action_shape": 2, "num_trajs": 6, "num_snippets": 600,
             "checkpoint_max": 100, "expert_model_path": "cartpole_dqn_seed0",
             "data_path": "abs data path", "reward_model_path": "abs data path + ./cartpole.params"},
            {"pretrain_updates": 606, "batch_size": 2, "data_path": None, "action_size": 2},
        ),
        (
            {"type": "drex", "obs_shape": 4, "action_shape": 2, "eps_list": [0.0, 0.5, 1.0],
             "num_trajs_per_bin": 20, "bc_path": "bc_path_placeholder",
             "offline_data_path": "offline_data_path_placeholder"},
            {"noise_levels": (0.0, 0.5, 1.0), "episodes_per_level": 20, "data_path": None},
        ),
        (
            {"type": "icm", "obs_shape": 4, "action_shape": 2, "intrinsic_reward_type": "add"},
            {"action_size": 2, "discrete_actions": True},
        ),
    ],
    ids=lambda value: value.get("type", ""),
)  # fmt: skip
def test_a_whole_section_of_a_config_file(section, expected, caplog):
    """With what only the pipelines use, and with the placeholders of DI-engine's files."""
    with caplog.at_level("INFO", "guerdon"):
        model = create_reward_model(AttributeDict(section), "cpu", None)
    assert {key: getattr(model.cfg, key) for key in expected} == expected
    (line,) = caplog.messages
    for key in ("expert_model_path", "intrinsic_reward_type", "collect_count", "checkpoint_max", "bc_path"):
        assert (key in line) == (key in section)
    assert "action_shape" not in line and "input_size" not in line  # these are used


def test_a_misspelt_key_is_still_refused():
    with pytest.raises(ConfigError, match="learning_rat"):
        create_reward_model({"type": "gail", "input_size": 5, "learning_rat": 1.0})


DQN = {
    "exp_name": "cartpole_dqn",
    "env": {"collector_env_num": 8, "collector_episode_num": 2, "evaluator_env_num": 5, "stop_value": 195},
    "policy": {
        "cuda": False,
        "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_size_list": [32, 32], "dueling": True},
        "nstep": 3,
        "discount_factor": 0.97,
        "learn": {"batch_size": 32, "learning_rate": 0.001, "learner": {"learner_num": 1}},
        "collect": {"n_sample": 128, "collector": {"collector_num": 2}},
        "eval": {"evaluator": {"eval_freq": 50}},
        "other": {
            "eps": {"type": "exp", "start": 0.95, "end": 0.1, "decay": 1000},
            "replay_buffer": {"replay_buffer_size": 1000, "enable_track_used_data": False},
            "commander": {"eval_interval": 5},
        },
    },
}
DQN_CREATE = {
    "env": {"type": "cartpole"},
    "env_manager": {"type": "base"},
    "policy": {"type": "dqn_command"},
    "learner": {"type": "base"},
}
PPO = {
    "exp_name": "cartpole_ppo",
    "env": {"collector_env_num": 8, "evaluator_env_num": 5, "n_evaluator_episode": 5, "stop_value": 195},
    "reward_model": {"intrinsic_reward_type": "add", "learning_rate": 1e-3, "batch_size": 32},
    "policy": {
        "model": {"obs_shape": 4, "action_shape": 2, "encoder_hidden_size_list": [32, 32]},
        "learn": {"epoch_per_collect": 2, "batch_size": 64, "learning_rate": 0.001},
        "collect": {"n_sample": 256, "unroll_len": 1, "discount_factor": 0.9, "gae_lambda": 0.95},
    },
}
IMITATION = [
    {"type": "pdeil", "alpha": 0.5, "discrete_action": False, "expert_data_path": "expert_data.pkl"},
    {"type": "gail", "input_size": 5, "hidden_size": 64, "batch_size": 64, "data_path": "."},
    {"type": "pwil", "s_size": 4, "a_size": 2, "sample_size": 500, "expert_data_path": "expert_data.pkl"},
    {
        "type": "red",
        "sample_size": 5000,
        "input_size": 5,
        "hidden_size": 64,
        "update_per_collect": 200,
        "batch_size": 128,
        "expert_data_path": "expert_data.pkl",
    },
]


@pytest.fixture
def expert_data(tmp_path, monkeypatch):
    """DI-engine's `expert_data.pkl` in the working directory."""
    monkeypatch.chdir(tmp_path)
    model = create_reward_model({"type": "gail", **SHAPES})
    scripted(model, episodes=1)
    rows = model.expert_rows
    items = [
        {
            "obs": rows.obs[t],
            "next_obs": rows.next_obs[t],
            "action": rows.actions[t],
            "reward": rows.env_rewards[t : t + 1],
            "done": bool(rows.done[t]),
        }
        for t in range(len(rows))
    ]
    (tmp_path / "expert_data.pkl").write_bytes(pickle.dumps(items))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("section", IMITATION, ids=lambda section: section["type"])
def test_the_imitation_cases(section, expert_data):
    main, create = {**deepcopy(DQN), "reward_model": section}, deepcopy(DQN_CREATE)
    create["reward_model"] = {"type": section["type"]}
    result = serial_pipeline_reward_model_offpolicy((main, create), seed=0, max_train_iter=2)
    assert result.train_iter >= 2 and len(result.reward_model.experts) == 1


def test_the_curiosity_cases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    create = {
        "env": {"type": "cartpole"},
        "policy": {"type": "ppo_offpolicy"},
        "reward_model": {"type": "rnd"},
    }
    result = serial_pipeline_reward_model_onpolicy([deepcopy(PPO), create], seed=0, max_train_iter=2)
    assert result.reward_model.train_iter > 0
    create["reward_model"] = {"type": "icm"}
    result = serial_pipeline_reward_model_offpolicy([deepcopy(PPO), create], seed=0, max_train_iter=2)
    assert result.reward_model.train_iter > 0
