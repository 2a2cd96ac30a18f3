"""The data formats: one table of them, and which of them a path holds."""

from __future__ import annotations

import difflib
import logging
from pathlib import Path

from guerdon.core.errors import ConfigError, DataError
from guerdon.core.plugins import Plugin, load_plugins
from guerdon.core.types import display_path
from guerdon.data.formats.base import EpisodeWriter, Format
from guerdon.data.formats.folder import Folder
from guerdon.data.formats.lerobot import LeRobot
from guerdon.data.formats.maniskill_h5 import ManiSkillH5
from guerdon.data.formats.minari_h5 import Minari
from guerdon.data.formats.native import Native
from guerdon.data.formats.npy_trajectory import NpyTrajectory
from guerdon.data.formats.pkl_episode import PklEpisode
from guerdon.data.formats.realworld_pkl import RealworldPkl
from guerdon.data.formats.reward_pt import RewardPt
from guerdon.data.formats.rlinf_episode import RlinfEpisode

__all__ = ["FORMATS", "EpisodeWriter", "Format", "detect_format", "find_format", "get_format"]

FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Native(),
        NpyTrajectory(),
        PklEpisode(),
        RlinfEpisode(),
        RealworldPkl(),
        RewardPt(),
        LeRobot(),
        Minari(),
        ManiSkillH5(),
        Folder(),
    )
}
"""Name -> format. Detection asks them in this order, and then those of plugins."""
PLUGIN_GROUP = "guerdon.formats"
"""Entry points of other distributions: name -> a subclass of `Format`."""

log = logging.getLogger("guerdon")


def get_format(name: str | Format) -> Format:
    """The format of that name: in the table, or of a plugin, which is imported now; a format is itself."""
    if isinstance(name, Format):
        return name
    if name in FORMATS:
        return FORMATS[name]
    plugins = load_plugins(PLUGIN_GROUP)
    if name in plugins:
        return _format_of(plugins[name])
    names = [*FORMATS, *plugins]
    nearest = [known for known in names if name and name in known]
    nearest = nearest or difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise DataError(f"unknown format {name!r}; {hint}known are {', '.join(sorted(names))}")


def _format_of(plugin: Plugin) -> Format:
    cls = plugin.load()
    if not (isinstance(cls, type) and issubclass(cls, Format)):
        raise ConfigError(f"{cls!r} of {plugin.distributions} is no class that derives from Format")
    return cls()


def find_format(path: Path, name: str | Format | None) -> Format:
    """The format of that name, or the one that is detected at `path`."""
    return detect_format(path) if name is None else get_format(name)


def detect_format(path: Path | str) -> Format:
    """The format of the data at `path`, by names and first bytes."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"{display_path(path)} does not exist")
    for each in FORMATS.values():
        if each.detect(path):
            return each
    for plugin in load_plugins(PLUGIN_GROUP).values():
        try:
            each = _format_of(plugin)
        except ConfigError as error:  # a broken plugin hides no other format
            log.warning("%s", error)
            continue
        if each.detect(path):
            return each
    if path.is_file() and path.stat().st_size == 0:
        raise DataError(f"{display_path(path)} is an empty file")
    if path.is_dir() and not any(item.is_file() for item in path.rglob("*")):
        raise DataError(f"{display_path(path)} is a directory without files")
    sought = "; ".join(f"{each.name}: {each.looks_for}" for each in FORMATS.values())
    raise DataError(f"{display_path(path)} holds no known format; looked for {sought}")
