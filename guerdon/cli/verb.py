"""What a verb is: a function that takes parsed arguments and returns a result, and its entry in the table."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from guerdon.config import GuerdonConfig

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
    next_steps: Sequence[str] = ()
    """Commands to run next; printed to stderr, not with `--json`."""


Handler: TypeAlias = Callable[[argparse.Namespace], "Result | None"]
Argument: TypeAlias = tuple[tuple[str, ...], dict[str, Any]]


class Verb:
    """A line of the table of verbs.

    Args:
        name: one word, or two: a group and an action.
        function: `module:function` in `guerdon.cli`; imported when the verb runs.
        help: what it does.
        arguments: what it takes, so that help and wrong usage need no import.
        stage: the heading that `guerdon --help` lists it under.
        example: a command that shows how it is used.
    """

    def __init__(
        self,
        name: str,
        function: str,
        help: str,
        *arguments: Argument,
        stage: str = "tools",
        example: str = "",
    ) -> None:
        self.name, self.help, self.stage, self.example = name, help, stage, example
        self.arguments, self._function = arguments, function

    def load(self) -> Handler:
        """The function."""
        module, _, name = self._function.partition(":")
        handler: Handler = getattr(import_module(f"guerdon.cli.{module}"), name)
        return handler

    def run(self, arguments: argparse.Namespace) -> Result | None:
        """Import the function and call it."""
        return self.load()(arguments)


def argument(*names: str, **options: Any) -> Argument:
    """An argument of a verb, in the words of `ArgumentParser.add_argument`."""
    return names, options


OVERRIDES = argument("overrides", nargs="*", metavar="key=value", help="settings, as Hydra takes them")


def config_arguments(default: str, *, rlinf: bool = True) -> tuple[Argument, ...]:
    """A config by its name, or a file of RLinf's, and `key=value` settings over it."""
    help_rlinf = "a config file of RLinf, in the place of --config-name"
    return (
        argument("--config-name", default=default, metavar="NAME", help=f"config (default: {default})"),
        argument("--config-path", metavar="DIR", help="where to look for it first"),
        *([argument("--rlinf", metavar="FILE", help=help_rlinf)] if rlinf else []),
        OVERRIDES,
    )


def config_of(arguments: argparse.Namespace) -> GuerdonConfig:
    """The config that the arguments of `config_arguments` name."""
    from guerdon.config.load import load_config, load_rlinf

    if arguments.rlinf is not None:
        return load_rlinf(arguments.rlinf, arguments.overrides)
    return load_config(arguments.config_name, arguments.overrides, arguments.config_path)


def aligned(rows: Iterable[tuple[str, str]], width: int = 13) -> list[str]:
    """Lines of a name and a value each."""
    return [f"{name:<{width}}{value}" for name, value in rows]


def setting(name: str, path: Path | str) -> str:
    """`name=path` as Hydra reads it, with the path as seen from the working directory."""
    from guerdon.core.types import display_path  # imports NumPy

    shown = display_path(path)
    if not re.fullmatch(r"[\w./-]+", shown):  # in quotes; there a backslash counts double before a quote only
        shown = '"' + re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + m[2].replace('"', r"\""), shown) + '"'
    return f"{name}={shown}"


def next_command(*words: str) -> str:
    """A line that can be copied to a shell."""
    return shlex.join(["guerdon", *words])


def print_result(arguments: argparse.Namespace, result: Result) -> None:
    """One JSON object if asked for; lines otherwise, and then what to run next."""
    if arguments.json:
        print(strict_json.dumps(result.values), flush=True)
        return
    print("\n".join(result.lines), flush=True)
    for number, step in enumerate(result.next_steps):
        print(f"{'next: ' if number == 0 else '      '}{step}", file=sys.stderr)
