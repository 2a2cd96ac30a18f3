"""Reads RLinf's config files with the groups of their `defaults` lists; `rlinf.py` translates them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from guerdon.config.nested import Tree, merged, put
from guerdon.config.yaml_files import MAX_BYTES, check_file
from guerdon.core.errors import ConfigError
from guerdon.core.types import display_path

log = logging.getLogger("guerdon")

MAX_FILES = 64
"""That a config is composed of."""


def is_rlinf(path: Path) -> bool:
    """Whether a file looks like a config of RLinf's trainings or fits, by the names of its sections."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        text = file.read(MAX_BYTES).decode("utf-8", "replace")
    sections = set(re.findall(r"^([a-z_]+):", text, re.MULTILINE))
    fits = {"runner", "actor", "data"} <= sections and "train_data_paths:" in text
    return fits or {"runner", "actor", "rollout"} <= sections


def read_rlinf(path: Path | str) -> Tree:
    """A file of RLinf with the files of its `defaults` list, composed as Hydra does.

    `group/name@place` is `group/name.yaml` beside the file. Groups that are not there are left out, with a
    notice: they configure engines that Guerdon does not have.

    Raises:
        ConfigError: a file cannot be read, names itself, or names files elsewhere.
    """
    return _composed(Path(path), (), [])


def _composed(path: Path, above: tuple[Path, ...], seen: list[Path]) -> Tree:
    """The settings of `path`, which the files `above` name; `seen` are all files that were read."""
    shown = display_path(path)
    if path in above:
        raise ConfigError(f"{shown} names itself in its `defaults`")
    seen.append(path)
    if len(seen) > MAX_FILES:
        raise ConfigError(f"{display_path(seen[0])} is made of more than {MAX_FILES} files")
    tree = _read(path)
    base: Tree = {}
    absent = []
    entries = tree.pop("defaults", None) or []
    if not isinstance(entries, list):
        raise ConfigError(f"{shown}: `defaults` must be a list, not {repr(entries)[:60]}")
    for entry in entries:
        if isinstance(entry, Mapping):  # `env: name`, or `override hydra/...`
            entry = next((f"{key}/{value}" for key, value in entry.items()), "")
        name, _, place = str(entry).partition("@")
        if name == "_self_" or name.startswith(("override ", "hydra")):
            continue
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise ConfigError(f"{shown} names {name[:60]!r} in its `defaults`, which is not beside it")
        file = path.parent / f"{name}.yaml"
        if not os.path.isfile(file):  # noqa: PTH113
            absent.append(name)
            continue
        part = _composed(file, (*above, path), seen)
        if place and place != "_global_":
            part = _placed(part, place)
        base = merged(base, part)
    if absent:
        log.info("config: RLinf's groups that are not beside the file are left out: %s", ", ".join(absent))
    result: Tree = merged(base, tree)
    return result


def _read(path: Path) -> Tree:
    if not path.is_file():
        raise ConfigError(f"there is no config of RLinf at {display_path(path)}")
    check_file(path)
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (
        yaml.YAMLError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
    ) as error:  # PyYAML lets all of them out
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{display_path(path)} holds a value that is none: {reason}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{display_path(path)} holds no settings")
    return tree


def _placed(part: Tree, place: str) -> Tree:
    """Settings below a dotted path; references to neighbours (`${..name}`) keep their meaning."""
    placed: Tree = {}
    put(placed, place, part)
    return placed
