"""Where each setting of a config comes from: the schema, a file or the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from guerdon.config.build import to_plain
from guerdon.config.compat import translate_override
from guerdon.config.compose import PACKAGE_CONF, composed_files, search_dirs, split_overrides
from guerdon.config.load import ZOO_CONF, load_config, load_serial
from guerdon.config.nested import KeyPath, dotted, get, leaves, parts
from guerdon.config.schema import GuerdonConfig
from guerdon.config.schema_zoo import SerialConfig
from guerdon.core.types import display_path

DEFAULT, COMMAND_LINE, IMPLIED = "default", "command line", "implied by other settings"


class Setting(NamedTuple):
    """One value of a config."""

    path: KeyPath
    value: Any
    origin: str
    """`default`, `command line`, a file or `implied by other settings`; with a reference (`${...}`) in it."""


def explain_config(
    config_name: str | None,
    overrides: Sequence[str] = (),
    config_path: str | os.PathLike[str] | None = None,
    *,
    zoo: bool = False,
) -> list[Setting]:
    """All settings of a config with their origins, in the order of the schema.

    Args:
        config_name: as `load_config` takes it; None: the schema's defaults.
        overrides: Hydra's.
        config_path: folder to look in first.
        zoo: the config is one of `guerdon zoo`; the package's own ones are known by their names.

    Raises:
        ConfigError: as `load_config`.
    """
    folder = None if config_path is None else os.fspath(config_path)
    zoo = zoo or (folder is None and config_name is not None and (ZOO_CONF / f"{config_name}.yaml").is_file())
    config: SerialConfig | GuerdonConfig
    if zoo:
        config = load_serial({} if config_name is None else config_name, overrides, folder)
    else:
        config = load_config(config_name, overrides, folder)
    name, dirs = search_dirs(config_name or "", folder, ZOO_CONF if zoo else PACKAGE_CONF)
    groups, values = split_overrides(overrides, dirs)
    files = composed_files(name or None, () if zoo else groups, dirs) if name or groups else []
    given = [(path, value, _shown(file)) for file, tree in files for path, value in leaves(tree)]

    def today(path: KeyPath) -> KeyPath:
        return path if zoo else parts(translate_override(dotted(path)))

    origins: dict[KeyPath, str] = {}
    # As in `translate`: where files hold an older and today's spelling of a setting, the older one wins.
    for path, value, file in sorted(given, key=lambda item: today(item[0]) != item[0]):
        origins[today(path)] = _with_reference(file, value)
    for override in values:
        for path, value in leaves(override.value, parts(override.key)):
            _forget(origins, today(path))
            if not override.delete:
                origins[today(path)] = _with_reference(COMMAND_LINE, value)
    defaults = to_plain(type(config)())
    return [
        Setting(path, value, _origin(origins, path, is_default=get(defaults, path) == value))
        for path, value in leaves(to_plain(config))
    ]


def _origin(origins: dict[KeyPath, str], path: KeyPath, *, is_default: bool) -> str:
    """Who gave the value at `path`: itself, a section around it, or an entry inside of it, such as `a.0`."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return origins[path[:length]]
    inside = [origin for other, origin in origins.items() if other[: len(path)] == path]
    return inside[-1] if inside else DEFAULT if is_default else IMPLIED


def _forget(origins: dict[KeyPath, str], path: KeyPath) -> None:
    """What stood at `path` and below it is replaced."""
    for other in [other for other in origins if other[: len(path)] == path]:
        del origins[other]


def _with_reference(origin: str, value: Any) -> str:
    """A value that refers to others is shown as it was written, too."""
    return f"{origin}: {value}" if isinstance(value, str) and "${" in value else origin


def _shown(file: str) -> str:
    """Configs of the package by their place in it, others by their path."""
    home = PACKAGE_CONF.parent.parent
    return str(Path(file).relative_to(home)) if file.startswith(str(PACKAGE_CONF)) else display_path(file)
