"""From a config's name and overrides, or from a plain mapping, to checked settings.

Hydra composes files and groups; older spellings are translated; overrides go on top; defaults of the
schema fill the rest; `${...}` is resolved; and only then every key and type is checked. `load_config` gives a
`GuerdonConfig`, `load_serial` the settings of a run of the zoo.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from guerdon.config.build import build, flatten_keys, to_plain
from guerdon.config.compat import (
    Override,
    delete_override,
    fill_rlinf_defaults,
    notice_line,
    translate,
    translate_override,
)
from guerdon.config.compose import PACKAGE_CONF, compose_tree, search_dirs, split_overrides
from guerdon.config.di_engine import from_di_engine
from guerdon.config.di_engine_files import read_di_engine
from guerdon.config.nested import Tree, dotted, leaves, merged, parts, put
from guerdon.config.rlinf import from_rlinf
from guerdon.config.rlinf_files import is_rlinf, read_rlinf
from guerdon.config.schema import EnvConfig, GuerdonConfig
from guerdon.config.schema_reward import RewardModelConfig
from guerdon.config.schema_zoo import SerialConfig
from guerdon.config.yaml_files import check_references
from guerdon.core.errors import ConfigError

ZOO_CONF = PACKAGE_CONF / "zoo"
"""The configs of the zoo that come with the package."""

log = logging.getLogger("guerdon")


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
    name, dirs = search_dirs(os.fspath(config_name or ""), config_path)
    if config_path is not None and is_rlinf(file := dirs[0] / f"{name}.yaml"):
        return load_rlinf(file, overrides)
    groups, values = split_overrides(overrides, dirs)
    return _finish(compose_tree(name or None, groups, dirs), values)


def load_rlinf(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> GuerdonConfig:
    """The settings of one of RLinf's own config files, with overrides in our spelling.

    Raises:
        ConfigError: As `load_config`; also where the file asks for what has no counterpart here.
    """
    file = Path(path)
    theirs = {key: value for key, value in read_rlinf(file).items() if key != "hydra"}
    tree, notices = from_rlinf(resolve_references(theirs), file.stem)
    if notices:
        log.info("config: RLinf's %s: %s", file.name, "; ".join(notices))
    groups, values = split_overrides(overrides, [PACKAGE_CONF])
    if groups:
        raise ConfigError(f"{groups[0]!r} chooses a config group, which RLinf's file does by itself")
    return _finish(tree, values)


def load_tree(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> GuerdonConfig:
    """A config from plain containers, such as pasted YAML, in any of the spellings.

    `defaults` and `hydra`, which speak to Hydra alone, are left out.

    Raises:
        ConfigError: As `load_config`; also where the tree asks Hydra to compose other files.
    """
    for entry in tree.get("defaults") or []:
        keys = entry if isinstance(entry, Mapping) else ()  # a mapping speaks to Hydra alone, or names others
        for_hydra = keys and all(str(key).removeprefix("override ").startswith("hydra/") for key in keys)
        if entry != "_self_" and not for_hydra:
            raise ConfigError(f"the defaults list names another config, {entry!r}: save and load the file")
    groups, values = split_overrides(overrides, [PACKAGE_CONF])
    if groups:
        raise ConfigError(f"{groups[0]!r} chooses a config group: save the config and load the file")
    plain = {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}
    try:
        copied = to_plain(plain)
    except RecursionError as error:
        raise ConfigError("the settings are nested too deep, or contain themselves") from error
    return _finish(copied, values)


def _finish(tree: Mapping[str, Any], overrides: Sequence[Override]) -> GuerdonConfig:
    translated, notices = translate(tree, overrides)
    fill_rlinf_defaults(translated, tree)
    if notices:
        log.info(notice_line(notices))
    whole = resolve_references(merged(to_plain(GuerdonConfig()), translated))
    config = build(GuerdonConfig, whole)
    named = [*(dotted(path) for path, _ in leaves(tree)), *(override.key for override in overrides)]
    paths = [parts(translate_override(name)) for name in named]
    given = {str(path[2]) for path in paths if path[:2] == ("reward", "model") and len(path) > 2}
    if len(given) < len(fields(RewardModelConfig)) // 2:  # more is what a run wrote: the defaults of its time
        config.reward.model.remember_given(given)
    return _with_robot_address(config)


def _with_robot_address(config: GuerdonConfig) -> GuerdonConfig:
    """RLinf's configs name a robot's address among the machines; its environment needs it, too."""
    hardware = [group.hardware for group in config.cluster.node_groups if group.hardware is not None]
    devices = [device for each in hardware for device in each.configs]
    addresses = [str(device["robot_ip"]) for device in devices if device.get("robot_ip")]
    for name in ("train", "eval") if addresses else ():
        env: EnvConfig = getattr(config.env, name)
        if env.env_type == "robot" and not {*env.init_params, *env.override_cfg} & {"robot_ip", "url"}:
            env = replace(env, override_cfg={**env.override_cfg, "robot_ip": addresses[0]})
            config = replace(config, env=replace(config.env, **{name: env}))
    return config


def load_serial(
    given: Any,
    overrides: Sequence[str] = (),
    config_path: str | None = None,
    max_env_step: int | None = None,
    *,
    trust: bool = False,
) -> SerialConfig:
    """Checked settings of a serial pipeline.

    Args:
        given: a `SerialConfig`, a mapping, the name of a config in `config_path` or in the package's
            `conf/zoo/`, the path of a YAML file, DI-engine's `(main_config, create_config)`, or the path of a
            Python file that has them.
        overrides: Hydra's: `a.b=c`, `+a.b=c`, `~a.b`.
        config_path: folder to look in first.
        max_env_step: the run's length, for settings of DI-engine that are counted in steps.
        trust: run a Python file, where its config cannot be read without that.

    Raises:
        ConfigError: in one or two lines, what is wrong and where.
    """
    if isinstance(given, str | Path) and Path(given).suffix == ".py":
        main, create, arguments = read_di_engine(given, trust)
        main.setdefault("seed", arguments.get("seed", 0))
        max_env_step = arguments.get("max_env_step") if max_env_step is None else max_env_step
        given = (main, create)
    from_file = isinstance(given, str | Path)
    name, dirs = search_dirs(str(given) if from_file else "", config_path, ZOO_CONF)
    if from_file:
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
    for override in split_overrides(overrides, dirs)[1]:
        path = parts(override.key)
        if override.delete:
            delete_override(changed, override, path)
        else:
            for leaf, value in leaves(override.value, path):
                put(changed, leaf, value)
    if from_file:  # only files refer to other settings; a mapping may hold what is no text at all
        changed = resolve_references(merged(to_plain(SerialConfig()), changed), SerialConfig)
    return build(SerialConfig, changed)


def resolve_references(tree: Mapping[str, Any], schema: type = GuerdonConfig) -> dict[str, Any]:
    """The tree with every `${...}` replaced by what it refers to; `schema` has the names to suggest."""
    if not check_references(tree):
        return {str(key): value for key, value in tree.items()}
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

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
