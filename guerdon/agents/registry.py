"""The table of agents: `learner.algorithm` names one of them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from guerdon.agents.agent import AnyAgent
from guerdon.agents.dqn import DQN
from guerdon.agents.networks import ObsSpec
from guerdon.agents.ppo import PPO
from guerdon.agents.sac import SAC
from guerdon.agents.td3 import TD3
from guerdon.config import LearnerConfig
from guerdon.config.schema_learn import AGENT_PLUGINS
from guerdon.core.devices import resolve_device
from guerdon.core.errors import ConfigError, unknown_name
from guerdon.core.plugins import load_plugins

AGENTS: dict[str, type[AnyAgent]] = {"ppo": PPO, "sac": SAC, "td3": TD3, "dqn": DQN}


def agent_class(name: str) -> type[AnyAgent]:
    """The class of an agent, of the table or of a plugin; an unknown name is a `ConfigError`."""
    if name in AGENTS:
        return AGENTS[name]
    plugins = load_plugins(AGENT_PLUGINS)
    if name not in plugins:
        raise ConfigError(unknown_name("learner.algorithm", name, [*AGENTS, *plugins]))
    loaded: type[AnyAgent] = plugins[name].load()
    return loaded


def make_agent(
    cfg: LearnerConfig,
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    seed: int,
    *,
    only_acts: bool = False,
) -> AnyAgent:
    """The agent that `learner.algorithm` names, for the spaces of a single environment.

    Args:
        cfg: the `learner` section.
        observation_space: of a single environment.
        action_space: of a single environment.
        seed: of everything that the agent draws.
        only_acts: a copy that gets its weights from another one (`load_policy`) and never learns.
    """
    agent = agent_class(cfg.algorithm)
    if not isinstance(action_space, agent.action_spaces):
        others = [name for name, other in AGENTS.items() if isinstance(action_space, other.action_spaces)]
        kinds = " or ".join(
            "discrete" if kind is gym.spaces.Discrete else "continuous" for kind in agent.action_spaces
        )
        hint = f"; use {' or '.join(others)}" if others else ""
        raise ConfigError(f"{agent.__name__} needs {kinds} actions, not {action_space}{hint}")
    section = agent.acting_settings(cfg.section) if only_acts else cfg.section
    return agent(
        ObsSpec.of(observation_space),
        action_space,
        section,
        cfg.network,
        seed=seed,
        device=resolve_device(cfg.device, "learner.device"),
    )
