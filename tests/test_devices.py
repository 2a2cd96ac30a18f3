"""`device: auto`, and networks that are on the device that was asked for.

There was never a GPU to run on. A stub says that there is one; `meta` tensors have shapes and a device and no
values, and an operation on tensors of two devices fails with them as it does on a GPU.
"""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

import guerdon as gd
from guerdon.agents.dqn import DQN
from guerdon.agents.networks import STATE, ObsSpec
from guerdon.agents.ppo import PPO
from guerdon.agents.registry import make_agent
from guerdon.agents.td3 import TD3
from guerdon.config import (
    DQNConfig,
    EnvConfig,
    LearnerConfig,
    NetworkConfig,
    PPOConfig,
    TD3Config,
    load_config,
)
from guerdon.core.batches import Rollout, TrainBatch
from guerdon.core.devices import resolve_device
from guerdon.core.errors import ConfigError
from guerdon.fit.fit import device_of
from guerdon.fit.process_group import ProcessGroup
from guerdon.rewards import StepBatch, create_reward_model
from guerdon.rewards.image.scorer import scoring_device
from guerdon.training.acting import PolicySpec
from guerdon.training.checkpoints import load_policy, save_policy
from guerdon.training.task_reward import RewardWorker

OBS, ACTIONS = gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2)


@pytest.fixture
def gpu(monkeypatch):
    """Torch says that there are two GPUs; nothing can be put there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_auto_is_the_default_of_learner_and_fit():
    config = load_config("train")
    assert config.learner.device == config.fit.device == "auto"


def test_auto_takes_a_gpu_where_there_is_one(gpu):
    assert resolve_device("auto") == "cuda" and resolve_device("cpu") == "cpu"
    assert resolve_device("cuda:1") == "cuda:1" and resolve_device(torch.device("cuda", 1)) == "cuda:1"
    with pytest.raises(ConfigError, match="'cuda:2', and torch finds GPUs up to cuda:1 here"):
        resolve_device("cuda:2")
    fit = load_config("train_reward", ["fit.gpu_id=1"]).fit
    assert device_of(fit, ProcessGroup()) == torch.device("cuda", 1)


def test_auto_takes_the_cpu_elsewhere(no_gpu):
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ConfigError, match=r"learner\.device is 'cuda:1', and torch finds no GPU here"):
        resolve_device("cuda:1", "learner.device")
    with pytest.raises(ConfigError, match=r"learner\.device must be such as 'cpu'"):
        resolve_device("gpu", "learner.device")


@pytest.mark.parametrize(("device", "expected"), [("auto", "cuda"), ("cuda:1", "cuda"), ("cpu", "cpu")])
def test_copies_of_the_policy_follow_the_learner(gpu, monkeypatch, device, expected):
    asked = []
    monkeypatch.setattr(
        "guerdon.training.acting.make_agent", lambda cfg, *_, **__: asked.append(cfg.device) or cfg
    )
    PolicySpec(cfg=LearnerConfig(algorithm="dqn", device=device), spaces=(OBS, ACTIONS)).make()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the copy's machine has none
    PolicySpec(cfg=LearnerConfig(algorithm="dqn", device=device), spaces=(OBS, ACTIONS)).make()
    assert asked == [expected, "cpu"]


def test_a_policy_that_was_trained_on_a_gpu_is_loaded_without_one(no_gpu, tmp_path):
    cfg = LearnerConfig(algorithm="dqn", network=NetworkConfig(hidden=(8,)))
    agent = make_agent(cfg, OBS, ACTIONS, seed=0)
    elsewhere = replace(cfg, device="cuda:1")
    saved = load_policy(save_policy(tmp_path, agent, elsewhere, EnvConfig(), (OBS, ACTIONS), 5, {}))
    assert saved.learner.device.type == "cpu" and saved.config.device == "cuda:1"
    obs = np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(
        saved.learner.act(obs, deterministic=True), agent.act(obs, deterministic=True)
    )


def test_agents_keep_auto_for_whoever_goes_on_elsewhere(no_gpu):
    with gd.DQN("CartPole-v1") as agent:
        assert agent.runner.config.learner.device == "auto" and agent.runner.learner.device.type == "cpu"


def test_random_numbers_of_a_gpu_become_a_seed_on_the_cpu():
    box = gym.spaces.Box(-1, 1, (2,))
    agents = [
        TD3(ObsSpec.of(OBS), box, TD3Config(), NetworkConfig(hidden=(8,)), seed=seed) for seed in (0, 1)
    ]
    state = agents[0].state_dict()
    state["act_noise"] = torch.arange(16, dtype=torch.uint8)  # as long as the state of a GPU's generator
    obs = np.zeros((3, 4), np.float32)
    for agent in agents:
        agent.load_state_dict(state)
    np.testing.assert_array_equal(agents[0].act(obs), agents[1].act(obs))
    with pytest.raises(RuntimeError, match="RNG state"):  # what is damaged is no seed
        agents[0].load_state_dict({**state, "noise": torch.arange(7, dtype=torch.uint8)})


def meta_batch(count=6):
    def numbers(*shape):
        return torch.zeros(count, *shape, device="meta")

    return TrainBatch(
        obs={STATE: numbers(4)},
        actions=torch.zeros(count, dtype=torch.int64, device="meta"),
        training_rewards=numbers(),
        next_obs={STATE: numbers(4)},
        not_terminated=numbers(),
        discount=numbers(),
    )


def test_dqn_computes_where_it_is():
    agent = DQN(ObsSpec.of(OBS), ACTIONS, DQNConfig(), NetworkConfig(hidden=(8,)), seed=0, device="meta")
    targets = agent.targets(meta_batch())
    assert targets.device.type == "meta" and targets.shape == (6,)


def test_ppo_is_where_it_was_put():
    agent = PPO(ObsSpec.of(OBS), ACTIONS, PPOConfig(), NetworkConfig(hidden=(8,)), seed=0, device="meta")
    assert {part.device.type for part in agent.actor.parameters()} == {"meta"}


def test_ppo_takes_statistics_of_observations_where_it_is(monkeypatch):
    agent = PPO(ObsSpec.of(OBS), ACTIONS, PPOConfig(), NetworkConfig(hidden=(8,)), seed=0, device="meta")
    seen = []
    monkeypatch.setattr(agent, "_minibatches", lambda count: iter(()))
    monkeypatch.setattr(agent, "_statistics", lambda notes: {})
    monkeypatch.setattr(agent.actor, "observe", lambda obs: seen.append(obs[STATE].device.type))
    flat = torch.zeros(3, 2)
    names = ["log_probs", "values", "env_rewards", "training_rewards", "final_values"]
    ends = {name: flat.bool() for name in ("terminated", "truncated", "success")}
    rollout = Rollout(
        obs={STATE: torch.zeros(3, 2, 4)},
        actions=flat.long(),
        last_values=torch.zeros(2),
        elapsed=flat.long(),
        **{name: flat.clone() for name in names},
        **ends,
    )
    agent.update(rollout)
    assert seen == ["meta"]


@pytest.mark.parametrize("kind", ["gail", "rnd", "red"])
def test_reward_models_compute_where_they_are(kind):
    section = {"type": kind, "obs_shape": 4, "action_size": 2, "normalize_obs": False}  # which reads values
    model = create_reward_model(section, "meta")
    assert {part.device.type for part in model.network.parameters()} == {"meta"}
    ends = torch.zeros(6, dtype=torch.bool)
    steps = StepBatch(
        obs=torch.zeros(6, 4),
        actions=torch.from_numpy(np.zeros(6, np.int64)),
        next_obs=torch.zeros(6, 4),
        env_rewards=torch.zeros(6),
        terminated=ends,
        truncated=ends,
    )
    rewards = model.rewards(steps.to("meta"))
    assert rewards.device.type == "meta" and rewards.shape == (6,)


def test_int8_stays_on_the_cpu(gpu):
    assert scoring_device("auto", "int8") == scoring_device("cpu", "int8") == "cpu"
    assert scoring_device(torch.device("cpu"), "int8") == "cpu" and scoring_device("auto", "fp32") == "cuda"
    with pytest.raises(ConfigError, match="CPU alone, not on cuda:1"):
        scoring_device("cuda:1", "int8")


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("auto", "cuda:0")]
)
def test_a_reward_worker_fits_where_it_was_told_to(gpu, monkeypatch, device, expected):
    asked = []

    def fit(config):
        asked.append(device_of(config.fit, ProcessGroup()))
        raise ConfigError("seen")

    monkeypatch.setattr("guerdon.training.task_reward.train_reward", fit)
    worker = RewardWorker({"fit": {"data": {"path": "data"}}, "reward": {}}, device=device)
    with pytest.raises(ConfigError, match="seen"):
        worker.fit()
    assert asked == [torch.device(expected)]


def test_a_reward_worker_refuses_a_device_that_is_not_there(no_gpu):
    with pytest.raises(ConfigError, match="device is 'cuda:1', and torch finds no GPU here"):
        RewardWorker({"reward": {}}, device="cuda:1")
