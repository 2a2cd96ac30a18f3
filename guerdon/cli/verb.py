"""What a verb is: a function that takes parsed arguments and returns a result, and its entry in the table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

from guerdon.core import strict_json


@dataclass(frozen=True)
class Result:
    """What a verb found or did."""

    values: dict[str, Any]
    """Printed with `--json`."""
    lines: Sequence[str]
    """Printed without."""
    ok: bool = True
    """False: exit code 1."""
    error: str = ""
    """Printed to stderr after the result; exit code 1."""


Handler: TypeAlias = Callable[[argparse.Namespace], "Result | None"]
Argument: TypeAlias = tuple[tuple[str, ...], dict[str, Any]]


class Verb(NamedTuple):
    """A line of the table of verbs."""

    name: str
    """One word, or two: a group and an action."""
    function: str
    """`module:function` in `guerdon.cli`; imported when the verb is used."""
    help: str

    def load(self) -> Handler:
        """The function, made by `takes`."""
        module, _, name = self.function.partition(":")
        handler: Handler = getattr(import_module(f"guerdon.cli.{module}"), name)
        return handler


def argument(*names: str, **options: Any) -> Argument:
    """An argument of a verb, in the words of `ArgumentParser.add_argument`."""
    return names, options


def takes(*arguments: Argument) -> Callable[[Handler], Handler]:
    """Decorate a verb's function with the arguments that it takes."""

    def attach(function: Handler) -> Handler:
        function.arguments = arguments  # type: ignore[attr-defined]
        return function

    return attach


OVERRIDES = argument("overrides", nargs="*", metavar="key=value", help="settings, as Hydra takes them")


def config_arguments(default: str) -> tuple[Argument, ...]:
    """A config by its name, and `key=value` settings over it."""
    return (
        argument("--config-name", default=default, metavar="NAME", help=f"config (default: {default})"),
        argument("--config-path", metavar="DIR", help="where to look for it first"),
        OVERRIDES,
    )


def print_result(arguments: argparse.Namespace, result: Result) -> None:
    """One JSON object if asked for, lines otherwise."""
    print(strict_json.dumps(result.values) if arguments.json else "\n".join(result.lines), flush=True)
