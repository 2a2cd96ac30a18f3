"""What verbs have in common: a config with overrides, and one way to print a result."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypeAlias

from guerdon.core import strict_json

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where verbs are added."""


def add_config(parser: argparse.ArgumentParser, default: str) -> None:
    """A config by its name, and `key=value` settings over it."""
    parser.add_argument("--config-name", default=default, metavar="NAME", help=f"config (default: {default})")
    parser.add_argument("--config-path", metavar="DIR", help="where to look for it first")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as Hydra takes them")


def print_result(arguments: argparse.Namespace, result: dict[str, Any], lines: Sequence[str]) -> None:
    """The result: one JSON object if asked for, lines for people otherwise."""
    print(strict_json.dumps(result) if arguments.json else "\n".join(lines))
