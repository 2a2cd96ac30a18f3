"""Plain containers to dataclasses and back, with errors that name the path and the nearest known key."""

from __future__ import annotations

import math
import os
import re
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from guerdon.config.limits import NameOrPlugin
from guerdon.core.errors import ConfigError

T = TypeVar("T")

MANDATORY = "???"
"""What Hydra files write for a value that the user has to give."""
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,300}")


def build(cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """An instance of the dataclass `cls` from plain containers; keys that are absent keep their defaults.

    Args:
        cls: A dataclass whose fields are settings or further dataclasses.
        data: The settings, as YAML gives them.
        path: Where `data` sits in the whole tree; errors begin with it.

    Raises:
        ConfigError: A key is unknown, or a value is missing, of the wrong type or out of range.
    """
    return cast(T, _Builder(cls, path).value(cls, data, path))


class Checked:
    """A section of settings that checks itself, however it is made: by `build`, from Python, by `replace`.

    The type of a field says what it may hold (`limits.py`), and the code of `build` checks it. Values
    in another form take that of the type: lists become tuples, paths text, mappings sections.
    """

    def __post_init__(self) -> None:
        """Raise a `ConfigError` for the first field that does not hold what its type says."""
        cls: type = type(self)
        builder = _Builder(cls, cls.__name__)
        for name, hint in _hints(cls).items():
            value = builder.value(hint, getattr(self, name), f"{cls.__name__}.{name}")
            object.__setattr__(self, name, value)


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts and tuples as lists, ready for YAML or JSON; `build` reads it back."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def check_field(cls: type, name: str, value: Any, called: str) -> Any:
    """`value` as the field `name` of the dataclass `cls` takes it; a `ConfigError` speaks of `called`."""
    return _Builder(cls, "").value(_hints(cls)[name], value, called)


def flatten_keys(cls: type, sections: bool = False) -> list[str]:
    """The dotted paths of all settings below the dataclass `cls`, with `sections` those of sections too."""
    keys: list[str] = []
    for name, hint in _hints(cls).items():
        section = _section_class(hint)
        if section is None or sections:
            keys.append(name)
        if section is not None:
            keys.extend(f"{name}.{key}" for key in flatten_keys(section, sections))
    return keys


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: hints[item.name] for item in fields(cls)}


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _members(hint: Any) -> list[Any]:
    """The types of a union without None; of any other type, itself."""
    if not _is_union(hint):
        return [hint]
    return [member for member in get_args(hint) if member is not type(None)]


def _section_class(hint: Any) -> type | None:
    """The dataclass that `hint` or its only alternative to None is."""
    members = _members(hint)
    return cast(type, members[0]) if len(members) == 1 and is_dataclass(members[0]) else None


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _show(value: Any) -> str:
    """A value as quoted in an error: short, and with its type where that is the question."""
    try:
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    except ValueError:  # of whole numbers with thousands of digits
        text = "a number with too many digits"
    return text if len(text) <= 80 else text[:77] + "..."


def describe(hint: Any) -> str:
    """What a setting of this type may hold, in words."""
    if _is_union(hint):
        parts = [describe(member) for member in _members(hint)]
        return " or ".join([*parts, "null"] if type(None) in get_args(hint) else parts)
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if isinstance(args[1], NameOrPlugin):
            return str(args[1])
        return f"{describe(args[0])} {' and '.join(str(limit) for limit in args[1:])}"
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(repr(choice) for choice in args)
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)} entries, each {describe(args[0])}"
    if origin in (list, tuple):
        return "a list"
    if origin is dict or is_dataclass(hint):
        return "a section with keys"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))


def _num_shared(known: str, path: str) -> int:
    """How many leading parts two dotted paths have in common."""
    pairs = zip(known.split("."), path.split("."), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


class _Builder:
    """Builds one tree; knows the root so that a misplaced key can be found elsewhere."""

    def __init__(self, root: type, path: str) -> None:
        self._root, self._path = root, path

    def value(self, hint: Any, value: Any, path: str) -> Any:
        """`value` as the type `hint`, or a ConfigError."""
        if isinstance(value, str) and value == MANDATORY:
            raise ConfigError(f"{path} is mandatory: give it {describe(hint)}")
        if hint is Any:
            return to_plain(value)
        if _is_union(hint):
            return self._union(hint, value, path)
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            built = self.value(args[0], value, path)
            if not all(limit.holds(built) for limit in args[1:]):
                raise self._wrong(hint, value, path)
            return built
        if is_dataclass(hint):
            checked = isinstance(value, cast(type, hint)) and isinstance(value, Checked)
            return value if checked else self._section(cast(type, hint), value, path)
        if origin is Literal:
            if not any(type(value) is type(choice) and value == choice for choice in args):
                raise self._wrong(hint, value, path)
            return value
        if origin in (list, tuple):
            return self._sequence(hint, value, path)
        if origin is dict:
            if value is None:
                return {}
            if not isinstance(value, Mapping):
                raise self._wrong(hint, value, path)
            return {str(key): self.value(args[1], item, _join(path, key)) for key, item in value.items()}
        return self._scalar(hint, value, path)

    def _section(self, cls: type, value: Any, path: str) -> Any:
        if value is None:  # `reward:` with nothing below it
            value = {}
        if not isinstance(value, Mapping):
            raise self._wrong(cls, value, path)
        hints = _hints(cls)
        for key in value:
            if key not in hints:
                raise ConfigError(f"unknown setting {_join(path, key)!r}{self._hint_at(hints, key, path)}")
        built = {key: self.value(hints[key], item, _join(path, key)) for key, item in value.items()}
        for item in fields(cls):
            if item.default is MISSING and item.default_factory is MISSING and item.name not in built:
                wanted = describe(hints[item.name])
                raise ConfigError(f"{_join(path, item.name)} is missing: give it {wanted}")
        return cls(**built)

    def _hint_at(self, siblings: Mapping[str, Any], key: Any, path: str) -> str:
        """`: did you mean ...?` for an unknown key, from its siblings first and then from the whole tree."""
        name = str(key)
        tree = [_join(self._path, known) for known in flatten_keys(self._root, sections=True)]
        places: dict[str, list[str]] = {}  # last part of a path -> all paths that end so
        for known in tree:
            places.setdefault(known.rpartition(".")[2], []).append(known)

        def elsewhere(last: str) -> list[str]:
            return sorted(places[last], key=lambda known: -_num_shared(known, path))[:3]

        for found in (
            [_join(path, match) for match in get_close_matches(name, siblings, n=1, cutoff=0.8)],
            elsewhere(name) if name in places else [],
            [_join(path, match) for match in get_close_matches(name, siblings, n=1)],
            get_close_matches(_join(path, name), tree, n=1, cutoff=0.85),
            *(elsewhere(match) for match in get_close_matches(name, places, n=1, cutoff=0.8)),
        ):
            if found:
                return f": did you mean {' or '.join(repr(known) for known in found)}?"
        return f"; known here: {', '.join(siblings)}"

    def _union(self, hint: Any, value: Any, path: str) -> Any:
        if value is None and type(None) in get_args(hint):
            return None
        members = _members(hint)
        if isinstance(value, Mapping):
            members = [member for member in members if is_dataclass(member)] or members
        if len(members) == 1 and not isinstance(value, str):
            return self.value(members[0], value, path)
        for member in members:
            try:
                return self.value(member, value, path)
            except ConfigError:
                continue
        raise self._wrong(hint, value, path)

    def _sequence(self, hint: Any, value: Any, path: str) -> Any:
        origin, args = get_origin(hint), get_args(hint)
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise self._wrong(hint, value, path)
        fixed = origin is tuple and args[-1] is not Ellipsis
        if fixed and len(value) != len(args):
            raise self._wrong(hint, value, path)
        items = [
            self.value(args[index] if fixed else args[0], item, f"{path}[{index}]")
            for index, item in enumerate(value)
        ]
        return tuple(items) if origin is tuple else items

    def _scalar(self, hint: Any, value: Any, path: str) -> Any:
        number = isinstance(value, Real) and not isinstance(value, bool)
        if hint is float:
            with suppress(ValueError, OverflowError):  # also text such as `1e-4`, a string in YAML 1.1
                if (number or isinstance(value, str)) and math.isfinite(converted := float(value)):
                    return converted
        elif hint is int:
            if number and isinstance(value, Integral):
                return int(value)
            if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value):  # ${oc.env:...} gives text
                return int(value)
        elif hint is str and isinstance(value, os.PathLike) and isinstance(os.fspath(value), str):
            return os.fspath(value)
        elif hint is bool and isinstance(value, np.bool_):
            return bool(value)
        elif isinstance(value, hint):
            return value
        raise self._wrong(hint, value, path)

    def _wrong(self, hint: Any, value: Any, path: str) -> ConfigError:
        """The error for a value that does not fit, with a remedy where the mistake is a common one."""
        choices: list[str] = []
        for member in _members(hint):
            if get_origin(member) is Literal:
                choices += map(str, get_args(member))
        for limit in get_args(hint)[1:]:
            if isinstance(limit, NameOrPlugin):
                choices += limit.names
        near = get_close_matches(value[:80], choices, n=1) if isinstance(value, str) else []
        remedy = ""
        if near:
            remedy = f" (did you mean {near[0]!r}?)"
        elif (
            isinstance(value, str)
            and value.lower() == "none"
            and _is_union(hint)
            and type(None) in get_args(hint)
        ):
            remedy = " (write null)"
        elif hint is str and isinstance(value, int | float):
            remedy = " (put it in quotes)"
        elif isinstance(value, str) and any(get_origin(member) in (list, tuple) for member in _members(hint)):
            remedy = f" (write [{value}])" if len(value) <= 80 else ""
        kind = "" if value is None or isinstance(value, str) else f" ({type(value).__name__})"
        where = path or "the config"
        return ConfigError(f"{where} must be {describe(hint)}, not {_show(value)}{kind}{remedy}")
