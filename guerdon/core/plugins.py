"""Plugins: objects that other installed distributions offer under an entry-point group of Guerdon.

A distribution offers one in its `pyproject.toml`:

    [project.entry-points."guerdon.envs"]
    my_simulator = "my_package.envs:make_vector_env"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any

from guerdon.core.errors import ConfigError, unknown_name


@dataclass(frozen=True)
class Plugin:
    """A name under an entry-point group; its module is imported by `load`, not before."""

    name: str
    entries: tuple[EntryPoint, ...]
    """More than one if several distributions offer the same name; such a plugin cannot be loaded."""

    @property
    def distributions(self) -> str:
        """The distributions that offer it, for messages."""
        return ", ".join(entry.dist.name if entry.dist else entry.value for entry in self.entries)

    def load(self) -> Any:
        """Import the object; ConfigError, with the name of the distribution, if that fails."""
        what = f"plugin {self.name!r} ({self.entries[0].group})"
        if len(self.entries) > 1:
            raise ConfigError(f"{what} is offered by several distributions: {self.distributions}; keep one")
        try:
            return self.entries[0].load()
        except Exception as error:  # whatever a foreign module raises while it is imported
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{what} of {self.distributions} cannot be loaded: {reason}") from error


def load_plugins(group: str) -> dict[str, Plugin]:
    """Name -> plugin for all that is installed under an entry-point group; imports none of them.

    Reading the metadata of all distributions takes milliseconds: look into built-in tables first.
    """
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return {name: Plugin(name, entries) for name, entries in sorted(found.items())}


def load_named(what: str, name: str, builtin: Mapping[str, str], group: str) -> Any:
    """The object of that name: from a table of ours (name -> `module:attribute`) or from a plugin.

    Args:
        what: what is named, for the message.
        name: its name.
        builtin: our own objects; imported on use.
        group: the entry-point group of plugins.
    """
    if name in builtin:
        return resolve_name(builtin[name])
    plugins = load_plugins(group)
    if name not in plugins:
        raise ConfigError(unknown_name(what, name, [*builtin, *plugins]))
    return plugins[name].load()
