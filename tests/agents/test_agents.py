"""The interface of agents and their table: the training code asks no agent for its class."""

import ast
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import guerdon
from guerdon.agents.registry import AGENTS, agent_class, make_agent
from guerdon.config import BCConfig, LearnerConfig, NetworkConfig
from guerdon.core.errors import ConfigError

STATES = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
VECTORS, CHOICES = gym.spaces.Box(-1.0, 1.0, (2,), np.float32), gym.spaces.Discrete(4)
ROOT = Path(guerdon.__file__).parent


def make(name: str, **settings):
    space = VECTORS if gym.spaces.Box in AGENTS[name].action_spaces else CHOICES
    cfg = LearnerConfig(algorithm=name, network=NetworkConfig(hidden=(8,)))
    return make_agent(cfg, STATES, space, 0, **settings), space


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_acts_is_copied_and_is_saved(name):
    obs = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    agent, space = make(name)
    assert agent.name == name and agent.on_policy == (name == "ppo")
    steady = agent.act(obs, deterministic=True)
    assert all(space.contains(action) for action in steady)
    copy, _ = make(name, only_acts=True)
    copy.load_policy(agent.policy_state())
    again, _ = make(name)
    again.load_state_dict(agent.state_dict())
    for other in (copy, again):
        assert np.array_equal(other.act(obs, deterministic=True), steady)
    assert np.array_equal(again.act(obs, progress=0.5), agent.act(obs, progress=0.5))
    agent.check_reference()


def test_a_copy_that_only_acts_has_no_critics_to_spare():
    cfg = LearnerConfig(algorithm="sac", network=NetworkConfig(hidden=(8,)))
    whole, small = (make_agent(cfg, STATES, VECTORS, 0, only_acts=only) for only in (False, True))
    assert len(small.critics.flat) < len(whole.critics.flat)


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_clones_or_says_that_it_does_not(name):
    agent, _ = make(name)
    data = {"state": torch.randn(16, 3)}, torch.zeros(16, 2)
    if name == "dqn":
        with pytest.raises(ConfigError, match="dqn cannot clone"):
            agent.clone(data, BCConfig(epochs=2), seed=0)
    else:
        assert agent.clone(data, BCConfig(epochs=2), seed=0)["num_updates"] == 2


def test_wrong_names_and_actions_are_refused():
    with pytest.raises(ConfigError, match="did you mean 'td3'"):
        agent_class("td4")
    for name, space, hint in (
        ("sac", CHOICES, "SAC needs continuous actions.*use ppo or dqn"),
        ("dqn", VECTORS, "DQN needs discrete actions.*use ppo or sac or td3"),
        ("td3", gym.spaces.MultiBinary(2), "TD3 needs continuous actions"),
    ):
        with pytest.raises(ConfigError, match=hint):
            make_agent(LearnerConfig(algorithm=name), STATES, space, 0)


def test_no_class_of_an_agent_is_named_outside_of_the_agents():
    classes = {agent.__name__ for agent in AGENTS.values()}
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        if place.parts[0] in ("agents", "api") or len(place.parts) == 1:  # the API has classes of these names
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and node.id in classes:
                found.append(f"{place}:{node.lineno} {node.id}")
    assert found == []
