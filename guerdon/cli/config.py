"""`guerdon config show`: a config with where each value comes from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from guerdon.cli.verb import Result
from guerdon.config.nested import dotted
from guerdon.config.origins import DEFAULT, Setting, explain_config

COLUMN = 48
"""Where the origins begin."""


def show_verb(arguments: argparse.Namespace) -> Result:
    """The composed config as YAML, the origin of each value as a comment."""
    name, overrides = _name_first(arguments.overrides)
    settings = explain_config(name, overrides, arguments.config_path, zoo=arguments.zoo)
    if arguments.changed:
        settings = [setting for setting in settings if setting.origin != DEFAULT]
    values = {dotted(one.path): {"value": one.value, "from": one.origin} for one in settings}
    return Result({"config": name, "settings": values}, yaml_lines(settings))


def _name_first(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """A config's name, if the first word is one, and the settings."""
    if words and "=" not in words[0] and not words[0].startswith("~"):
        return words[0], words[1:]
    return None, words


def yaml_lines(settings: Sequence[Setting]) -> list[str]:
    """Nested YAML that can be used as a config file."""
    lines: list[str] = []
    before: tuple[Any, ...] = ()
    for path, value, origin in settings:
        shared = 0
        while shared < len(path) - 1 and path[: shared + 1] == before[: shared + 1]:
            shared += 1
        lines += [f"{'  ' * depth}{path[depth]}:" for depth in range(shared, len(path) - 1)]
        line = f"{'  ' * (len(path) - 1)}{path[-1]}: {_scalar(value)}"
        lines.append(f"{line:<{COLUMN}}  # {origin}")
        before = path
    return lines


def _scalar(value: Any) -> str:
    """A value in one line of YAML."""
    import yaml  # type: ignore[import-untyped]

    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")
