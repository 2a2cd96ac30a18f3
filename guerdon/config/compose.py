"""Hydra: config files, config groups and the grammar of overrides. Nothing else imports it.

Hydra is imported inside the functions, which keeps `import guerdon` fast. It composes and no more: no
job folder, no change of directory, and its global state is as before when a call returns.
"""

from __future__ import annotations

import copy
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import guerdon
from guerdon.config.compat import Override
from guerdon.config.nested import merged
from guerdon.config.yaml_files import check_file
from guerdon.core.errors import ConfigError
from guerdon.core.types import display_path

if TYPE_CHECKING:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override as HydraOverride
    from hydra.plugins.config_source import ConfigResult, ConfigSource

PACKAGE_CONF = Path(guerdon.__file__).parent / "conf"
"""The configs and groups that come with the package."""

T = TypeVar("T")
_LOCK = threading.RLock()  # Hydra keeps its state in globals


def search_dirs(
    config_name: str, config_path: str | os.PathLike[str] | None, package_conf: Path = PACKAGE_CONF
) -> tuple[str, list[Path]]:
    """A config's name, and where it is looked for: in the given folder first, then in the package's own.

    The name may also be the path of a YAML file, whose folder then is the first.

    Raises:
        ConfigError: The given folder does not exist.
    """
    dirs = [package_conf] if config_path is None else [Path(config_path).expanduser().resolve(), package_conf]
    if not dirs[0].is_dir():
        raise ConfigError(f"config path {config_path} is not a folder")
    file = Path(config_name)
    is_there = config_path is not None and (dirs[0] / file).is_file()
    if file.suffix in (".yaml", ".yml") and file.is_file() and not is_there:
        return file.stem, [file.parent.resolve(), *dirs]
    return config_name, dirs


def split_overrides(overrides: Sequence[str], dirs: Sequence[Path]) -> tuple[list[str], list[Override]]:
    """Parse overrides with Hydra's grammar.

    Returns:
        Those for Hydra (choices of config groups, its own settings), and values of settings in their order.

    Raises:
        ConfigError: An override cannot be read, or asks for a sweep.
    """
    hydra: list[str] = []
    values: list[Override] = []
    for text in [overrides] if isinstance(overrides, str) else overrides:
        parsed = _parse(text)
        key = parsed.key_or_group
        if parsed.is_sweep_override():
            raise ConfigError(
                f"override {text!r} is a sweep over several values, which is not supported: "
                f"start one run per value, or write {key}=[...] for a list"
            )
        value = copy.deepcopy(parsed.value())  # the same text is parsed once
        may_choose = isinstance(value, str | list) or parsed.is_delete()
        is_group = may_choose and any((folder / key).is_dir() for folder in dirs)
        if is_group or parsed.package is not None or key.startswith(("hydra.", "hydra/")):
            hydra.append(text)
        else:
            values.append(Override(key=key, value=value, delete=parsed.is_delete()))
    return hydra, values


def compose_tree(
    config_name: str | None, group_overrides: Sequence[str], dirs: Sequence[Path]
) -> dict[str, Any]:
    """The composed config as plain containers, with `${...}` left as it stands.

    A group that the config's defaults list does not name is laid on top, so that `env=tabletop` works on
    any config. (Hydra's own `+env=tabletop` drops the values of a file whose defaults list holds nothing
    but `override` entries.)

    Configs of the package alone are composed once in a process, because its files do not change.

    Raises:
        ConfigError: A config or an option is missing, or a file is not valid YAML.
    """
    is_ours = all(folder.is_relative_to(PACKAGE_CONF) for folder in dirs)
    if is_ours and not any("hydra" in text for text in group_overrides):
        return copy.deepcopy(_composed_once(config_name, tuple(group_overrides), tuple(dirs)))
    return _composed(config_name, group_overrides, dirs)


def _composed(
    config_name: str | None, group_overrides: Sequence[str], dirs: Sequence[Path]
) -> dict[str, Any]:
    tree, *appended = _in_parts(config_name, group_overrides, dirs, _compose)
    for part in appended:
        tree = merged(tree, part)
    return tree


def composed_files(
    config_name: str | None, group_overrides: Sequence[str], dirs: Sequence[Path]
) -> list[tuple[str, Any]]:
    """The files that `compose_tree` merges, in their order: where each is, and what it adds to the config."""
    parts = _in_parts(config_name, group_overrides, dirs, _files)
    return [file for files in parts for file in files]


def _in_parts(
    config_name: str | None,
    group_overrides: Sequence[str],
    dirs: Sequence[Path],
    read: Callable[[str | None, list[str]], T],
) -> list[T]:
    """What `read` says of the config, and then of each group that its defaults list does not name."""
    chosen = [text for text in group_overrides if not text.startswith("+")]
    appended = ["+" + text.lstrip("+") for text in group_overrides if text.startswith("+")]
    if config_name is not None:
        dirs = _home_first(config_name, dirs)
    with errors_explained(dirs), _hydra(dirs):
        search = _search_path_override(config_name, chosen, dirs)
        while True:
            try:
                found = [read(config_name, [search, *chosen])]
                break
            except Exception as error:
                missing = _not_in_defaults_list(error, chosen)
                if missing is None:
                    raise
                chosen.remove(missing)
                appended.append(f"+{missing}")
        return found + [read(None, [search, text]) for text in appended]


_composed_once = cache(_composed)


@cache
def _parser() -> OverridesParser:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create()


@lru_cache(maxsize=1024)
def _parse(text: str) -> HydraOverride:
    from hydra.errors import HydraException

    try:
        parsed = _parser().parse_override(text)
        if not parsed.key_or_group:
            raise HydraException("there is no key")
    except (HydraException, RecursionError) as error:
        raise ConfigError(
            f"cannot read the override {text!r} ({_one_line(error)}): "
            "it must look like key=value; put a value with special characters in quotes, 'key=\"value\"'"
        ) from error
    return parsed


def _compose(config_name: str | None, overrides: list[str]) -> dict[Any, Any]:
    from hydra import compose
    from omegaconf import OmegaConf

    with warnings.catch_warnings():
        # A file's own values come after its defaults list, with or without `_self_`.
        warnings.filterwarnings("ignore", message=".*Defaults list is missing `_self_`.*")
        config = compose(config_name, overrides=overrides)
    tree = OmegaConf.to_container(config, resolve=False)
    assert isinstance(tree, dict)
    return tree


def _files(config_name: str | None, overrides: list[str]) -> list[tuple[str, Any]]:
    """The files of a config in the order in which Hydra merges them."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    loader: Any = GlobalHydra.instance().config_loader()
    listed = loader.compute_defaults_list(config_name, overrides, RunMode.RUN).defaults
    _, repository = loader._parse_overrides_and_create_caching_repo(config_name, overrides)
    found = []
    for entry in listed:
        if not entry.config_path.startswith("hydra/"):
            file = loader._load_single_config(default=entry, repo=repository)
            name = entry.config_path.removesuffix(".yaml")
            tree = OmegaConf.to_container(file.config, resolve=False)
            found.append((f"{file.path.removeprefix('file://')}/{name}.yaml", tree))
    return found


@contextmanager
def _hydra(dirs: Sequence[Path]) -> Iterator[None]:
    """Hydra set up for `dirs[0]`; whatever was set up before is restored."""
    from hydra import initialize_config_dir
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.version import VersionBase

    with _LOCK:
        before, version = GlobalHydra.instance().hydra, VersionBase.instance().version_base
        GlobalHydra.instance().clear()
        Plugins.instance()  # fills the registry
        sources = SourcesRegistry.instance().types
        reader = sources["file"]
        sources["file"] = _limited(reader)
        try:
            with initialize_config_dir(str(dirs[0]), job_name="guerdon", version_base="1.3"):
                yield
        finally:
            sources["file"] = reader
            GlobalHydra.instance().hydra = before
            VersionBase.instance().version_base = version


@cache
def _limited(reader: type[ConfigSource]) -> type[ConfigSource]:
    """Hydra's reader of files, but for files that are beyond the limits of `yaml_files`."""

    class LimitedFiles(reader):  # type: ignore[misc,valid-type]
        def load_config(self, config_path: str) -> ConfigResult:
            path = Path(self.path) / self._normalize_file_name(config_path)
            if path.exists():
                check_file(path)
            with file_named(path):
                result: ConfigResult = super().load_config(config_path)
            return result

    return LimitedFiles


@contextmanager
def file_named(path: Path) -> Iterator[None]:
    """What Python's own conversions say of a file (`!!int x`), as a `ConfigError` that names it."""
    try:
        yield
    except (
        ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError, OSError,
    ) as error:  # fmt: skip
        raise ConfigError(f"{display_path(path)} is no config: {_one_line(error)}") from error


def _search_path_override(config_name: str | None, chosen: list[str], dirs: Sequence[Path]) -> str:
    """The override that adds the further folders, beside those that the user or the file adds."""
    from omegaconf import OmegaConf

    added: list[Any] = []
    primary = None if config_name is None else _find(config_name, dirs)
    if primary is not None:
        check_file(primary)
        with file_named(primary):
            config = OmegaConf.load(primary)
        if not OmegaConf.is_dict(config):
            raise ConfigError(f"{display_path(primary)} holds a list: a config is made of key: value lines")
        added.extend(OmegaConf.select(config, "hydra.searchpath") or [])
    for text in [text for text in chosen if _parse(text).key_or_group == "hydra.searchpath"]:
        chosen.remove(text)
        value = _parse(text).value()
        added = value if isinstance(value, list) else [value]
    paths = [str(path) for path in added] + [f"file://{folder}" for folder in dirs[1:]]
    quoted = ("'" + path.replace("\\", "\\\\").replace("'", "\\'") + "'" for path in paths)
    return f"hydra.searchpath=[{','.join(quoted)}]"


def _find(config_name: str, dirs: Sequence[Path]) -> Path | None:
    name = config_name if config_name.endswith(".yaml") else f"{config_name}.yaml"
    return next((folder / name for folder in dirs if (folder / name).is_file()), None)


def _home_first(config_name: str, dirs: Sequence[Path]) -> list[Path]:
    """The folders with the config's own first, because Hydra looks for it there alone."""
    file = _find(config_name, dirs)
    if file is None:
        where = ", ".join(display_path(folder) for folder in dirs)
        raise ConfigError(f"no config {config_name!r} in {where}{_nearest(config_name, _names(dirs))}")
    home = next(folder for folder in dirs if file.is_relative_to(folder))
    return [home, *(folder for folder in dirs if folder != home)]


def _names(dirs: Sequence[Path], group: str = "") -> list[str]:
    return sorted({file.stem for folder in dirs for file in (folder / group).glob("*.yaml")})


def _nearest(name: str, names: Sequence[str]) -> str:
    """`: did you mean ...?`, followed by what there is."""
    near = get_close_matches(name, names, n=1)
    guess = f": did you mean {near[0]!r}?" if near else ";"
    return f"{guess} available: {', '.join(names) or 'none'}"


def _not_in_defaults_list(error: Exception, chosen: Sequence[str]) -> str | None:
    """The group override that failed because the config's defaults list does not name its group."""
    match = re.match(r"Could not override '([^']+)'", str(error))
    return next((text for text in chosen if match and text.split("=", 1)[0] == match.group(1)), None)


@contextmanager
def errors_explained(dirs: Sequence[Path]) -> Iterator[None]:
    """Hydra's, OmegaConf's and YAML's errors as a ConfigError of one line."""
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        yield
    except YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f"{display_path(mark.name)}, line {mark.line + 1}" if mark is not None else "a config file"
        raise ConfigError(f"{place}: not valid YAML: {problem or error}") from error
    except MissingConfigException as error:
        missing = re.search(r"Could not (?:find|load) '([^']+)'", str(error))
        if missing is None:
            raise ConfigError(_one_line(error)) from error
        group, _, option = missing.group(1).rpartition("/")
        what = f"{group} has no option" if group else "no config"
        raise ConfigError(f"{what} {option!r}{_nearest(option, _names(dirs, group))}") from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error.__cause__ or error)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, AssertionError) as error:
        where = ", ".join(display_path(folder) for folder in dirs)
        raise ConfigError(f"Hydra cannot compose the configs in {where}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."
