"""Guerdon: learned rewards for reinforcement learning, and the evidence that they can be trusted.

    import guerdon as gd

    data = gd.collect("guerdon/Tabletop-v0", policy="scripted", successes=50, failures=50, out="data")
    reward = gd.fit_reward(data, epochs=6)
    agent = gd.PPO("guerdon/Tabletop-v0", reward=reward).learn(100_000)

The names of `__all__` are imported on first use: `import guerdon` loads neither torch nor Gymnasium.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from guerdon.api.agents import DQN, PPO, RLPD, SAC, TD3, Agent, load_agent
    from guerdon.api.card import Card
    from guerdon.api.data import Dataset, collect, read
    from guerdon.api.prove import prove
    from guerdon.api.reward import Reward, fit_reward, load_reward
    from guerdon.api.wrap import wrap
    from guerdon.api.zoo import check_reward_model, reward_model

__all__ = [
    "DQN",
    "PPO",
    "RLPD",
    "SAC",
    "TD3",
    "Agent",
    "Card",
    "Dataset",
    "Reward",
    "check_reward_model",
    "collect",
    "fit_reward",
    "load_agent",
    "load_reward",
    "prove",
    "read",
    "reward_model",
    "wrap",
]
_MODULES = {
    "agents": ("DQN", "PPO", "RLPD", "SAC", "TD3", "Agent", "load_agent"),
    "card": ("Card",),
    "data": ("Dataset", "read"),
    "prove": ("prove",),
    "reward": ("Reward", "fit_reward", "load_reward"),
    "wrap": ("wrap",),
    "zoo": ("check_reward_model", "reward_model"),
}
"""Modules of `guerdon.api` and the names that they give."""


def __getattr__(name: str) -> Any:
    """A public name, imported now."""
    if name == "collect":  # also the module of the collecting classes, which can be called
        return import_module("guerdon.collect")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"guerdon.api.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
