"""What a verb is: a function that takes parsed arguments and returns a result, and its entry in the table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

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


class Verb:
    """A line of the table of verbs.

    Args:
        name: one word, or two: a group and an action.
        function: `module:function` in `guerdon.cli`; imported when the verb runs.
        help: what it does.
        arguments: what it takes, so that help and wrong usage need no import; none here: `takes` has them.
    """

    def __init__(self, name: str, function: str, help: str, *arguments: Argument) -> None:
        self.name, self.help, self._function, self._arguments = name, help, function, arguments

    def load(self) -> Handler:
        """The function."""
        module, _, name = self._function.partition(":")
        handler: Handler = getattr(import_module(f"guerdon.cli.{module}"), name)
        return handler

    def run(self, arguments: argparse.Namespace) -> Result | None:
        """Import the function and call it."""
        return self.load()(arguments)

    @property
    def arguments(self) -> Sequence[Argument]:
        """What it takes."""
        return self._arguments or getattr(self.load(), "arguments", ())


def argument(*names: str, **options: Any) -> Argument:
    """An argument of a verb, in the words of `ArgumentParser.add_argument`."""
    return names, options


def takes(*arguments: Argument) -> Callable[[Handler], Handler]:
    """Decorate a verb's function with its arguments, where those of the table do not serve."""

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


def aligned(rows: Iterable[tuple[str, str]], width: int = 13) -> list[str]:
    """Lines of a name and a value each."""
    return [f"{name:<{width}}{value}" for name, value in rows]


def print_result(arguments: argparse.Namespace, result: Result) -> None:
    """One JSON object if asked for, lines otherwise."""
    print(strict_json.dumps(result.values) if arguments.json else "\n".join(result.lines), flush=True)
