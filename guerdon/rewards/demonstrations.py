"""Demonstrations of states and actions: reading them in several forms, and writing them in one.

The form of ours is one safetensors file with the parts of `Transitions`, all episodes in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from guerdon.errors import DataError
from guerdon.rewards.transitions import Transitions, from_items
from guerdon.store import safe_pickle
from guerdon.store.atomic import make_directory, write_atomic
from guerdon.types import display_path

SUFFIX = ".safetensors"


def write_demonstrations(path: Path | str, episodes: Sequence[Transitions]) -> None:
    """Write whole episodes, [T] each, to one file, at once or not at all."""
    path = Path(path)
    if path.suffix != SUFFIX:
        raise DataError(
            f"demonstrations are written to a file that ends in {SUFFIX}, not {display_path(path)}"
        )
    rows = Transitions.cat(episodes)
    if not all(bool(each.done[-1]) for each in episodes) or int(rows.done.sum()) != len(episodes):
        raise DataError("demonstrations must be whole episodes: the last step, and no other, ends one")
    content = save({name: part.contiguous() for name, part in rows.parts().items()})
    make_directory(path.parent)
    write_atomic(path, lambda file: file.write(content))


def read_demonstrations(source: Any) -> list[Transitions]:
    """Episodes, [T] each, from a path, a list of dicts, `Transitions`, or a list of episodes in these forms.

    An episode that is cut off at the end of the data is kept; its last step then counts as truncated.
    """
    if isinstance(source, str | Path):
        return _from_file(Path(source))
    if isinstance(source, Transitions):
        return _whole_episodes(source)
    if isinstance(source, Sequence) and source and not isinstance(source[0], dict):
        return [episode for each in source for episode in _whole_episodes(from_items(each))]
    return _whole_episodes(from_items(source))


def _from_file(path: Path) -> list[Transitions]:
    if not path.exists():
        raise DataError(f"there are no demonstrations at {display_path(path)}")
    if path.suffix == SUFFIX:
        try:
            return _whole_episodes(Transitions(**load_file(path)))
        except (SafetensorError, TypeError) as error:
            raise DataError(f"{display_path(path)} holds no demonstrations: {error}") from error
    return read_demonstrations(safe_pickle.load(path))


def _whole_episodes(rows: Transitions) -> list[Transitions]:
    if len(rows.shape) == 1 and len(rows) and not bool(rows.done[-1]):
        truncated = rows.truncated.clone()
        truncated[-1] = True
        rows = replace(rows, truncated=truncated)
    episodes = rows.episodes()
    if not episodes:
        raise DataError("the demonstrations hold no finished episode")
    return episodes


def returns_of(episodes: Sequence[Transitions]) -> torch.Tensor:
    """Sums of the env rewards, float32 [number of episodes]."""
    return torch.stack([each.env_rewards.sum() for each in episodes])
