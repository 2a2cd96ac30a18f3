"""How the models of the zoo are saved, loaded and moved to another device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import nn

from guerdon.config import to_plain
from guerdon.core.errors import DataError
from guerdon.core.running_stats import Statistics
from guerdon.rewards.model import BaseRewardModel
from guerdon.rewards.zoo.networks import Adam, RewardNetwork
from guerdon.rewards.zoo.settings import SHAPES


class SavedModel(BaseRewardModel):
    """The part of `ZooModel` that knows what a model consists of."""

    saved: ClassVar[tuple[str, ...]] = ()
    """Attributes that are saved beside network and statistics: tensors, numbers and modules."""
    cfg: Any
    device: torch.device
    network: RewardNetwork
    obs_statistics: Statistics
    optimizer: Adam | None
    generator: torch.Generator
    experience: Any
    train_iter: int
    new_data_count: int

    def state_dict(self) -> dict[str, Any]:
        """All that learning and scoring depend on, demonstrations aside; a copy."""
        return {
            "settings": json.dumps(to_plain(self.cfg)),
            "network": deepcopy(dict(self.network.state_dict())),
            "statistics": deepcopy(dict(self.obs_statistics.state_dict())),
            "optimizer": None if self.optimizer is None else deepcopy(self.optimizer.state_dict()),
            "generator": self.generator.get_state(),
            "experience": self.experience.state_dict(),
            "train_iter": self.train_iter,
            "new_data_count": self.new_data_count,
            **self.own_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict` of a model with the same settings."""
        theirs = json.loads(state["settings"])
        ours = json.loads(json.dumps(to_plain(self.cfg)))
        changed = [key for key in (*SHAPES, "hidden", "type") if theirs.get(key) != ours.get(key)]
        if changed:
            raise DataError(
                f"what was saved is another reward model: reward_model.{changed[0]} is "
                f"{theirs.get(changed[0])}, here {ours.get(changed[0])}"
            )
        try:
            self.network.load_state_dict(state["network"])
            self.obs_statistics.load_state_dict(state["statistics"])
            if self.optimizer is not None:
                self.optimizer.load_state_dict(state["optimizer"])
            self.load_own_state(state)
        except (RuntimeError, KeyError, ValueError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise DataError(f"what was saved does not fit this {type(self).__name__}: {reason}") from error
        self.generator.set_state(state["generator"].cpu())
        self.experience.load_state_dict(state["experience"])
        self.train_iter, self.new_data_count = int(state["train_iter"]), int(state["new_data_count"])

    def own_state(self) -> dict[str, Any]:
        """What a model keeps beside network and statistics: the attributes of `saved`."""
        kept = {name: getattr(self, name) for name in self.saved}
        return {
            name: deepcopy(dict(value.state_dict()) if isinstance(value, nn.Module) else value)
            for name, value in kept.items()
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `own_state` gave."""
        for name in self.saved:
            held = getattr(self, name)
            if isinstance(held, nn.Module):
                held.load_state_dict(state[name])
            else:
                setattr(self, name, _moved(deepcopy(state[name]), self.device))

    def to_device(self, device: torch.device | str) -> None:
        """Move all tensors, modules and transitions among the attributes to another device."""
        self.device = torch.device(device)
        vars(self).update(_moved(vars(self), self.device))
        if self.optimizer is not None:  # loading puts its state where the weights are
            self.optimizer.load_state_dict(self.optimizer.state_dict())


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors, modules, transitions and models on another device, also those in lists and dicts."""
    if isinstance(value, SavedModel):
        value.to_device(device)
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return [_moved(item, device) for item in value] if isinstance(value, list) else value
