"""Keyword arguments that set the fields of config sections; errors speak of the keyword."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from guerdon.config.build import check_field
from guerdon.core.errors import ConfigError, unknown_name
from guerdon.core.progress import no_progress

T = TypeVar("T")
Place: TypeAlias = tuple[str, ...]
"""Where a setting stands below a section: the names of the sections on the way, and its own."""


class Keywords:
    """The keyword arguments that a function takes for the settings of a section.

    Args:
        owner: what takes them, for messages.
        root: the section.
        places: sections below it (`()` is itself, `("ppo",)` its section `ppo`). The fields of each that are
            no sections are keywords; where two have a field of one name, the section named first has it.
        aliases: further keywords -> where they stand, dotted; several places take the same value.
        without: fields that are no keywords.
    """

    def __init__(
        self,
        owner: str,
        root: type,
        places: Collection[Place],
        aliases: Mapping[str, str | tuple[str, ...]] | None = None,
        without: Collection[str] = (),
    ) -> None:
        self._owner, self._root = owner, root
        self._known: dict[str, tuple[Place, ...]] = {}
        for place in places:
            section = self._section(place)
            for item in fields(section):
                if item.name not in without and not is_dataclass(_default(section, item.name)):
                    self._known.setdefault(item.name, ((*place, item.name),))
        for name, targets in (aliases or {}).items():
            given = (targets,) if isinstance(targets, str) else targets
            self._known[name] = tuple(tuple(target.split(".")) for target in given)

    def _section(self, place: Place) -> type:
        section = self._root
        for name in place:
            section = type(_default(section, name))
        return section

    @property
    def names(self) -> list[str]:
        """All keywords."""
        return sorted(self._known)

    def apply(self, section: T, given: Mapping[str, Any], other_names: Collection[str] = ()) -> T:
        """`section` with the given keywords; an unknown one, or a wrong value, is an error about it.

        `other_names` are arguments of the function itself, which may have been meant.
        """
        for name, value in given.items():
            if name not in self._known:
                known = [*self._known, *other_names]
                raise ConfigError(f"{self._owner}: {unknown_name('argument', name, known)}")
            for place in self._known[name]:
                checked = check_field(self._section(place[:-1]), place[-1], value, name)
                section = _put(section, place, checked)
        return section


def _default(section: type, name: str) -> Any:
    """What a field holds unless told otherwise; sections of settings can all be made without arguments."""
    return getattr(section(), name)


def _put(section: T, place: Place, value: Any) -> T:
    if len(place) > 1:
        value = _put(getattr(section, place[0]), place[1:], value)
    return replace(section, **{place[0]: value})  # type: ignore[type-var]


def check_count(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least `least`; the error names the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r:.80}")
    return value


def check_seed(seed: Any) -> int:
    """A seed, a whole number of at least 0."""
    return check_count("seed", seed, 0)


def check_path(name: str, value: Any, what: str = "a path") -> Path:
    """The path that was given; the error names the argument."""
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name} must be {what}, not {value!r:.80}")
    return Path(value)


def check_env_kwargs(given: Any) -> dict[str, Any]:
    """Arguments of an environment's constructor; None: there are none."""
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"env_kwargs must be a dict of the environment's arguments, not {given!r:.80}")
    return dict(given or {})


def shown(progress: bool) -> Any:
    """A context in which progress bars are shown, or not."""
    return nullcontext() if progress else no_progress()
