"""From a config's name and overrides, or from a plain mapping, to a checked `GuerdonConfig`.

Hydra composes files and groups; older spellings are translated; overrides go on top; defaults of the
schema fill the rest; `${...}` is resolved; and only then every key and type is checked.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from guerdon.config.build import build, flatten_keys, to_plain
from guerdon.config.compat import Override, notice_line, translate, with_robot_address
from guerdon.config.compose import compose_tree, search_dirs, split_overrides
from guerdon.config.nested import merged
from guerdon.config.schema import GuerdonConfig
from guerdon.config.yaml_files import check_references
from guerdon.core.errors import ConfigError

_LOGGER = logging.getLogger("guerdon")


def load_config(
    config_name: str | os.PathLike[str] | None,
    overrides: Sequence[str] = (),
    config_path: str | os.PathLike[str] | None = None,
) -> GuerdonConfig:
    """Compose a config, apply overrides and check the result.

    Args:
        config_name: Name of a YAML file in `config_path` or in the package's `conf/`, or the path of a
            YAML file; None starts from the schema's defaults.
        overrides: Hydra's: `a.b=c`, `+a.b=c`, `~a.b`, and choices of groups such as `env=tabletop`.
        config_path: Folder to look in first, relative to the working directory.

    Raises:
        ConfigError: In one or two lines, what is wrong and where.
    """
    config_name = None if config_name is None else os.fspath(config_name)
    if config_name is not None and config_name.endswith((".yaml", ".yml")) and config_path is None:
        file = Path(config_name)
        if file.is_file():
            config_name, config_path = file.stem, str(file.parent)
    dirs = search_dirs(config_path)
    split = split_overrides(overrides, dirs)
    tree = compose_tree(config_name, split.hydra, dirs)
    return _finish(tree, split.values)


def load_tree(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> GuerdonConfig:
    """A config from plain containers, such as pasted YAML, in any of the spellings.

    `defaults` and `hydra`, which speak to Hydra alone, are left out.

    Raises:
        ConfigError: As `load_config`; also where the tree asks Hydra to compose other files.
    """
    entries = tree.get("defaults") or []
    composed = [entry for entry in entries if entry != "_self_" and not _is_hydra_entry(entry)]
    if composed:
        raise ConfigError(f"the defaults list names another config, {composed[0]!r}: save and load the file")
    split = split_overrides(overrides, search_dirs(None))
    if split.hydra:
        raise ConfigError(f"{split.hydra[0]!r} chooses a config group: save the config and load the file")
    plain = {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}
    try:
        copied = to_plain(plain)
    except RecursionError as error:
        raise ConfigError("the settings are nested too deep, or contain themselves") from error
    return _finish(copied, split.values)


def _is_hydra_entry(entry: Any) -> bool:
    return isinstance(entry, Mapping) and all(
        str(key).removeprefix("override ").startswith("hydra/") for key in entry
    )


def _finish(tree: Mapping[str, Any], overrides: Sequence[Override]) -> GuerdonConfig:
    translated, notices = translate(tree, overrides)
    if notices:
        _LOGGER.info(notice_line(notices))
    whole = resolve_references(merged(to_plain(GuerdonConfig()), translated))
    return build(GuerdonConfig, with_robot_address(whole))


def resolve_references(tree: Mapping[str, Any], schema: type = GuerdonConfig) -> dict[str, Any]:
    """The tree with every `${...}` replaced by what it refers to; `schema` has the names to suggest."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    check_references(tree)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_reference_error(error, schema)) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # of OmegaConf's own functions
        raise ConfigError(f"a reference (${{...}}) cannot be resolved: {error}") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _reference_error(error: Any, schema: type) -> str:
    """What is wrong with a `${...}`, and where it stands."""
    where = str(getattr(error, "full_key", None) or "the config")
    reason = str(getattr(error, "msg", None) or error).strip().partition("\n")[0]
    variable = re.search(r"Environment variable '([^']+)' not found", reason)
    if variable is not None:
        name = variable.group(1)
        remedy = f"export {name}=... or override {where}"
        return f"{where} needs the environment variable {name}, which is not set: {remedy}"
    key = re.search(r"Interpolation key '([^']+)' not found", reason)
    if key is not None:
        near = get_close_matches(key.group(1), flatten_keys(schema, sections=True), n=1)
        guess = f": did you mean ${{{near[0]}}}?" if near else ""
        return f"{where} refers to ${{{key.group(1)}}}, which does not exist{guess}"
    return f"{where}: {reason}"
