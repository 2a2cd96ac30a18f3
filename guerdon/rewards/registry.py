"""The one table of reward models, name -> class, and those that other installed distributions offer.

A distribution offers a model by an entry point of the group `guerdon.reward_models`:

    [project.entry-points."guerdon.reward_models"]
    surprise = "my_package.surprise:Surprise"
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import torch

from guerdon.config.di_engine import section_from_di_engine
from guerdon.config.di_engine_names import REWARD_MODELS as DI_ENGINE_NAMES
from guerdon.core.devices import resolve_device
from guerdon.core.errors import ConfigError
from guerdon.core.plugins import load_plugins
from guerdon.rewards.model import BaseRewardModel
from guerdon.rewards.zoo.airl import AIRL
from guerdon.rewards.zoo.base import ZooModel
from guerdon.rewards.zoo.baselines import BASELINES
from guerdon.rewards.zoo.drex import DREX
from guerdon.rewards.zoo.ensemble import Ensemble
from guerdon.rewards.zoo.gail import GAIL
from guerdon.rewards.zoo.gcl import GCL
from guerdon.rewards.zoo.her import HER
from guerdon.rewards.zoo.icm import ICM
from guerdon.rewards.zoo.image_success import ImageSuccess
from guerdon.rewards.zoo.ngu import NGU
from guerdon.rewards.zoo.pdeil import PDEIL
from guerdon.rewards.zoo.pwil import PWIL
from guerdon.rewards.zoo.red import RED
from guerdon.rewards.zoo.rnd import RND
from guerdon.rewards.zoo.trex import TREX

log = logging.getLogger("guerdon")

PLUGIN_GROUP = "guerdon.reward_models"
REWARD_MODELS: dict[str, type[BaseRewardModel]] = {
    "airl": AIRL,
    "drex": DREX,
    "ensemble": Ensemble,
    "gail": GAIL,
    "gcl": GCL,
    "her": HER,
    "icm": ICM,
    "image_success": ImageSuccess,
    "ngu": NGU,
    "pdeil": PDEIL,
    "pwil": PWIL,
    "red": RED,
    "rnd": RND,
    "trex": TREX,
    **BASELINES,
}
"""Names that `reward_model.type` may have, beside those of installed plugins."""


def register_reward_model(name: str, cls: type[BaseRewardModel]) -> None:
    """Make a reward model of yours known as `name`."""
    if name in REWARD_MODELS and REWARD_MODELS[name] is not cls:
        raise ConfigError(f"the name {name!r} is taken by {REWARD_MODELS[name].__name__}: choose another")
    REWARD_MODELS[name] = _checked_class(cls)


def _checked_class(cls: Any) -> type[BaseRewardModel]:
    if not (isinstance(cls, type) and issubclass(cls, BaseRewardModel)):
        raise ConfigError(f"{cls!r} is no class that derives from guerdon.rewards.BaseRewardModel")
    return cls


def reward_model_class(name: str) -> type[BaseRewardModel]:
    """The class of that name: in the table, or of a plugin, which is imported now."""
    if name in REWARD_MODELS:
        return REWARD_MODELS[name]
    plugins = load_plugins(PLUGIN_GROUP)
    if name in plugins:
        return _checked_class(plugins[name].load())
    known = sorted({*REWARD_MODELS, *plugins})
    near = get_close_matches(str(name).lower().replace("-", "_"), known, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    raise ConfigError(f"there is no reward model {name!r} ({remedy})")


def create_reward_model(
    cfg: Any, device: torch.device | str = "cpu", tb_logger: Any = None
) -> BaseRewardModel:
    """Make the reward model that `cfg.type` names; it sees this section of the settings and no other.

    Args:
        cfg: a mapping with `type`, or the model's settings as a dataclass. Keys may be DI-engine's.
        device: where its networks are; `auto`: on a GPU where there is one.
        tb_logger: has `add_scalar(name, value, step)`; None logs nothing.
    """
    if isinstance(cfg, str):
        raise ConfigError(
            f"create_reward_model takes settings, not the text {cfg!r}: {{'type': {cfg!r}, ...}}"
        )
    name = cfg.get("type") if isinstance(cfg, Mapping) else getattr(cfg, "type", None)
    if not name:
        raise ConfigError("reward_model.type is missing: it names the reward model")
    if isinstance(cfg, Mapping):
        cls = REWARD_MODELS.get(DI_ENGINE_NAMES.get(str(name), str(name)))
        known = (
            {item.name for item in fields(cls.Settings)} if cls and issubclass(cls, ZooModel) else set(cfg)
        )
        if not set(cfg) <= known:
            cfg, dropped = section_from_di_engine(cfg)
            name = cfg["type"]
            if dropped:
                log.info("reward_model: DI-engine's keys without meaning here: %s", ", ".join(dropped))
        cfg = section_of(cfg)
    return reward_model_class(name)(cfg, resolve_device(device), tb_logger)  # type: ignore[call-arg]


class Section(dict[str, Any]):
    """A mapping of settings whose keys are attributes too, as plugins of other libraries expect it."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"reward_model.{name} is not set; there are {', '.join(self)}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def section_of(cfg: Mapping[str, Any]) -> Section:
    """A copy of a mapping with attributes, in its nested mappings too."""
    return Section(
        {key: section_of(item) if isinstance(item, Mapping) else item for key, item in cfg.items()}
    )
