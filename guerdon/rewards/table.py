"""The one table of reward models: name -> class."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch

from guerdon.errors import ConfigError
from guerdon.rewards.base import BaseRewardModel
from guerdon.rewards.drex import DREX
from guerdon.rewards.gail import GAIL
from guerdon.rewards.pdeil import PDEIL
from guerdon.rewards.pwil import PWIL
from guerdon.rewards.red import RED
from guerdon.rewards.trex import TREX

REWARD_MODELS: dict[str, type[BaseRewardModel]] = {
    "drex": DREX,
    "gail": GAIL,
    "pdeil": PDEIL,
    "pwil": PWIL,
    "red": RED,
    "trex": TREX,
}
"""Names that `reward_model.type` may have; plugins join through `register_reward_model`."""


def register_reward_model(name: str, cls: type[BaseRewardModel]) -> None:
    """Make a reward model of yours known as `name`."""
    if name in REWARD_MODELS and REWARD_MODELS[name] is not cls:
        raise ConfigError(f"the name {name!r} is taken by {REWARD_MODELS[name].__name__}: choose another")
    if not (isinstance(cls, type) and issubclass(cls, BaseRewardModel)):
        raise ConfigError(f"{cls!r} is no class that derives from guerdon.rewards.BaseRewardModel")
    REWARD_MODELS[name] = cls


def reward_model_class(name: str) -> type[BaseRewardModel]:
    """The class of that name."""
    if name in REWARD_MODELS:
        return REWARD_MODELS[name]
    near = get_close_matches(str(name).lower().replace("-", "_"), REWARD_MODELS, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(REWARD_MODELS))}"
    raise ConfigError(f"there is no reward model {name!r} ({remedy})")


def create_reward_model(
    cfg: Any, device: torch.device | str = "cpu", tb_logger: Any = None
) -> BaseRewardModel:
    """Make the reward model that `cfg.type` names; it sees this section of the settings and no other.

    Args:
        cfg: a mapping with `type`, or the model's settings as a dataclass.
        device: where its networks are.
        tb_logger: has `add_scalar(name, value, step)`; None logs nothing.
    """
    name = cfg.get("type") if isinstance(cfg, Mapping) else getattr(cfg, "type", None)
    if not name:
        raise ConfigError("reward_model.type is missing: it names the reward model")
    section = {**cfg} if type(cfg) is dict else cfg
    return reward_model_class(name)(section, device, tb_logger)  # type: ignore[call-arg]
