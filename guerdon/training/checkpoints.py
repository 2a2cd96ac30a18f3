"""Saved policies: a folder with the learner's whole state and what is needed to build it again."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from guerdon.agents.agent import AnyAgent
from guerdon.agents.networks import ObsSpec, cnn_output_size
from guerdon.agents.registry import make_agent
from guerdon.config import EnvConfig, LearnerConfig, build, to_plain
from guerdon.core.atomic import make_directory, write_atomic
from guerdon.core.devices import device_here
from guerdon.core.errors import ConfigError, DataError, GuerdonError
from guerdon.core.types import display_path
from guerdon.data.files.bounds import one_line, parse_json, read_small
from guerdon.data.files.checksums import check_archive, load_torch
from guerdon.rewards.image.weights import read_safetensors

log = logging.getLogger("guerdon")

DESCRIPTION = "policy.json"
STATE = "state.pt"
LAST, PREVIOUS, BEST = "last", "previous", "best"
"""Where the serial pipelines keep their latest state and the one before; the other runs have `step_N`."""
MAX_SPACE = 1 << 22
"""Numbers in one observation, or choices of an action."""
MAX_LAYERS = 64


@dataclass(frozen=True, kw_only=True)
class SavedPolicy:
    """What `load_policy` finds."""

    folder: Path
    learner: AnyAgent
    config: LearnerConfig
    """The `learner` section of the run."""
    action_space: gym.Space[Any]
    env: EnvConfig
    """The `env.eval` section of the run."""
    step: int
    state: dict[str, Any]
    """Everything else that resuming needs."""
    observation_space: gym.Space[Any]
    control_mode: str | None
    """What its actions mean, where the robot knows several ways and the file tells."""

    def playable_env(self, named: str | None, how: str) -> EnvConfig:
        """The environment to play in: the policy's own, or the one of the id that the user `named`.

        An id of the form `module:Env` imports a module, that is runs its code: whoever wrote the file must
        not decide that. `how` says how the user can name it.
        """
        if named is not None and named != self.env.id:
            return EnvConfig(id=named)
        for asked in (self.env.id, self.env.init_params.get("id")):
            module = asked.rpartition(":")[0] if isinstance(asked, str) else ""
            if module and module.partition(".")[0] != "guerdon" and asked != named:
                raise ConfigError(
                    f"{display_path(self.folder)} holds a policy for {one_line(asked)!r}: that would import "
                    f"the module {one_line(module)!r} and run its code. If you trust it, {how}"
                )
        return self.env

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
            if space_text(own) != space_text(wanted):
                raise ConfigError(
                    f"{place} holds a policy that {name} {space_text(own)}, but the environment has "
                    f"{space_text(wanted)}"
                )


def save_policy(
    folder: Path,
    learner: AnyAgent,
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
    text = json.dumps(about, indent=1)
    write_atomic(folder / DESCRIPTION, lambda file: file.write(text.encode()))  # the copy for people
    content = {"step": step, "learner": learner.state_dict(), "run": state, "description": text}
    write_atomic(folder / STATE, lambda file: torch.save(content, file))
    return folder


def load_policy(place: Path | str, seed: int = 0) -> SavedPolicy:
    """Load a folder that `save_policy` wrote, or the latest or best one of a run's folder.

    Nothing is imported or run for it. A folder whose checksums do not fit is refused.
    """
    folder = find_policy(place)
    shown = display_path(folder)
    content = load_torch(folder / STATE)
    try:
        about = _description(folder, content)
        cfg = build(LearnerConfig, about["learner"], "learner")
        env = _without_imports(build(EnvConfig, about["env"], "env.eval"))
        spaces = space_from_plain(about["observation_space"]), space_from_plain(about["action_space"])
        step, run = int(content["step"]), content["run"]
        mode = about.get("control_mode", env.init_params.get("control_mode"))  # the latter in older files
        if not isinstance(run, dict) or not isinstance(mode, str | None):
            raise DataError("the state of the run is damaged")
        _check_sizes(cfg, spaces, content["learner"])
    except Exception as error:  # hostile bytes can fail in any way
        raise DataError(f"{shown} holds no readable policy: {_reason(error)}") from error
    try:
        learner = make_agent(replace(cfg, device=device_here(cfg.device)), *spaces, seed)
    except Exception as error:  # such as an encoder that is gone
        raise DataError(f"{shown}: its policy cannot be made: {_reason(error)}") from error
    try:
        learner.load_state_dict(content["learner"])
    except Exception as error:
        raise DataError(f"{shown}: the weights do not fit the description: {_reason(error)}") from error
    return SavedPolicy(
        folder=folder,
        learner=learner,
        config=cfg,
        action_space=spaces[1],
        env=env,
        step=step,
        state=run,
        observation_space=spaces[0],
        control_mode=mode,
    )


def _without_imports(env: EnvConfig) -> EnvConfig:
    """The environment of a saved policy; a file must not name a function that is imported and called."""
    if env.label_fn is not None:
        log.info("the policy's env.label_fn=%s is not used: a file imports nothing", one_line(env.label_fn))
    return replace(env, label_fn=None)


def _reason(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else one_line(error, 300)


def _description(folder: Path, content: Any) -> dict[str, Any]:
    """What to build: the text beside the weights, under their checksum; in older files that of the copy."""
    if not isinstance(content, dict):
        raise DataError(f"{STATE} holds a {type(content).__name__}")
    text, path = content.get("description"), folder / DESCRIPTION
    try:
        copied = read_small(path)
    except FileNotFoundError:
        copied = None
    if text is None:
        if copied is None:
            raise DataError(f"there is no {DESCRIPTION}")
        log.info("%s carries no checksum: damage in it would go unnoticed", display_path(path))
        text = copied
    elif not isinstance(text, str):
        raise DataError("the description is no text")
    elif copied is not None and copied.strip() != text.encode().strip():
        log.warning("%s differs from the description inside %s, which is used", display_path(path), STATE)
    about = parse_json(text, DESCRIPTION)
    if not isinstance(about, dict):
        raise DataError("the description is no JSON object")
    return about


def _check_sizes(cfg: LearnerConfig, spaces: tuple[gym.Space[Any], gym.Space[Any]], state: Any) -> None:
    """Refuse networks that are larger than what was saved, before memory is taken for them."""
    spec, actions = ObsSpec.of(spaces[0]), int(gym.spaces.flatdim(spaces[1]))
    features = cfg.network.image_features if spec.images else 0
    layers = [spec.state_size + features, *cfg.network.hidden, actions]
    needed = sum(size_in * size_out for size_in, size_out in pairwise(layers))
    needed *= getattr(cfg.section, "num_critics", 1)
    if spec.images and cfg.network.encoder is None:  # of another encoder only its features are saved
        needed += features * cnn_output_size(spec.images)
    saved = _count_numbers(state)
    if needed > saved:
        raise DataError(f"the description asks for {needed} weights, the file has {saved}")
    if len(layers) > MAX_LAYERS:
        raise DataError(f"the description has {len(layers)} layers")


def _count_numbers(state: Any) -> int:
    """How many numbers the tensors in nested containers have."""
    if isinstance(state, torch.Tensor):
        return state.numel()
    if isinstance(state, dict):
        return sum(map(_count_numbers, state.values()))
    return sum(map(_count_numbers, state)) if isinstance(state, list | tuple) else 0


def find_policy(place: Path | str) -> Path:
    """The folder of a saved policy at `place`: itself, or the latest one of a run."""
    place = Path(place)
    if (place / STATE).is_file():
        return place
    for root in (place, place / "checkpoints"):
        found = _newest_first(root)
        if found:
            return found[0]
    raise DataError(f"{display_path(place)} holds no saved policy (checkpoints/step_N/{STATE})")


def find_sound_policy(place: Path, setting: str) -> Path:
    """The folder to resume from; if it is damaged, the error names the newest sound one before it.

    Args:
        place: what the user gave.
        setting: the name of the setting that took it, for the message.
    """
    folder = find_policy(place)
    try:
        _check_folder(folder)
    except DataError as error:
        found = _newest_first(folder.parent)
        for other in found[found.index(folder) + 1 :] if folder in found else ():
            try:
                _check_folder(other)
            except DataError as further:
                log.warning("%s", further)
                continue
            hint = f"the checkpoint before it is whole: go on with {setting}={display_path(other)}"
            raise DataError(f"{error}; {hint}") from error
        raise DataError(f"{error}; there is no whole checkpoint before it") from error
    return folder


@contextmanager
def readable_state(folder: Path) -> Iterator[None]:
    """Turn whatever a damaged state of a run sets off into one line that names the checkpoint."""
    try:
        yield
    except GuerdonError:
        raise
    except Exception as error:  # hostile bytes can fail in any way
        raise DataError(
            f"{display_path(folder)}: the state of the run is damaged: {_reason(error)}"
        ) from error


def _newest_first(root: Path) -> list[Path]:
    """The saved policies in a folder of checkpoints, that to go on from first."""
    steps = [
        (int(match[1]), item)
        for item in (root.iterdir() if root.is_dir() else ())
        if (match := re.fullmatch(r"step_([0-9]{1,18})", item.name))
    ]
    ordered = [root / LAST, root / PREVIOUS, *(item for _, item in sorted(steps, reverse=True)), root / BEST]
    return [item for item in ordered if (item / STATE).is_file()]


def _check_folder(folder: Path) -> None:
    """Compare the checksums of all files of a checkpoint."""
    for path in sorted(item for item in folder.rglob("*") if item.is_file()):
        if path.suffix in (".pt", ".npz"):
            check_archive(path)
        elif path.suffix == ".safetensors":
            read_safetensors(path)


def space_text(space: gym.Space[Any]) -> str:
    """A space in a few words, equal for spaces that one policy can act in."""
    if isinstance(space, gym.spaces.Dict):
        return ", ".join(f"{name} {space_text(part)}" for name, part in sorted(space.spaces.items()))
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


def space_from_plain(plain: Any, depth: int = 0) -> gym.Space[Any]:
    """The inverse of `space_to_plain`; a `DataError` on anything else."""
    if not isinstance(plain, dict) or depth > 2:
        raise DataError("a space is damaged")
    if plain["kind"] == "dict":
        parts = {str(name): space_from_plain(part, depth + 1) for name, part in plain["spaces"].items()}
        return gym.spaces.Dict(parts)
    if plain["kind"] == "discrete":
        if not 1 <= int(plain["n"]) <= MAX_SPACE:
            raise DataError(f"a space has {one_line(plain['n'])} choices")
        return gym.spaces.Discrete(int(plain["n"]), start=int(plain["start"]))
    shape, dtype = tuple(plain["shape"]), np.dtype(plain["dtype"])
    known = all(type(size) is int and size >= 0 for size in shape)
    if not known or math.prod(shape) > MAX_SPACE or dtype.kind not in "fiub":
        raise DataError(f"a space has the shape {one_line(shape)} of {one_line(dtype)}")
    low, high = (np.broadcast_to(np.array(plain[side]), shape).astype(dtype) for side in ("low", "high"))
    return gym.spaces.Box(low, high, shape, dtype.type)
