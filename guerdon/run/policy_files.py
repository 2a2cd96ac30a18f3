"""Saved policies: a folder with the learner's whole state and what is needed to build it again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from guerdon.config import EnvConfig, LearnerConfig, build, to_plain
from guerdon.errors import ConfigError, DataError
from guerdon.learn.dqn import DQN
from guerdon.learn.networks import ObsSpec
from guerdon.learn.ppo import PPO
from guerdon.learn.sac import SAC
from guerdon.store import safe_pickle
from guerdon.store.atomic import make_directory, write_atomic
from guerdon.types import display_path

DESCRIPTION = "policy.json"
STATE = "state.pt"
LAST = "last"
"""Where the serial pipelines keep their latest state; the other runs have `step_N`."""

AnyLearner = PPO | SAC | DQN


def make_learner(
    cfg: LearnerConfig, observation_space: gym.Space[Any], action_space: gym.Space[Any], seed: int
) -> AnyLearner:
    """The learner that `learner.algorithm` names, for the spaces of a single environment."""
    spec = ObsSpec.of(observation_space)
    shared: dict[str, Any] = {"seed": seed, "device": cfg.device}
    if cfg.algorithm == "ppo":
        return PPO(spec, action_space, cfg.ppo, cfg.network, **shared)
    if cfg.algorithm == "sac":
        if not isinstance(action_space, gym.spaces.Box):
            raise ConfigError(f"SAC needs continuous actions, not {action_space}; use ppo or dqn")
        return SAC(spec, action_space, cfg.sac, cfg.network, **shared)
    if not isinstance(action_space, gym.spaces.Discrete):
        raise ConfigError(f"DQN needs discrete actions, not {action_space}; use ppo or sac")
    return DQN(spec, action_space, cfg.dqn, cfg.network, **shared)


@dataclass(frozen=True, kw_only=True)
class SavedPolicy:
    """What `load_policy` finds."""

    folder: Path
    learner: AnyLearner
    action_space: gym.Space[Any]
    env: EnvConfig
    """The `env.eval` section of the run."""
    step: int
    state: dict[str, Any]
    """Everything else that resuming needs."""
    observation_space: gym.Space[Any]
    control_mode: str | None
    """What its actions mean, where the robot knows several ways and the file tells."""

    def check_fits(self, spaces: tuple[gym.Space[Any], gym.Space[Any]], control_mode: str | None) -> None:
        """Raise unless the policy can act in an environment with these spaces and this control mode."""
        place = display_path(self.folder)
        if None not in (self.control_mode, control_mode) and self.control_mode != control_mode:
            raise ConfigError(
                f"{place} holds a policy for control_mode {self.control_mode}, but the environment "
                f"has {control_mode}: set init_params.control_mode={self.control_mode} in env.train and "
                "env.eval, or use another checkpoint"
            )
        for name, own, wanted in (
            ("observes", self.observation_space, spaces[0]),
            ("acts in", self.action_space, spaces[1]),
        ):
            if _shape(own) != _shape(wanted):
                raise ConfigError(
                    f"{place} holds a policy that {name} {_shape(own)}, but the environment has "
                    f"{_shape(wanted)}"
                )


def save_policy(
    folder: Path,
    learner: AnyLearner,
    cfg: LearnerConfig,
    env: EnvConfig,
    spaces: tuple[gym.Space[Any], gym.Space[Any]],
    step: int,
    state: dict[str, Any],
    *,
    control_mode: str | None = None,
) -> Path:
    """Save a learner; the state is written last, so that a folder with one is whole."""
    make_directory(folder)
    about = {
        "step": step,
        "learner": to_plain(cfg),
        "env": to_plain(env),
        "control_mode": control_mode,
        "observation_space": space_to_plain(spaces[0]),
        "action_space": space_to_plain(spaces[1]),
    }
    text = json.dumps(about, indent=1).encode()
    write_atomic(folder / DESCRIPTION, lambda file: file.write(text))
    content = {"step": step, "learner": learner.state_dict(), "run": state}
    write_atomic(folder / STATE, lambda file: torch.save(content, file))
    return folder


def load_policy(place: Path | str, seed: int = 0) -> SavedPolicy:
    """Load a folder that `save_policy` wrote, or the latest or best one of a run's folder."""
    folder = find_policy(place)
    shown = display_path(folder)
    try:
        about = json.loads((folder / DESCRIPTION).read_text())
        cfg = build(LearnerConfig, about["learner"], "learner")
        env = build(EnvConfig, about["env"], "env.eval")
        spaces = space_from_plain(about["observation_space"]), space_from_plain(about["action_space"])
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        raise DataError(f"{shown} holds no readable policy: {error}") from error
    content = safe_pickle.load_torch(folder / STATE)
    learner = make_learner(cfg, *spaces, seed)
    try:
        learner.load_state_dict(content["learner"])
    except (KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{shown}: the weights do not fit the description: {error}") from error
    step, state = int(content["step"]), content["run"]
    mode = about.get("control_mode", env.init_params.get("control_mode"))  # the latter in older files
    return SavedPolicy(
        folder=folder,
        learner=learner,
        action_space=spaces[1],
        env=env,
        step=step,
        state=state,
        observation_space=spaces[0],
        control_mode=mode,
    )


def find_policy(place: Path | str) -> Path:
    """The folder of a saved policy at `place`: itself, or the latest one of a run."""
    place = Path(place)
    if (place / STATE).is_file():
        return place
    for root in (place, place / "checkpoints"):
        if (root / LAST / STATE).is_file():
            return root / LAST
        steps = [
            (int(item.name[5:]), item)
            for item in (root.iterdir() if root.is_dir() else ())
            if item.name.startswith("step_") and item.name[5:].isdecimal() and (item / STATE).is_file()
        ]
        if steps:
            return max(steps)[1]
    raise DataError(f"{display_path(place)} holds no saved policy (checkpoints/step_N/{STATE})")


def _shape(space: gym.Space[Any]) -> str:
    """A space in a few words."""
    if isinstance(space, gym.spaces.Dict):
        return ", ".join(f"{name} {_shape(part)}" for name, part in sorted(space.spaces.items()))
    if isinstance(space, gym.spaces.Discrete):
        return f"{space.n} choices"
    return f"{list(space.shape or ())} numbers"


def space_to_plain(space: gym.Space[Any]) -> dict[str, Any]:
    """A Box, Discrete or Dict space as JSON; bounds of a Box only where they are the same for all entries."""
    if isinstance(space, gym.spaces.Dict):
        return {"kind": "dict", "spaces": {name: space_to_plain(part) for name, part in space.spaces.items()}}
    if isinstance(space, gym.spaces.Discrete):
        return {"kind": "discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, gym.spaces.Box):
        flat = len(space.shape) < 3  # images have one bound for all pixels
        low, high = (
            side.astype(np.float64).tolist() if flat else float(side.flat[0])
            for side in (space.low, space.high)
        )
        return {
            "kind": "box",
            "low": low,
            "high": high,
            "shape": list(space.shape),
            "dtype": str(space.dtype),
        }
    raise ConfigError(f"a policy for the space {space} cannot be saved")


def space_from_plain(plain: dict[str, Any]) -> gym.Space[Any]:
    """The inverse of `space_to_plain`."""
    if plain["kind"] == "dict":
        return gym.spaces.Dict({name: space_from_plain(part) for name, part in plain["spaces"].items()})
    if plain["kind"] == "discrete":
        return gym.spaces.Discrete(int(plain["n"]), start=int(plain["start"]))
    shape, dtype = tuple(plain["shape"]), np.dtype(plain["dtype"])
    low, high = (np.broadcast_to(np.array(plain[side]), shape).astype(dtype) for side in ("low", "high"))
    return gym.spaces.Box(low, high, shape, dtype.type)
