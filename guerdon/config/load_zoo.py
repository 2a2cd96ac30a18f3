"""Settings of the serial pipelines: from a name, a file, a mapping, or DI-engine's pair of configs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from guerdon.config.build import build, to_plain
from guerdon.config.compat import Override
from guerdon.config.compat_zoo import from_di_engine
from guerdon.config.compose import PACKAGE_CONF, compose_tree, split_overrides
from guerdon.config.load import resolve_references
from guerdon.config.nested import ABSENT, Tree, delete, get, leaves, merged, parts, put
from guerdon.config.schema_zoo import SerialConfig
from guerdon.core.errors import ConfigError

ZOO_CONF = PACKAGE_CONF / "zoo"
"""The configs that come with the package."""

log = logging.getLogger("guerdon")


def load_serial(
    given: Any, overrides: Sequence[str] = (), config_path: str | None = None, max_env_step: int | None = None
) -> SerialConfig:
    """Checked settings of a serial pipeline.

    Args:
        given: a `SerialConfig`, a mapping, the name of a config in `config_path` or in the package's
            `conf/zoo/`, the path of a YAML file, or DI-engine's `(main_config, create_config)`.
        overrides: Hydra's: `a.b=c`, `+a.b=c`, `~a.b`.
        config_path: folder to look in first.
        max_env_step: the run's length, for settings of DI-engine that are counted in steps.

    Raises:
        ConfigError: in one or two lines, what is wrong and where.
    """
    dirs = [Path(config_path).expanduser().resolve(), ZOO_CONF] if config_path is not None else [ZOO_CONF]
    from_file = isinstance(given, str | Path)
    if from_file:
        name = str(given)
        if name.endswith((".yaml", ".yml")) and Path(name).is_file():
            file = Path(name).resolve()
            name, dirs = file.stem, [file.parent, *dirs]
        tree: Mapping[str, Any] = compose_tree(name, (), dirs)
    elif isinstance(given, SerialConfig):
        tree = to_plain(given)
    elif isinstance(given, Mapping):
        tree = given
    elif isinstance(given, Sequence) and len(given) == 2 and all(isinstance(one, Mapping) for one in given):
        tree, notices = from_di_engine(given[0], given[1], max_env_step)
        if notices:
            log.info("config: DI-engine's spelling: %s", "; ".join(notices))
    else:
        raise ConfigError(
            "a serial pipeline takes the name of a config, settings as a mapping, or DI-engine's pair "
            f"(main_config, create_config), not {type(given).__name__}"
        )
    changed: Tree = to_plain(tree)
    if from_file:
        changed.setdefault("exp_name", name)
    for override in split_overrides(overrides, dirs).values:
        _apply(changed, override)
    if from_file:  # only files refer to other settings; a mapping may hold what is no text at all
        changed = resolve_references(merged(to_plain(SerialConfig()), changed), SerialConfig)
    return build(SerialConfig, changed)


def _apply(tree: Tree, override: Override) -> None:
    """Put one override into the tree."""
    path = parts(override.key)
    if not override.delete:
        for leaf, value in leaves(override.value, path):
            put(tree, leaf, value)
        return
    if get(tree, path) is ABSENT:
        raise ConfigError(f"~{override.key}: there is nothing to remove, it is not set")
    delete(tree, path)
