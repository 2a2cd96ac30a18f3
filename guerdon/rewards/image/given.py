"""What a reward worker may be given: a config in any form, its `reward` section, or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from guerdon.config import GuerdonConfig, RewardConfig, RewardModelConfig, load_tree
from guerdon.core.errors import ConfigError

RewardGiven: TypeAlias = "GuerdonConfig | RewardConfig | Mapping[str, Any] | str | os.PathLike[str]"
"""A whole config or its `reward` section (dataclass, nested dict or OmegaConf's), or a checkpoint's path."""


def whole_config(given: RewardGiven, who: str) -> GuerdonConfig:
    """The config that `who` was given; what it leaves out has its default."""
    if isinstance(given, GuerdonConfig):
        return given
    if isinstance(given, RewardConfig):
        return replace(GuerdonConfig(), reward=given)
    if isinstance(given, str | os.PathLike):
        return whole_config(RewardConfig(model=RewardModelConfig(checkpoint_path=os.fspath(given))), who)
    if isinstance(given, Mapping):  # plain, or OmegaConf's; the whole config or its section, in any spelling
        return load_tree(given if "reward" in given else {"reward": given})
    raise ConfigError(
        f"{who} takes a RewardConfig, a config as a mapping or the path of a checkpoint, not "
        f"{type(given).__name__}"
    )


def reward_section(given: RewardGiven, who: str) -> RewardConfig:
    """The `reward` section of what `who` was given."""
    return whole_config(given, who).reward
